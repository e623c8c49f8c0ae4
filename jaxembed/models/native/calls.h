// What XLA calls: each shares a call's work out over items and threads.
#pragma once

#include "layers.h"
#include "threads.h"

static XLA_FFI_Error* error_of(XLA_FFI_CallFrame* frame, const char* message) {
  XLA_FFI_Error_Create_Args args = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE,
                                    .message = message,
                                    .errc = XLA_FFI_Error_Code_RESOURCE_EXHAUSTED};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// XLA first asks for which version of its interface this was compiled.
static int asks_for_metadata(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Extension_Base* extension = frame->extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  return 1;
}

static XLA_FFI_Buffer* argument(XLA_FFI_CallFrame* frame, int i) { return frame->args.args[i]; }
static XLA_FFI_Buffer* result(XLA_FFI_CallFrame* frame, int i) { return frame->rets.rets[i]; }

static XLA_FFI_Scalar* attribute(XLA_FFI_CallFrame* frame, const char* name) {
  for (int64_t i = 0; i < frame->attrs.size; i++) {
    const XLA_FFI_ByteSpan* span = frame->attrs.names[i];
    if (span->len == strlen(name) && !memcmp(span->ptr, name, span->len)) return frame->attrs.attrs[i];
  }
  return NULL;
}

static int64_t whole(XLA_FFI_CallFrame* frame, const char* name) {
  return *(int64_t*)attribute(frame, name)->value;
}

enum { MOST_SHARED = 64 };  // blocks whose columns are shared out

// x, kernel, bias, and with mode NORM residual, scale, shift -> y
XLA_FFI_Error* jaxembed_linear(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  XLA_FFI_Buffer *x = argument(frame, 0), *y = result(frame, 0);
  Linear l = {.x = x->data,
              .kernel = argument(frame, 1)->data,
              .bias = argument(frame, 2)->data,
              .y = y->data,
              .k = x->dims[x->rank - 1],
              .n = y->dims[y->rank - 1],
              .y_stride = y->dims[y->rank - 1],
              .rows = 1,
              .x_is_float = x->dtype == XLA_FFI_DataType_F32,
              .y_is_float = y->dtype == XLA_FFI_DataType_F32,
              .mode = (int)whole(frame, "mode")};
  for (int64_t i = 0; i < x->rank - 1; i++) l.rows *= x->dims[i];
  if (l.mode == NORM) {
    l.residual = argument(frame, 3)->data;
    l.scale = argument(frame, 4)->data;
    l.shift = argument(frame, 5)->data;
    l.eps = *(float*)attribute(frame, "eps")->value;
  }
  // Blocks that stay in the second-level cache; where there are few rows, the columns are shared out
  const int worth_sharing = (double)l.rows * l.k * l.n > 2e6;
  const int64_t threads = worth_sharing ? share_of_threads(frame) : 1;
  l.block = max64(PANEL, min64(128, 131072 / l.k / PANEL * PANEL));
  const int64_t blocks = parts(l.rows, l.block);
  l.columns = l.n;
  if (blocks < threads && blocks <= MOST_SHARED)
    l.columns = parts(parts(l.n, PANEL), parts(2 * threads, blocks)) * PANEL;
  l.column_parts = parts(l.n, l.columns);
  atomic_int unfinished[MOST_SHARED];
  if (l.column_parts > 1) {
    for (int64_t i = 0; i < blocks; i++) atomic_init(&unfinished[i], (int)l.column_parts);
    l.unfinished = unfinished;
  }
  if (on_threads(frame, linear_item, &l, sizeof l, blocks * l.column_parts, threads))
    return error_of(frame, "jaxembed_linear: out of memory");
  return NULL;
}

static XLA_FFI_Error* attention_of(XLA_FFI_CallFrame* frame, Attention* t) {
  XLA_FFI_Buffer* y = result(frame, 0);
  t->mixed = y->data;
  t->rows = y->dims[0], t->length = y->dims[1], t->heads = y->dims[2], t->width = y->dims[3];
  t->mixed_stride = t->heads * t->width;
  t->causal = (int)whole(frame, "causal");
  t->reach = whole(frame, "reach");
  if (t->reach < 0) t->reach = t->length;
  const int worth_sharing = (double)t->rows * t->heads * t->length * t->length > 1e5;
  const int64_t threads = worth_sharing ? share_of_threads(frame) : 1;
  t->heads_per_item = t->rows >= 4 * threads ? t->groups : 1;
  const int64_t items = t->rows * parts(t->groups, t->heads_per_item);
  if (on_threads(frame, attention_item, t, sizeof *t, items, threads))
    return error_of(frame, "jaxembed_attention: out of memory");
  return NULL;
}

