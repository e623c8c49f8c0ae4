// The functions that XLA calls. Each divides its work into items and runs them on threads. It
// returns NULL, or an error.
#pragma once

#include "bind.h"
#include "layers.h"
#include "threads.h"

static XLA_FFI_Error* out_of_memory(XLA_FFI_CallFrame* frame, const char* call) {
  return error_of(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, call, "out of memory");
}

// Whether XLA asks for metadata, as it does first: it is given the version of its interface that
// this was compiled for.
static int asks_for_metadata(XLA_FFI_CallFrame* frame) {
  // __typeof__, because jaxlib 0.11 renamed this type; its fields are the same
  const __typeof__(*frame->extension_start)* extension = frame->extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  return 1;
}

// The same versions for Python, which compares them with those of the installed jaxlib.
const int jaxembed_ffi_major = XLA_FFI_API_MAJOR, jaxembed_ffi_minor = XLA_FFI_API_MINOR;

// The adapters of a product by the names of their operands; none if they do not come.
static Adapters adapters_of(const Bound* bound, const char* down, const char* up,
                            const char* owners, Size width) {
  return (Adapters){.down = data_of(bound, down),
                    .up = data_of(bound, up),
                    .owners = data_of(bound, owners),
                    .numbers = data_of(bound, "numbers"),
                    .width = bound->sizes[width]};
}

// The adapters of a call that has one product.
static Adapters only_adapters(const Bound* bound) {
  return adapters_of(bound, "adapter_down", "adapter_up", "adapter_owners", NARROW);
}

// Give a product its weight, by the prefix of the names of its operands.
static void bind_weight(const Bound* bound, const char* kernel, const char* scales, Linear* l) {
  if (!(bound->mode & QUANTIZED)) {
    l->kernel = data_of(bound, kernel);
    return;
  }
  const XLA_FFI_Buffer* of_scales = buffer_of(bound, scales);
  l->quantized = (Quantized){.values = data_of(bound, kernel),
                             .scales = of_scales->data,
                             .group = l->k / of_scales->dims[1]};
}

enum { MLP_BLOCK = 128 };  // rows

// The number of threads for products of so many rows with weights of so many elements: few are not
// worth sharing. Fewer than eight rows count as eight, for then reading the weights takes the time.
static int64_t threads_for(XLA_FFI_CallFrame* frame, int64_t rows, int64_t weights) {
  return (double)max64(rows, 8) * weights > 2e6 ? share_of_threads(frame) : 1;
}

// A linear layer; with mode NORM, the layer norm of its sum with a residual; with a gated mode, the
// product of its two halves, the first activated.
XLA_FFI_Error* jaxembed_linear(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  const int64_t* mode = number(frame, "mode", XLA_FFI_DataType_S64);
  const Call* call = &linear_call;
  if (mode && end_of(*mode) == NORM) call = &linear_norm_call;
  if (mode && end_of(*mode) >= GATED_GELU) call = &gated_linear_call;
  Bound bound;
  XLA_FFI_Error* error = bind_call(frame, call, &bound);
  if (error) return error;
  Linear l = {.x = data_of(&bound, "x"),
              .bias = data_of(&bound, "bias"),
              .segments = data_of(&bound, "segments"),
              .y = bound.result->data,
              .rows = bound.sizes[LEADING],
              .k = bound.sizes[IN],
              .n = bound.sizes[OUT],
              .y_stride = bound.sizes[OUT],
              .x_is_float = bound.operands[0]->dtype == XLA_FFI_DataType_F32,
              .y_is_float = bound.result->dtype == XLA_FFI_DataType_F32,
              .mode = end_of(bound.mode),
              .eps = real_of(&bound, "eps"),
              .adapters = only_adapters(&bound)};
  bind_weight(&bound, "kernel", "kernel_scales", &l);
  if (l.mode == NORM) {
    l.residual = data_of(&bound, "residual");
    l.scale = data_of(&bound, "scale");
    l.shift = data_of(&bound, "shift");
  }
  const int64_t threads = threads_for(frame, live_of(l.rows, l.segments), l.k * l.n);
  atomic_int unfinished[MOST_SHARED];
  const int64_t items = divide_into_items(&l, threads, unfinished);
  if (on_threads(frame, linear_item, &l, sizeof l, items, threads))
    return out_of_memory(frame, "linear");
  return NULL;
}

