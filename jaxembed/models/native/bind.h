// Checks a call from XLA against its table in operands.h, and gives access to its operands. A
// mismatch becomes an error that names both what came and what is expected.
#pragma once

#include <float.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "operands.h"

// A call whose operands, attributes and sizes are known.
typedef struct {
  const Call* call;
  int64_t mode;  // the attribute `mode`
  XLA_FFI_Buffer* operands[MOST_OPERANDS];  // NULL: does not come in this mode
  XLA_FFI_Buffer* result;
  const void* attributes[MOST_ATTRIBUTES];
  int64_t sizes[SIZES];    // 0: not known yet
  const int64_t* leading;  // the leading axes, which all operands with LEADING share
  int64_t leading_axes;
} Bound;

// The text of a message; what does not fit is cut off.
typedef struct {
  size_t used;
  char text[512];
} Text;

// Append formatted text.
static void add(Text* to, const char* format, ...) {
  va_list values;
  va_start(values, format);
  const size_t left = sizeof to->text - to->used;
  const int size = vsnprintf(to->text + to->used, left, format, values);
  va_end(values);
  if (size > 0) to->used += (size_t)min64(size, (int64_t)left - 1);
}

// Create an error for XLA; XLA frees it.
static XLA_FFI_Error* error_of(XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code,
                               const char* call, const char* message) {
  Text text = {0};
  add(&text, "jaxembed_%s: %s", call, message);
  XLA_FFI_Error_Create_Args args = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE,
                                    .message = text.text,
                                    .errc = code};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Create the error of a call that does not match its table.
static XLA_FFI_Error* slip(XLA_FFI_CallFrame* frame, const Bound* bound, const Text* message) {
  return error_of(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, bound->call->name, message->text);
}

// Append the name of a dtype.
static void add_dtype(Text* to, int dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_F32: add(to, "f32"); return;
    case XLA_FFI_DataType_F16: add(to, "f16"); return;
    case XLA_FFI_DataType_BF16: add(to, "bf16"); return;
    case XLA_FFI_DataType_S8: add(to, "s8"); return;
    case XLA_FFI_DataType_S32: add(to, "s32"); return;
    case XLA_FFI_DataType_S64: add(to, "s64"); return;
    default: add(to, "dtype %d of XLA", dtype);
  }
}

// Append the dtype and shape of a buffer, such as "f32[3, 16, 64]".
static void add_buffer(Text* to, const XLA_FFI_Buffer* buffer) {
  add_dtype(to, buffer->dtype);
  for (int64_t i = 0; i < buffer->rank; i++)
    add(to, "%s%lld", i ? ", " : "[", (long long)buffer->dims[i]);
  add(to, buffer->rank ? "]" : "[]");
}

// Whether an operand is a quantized weight in a mode.
static int is_bytes(const Operand* operand, int64_t mode) {
  return operand->layout == WEIGHT && mode & QUANTIZED;
}

// The dtypes that an operand may have in a mode, one bit for each.
static uint64_t dtypes_of(const Operand* operand, int64_t mode) {
  return is_bytes(operand, mode) ? DTYPE(S8) : operand->dtypes;
}

// Append what an operand must be, such as "f32 or bf16 [rows = 3, length (a multiple of 16)]".
static void add_operand(Text* to, const Bound* bound, const Operand* operand) {
  const char* before = "";
  for (int dtype = 0; dtype < 64; dtype++)
    if (dtypes_of(operand, bound->mode) >> dtype & 1) add(to, "%s", before), add_dtype(to, dtype), before = " or ";
  if (operand->layout == SCALES) add(to, " [out / 32, groups, 2, 32], the scales of");
  else if (operand->layout != PLAIN_ARRAY) {
    const int unit = is_bytes(operand, bound->mode) ? BYTES : UNIT;
    add(to, " in 6 axes, [out / 32, in / %d, 2, 16, 16, %d], the panels of", TILE * unit, unit);
  }
  before = " [";
  for (int i = 0; i < MOST_AXES && operand->shape[i]; i++, before = ", ") {
    const Size size = operand->shape[i];
    add(to, "%s%s", before, size_rules[size].name);
    if (size != LEADING && bound->sizes[size])
      add(to, " = %lld", (long long)bound->sizes[size]);
    else if (size_rules[size].multiple > 1)
      add(to, " (a multiple of %lld)", (long long)size_rules[size].multiple);
    for (int64_t axis = 0; size == LEADING && bound->leading && axis < bound->leading_axes; axis++)
      add(to, "%s%lld", axis ? ", " : " = ", (long long)bound->leading[axis]);
  }
  add(to, "]");
}

