// Computes linear layers: products with a whole weight, then bias, activation or layer norm.
#pragma once

#include <stdatomic.h>

#include "adapters.h"
#include "numbers.h"
#include "product.h"
#include "scratch.h"

enum { CHUNK = 384 };  // features of a panel that stay in the first-level cache
// What follows the product. NORM: layer norm of the sum with `residual`. GATED: the weight has twice
// the columns, and the first half, activated, is multiplied with the second half.
enum { PLAIN, NORM, GELU, GATED_GELU, GATED_SILU, GATED_GELU_TANH, MODES };

typedef struct {
  const void* x;  // [rows, k]
  const bf16* kernel;  // the weight, in panels
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
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    for (int64_t j = 0; j < n; j += TILE) sum = _mm512_add_ps(sum, _mm512_loadu_ps(y + j));
    __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / n);
    for (int64_t j = 0; j < n; j += TILE) {
      __m512 centred = _mm512_sub_ps(_mm512_loadu_ps(y + j), mean);
      squares = _mm512_fmadd_ps(centred, centred, squares);
    }
    __m512 variance = _mm512_set1_ps(_mm512_reduce_add_ps(squares) / n + l->eps);
    __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_sqrt_ps(variance));
    for (int64_t j = 0; j < n; j += TILE) {
      __m512 centred = _mm512_sub_ps(_mm512_loadu_ps(y + j), mean);
      __m512 scaled = _mm512_mul_ps(_mm512_mul_ps(centred, inverse), _mm512_loadu_ps(l->scale + j));
      _mm512_storeu_ps(y + j, _mm512_add_ps(scaled, _mm512_loadu_ps(l->shift + j)));
    }
  }
}

static inline int is_gated(const Linear* l) { return l->mode >= GATED_GELU; }

// The number of floats of scratch memory that `multiply` needs for a block of rows.
static int64_t sums_of(const Linear* l, int64_t block) { return block * PANEL * (1 + is_gated(l)); }

// The number of bfloat16 for the tiles of a block of rows, and after them for the same of adapters.
static int64_t tiles_of(const Linear* l, int64_t block) {
  return block * (l->k + l->adapters.width + 1);  // 1: `Taken` of each group
}

// The place after the tiles of some rows, for what adapters add before `up`.
static inline bf16* narrow_of(const Linear* l, const bf16* tiles, int64_t rows) {
  return (bf16*)tiles + parts(rows, TILE) * TILE * l->k;
}

// The place after that, for the columns that adapters take.
static inline Taken* taken_of(const Linear* l, const bf16* tiles, int64_t rows) {
  return (Taken*)(narrow_of(l, tiles, rows) + parts(rows, TILE) * TILE * l->adapters.width);
}

// Copy rows of x into tiles of 16 rows and 32 features: [rows / 16][k / 32][16][32]. Float32 is
// rounded, and missing rows of the last tile become zeros. With y_in_tiles, y has this layout too.
static void lay_in_tiles(const Linear* l, int64_t first, int64_t last, bf16* tiles) {
  const int64_t k = l->k, padded = parts(last - first, TILE) * TILE;
  for (int64_t row = 0; row < padded; row++) {
    bf16* line = tiles + row / TILE * TILE * k + row % TILE * STEP;
    const int64_t from = (first + row) * k;
    for (int64_t at = 0; at < k; at += STEP, line += TILE_ELEMENTS) {
      if (first + row >= last) {
        _mm512_storeu_si512(line, _mm512_setzero_si512());
      } else if (l->x_is_float) {
        const float* x = (const float*)l->x + from + at;
        store_bf16(line, _mm512_loadu_ps(x), _mm512_loadu_ps(x + TILE));
      } else {
        _mm512_storeu_si512(line, _mm512_loadu_si512((const bf16*)l->x + from + at));
      }
    }
  }
}