// Read what all calls of attention share, besides queries, keys and values.
static void bind_attention(const Bound* bound, Attention* t) {
  t->segments = data_of(bound, "segments");
  t->mixed = bound->result->data;
  t->rows = bound->sizes[ROWS], t->length = bound->sizes[LENGTH];
  t->causal = (int)whole_of(bound, "causal");
  t->reach = whole_of(bound, "reach");
  if (t->reach < 0 || t->reach > t->length) t->reach = t->length;
  t->cap = real_of(bound, "cap");
  if (bound->mode & BIASED) t->bias = data_of(bound, "distance_bias");
  if (bound->mode & ROTATED) t->cos = data_of(bound, "cos"), t->sin = data_of(bound, "sin");
}

// Run attention with the operands that `t` already has.
static XLA_FFI_Error* attention_of(XLA_FFI_CallFrame* frame, const Bound* bound, Attention* t) {
  bind_attention(bound, t);
  t->heads = bound->sizes[HEADS], t->width = bound->sizes[WIDTH];
  t->mixed_stride = t->heads * t->width;
  const int worth_sharing = (double)t->rows * t->heads * t->length * t->length > 1e5;
  const int64_t threads = worth_sharing ? share_of_threads(frame) : 1;
  t->heads_per_item = t->rows >= 4 * threads ? t->groups : 1;
  const int64_t items = t->rows * parts(t->groups, t->heads_per_item);
  if (on_threads(frame, attention_item, t, sizeof *t, items, threads))
    return out_of_memory(frame, bound->call->name);
  return NULL;
}

// Attention with query, key and value in arrays of their own.
XLA_FFI_Error* jaxembed_attention(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  Bound bound;
  XLA_FFI_Error* error = bind_call(frame, &attention_call, &bound);
  if (error) return error;
  Attention t = {.query = data_of(&bound, "query"),
                 .key = data_of(&bound, "key"),
                 .value = data_of(&bound, "value"),
                 .groups = bound.sizes[GROUPS]};
  t.query_stride = bound.sizes[HEADS] * bound.sizes[WIDTH];
  t.key_stride = t.value_stride = bound.sizes[GROUPS] * bound.sizes[WIDTH];
  return attention_of(frame, &bound, &t);
}

// Attention with query, key and value side by side in one array.
XLA_FFI_Error* jaxembed_joint_attention(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  Bound bound;
  XLA_FFI_Error* error = bind_call(frame, &joint_attention_call, &bound);
  if (error) return error;
  const int64_t dim = bound.sizes[HEADS] * bound.sizes[WIDTH];
  const element* first = data_of(&bound, "joint");
  Attention t = {.query = first,
                 .key = first + dim,
                 .value = first + 2 * dim,
                 .groups = bound.sizes[HEADS]};
  t.query_stride = t.key_stride = t.value_stride = 3 * dim;
  return attention_of(frame, &bound, &t);
}

// The heads of an item, at most `most`: fewer if threads then finish much sooner, because each has
// as many items as the others.
static int64_t even_heads(int64_t row_parts, int64_t heads, int64_t most, int64_t threads) {
  int64_t best = most, best_heads = INT64_MAX;
  for (int64_t some = most; some > 0; some--) {
    // of the thread that has the most
    const int64_t of_thread = parts(row_parts * parts(heads, some), threads) * some;
    if (of_thread < best_heads - best_heads / 8) best = some, best_heads = of_thread;
  }
  return best;
}

// The product that gives queries, keys and values, and their attention.
XLA_FFI_Error* jaxembed_self_attention(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  Bound bound;
  XLA_FFI_Error* error = bind_call(frame, &self_attention_call, &bound);
  if (error) return error;
  const int64_t rows = bound.sizes[ROWS], length = bound.sizes[LENGTH], dim = bound.sizes[DIM];
  const int64_t heads = bound.sizes[HEADS];
  SelfAttention s = {.qkv = {.x = data_of(&bound, "hidden"),
                             .bias = data_of(&bound, "bias"),
                             .rows = rows * length,
                             .k = dim,
                             .n = 3 * dim,
                             .x_is_float = 1,
                             .adapters = only_adapters(&bound)},
                     .attention = {.mixed_stride = dim, .heads = heads, .width = dim / heads}};
  bind_weight(&bound, "kernel", "kernel_scales", &s.qkv);
  bind_attention(&bound, &s.attention);
  // An item has enough rows to make up for reading the weight, few enough heads to stay in the
  // cache, and there are items for all threads.
  s.rows_per_item = max64(1, 128 / length);
  const int64_t row_parts = parts(rows, s.rows_per_item);
  const int64_t tokens = s.rows_per_item * length;
  const int64_t threads = threads_for(frame, rows * length, 3 * dim * dim);
  int64_t head_parts = parts(tokens * 3 * dim * (int64_t)sizeof(element), 640 * 1024);
  if (row_parts * head_parts < threads) head_parts = parts(threads, row_parts);
  s.attention.heads_per_item =
      even_heads(row_parts, heads, parts(heads, min64(heads, head_parts)), threads);
  const int64_t items = row_parts * parts(heads, s.attention.heads_per_item);
  if (on_threads(frame, self_attention_item, &s, sizeof s, items, threads))
    return out_of_memory(frame, "self_attention");
  return NULL;
}

