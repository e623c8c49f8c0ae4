// Computes products of quantized rows with quantized weights. Sums of a group of features are int32,
// and so the same with any instructions.
//
// A weight is s8 in panels of product.h, with units of four features. Each group of features has a
// scale for every column, w = scale * s; and for every row a scale and a zero point, x = scale * (u -
// zero), where u is u8. So the sum of x * w is scale of row * scale of column * (sum of u * s - zero *
// sum of s).
#pragma once

#include "numbers.h"
#include "product.h"

enum { BYTES = 4, BYTES_STEP = TILE * BYTES, BYTES_TILE = TILE * BYTES_STEP };

typedef struct {
  const int8_t* values;  // in panels; NULL: the weight is not quantized
  const float* scales;   // [n / 32][groups][2][32]: of each column the scale, and scale * sum of s
  int64_t group;         // features of a group, whole steps of 64
} Quantized;

// What a group of a row is multiplied with: its scale, and -scale * zero.
typedef struct {
  float scale, offset;
} RowScale;

// Sixteen features of x, which are float32 or elements, from `at` on.
static inline vec features(const void* x, int is_float, int64_t at) {
  return is_float ? v_load((const float*)x + at) : load_elements((const element*)x + at);
}

// Quantize a group of a row of x, whose first feature is at `at`, to u8 in tiles [64], [64], ... A
// group that is not finite gets NaN as its scale, and so has NaN in all products.
static inline RowScale quantize(const void* x, int is_float, int64_t at, int64_t group, uint8_t* to) {
  vec low = v_all(0.0f), high = low, odd = low;  // the range includes zero
  for (int64_t i = 0; i < group; i += TILE) {
    const vec some = features(x, is_float, at + i);
    low = v_min(low, some), high = v_max(high, some);
    odd = v_fma(some, v_all(0.0f), odd);
  }
  const float least = -v_largest(v_sub(v_all(0.0f), low)), most = v_largest(high);
  float scale = most / 255 - least / 255;
  if (!(scale > 1e-30f)) scale = 1;
  const vec inverse = v_all(1 / scale), zero = v_round(v_mul(v_all(-least), inverse));
  for (int64_t i = 0; i < group; i += TILE) {
    const vec u = v_fma(features(x, is_float, at + i), inverse, zero);
    store_u8(to + i / BYTES_STEP * BYTES_TILE + i % BYTES_STEP,
             v_min(v_max(u, v_all(0.0f)), v_all(255.0f)));
  }
  float first[TILE];
  v_store(first, zero);
  scale += v_sum(odd);
  return (RowScale){scale, -scale * first[0]};
}

// Scale the sums of a group in one row and 16 columns, and add them to `to`, or set them there unless
// `add` is set. `of_columns` has the scales of these columns, and 32 floats after them their sums.
static inline void finish_group(ints sums, RowScale row, const float* of_columns, int add, float* to) {
  const vec product = v_mul(v_from(sums), v_load(of_columns));
  const vec before = add ? v_load(to) : v_all(0.0f);
  const vec rest = v_fma(v_load(of_columns + PANEL), v_all(row.offset), before);
  v_store(to, v_fma(product, v_all(row.scale), rest));
}

// `quantized_product` adds the product of a group of features, for as many rows as `whole_rows` says,
// with a panel to sums[rows, 32], or sets it there unless `add` is set. `x` is in tiles, with `lower`
// bytes from one 16 rows to the next; `of_rows` are the scales of the group, `groups` from row to row.
// `of_columns` are the scales of the panel's group. The weight `ahead` bytes further on is prefetched.
#ifdef __AMX_INT8__
static inline void product_of_bytes(const uint8_t* x, int64_t lower, int rows, const int8_t* panel,
                                    int64_t steps, int32_t* out) {
  __asm__ volatile("" ::: "memory");  // gcc does not know that tile loads read memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; step++, x += BYTES_TILE, panel += 2 * BYTES_TILE) {
    _tile_loadd(6, panel, BYTES_STEP);
    _tile_loadd(7, panel + BYTES_TILE, BYTES_STEP);
    _tile_loadd(4, x, BYTES_STEP);
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    if (rows == TILE) continue;
    _tile_loadd(5, x + lower, BYTES_STEP);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  _tile_stored(0, out, PANEL * 4);
  _tile_stored(1, out + TILE, PANEL * 4);
  if (rows == TILE) return;
  _tile_stored(2, out + TILE * PANEL, PANEL * 4);
  _tile_stored(3, out + TILE * PANEL + TILE, PANEL * 4);
}

static inline void quantized_product(const uint8_t* x, int64_t lower, int rows,
                                     const RowScale* of_rows, int64_t groups, const int8_t* panel,
                                     const float* of_columns, int64_t steps, int64_t ahead, int add,
                                     float* sums) {
  (void)ahead;
  int32_t out[PANEL * PANEL] __attribute__((aligned(64)));
  product_of_bytes(x, lower, rows, panel, steps, out);
  __asm__ volatile("" ::: "memory");
  for (int i = 0; i < rows; i++)
    for (int half = 0; half < PANEL; half += TILE)
      finish_group(_mm512_loadu_si512(out + i * PANEL + half), of_rows[i * groups],
                   of_columns + half, add, sums + i * PANEL + half);
}
#else
static inline __attribute__((always_inline)) void quantized_group(
    const uint8_t* x, const int rows, const RowScale* of_rows, int64_t groups, const int8_t* panel,
    const float* of_columns, int64_t steps, int64_t ahead, int add, float* sums) {
  ints totals[MOST_ROWS][HALVES];
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
    for (int half = 0; half < HALVES; half++) totals[i][half] = i_none();
  for (int64_t step = 0; step < steps; step++, x += BYTES_TILE, panel += 2 * BYTES_TILE)
    for (int at = 0; at < BYTES_STEP; at += BYTES) {
      Signed columns[HALVES];
      for (int half = 0; half < HALVES; half++) {
        const int8_t* line = panel + at * TILE + half * BYTES_TILE;
        columns[half] = load_signed(line);
        __builtin_prefetch(line + ahead, 0, 2);
      }
#pragma GCC unroll 8
      for (int i = 0; i < rows; i++) {
        const Unsigned four = all_unsigned(x + i * BYTES_STEP + at);
        for (int half = 0; half < HALVES; half++)
          totals[i][half] = i_dot(totals[i][half], four, columns[half]);
      }
    }
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
    for (int half = 0; half < HALVES; half++)
      finish_group(totals[i][half], of_rows[i * groups], of_columns + half * TILE, add,
                   sums + i * PANEL + half * TILE);
}

static void quantized_product(const uint8_t* x, int64_t lower, int rows, const RowScale* of_rows,
                              int64_t groups, const int8_t* panel, const float* of_columns,
                              int64_t steps, int64_t ahead, int add, float* sums) {
  for (; rows > 0; rows -= TILE, x += lower, of_rows += TILE * groups, sums += TILE * PANEL) {
    const int tile = rows < TILE ? rows : TILE;
    for (int first = 0, number; first < tile; first += number) {
      number = next_group(tile - first, GROUP);
      for (int half = 0; half < 2; half += HALVES)
        BY_ROWS(number, quantized_group(x + first * BYTES_STEP, count, of_rows + first * groups,
                                        groups, panel + half * BYTES_TILE, of_columns + half * TILE,
                                        steps, ahead, add, sums + first * PANEL + half * TILE))
    }
  }
}
#endif
