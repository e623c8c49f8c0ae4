// Computes linear layers: products with a whole weight, then bias, activation or layer norm.
#pragma once

#include <stdatomic.h>

#include "adapters.h"
#include "numbers.h"
#include "product.h"
#include "scratch.h"

enum { CHUNK = 768 / sizeof(element) };  // features of a panel that stay in the first-level cache
// What follows the product. NORM: layer norm of the sum with `residual`. GATED: the weight has twice
// the columns, and the first half, activated, is multiplied with the second half.
enum { PLAIN, NORM, GELU, GATED_GELU, GATED_SILU, GATED_GELU_TANH, MODES };

typedef struct {
  const void* x;  // [rows, k]
  const element* kernel;  // the weight, in panels
  const float *bias, *residual, *scale, *shift;
  void* y;             // [rows, n], starting at column `y_column`
  int64_t rows, k, n;  // n: columns of y
  int64_t y_stride, y_column;
  int64_t block;         // rows of an item, a multiple of 32
  int64_t columns;       // columns of an item, a multiple of 32
  int64_t column_parts;  // number of items that share a block
  int x_is_float, y_is_float, y_in_tiles, mode;
  float eps;
  Adapters adapters;
  atomic_int* unfinished;  // number of unfinished items of each block; the last computes the norm
} Linear;

// Apply layer norm to the rows [first, last) of y in place.
static void norm_rows(const Linear* l, int64_t first, int64_t last) {
  const int64_t n = l->n;
  for (int64_t row = first; row < last; row++) {
    float* y = (float*)l->y + row * l->y_stride;
    vec sum = v_all(0.0f), squares = v_all(0.0f);
    for (int64_t j = 0; j < n; j += TILE) sum = v_add(sum, v_load(y + j));
    vec mean = v_all(v_sum(sum) / n);
    for (int64_t j = 0; j < n; j += TILE) {
      vec centred = v_sub(v_load(y + j), mean);
      squares = v_fma(centred, centred, squares);
    }
    vec variance = v_all(v_sum(squares) / n + l->eps);
    vec inverse = v_div(v_all(1.0f), v_sqrt(variance));
    for (int64_t j = 0; j < n; j += TILE) {
      vec centred = v_sub(v_load(y + j), mean);
      vec scaled = v_mul(v_mul(centred, inverse), v_load(l->scale + j));
      v_store(y + j, v_add(scaled, v_load(l->shift + j)));
    }
  }
}

static inline int is_gated(const Linear* l) { return l->mode >= GATED_GELU; }

// The number of floats of scratch memory that `multiply` needs for a block of rows.
static int64_t sums_of(const Linear* l, int64_t block) { return block * PANEL * (1 + is_gated(l)); }

// The number of elements for the tiles of a block of rows, and after them for the same of adapters.
static int64_t tiles_of(const Linear* l, int64_t block) {
  return block * (l->k + l->adapters.width + 1);  // 1: `Taken` of each group
}

// The place after the tiles of some rows, for what adapters add before `up`.
static inline element* narrow_of(const Linear* l, const element* tiles, int64_t rows) {
  return (element*)tiles + parts(rows, TILE) * TILE * l->k;
}

// The place after that, for the columns that adapters take.
static inline Taken* taken_of(const Linear* l, const element* tiles, int64_t rows) {
  return (Taken*)(narrow_of(l, tiles, rows) + parts(rows, TILE) * TILE * l->adapters.width);
}

// Copy rows of x into tiles of 16 rows and STEP features: [rows / 16][k / STEP][16][STEP]. Float32
// is rounded to elements, and missing rows of the last tile become zeros. With y_in_tiles, y has this
// layout too.
static void lay_in_tiles(const Linear* l, int64_t first, int64_t last, element* tiles) {
  const int64_t k = l->k, padded = parts(last - first, TILE) * TILE;
  for (int64_t row = 0; row < padded; row++) {
    element* line = tiles + row / TILE * TILE * k + row % TILE * STEP;
    const int64_t from = (first + row) * k;
    for (int64_t at = 0; at < k; at += STEP, line += TILE_ELEMENTS) {
      if (first + row >= last) {
        memset(line, 0, STEP * sizeof(element));
      } else if (l->x_is_float) {
        store_step(line, (const float*)l->x + from + at);
      } else {
        memcpy(line, (const element*)l->x + from + at, STEP * sizeof(element));
      }
    }
  }
}

// What 16 columns of a gated product are multiplied with: the sums of their gate, activated.
static inline vec gate_of(const Linear* l, const float* sums, const float* bias) {
  const vec x = v_add(v_load(sums), v_load(bias));
  if (l->mode == GATED_SILU) return silu_vector(x);
  return l->mode == GATED_GELU_TANH ? gelu_tanh_vector(x) : gelu_vector(x);
}