// Run an MLP in phases. Returns 0, or not 0 if memory is short.
static int mlp_in_phases(XLA_FFI_CallFrame* frame, const Mlp* m, int64_t threads) {
  element* wide = malloc(m->blocks.rows * m->up.n * sizeof(element));
  if (!wide) return -1;
  Phases p = {.products = {m->out, m->up, m->down}};
  p.products[1].y = wide, p.products[2].x = wide;  // `up` writes what `down` reads
  atomic_int unfinished[PHASES][MOST_SHARED];
  int64_t end = 0;
  for (int phase = 0; phase < PHASES; phase++) {
    Linear* l = &p.products[phase];
    p.ends[phase] = end += divide_into_items(l, threads, unfinished[phase]);
  }
  const int failed = in_phases(frame, phase_item, &p, sizeof p, p.ends, threads);
  free(wide);
  return failed;
}

// The rest of a BERT layer after attention.
XLA_FFI_Error* jaxembed_mlp(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  Bound bound;
  const int64_t* mode = number(frame, "mode", XLA_FFI_DataType_S64);
  const int gated = mode && end_of(*mode) >= GATED_GELU;
  XLA_FFI_Error* error = bind_call(frame, gated ? &gated_mlp_call : &mlp_call, &bound);
  if (error) return error;
  const int64_t dim = bound.sizes[DIM], inner = bound.sizes[INNER];
  const int64_t rows = bound.sizes[LEADING];
  const float eps = real_of(&bound, "eps");
  const int32_t* segments = data_of(&bound, "segments");
  float* y = bound.result->data;
  Mlp m = {.out = {.x = data_of(&bound, "mixed"),
                   .residual = data_of(&bound, "hidden"),
                   .segments = segments,
                   .y = y,
                   .rows = rows,
                   .bias = data_of(&bound, "out_bias"),
                   .scale = data_of(&bound, "out_scale"),
                   .shift = data_of(&bound, "out_shift"),
                   .k = dim, .n = dim, .y_stride = dim,
                   .y_is_float = 1, .mode = NORM, .eps = eps},
           .up = {.x = y,
                  .bias = data_of(&bound, "up_bias"),
                  .segments = segments,
                  .rows = rows,
                  .k = dim, .n = inner, .y_stride = inner,
                  .x_is_float = 1, .mode = end_of(bound.mode)},
           .down = {.bias = data_of(&bound, "down_bias"),
                    .residual = y,
                    .segments = segments,
                    .scale = data_of(&bound, "down_scale"),
                    .shift = data_of(&bound, "down_shift"),
                    .y = y,
                    .rows = rows,
                    .k = inner, .n = dim, .y_stride = dim,
                    .y_is_float = 1, .mode = NORM, .eps = eps}};
  bind_weight(&bound, "out_kernel", "out_kernel_scales", &m.out);
  bind_weight(&bound, "up_kernel", "up_kernel_scales", &m.up);
  bind_weight(&bound, "down_kernel", "down_kernel_scales", &m.down);
  m.out.adapters = adapters_of(&bound, "out_adapter_down", "out_adapter_up", "out_adapter_owners",
                               OUT_NARROW);
  m.up.adapters = adapters_of(&bound, "up_adapter_down", "up_adapter_up", "up_adapter_owners",
                              UP_NARROW);
  m.down.adapters = adapters_of(&bound, "down_adapter_down", "down_adapter_up",
                                "down_adapter_owners", DOWN_NARROW);
  const int64_t live = live_of(rows, segments);
  const int64_t threads = threads_for(frame, live, dim * inner);
  int64_t block = MLP_BLOCK;
  while (block > PANEL && parts(live, block) < threads) block /= 2;
  m.blocks = even_blocks(rows, segments, block, threads);
  const int64_t blocks = m.blocks.count;
  const int failed = blocks < threads
                         ? mlp_in_phases(frame, &m, threads)
                         : on_threads(frame, mlp_item, &m, sizeof m, blocks, threads);
  return failed ? out_of_memory(frame, "mlp") : NULL;
}
