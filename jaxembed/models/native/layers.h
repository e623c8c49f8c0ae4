// Computes several products and attention in one call, so that intermediate results stay in a
// core's cache.
#pragma once

#include "attention.h"
#include "linear.h"

// The rest of a layer after attention: hidden <- norm(hidden + mixed . out), then
// norm(hidden + gelu(hidden . up) . down), where `up` may be gated instead. It takes a block of rows
// at a time, whose intermediate results stay in the second-level cache.
typedef struct {
  Linear out, up, down;
  int64_t rows, block;
} Mlp;

// A work item of the MLP: one block of rows. Returns 0, or -1 if memory is short.
static int mlp_item(const void* arguments, int64_t item) {
  const Mlp* m = arguments;
  const int64_t first = item * m->block, rows = min64(m->block, m->rows - first);
  const int64_t dim = m->out.n, width = m->up.n, block = m->block;
  const int64_t outer = max64(tiles_of(&m->out, block), tiles_of(&m->up, block));
  float* sums = scratch((sums_of(&m->up, block) + block * dim) * sizeof(float) +
                        (outer + tiles_of(&m->down, block)) * sizeof(element));
  if (!sums) return -1;
  float* hidden = sums + sums_of(&m->up, block);
  element* tiles = (element*)(hidden + block * dim);
  element* inner = tiles + outer;

  Linear out = m->out, up = m->up, down = m->down;
  out.x = (const element*)out.x + first * dim;
  out.residual += first * dim;
  out.y = hidden;
  out.adapters = of_rows(out.adapters, first);
  up.adapters = of_rows(up.adapters, first);
  down.adapters = of_rows(down.adapters, first);
  lay_in_tiles(&out, 0, rows, tiles);
  narrow(&out, tiles, 0, rows, sums);
  multiply(&out, tiles, 0, rows, 0, dim, sums);
  norm_rows(&out, 0, rows);

  up.x = hidden;
  up.y = inner;
  if (rows % TILE) memset(inner, 0, block * width * sizeof(element));
  lay_in_tiles(&up, 0, rows, tiles);
  narrow(&up, tiles, 0, rows, sums);
  multiply(&up, tiles, 0, rows, 0, width, sums);

  down.residual = hidden;
  down.y = (float*)down.y + first * dim;
  narrow(&down, inner, 0, rows, sums);
  multiply(&down, inner, 0, rows, 0, dim, sums);
  norm_rows(&down, 0, rows);
  return 0;
}

// Attention from the hidden states. An item has some heads of some rows, whose queries, keys and
// values stay in the second-level cache.
typedef struct {
  Linear qkv;
  Attention attention;
  int64_t rows_per_item;
} SelfAttention;

// A work item of self-attention. Returns 0, or -1 if memory is short.
static int self_attention_item(const void* arguments, int64_t item) {
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
                         tiles_of(&l, block) * sizeof(element) +
                         block * 3 * t.heads_per_item * t.width * sizeof(element));
  if (!memory) return -1;
  float* sums = (float*)(memory + attention_memory(&t));
  element* tiles = (element*)(sums + block * PANEL);
  element* joint = tiles + tiles_of(&l, block);

  l.x = (const float*)l.x + first_row * t.length * l.k;
  l.adapters = of_rows(l.adapters, first_row * t.length);
  l.y_stride = 3 * wide;
  lay_in_tiles(&l, 0, tokens, tiles);
  narrow(&l, tiles, 0, tokens, sums);
  for (int of = 0; of < 3; of++) {  // queries, keys, values
    l.y = joint + of * wide;
    l.y_column = of * dim + first_head * t.width;
    multiply(&l, tiles, 0, tokens, l.y_column, l.y_column + wide, sums);
  }
  t.query = joint, t.key = joint + wide, t.value = joint + 2 * wide;
  t.query_stride = t.key_stride = t.value_stride = 3 * wide;
  t.heads = t.groups = heads;
  t.segments += first_row * t.length;
  t.mixed += first_row * t.length * dim + first_head * t.width;
  if (t.bias) t.bias += first_head * distances(&t);
  if (t.cos) {
    t.cos += first_row * t.length * t.width / 2;
    t.sin += first_row * t.length * t.width / 2;
  }
  for (int64_t row = 0; row < rows; row++) attend(&t, row, 0, heads, memory);
  return 0;
}
