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
#else
static inline void product(const bf16* a, int64_t a_stride, int64_t a_step, int64_t a_lower,
                           int rows, const bf16* panel, int64_t steps, int add, float* c,
                           int64_t c_stride) {
  enum { LINES = 8 };
  for (int first = 0; first < rows; first += LINES) {
    const bf16* line = a + first / TILE * a_lower + first % TILE * a_stride;
    const bf16* from = panel;
    float* to = c + first * c_stride;
    __m512 sums[LINES][2];
    for (int i = 0; i < LINES; i++)
      for (int half = 0; half < 2; half++)
        sums[i][half] = add ? _mm512_loadu_ps(to + i * c_stride + half * TILE)
                            : _mm512_setzero_ps();
    for (int64_t step = 0; step < steps; step++, line += a_step, from += 2 * TILE_ELEMENTS) {
      for (int pair = 0; pair < TILE; pair++) {
        __m512bh left = (__m512bh)_mm512_loadu_si512(from + pair * PANEL);
        __m512bh right = (__m512bh)_mm512_loadu_si512(from + pair * PANEL + TILE_ELEMENTS);
#pragma GCC unroll 8
        for (int i = 0; i < LINES; i++) {
          int32_t both;
          memcpy(&both, line + i * a_stride + pair * 2, sizeof both);
          __m512bh x = (__m512bh)_mm512_set1_epi32(both);
          sums[i][0] = _mm512_dpbf16_ps(sums[i][0], x, left);
          sums[i][1] = _mm512_dpbf16_ps(sums[i][1], x, right);
        }
      }
    }
    for (int i = 0; i < LINES; i++)
      for (int half = 0; half < 2; half++)
        _mm512_storeu_ps(to + i * c_stride + half * TILE, sums[i][half]);
  }
}
#endif