// Whether a size keeps its rule and equals the known value of its name; an unknown one is set.
static int is_size(Size size, int64_t value, int64_t* sizes) {
  if (value < 1 || value % size_rules[size].multiple) return 0;
  if (!sizes[size]) sizes[size] = value;
  return sizes[size] == value;
}

// Whether the first `axes` axes of a buffer are the leading ones of the call; unknown ones are set.
// Their number is free, but it and the sizes are the same for all operands with LEADING.
static int is_leading(const XLA_FFI_Buffer* buffer, int64_t axes, Bound* bound) {
  if (axes < 0) return 0;
  int64_t product = 1;
  for (int64_t i = 0; i < axes; i++) {
    if (buffer->dims[i] < 1) return 0;
    product *= buffer->dims[i];
  }
  if (!bound->leading) {
    bound->leading = buffer->dims;
    bound->leading_axes = axes;
    bound->sizes[LEADING] = product;
  }
  if (axes != bound->leading_axes) return 0;
  for (int64_t i = 0; i < axes; i++)
    if (buffer->dims[i] != bound->leading[i]) return 0;
  return 1;
}

// Whether a buffer has the shape of an operand. Sizes that were not known are set.
static int is_shape(const Operand* operand, const XLA_FFI_Buffer* buffer, Bound* bound) {
  const Size* shape = operand->shape;
  const int64_t* dims = buffer->dims;
  if (operand->layout == SCALES)  // it follows its weight, so that the sizes are known
    return buffer->rank == 4 && dims[1] > 0 && dims[2] == 2 && dims[3] == PANEL &&
           bound->sizes[shape[0]] % (dims[1] * BYTES_STEP) == 0 &&
           is_size(shape[1], dims[0] * PANEL, bound->sizes);
  if (operand->layout != PLAIN_ARRAY) {
    const int unit = is_bytes(operand, bound->mode) ? BYTES : UNIT;
    return buffer->rank == 6 && dims[2] == 2 && dims[3] == TILE && dims[4] == TILE &&
           dims[5] == unit && is_size(shape[0], dims[1] * TILE * unit, bound->sizes) &&
           is_size(shape[1], dims[0] * PANEL, bound->sizes);
  }
  int64_t axes = 0;
  while (axes < MOST_AXES && shape[axes]) axes++;
  int64_t before = 0;
  if (shape[0] == LEADING) {
    before = buffer->rank - --axes;
    shape++;
    if (!is_leading(buffer, before, bound)) return 0;
  }
  if (buffer->rank - before != axes) return 0;
  for (int64_t i = 0; i < axes; i++)
    if (!is_size(shape[i], dims[before + i], bound->sizes)) return 0;
  return 1;
}

// Check one buffer, and keep the sizes that it sets. Returns an error if it does not match.
static XLA_FFI_Error* bind_buffer(XLA_FFI_CallFrame* frame, const Operand* operand,
                                  const char* kind, const XLA_FFI_Buffer* buffer, Bound* bound) {
  Bound with = *bound;
  const int is_dtype = buffer->dtype < 64 && dtypes_of(operand, bound->mode) >> buffer->dtype & 1;
  if (is_dtype && is_shape(operand, buffer, &with)) {
    *bound = with;
    return NULL;
  }
  Text text = {0};
  add(&text, "%s %s: ", kind, operand->name);
  add_buffer(&text, buffer);
  add(&text, " came, wanted ");
  add_operand(&text, bound, operand);
  return slip(frame, bound, &text);
}

