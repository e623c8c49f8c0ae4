// Computes the product of some rows with a panel, from which all other products are built.
//
// A weight [K, N] is packed into panels of 32 columns: [N / 32][K / 32][2][16][16][2]. Each 32
// features of K and 16 columns are one AMX tile, whose 16 lines hold two neighbouring features for
// each column.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "sizes.h"

// Compute c[rows, 32] = a[rows, 32 * steps] . panel for 16 or 32 rows, or add it to c if `add` is
// set. `a_step` is the distance in elements from one step of a to the next, `a_lower` that to its
// second 16 rows.
#ifdef __AMX_BF16__
static inline void product(const bf16* a, int64_t a_stride, int64_t a_step, int64_t a_lower,
                           int rows, const bf16* panel, int64_t steps, int add, float* c,
                           int64_t c_stride) {
  const int64_t a_bytes = a_stride * 2, c_bytes = c_stride * 4;
  __asm__ volatile("" ::: "memory");  // gcc does not know that tile loads read memory
  if (add) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + TILE, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  if (rows == TILE) {
    for (int64_t step = 0; step < steps; step++, a += a_step, panel += 2 * TILE_ELEMENTS) {
      _tile_loadd(4, a, a_bytes);
      _tile_loadd(6, panel, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, panel + TILE_ELEMENTS, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + TILE, c_bytes);
    return;
  }
  float* lower = c + TILE * c_stride;
  if (add) {
    _tile_loadd(2, lower, c_bytes);
    _tile_loadd(3, lower + TILE, c_bytes);
  } else {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; step++, a += a_step, panel += 2 * TILE_ELEMENTS) {
    _tile_loadd(6, panel, 64);
    _tile_loadd(4, a, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a + a_lower, a_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, panel + TILE_ELEMENTS, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + TILE, c_bytes);
  _tile_stored(2, lower, c_bytes);
  _tile_stored(3, lower + TILE, c_bytes);
}

// The rows that the functions below take at once.
enum { GROUP = PANEL };

// Compute sums[rows, 32] = x[rows, 32 * steps] . panel, at least its columns [low, high). `x` is in
// tiles, with `lower` elements from one 16 rows to the next.
static inline void product_of_columns(const bf16* x, int64_t lower, int rows, const bf16* panel,
                                      int64_t steps, int64_t low, int64_t high, float* sums) {
  (void)low, (void)high;
  product(x, STEP, TILE_ELEMENTS, lower, rows, panel, steps, 0, sums, PANEL);
}

// Add x[rows, features] . panel to sums[rows, 32] for the features [low, high), which are even. `x`
// is as above; other features of the same steps are zeros.
static inline void add_product_of_features(const bf16* x, int64_t lower, int rows,
                                           const bf16* panel, int64_t low, int64_t high,
                                           float* sums) {
  const int64_t step = low / STEP;
  product(x + step * TILE_ELEMENTS, STEP, TILE_ELEMENTS, lower, rows,
          panel + step * 2 * TILE_ELEMENTS, parts(high, STEP) - step, 1, sums, PANEL);
}
#else
// The rows that the functions below take at once.
enum { GROUP = 8 };

// Compute `halves` times 16 columns of c[8, 32] = a . panel for the features [low, high), which are
// even. The rest is as in `product`.
static inline __attribute__((always_inline)) void multiply_group(
    const bf16* a, int64_t a_stride, int64_t a_step, const bf16* panel, int64_t low, int64_t high,
    const int halves, int add, float* c, int64_t c_stride) {
  __m512 sums[GROUP][2];
#pragma GCC unroll 8
  for (int i = 0; i < GROUP; i++)
    for (int half = 0; half < halves; half++)
      sums[i][half] = add ? _mm512_loadu_ps(c + i * c_stride + half * TILE) : _mm512_setzero_ps();
  for (int64_t step = low / STEP; step * STEP < high; step++) {
    const bf16 *line = a + step * a_step, *from = panel + step * 2 * TILE_ELEMENTS;
    const int64_t end = min64(high - step * STEP, STEP);
    for (int64_t at = max64(low - step * STEP, 0); at < end; at += 2) {
      __m512bh left = (__m512bh)_mm512_loadu_si512(from + at * TILE);
      __m512bh right = (__m512bh)_mm512_loadu_si512(from + at * TILE + TILE_ELEMENTS);
#pragma GCC unroll 8
      for (int i = 0; i < GROUP; i++) {
        int32_t both;
        memcpy(&both, line + i * a_stride + at, sizeof both);
        __m512bh x = (__m512bh)_mm512_set1_epi32(both);
        sums[i][0] = _mm512_dpbf16_ps(sums[i][0], x, left);
        if (halves > 1) sums[i][1] = _mm512_dpbf16_ps(sums[i][1], x, right);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < GROUP; i++)
    for (int half = 0; half < halves; half++)
      _mm512_storeu_ps(c + i * c_stride + half * TILE, sums[i][half]);
}

static inline void product(const bf16* a, int64_t a_stride, int64_t a_step, int64_t a_lower,
                           int rows, const bf16* panel, int64_t steps, int add, float* c,
                           int64_t c_stride) {
  for (int first = 0; first < rows; first += GROUP)
    multiply_group(a + first / TILE * a_lower + first % TILE * a_stride, a_stride, a_step, panel, 0,
                   steps * STEP, 2, add, c + first * c_stride, c_stride);
}

// Compute sums[8, 32] = x[8, 32 * steps] . panel, at least its columns [low, high). `x` is in tiles.
static inline void product_of_columns(const bf16* x, int64_t lower, int rows, const bf16* panel,
                                      int64_t steps, int64_t low, int64_t high, float* sums) {
  (void)lower, (void)rows;
  if (low < TILE && high > TILE)
    multiply_group(x, STEP, TILE_ELEMENTS, panel, 0, steps * STEP, 2, 0, sums, PANEL);
  else if (low < TILE)
    multiply_group(x, STEP, TILE_ELEMENTS, panel, 0, steps * STEP, 1, 0, sums, PANEL);
  else
    multiply_group(x, STEP, TILE_ELEMENTS, panel + TILE_ELEMENTS, 0, steps * STEP, 1, 0,
                   sums + TILE, PANEL);
}

// Add x[8, features] . panel to sums[8, 32] for the features [low, high), which are even. `x` is in
// tiles.
static inline void add_product_of_features(const bf16* x, int64_t lower, int rows,
                                           const bf16* panel, int64_t low, int64_t high,
                                           float* sums) {
  (void)lower, (void)rows;
  multiply_group(x, STEP, TILE_ELEMENTS, panel, low, high, 2, 1, sums, PANEL);
}
#endif
