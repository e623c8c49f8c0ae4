// Checks that products are right on this machine, with one of small integers, which is exact.
#pragma once

#include "linear.h"
#include "tiles.h"

// Convert a small integer to an element, which holds it exactly.
static element exact(float value) {
#ifdef ELEMENTS_ARE_FLOAT32
  return value;
#else
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (element)(bits >> 16);
#endif
}

// Returns 0 if a product is right on this machine, 2 if AMX may not be used, 3 if memory is short,
// 4 if a number is wrong. The process that checks exits with this status (FAULTS in library.py).
int jaxembed_check(void) {
  enum { ROWS = 40, K = 64, N = 64 };
  static element x[ROWS * K], kernel[K * N];
  static float bias[N], y[ROWS * N];
  if (jaxembed_prepare()) return 2;
  // small integers: they are exact as elements, and the sums of their products in float32
  for (int i = 0; i < ROWS * K; i++) x[i] = exact((float)(i * 7 % 13 - 6));
  float plain[K * N];
  for (int row = 0; row < K; row++)
    for (int column = 0; column < N; column++) {
      const float value = (float)((row * 5 + column * 3) % 11 - 5);
      plain[row * N + column] = value;
      const int at = ((column / PANEL) * (K / STEP) + row / STEP) * 2 * TILE_ELEMENTS +
                     column / TILE % 2 * TILE_ELEMENTS + row % STEP / UNIT * STEP +
                     column % TILE * UNIT + row % UNIT;
      kernel[at] = exact(value);
    }
  const Linear l = {.x = x, .kernel = kernel, .bias = bias, .y = y, .rows = ROWS, .k = K, .n = N,
                    .y_stride = N, .blocks = even_blocks(ROWS, NULL, ROWS, 1), .columns = N,
                    .column_parts = 1, .y_is_float = 1};
  tiles_on();
  const int failed = linear_item(&l, 0, -1);
  tiles_off();
  if (failed) return 3;
  for (int row = 0; row < ROWS; row++)
    for (int column = 0; column < N; column++) {
      float sum = 0;
      for (int i = 0; i < K; i++) sum += (float)((row * K + i) * 7 % 13 - 6) * plain[i * N + column];
      if (sum != y[row * N + column]) return 4;
    }
  return 0;
}