// Check all operands and the result.
static XLA_FFI_Error* bind_buffers(XLA_FFI_CallFrame* frame, Bound* bound) {
  const Operand* operands = bound->call->operands;
  int64_t count = 0;
  for (const Operand* operand = operands; operand->name; operand++)
    count += comes(operand, bound->mode);
  if (frame->args.size != count || frame->rets.size != 1) {
    Text text = {0};
    add(&text, "%lld operands and %lld results came, wanted 1 result and %lld operands:",
        (long long)frame->args.size, (long long)frame->rets.size, (long long)count);
    for (int64_t i = 0, left = count; left; i++)
      if (comes(&operands[i], bound->mode))
        add(&text, " %s%s", operands[i].name, --left ? "," : "");
    return slip(frame, bound, &text);
  }
  void* const* next = frame->args.args;
  for (int64_t i = 0; operands[i].name; i++) {
    if (!comes(&operands[i], bound->mode)) continue;
    bound->operands[i] = *next++;
    XLA_FFI_Error* error = bind_buffer(frame, &operands[i], "operand", bound->operands[i], bound);
    if (error) return error;
  }
  bound->result = frame->rets.rets[0];
  return bind_buffer(frame, &bound->call->result, "result", bound->result, bound);
}

// The index of an attribute, or -1.
static int64_t place_of_attribute(const XLA_FFI_Attrs* attributes, const char* name) {
  for (int64_t i = 0; i < attributes->size; i++) {
    const XLA_FFI_ByteSpan* span = attributes->names[i];
    if (span->len == strlen(name) && !memcmp(span->ptr, name, span->len)) return i;
  }
  return -1;
}

// A pointer to the value of an attribute if it is a number of this dtype, else NULL.
static const void* number(const XLA_FFI_CallFrame* frame, const char* name,
                          XLA_FFI_DataType dtype) {
  const int64_t place = place_of_attribute(&frame->attrs, name);
  if (place < 0 || frame->attrs.types[place] != XLA_FFI_AttrType_SCALAR) return NULL;
  const XLA_FFI_Scalar* scalar = frame->attrs.attrs[place];
  return scalar->dtype == dtype ? scalar->value : NULL;
}

// Whether a number is in the range of its attribute.
static int is_in_range(const Attribute* attribute, const void* value) {
  if (attribute->dtype == XLA_FFI_DataType_F32)
    return *(const float*)value >= 0 && *(const float*)value <= FLT_MAX;
  const int64_t whole = *(const int64_t*)value & ~attribute->bits;
  return whole >= attribute->least && whole <= attribute->most;
}

// Append what is wrong, such as "attribute reach: -5 came, wanted an s64 of at least -1".
static void add_attribute(Text* to, const Attribute* attribute, const void* value, int is_there) {
  const int is_real = attribute->dtype == XLA_FFI_DataType_F32;
  add(to, "attribute %s: ", attribute->name);
  if (!value) add(to, is_there ? "another type" : "nothing");
  else if (is_real) add(to, "%g", *(const float*)value);
  else add(to, "%lld", (long long)*(const int64_t*)value);
  add(to, " came, wanted %s of at least %lld", is_real ? "a finite f32" : "an s64",
      (long long)attribute->least);
  if (!is_real && attribute->most < INT64_MAX) add(to, ", at most %lld", (long long)attribute->most);
}

// Check one attribute, and keep its value.
static XLA_FFI_Error* bind_attribute(XLA_FFI_CallFrame* frame, const Attribute* attribute,
                                     const void** value, Bound* bound) {
  *value = number(frame, attribute->name, attribute->dtype);
  if (*value && is_in_range(attribute, *value)) {
    if (attribute->size) bound->sizes[attribute->size] = *(const int64_t*)*value;
    return NULL;
  }
  Text text = {0};
  const int is_there = place_of_attribute(&frame->attrs, attribute->name) >= 0;
  add_attribute(&text, attribute, *value, is_there);
  return slip(frame, bound, &text);
}