// Add bias and residual, apply GELU, or multiply with `gates`, the sums of 32 columns, and store
// them in y. Only a gated product has gates.
static inline void finish_columns(const Linear* l, int64_t row, int rows, int64_t column,
                                  const float* sums, const float* gates) {
  const float *of_gates = l->bias + column, *of_sums = of_gates + (gates ? l->n : 0);
  const vec bias[2] = {v_load(of_sums), v_load(of_sums + TILE)};
  for (int i = 0; i < rows; i++) {
    int64_t at = (row + i) * l->y_stride + column - l->y_column;
    vec low = v_add(v_load(sums + i * PANEL), bias[0]);
    vec high = v_add(v_load(sums + i * PANEL + TILE), bias[1]);
    if (gates) {
      low = v_mul(low, gate_of(l, gates + i * PANEL, of_gates));
      high = v_mul(high, gate_of(l, gates + i * PANEL + TILE, of_gates + TILE));
    } else if (l->mode == GELU) {
      low = gelu_vector(low), high = gelu_vector(high);
    } else if (l->mode == NORM) {
      low = v_add(low, v_load(l->residual + at));
      high = v_add(high, v_load(l->residual + at + TILE));
    }
    if (l->y_is_float) {
      v_store((float*)l->y + at, low);
      v_store((float*)l->y + at + TILE, high);
      continue;
    }
    if (l->y_in_tiles) {
      at = (row + i) / TILE * TILE * l->n + column * TILE + (row + i) % TILE * STEP;
      store_in_tiles((element*)l->y + at, low, high);
      continue;
    }
    store_elements((element*)l->y + at, low, high);
  }
}

// Multiply the rows [first, last), which are in `tiles`, with a panel of the weight. Unless it is a
// panel of gates (`column` is negative), the sums are finished as those of `column`.
static inline void multiply_panel(const Linear* l, const element* tiles, int64_t first, int64_t last,
                                  const element* panel, int64_t column, float* sums,
                                  const float* gates) {
  const int64_t k = l->k;
  // a chunk of the panel stays in the first-level cache while it is multiplied with all rows
  for (int64_t from = 0; from < k; from += CHUNK) {
    const int64_t steps = min64(CHUNK, k - from) / STEP;
    for (int64_t row = first; row < last; row += PANEL) {
      const int64_t rows = min64(PANEL, last - row), at = (row - first) * PANEL;
      product(tiles + (row - first) * k + from * TILE, STEP, TILE_ELEMENTS, TILE * k,
              rows > TILE ? PANEL : TILE, panel + from * PANEL, steps, from > 0, sums + at, PANEL);
      if (from + CHUNK < k) continue;
      if (l->adapters.width)
        widen_rows(&l->adapters, narrow_of(l, tiles, last - first),
                   taken_of(l, tiles, last - first), row - first, rows,
                   l->adapters.up + (panel - l->kernel) / k * l->adapters.width, sums + at);
      if (column >= 0) finish_columns(l, row, (int)rows, column, sums + at, gates ? gates + at : NULL);
    }
  }
}

// Compute what adapters add for the rows [first, last), which are in `tiles`, as far as `multiply`
// wants it to be: it is kept after the tiles. `sums` has room for 32 rows of a panel.
static void narrow(const Linear* l, element* tiles, int64_t first, int64_t last, float* sums) {
  if (l->adapters.width)
    narrow_rows(&l->adapters, l->k, tiles, first, last, narrow_of(l, tiles, last - first),
                taken_of(l, tiles, last - first), sums);
}

// Compute the columns [start, end) of the rows [first, last), which are in `tiles`; `narrow` must
// have been called for them. `sums` has room for sums_of a block of so many rows.
static void multiply(const Linear* l, const element* tiles, int64_t first, int64_t last, int64_t start,
                     int64_t end, float* sums) {
  float* gates = is_gated(l) ? sums + sums_of(l, parts(last - first, PANEL) * PANEL) / 2 : NULL;
  for (int64_t column = start; column < end; column += PANEL) {
    const element* panel = l->kernel + column * l->k;
    if (gates) {
      multiply_panel(l, tiles, first, last, panel, -1, gates, NULL);
      panel += l->n * l->k;
    }
    multiply_panel(l, tiles, first, last, panel, column, sums, gates);
  }
}

// A work item of a linear layer: some columns of a block of rows. Returns 0, or -1 if memory is
// short.
static int linear_item(const void* arguments, int64_t item) {
  const Linear* l = arguments;
  const int64_t block = item / l->column_parts, part = item % l->column_parts;
  const int64_t first = block * l->block, last = min64(first + l->block, l->rows);
  const int64_t start = part * l->columns, end = min64(start + l->columns, l->n);
  float* sums = scratch(sums_of(l, l->block) * sizeof(float) + tiles_of(l, l->block) * sizeof(element));
  if (!sums) return -1;
  element* tiles = (element*)(sums + sums_of(l, l->block));
  lay_in_tiles(l, first, last, tiles);
  narrow(l, tiles, first, last, sums);
  multiply(l, tiles, first, last, start, end, sums);
  if (l->mode == NORM &&
      (l->column_parts == 1 || atomic_fetch_sub(&l->unfinished[block], 1) == 1))
    norm_rows(l, first, last);
  return 0;
}