// query [rows, length, heads, width], key and value [rows, length, groups, width], segments
XLA_FFI_Error* jaxembed_attention(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  XLA_FFI_Buffer *query = argument(frame, 0), *key = argument(frame, 1);
  Attention t = {.query = query->data,
                 .key = key->data,
                 .value = argument(frame, 2)->data,
                 .segments = argument(frame, 3)->data,
                 .groups = key->dims[2]};
  t.query_stride = query->dims[2] * query->dims[3];
  t.key_stride = t.value_stride = key->dims[2] * key->dims[3];
  return attention_of(frame, &t);
}

// query, key and value side by side: [rows, length, 3, heads, width], and segments
XLA_FFI_Error* jaxembed_joint_attention(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  XLA_FFI_Buffer* joint = argument(frame, 0);
  const int64_t dim = joint->dims[3] * joint->dims[4];
  const bf16* first = joint->data;
  Attention t = {.query = first,
                 .key = first + dim,
                 .value = first + 2 * dim,
                 .segments = argument(frame, 1)->data,
                 .groups = joint->dims[3]};
  t.query_stride = t.key_stride = t.value_stride = 3 * dim;
  return attention_of(frame, &t);
}

// hidden [rows, length, dim], kernel and bias of queries, keys and values, segments; heads
XLA_FFI_Error* jaxembed_self_attention(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  XLA_FFI_Buffer* hidden = argument(frame, 0);
  const int64_t rows = hidden->dims[0], length = hidden->dims[1], dim = hidden->dims[2];
  const int64_t heads = whole(frame, "heads");
  SelfAttention s = {.qkv = {.x = hidden->data,
                             .kernel = argument(frame, 1)->data,
                             .bias = argument(frame, 2)->data,
                             .rows = rows * length,
                             .k = dim,
                             .n = 3 * dim,
                             .x_is_float = 1},
                     .attention = {.segments = argument(frame, 3)->data,
                                   .mixed = result(frame, 0)->data,
                                   .mixed_stride = dim,
                                   .rows = rows,
                                   .length = length,
                                   .heads = heads,
                                   .width = dim / heads,
                                   .reach = length}};
  // Enough rows to be worth the reading of the kernel, not so many heads that the cache overflows,
  // and items for several threads.
  s.rows_per_item = max64(1, 128 / length);
  const int64_t row_parts = parts(rows, s.rows_per_item);
  const int64_t tokens = s.rows_per_item * length;
  const int64_t threads = share_of_threads(frame);
  int64_t head_parts = parts(tokens * 3 * dim * (int64_t)sizeof(bf16), 640 * 1024);
  if (row_parts * head_parts < threads) head_parts = parts(threads, row_parts);
  s.attention.heads_per_item = parts(heads, min64(heads, head_parts));
  const int64_t items = row_parts * parts(heads, s.attention.heads_per_item);
  if (on_threads(frame, self_attention_item, &s, sizeof s, items, threads))
    return error_of(frame, "jaxembed_self_attention: out of memory");
  return NULL;
}

// mixed, hidden; kernel, bias, scale and shift of out; kernel and bias of up; as out's of down
XLA_FFI_Error* jaxembed_mlp(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  XLA_FFI_Buffer *hidden = argument(frame, 1), *up_bias = argument(frame, 7);
  const int64_t dim = hidden->dims[2], width = up_bias->dims[0];
  const float eps = *(float*)attribute(frame, "eps")->value;
  Mlp m = {.rows = hidden->dims[0] * hidden->dims[1],
           .out = {.x = argument(frame, 0)->data,
                   .residual = hidden->data,
                   .kernel = argument(frame, 2)->data,
                   .bias = argument(frame, 3)->data,
                   .scale = argument(frame, 4)->data,
                   .shift = argument(frame, 5)->data,
                   .k = dim, .n = dim, .y_stride = dim,
                   .y_is_float = 1, .mode = NORM, .eps = eps},
           .up = {.kernel = argument(frame, 6)->data,
                  .bias = up_bias->data,
                  .k = dim, .n = width,
                  .x_is_float = 1, .y_in_tiles = 1, .mode = GELU},
           .down = {.kernel = argument(frame, 8)->data,
                    .bias = argument(frame, 9)->data,
                    .scale = argument(frame, 10)->data,
                    .shift = argument(frame, 11)->data,
                    .y = result(frame, 0)->data,
                    .k = width, .n = dim, .y_stride = dim,
                    .y_is_float = 1, .mode = NORM, .eps = eps}};
  const int64_t threads = share_of_threads(frame);
  m.block = 128;
  while (m.block > PANEL && parts(m.rows, m.block) < threads) m.block /= 2;
  if (on_threads(frame, mlp_item, &m, sizeof m, parts(m.rows, m.block), threads))
    return error_of(frame, "jaxembed_mlp: out of memory");
  return NULL;
}
