// Computes several products and attention in one call, so that intermediate results stay in a
// core's cache.
#pragma once

#include "attention.h"
#include "linear.h"
#include "threads.h"

// The rest of a layer after attention: y <- norm(hidden + mixed . out), then
// norm(y + gelu(y . up) . down), where `up` may be gated instead. It takes a block of rows at a time,
// whose intermediate results stay in the core's cache if they fit.
typedef struct {
  Linear out, up, down;
  Blocks blocks;  // of rows
} Mlp;

// A work item of the MLP: one block of rows. See Work for the rest.
static int mlp_item(const void* arguments, int64_t item, int64_t before) {
  (void)before;
  const Mlp* m = arguments;
  const int64_t first = first_of_block(m->blocks, item);
  const int64_t last = first_of_block(m->blocks, item + 1);
  const int64_t dim = m->out.n, width = m->up.n, block = m->blocks.most;
  const int is_quantized = m->down.quantized.values != NULL;
  const size_t of_inner = is_quantized ? block * width * sizeof(element) : 0;
  const size_t outer = laid_bytes(&m->out, block) > laid_bytes(&m->up, block)
                           ? laid_bytes(&m->out, block)
                           : laid_bytes(&m->up, block);
  float* sums = scratch(sums_of(&m->up, block) * sizeof(float) + of_inner + outer +
                        laid_bytes(&m->down, block) + bytes_of_rows(block));
  if (!sums) return -1;
  // the input of `down` before it is quantized
  element* inner = (element*)(sums + sums_of(&m->up, block));
  char *memory = (char*)inner + of_inner, *of_last = memory + outer;
  clear_padding(&m->down, first, last, 0, dim);
  const Rows rows =
      live_rows(&m->out, first, last, (int32_t*)(of_last + laid_bytes(&m->down, block)));

  Laid laid;
  divide(&m->out, rows.count, memory, &laid);
  lay_out(&m->out, rows, 0, &laid, sums);
  multiply(&m->out, &laid, rows, 0, dim, sums);
  norm_rows(&m->out, rows);

  Laid wide;  // of `down`
  divide(&m->down, rows.count, of_last, &wide);
  Linear up = m->up, down = m->down;
  up.y_in_tiles = !is_quantized, up.y_is_live = 1;
  up.y = is_quantized ? inner : wide.tiles;
  divide(&up, rows.count, memory, &laid);
  lay_out(&up, rows, 0, &laid, sums);
  multiply(&up, &laid, rows, 0, width, sums);

  down.x = inner, down.x_is_live = 1;
  lay_out(&down, rows, !is_quantized, &wide, sums);
  multiply(&down, &wide, rows, 0, dim, sums);
  norm_rows(&down, rows);
  return 0;
}

// The same in three phases, the products, whose items the threads share: with few rows there are too
// few blocks for all threads.
typedef struct {
  Linear products[PHASES];
  int64_t ends[PHASES];
} Phases;

// A work item of a product. See Work for the rest.
static int phase_item(const void* arguments, int64_t item, int64_t before) {
  const Phases* p = arguments;
  int phase = 0;
  while (item >= p->ends[phase]) phase++;
  const int64_t first = phase ? p->ends[phase - 1] : 0;
  return linear_item(&p->products[phase], item - first, before - first);
}

// Attention from the hidden states. An item has some heads of some rows, whose queries, keys and
// values stay in the second-level cache.
typedef struct {
  Linear qkv;
  Attention attention;
  int64_t rows_per_item;
} SelfAttention;

// A work item of self-attention. See Work for the rest.
static int self_attention_item(const void* arguments, int64_t item, int64_t before) {
  const SelfAttention* s = arguments;
  Attention t = s->attention;
  Linear l = s->qkv;
  const int64_t dim = t.heads * t.width, head_parts = parts(t.heads, t.heads_per_item);
  const int64_t first_row = item / head_parts * s->rows_per_item;
  const int64_t rows = min64(s->rows_per_item, t.rows - first_row);
  const int64_t first_head = item % head_parts * t.heads_per_item;
  const int64_t heads = min64(t.heads_per_item, t.heads - first_head);
  const int64_t tokens = rows * t.length, most = s->rows_per_item * t.length;
  const int64_t wide = heads * t.width, block = parts(most, PANEL) * PANEL;

  char* memory = scratch(attention_memory(&t) + block * PANEL * sizeof(float) +
                         laid_bytes(&l, block) + bytes_of_rows(block) +
                         block * 3 * t.heads_per_item * t.width * sizeof(element));
  if (!memory) return -1;
  float* sums = (float*)(memory + attention_memory(&t));
  char* of_laid = (char*)(sums + block * PANEL);
  int32_t* at = (int32_t*)(of_laid + laid_bytes(&l, block));
  element* joint = (element*)((char*)at + bytes_of_rows(block));
  t.segments += first_row * t.length;
  l.segments = t.segments;
  // nothing is written to `joint` in padding, which `attend` does not use
  const Rows live = live_rows(&l, 0, tokens, at);
  Laid laid;
  divide(&l, tokens, of_laid, &laid);

  l.x = (const float*)l.x + first_row * t.length * l.k;
  l.adapters = of_rows(l.adapters, first_row * t.length);
  l.y_stride = 3 * wide;
  const int is_laid_out = before >= 0 && before / head_parts == item / head_parts;
  if (!is_laid_out) lay_out(&l, live, 0, &laid, sums);
  for (int of = 0; of < 3; of++) {  // queries, keys, values
    l.y = joint + of * wide;
    l.y_column = of * dim + first_head * t.width;
    multiply(&l, &laid, live, l.y_column, l.y_column + wide, sums);
  }
  t.query = joint, t.key = joint + wide, t.value = joint + 2 * wide;
  t.query_stride = t.key_stride = t.value_stride = 3 * wide;
  t.heads = t.groups = heads;
  t.mixed += first_row * t.length * dim + first_head * t.width;
  if (t.bias) t.bias += first_head * distances(&t);
  if (t.cos) {
    t.cos += first_row * t.length * t.width / 2;
    t.sin += first_row * t.length * t.width / 2;
  }
  for (int64_t row = 0; row < rows; row++) attend(&t, row, 0, heads, memory);
  return 0;
}