// What 16 columns of a gated product are multiplied with: the sums of their gate, activated.
static inline __m512 gate_of(const Linear* l, const float* sums, const float* bias) {
  const __m512 x = _mm512_add_ps(_mm512_load_ps(sums), _mm512_loadu_ps(bias));
  if (l->mode == GATED_SILU) return silu_vector(x);
  return l->mode == GATED_GELU_TANH ? gelu_tanh_vector(x) : gelu_vector(x);
}

// Add bias and residual, apply GELU, or multiply with `gates`, the sums of 32 columns, and store
// them in y. Only a gated product has gates.
static inline void finish_columns(const Linear* l, int64_t row, int rows, int64_t column,
                                  const float* sums, const float* gates) {
  const float *of_gates = l->bias + column, *of_sums = of_gates + (gates ? l->n : 0);
  const __m512 bias[2] = {_mm512_loadu_ps(of_sums), _mm512_loadu_ps(of_sums + TILE)};
  for (int i = 0; i < rows; i++) {
    int64_t at = (row + i) * l->y_stride + column - l->y_column;
    __m512 low = _mm512_add_ps(_mm512_load_ps(sums + i * PANEL), bias[0]);
    __m512 high = _mm512_add_ps(_mm512_load_ps(sums + i * PANEL + TILE), bias[1]);
    if (gates) {
      low = _mm512_mul_ps(low, gate_of(l, gates + i * PANEL, of_gates));
      high = _mm512_mul_ps(high, gate_of(l, gates + i * PANEL + TILE, of_gates + TILE));
    } else if (l->mode == GELU) {
      low = gelu_vector(low), high = gelu_vector(high);
    } else if (l->mode == NORM) {
      low = _mm512_add_ps(low, _mm512_loadu_ps(l->residual + at));
      high = _mm512_add_ps(high, _mm512_loadu_ps(l->residual + at + TILE));
    }
    if (l->y_is_float) {
      _mm512_storeu_ps((float*)l->y + at, low);
      _mm512_storeu_ps((float*)l->y + at + TILE, high);
      continue;
    }
    if (l->y_in_tiles)
      at = (row + i) / TILE * TILE * l->n + column * TILE + (row + i) % TILE * STEP;
    store_bf16((bf16*)l->y + at, low, high);
  }
}

// Multiply the rows [first, last), which are in `tiles`, with a panel of the weight. Unless it is a
// panel of gates (`column` is negative), the sums are finished as those of `column`.
static inline void multiply_panel(const Linear* l, const bf16* tiles, int64_t first, int64_t last,
                                  const bf16* panel, int64_t column, float* sums,
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
static void narrow(const Linear* l, bf16* tiles, int64_t first, int64_t last, float* sums) {
  if (l->adapters.width)
    narrow_rows(&l->adapters, l->k, tiles, first, last, narrow_of(l, tiles, last - first),
                taken_of(l, tiles, last - first), sums);
}

// Compute the columns [start, end) of the rows [first, last), which are in `tiles`; `narrow` must
// have been called for them. `sums` has room for sums_of a block of so many rows.
static void multiply(const Linear* l, const bf16* tiles, int64_t first, int64_t last, int64_t start,
                     int64_t end, float* sums) {
  float* gates = is_gated(l) ? sums + sums_of(l, parts(last - first, PANEL) * PANEL) / 2 : NULL;
  for (int64_t column = start; column < end; column += PANEL) {
    const bf16* panel = l->kernel + column * l->k;
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
  float* sums = scratch(sums_of(l, l->block) * sizeof(float) + tiles_of(l, l->block) * sizeof(bf16));
  if (!sums) return -1;
  bf16* tiles = (bf16*)(sums + sums_of(l, l->block));
  lay_in_tiles(l, first, last, tiles);
  narrow(l, tiles, first, last, sums);
  multiply(l, tiles, first, last, start, end, sums);
  if (l->mode == NORM &&
      (l->column_parts == 1 || atomic_fetch_sub(&l->unfinished[block], 1) == 1))
    norm_rows(l, first, last);
  return 0;
}