// Check all attributes; there must be no others.
static XLA_FFI_Error* bind_attributes(XLA_FFI_CallFrame* frame, Bound* bound) {
  const Attribute* attributes = bound->call->attributes;
  int64_t count = 0;
  for (; attributes[count].name; count++) {
    XLA_FFI_Error* error =
        bind_attribute(frame, &attributes[count], &bound->attributes[count], bound);
    if (error) return error;
    if (!strcmp(attributes[count].name, "mode"))
      bound->mode = *(const int64_t*)bound->attributes[count];
  }
  if (frame->attrs.size == count) return NULL;
  Text text = {0};
  add(&text, "%lld attributes came, wanted", (long long)frame->attrs.size);
  for (int64_t i = 0; i < count; i++) add(&text, "%s %s", i ? "," : "", attributes[i].name);
  return slip(frame, bound, &text);
}

// Check the relations between sizes.
static XLA_FFI_Error* bind_relations(XLA_FFI_CallFrame* frame, const Bound* bound) {
  for (const Relation* relation = bound->call->relations; relation->part; relation++) {
    const int64_t part = bound->sizes[relation->part], of = bound->sizes[relation->of];
    const int64_t by = relation->by ? bound->sizes[relation->by] : 1;
    if (!part || !of) continue;  // of an operand that does not come
    int64_t product;
    const int fits = !__builtin_mul_overflow(relation->times, part, &product) &&
                     !__builtin_mul_overflow(product, by, &product);
    if (fits && (relation->is_equal ? product - relation->less == of : of % product == 0)) continue;
    Text text = {0};
    const char *part_name = size_rules[relation->part].name, *of_name = size_rules[relation->of].name;
    add(&text, "%s = %lld and %s = %lld came, wanted %s to be ", part_name, (long long)part, of_name,
        (long long)of, of_name);
    add(&text, "%s%lld * %s", relation->is_equal ? "" : "a multiple of ",
        (long long)(relation->times * by), part_name);
    if (relation->less) add(&text, " - %lld", (long long)relation->less);
    return slip(frame, bound, &text);
  }
  return NULL;
}

// Check a call against its table. Returns NULL and fills `bound` if it matches, else an error.
static XLA_FFI_Error* bind_call(XLA_FFI_CallFrame* frame, const Call* call, Bound* bound) {
  *bound = (Bound){.call = call, .sizes = {[THREE] = 3}};
  XLA_FFI_Error* error = bind_attributes(frame, bound);
  if (!error) error = bind_buffers(frame, bound);
  return error ? error : bind_relations(frame, bound);
}

// The buffer of an operand; NULL if it does not come in this mode. The name must be in the call's
// table, as the names below must.
static const XLA_FFI_Buffer* buffer_of(const Bound* bound, const char* operand) {
  int64_t i = 0;
  while (strcmp(bound->call->operands[i].name, operand)) i++;
  return bound->operands[i];
}

// The data of an operand; NULL if it does not come in this mode.
static void* data_of(const Bound* bound, const char* operand) {
  const XLA_FFI_Buffer* buffer = buffer_of(bound, operand);
  return buffer ? buffer->data : NULL;
}

// A pointer to the value of an attribute.
static const void* attribute_of(const Bound* bound, const char* name) {
  int64_t i = 0;
  while (strcmp(bound->call->attributes[i].name, name)) i++;
  return bound->attributes[i];
}

// The value of an S64 attribute.
static int64_t whole_of(const Bound* bound, const char* name) {
  return *(const int64_t*)attribute_of(bound, name);
}

// The value of an F32 attribute.
static float real_of(const Bound* bound, const char* name) {
  return *(const float*)attribute_of(bound, name);
}
