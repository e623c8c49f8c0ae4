// A product on this machine against the same one in whole numbers.
#pragma once

#include "linear.h"
#include "tiles.h"

// Cut, not rounded.
static bf16 narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (bf16)(bits >> 16);
}

// Whether products come out right on this machine: 0, else a process exits with what is returned.
int jaxembed_check(void) {
  enum { ROWS = 40, K = 64, N = 64 };
  static bf16 x[ROWS * K], kernel[K * N];
  static float bias[N], y[ROWS * N];
  if (jaxembed_prepare()) return 2;
  // small whole numbers: bfloat16 holds them, and sums of their products, exactly
  for (int i = 0; i < ROWS * K; i++) x[i] = narrow((float)(i * 7 % 13 - 6));
  float plain[K * N];
  for (int row = 0; row < K; row++)
    for (int column = 0; column < N; column++) {
      const float value = (float)((row * 5 + column * 3) % 11 - 5);
      plain[row * N + column] = value;
      const int at = ((column / PANEL) * (K / STEP) + row / STEP) * 2 * TILE_ELEMENTS +
                     column / TILE % 2 * TILE_ELEMENTS + row % STEP / 2 * PANEL +
                     column % TILE * 2 + row % 2;
      kernel[at] = narrow(value);
    }
  const Linear l = {.x = x, .kernel = kernel, .bias = bias, .y = y, .rows = ROWS, .k = K, .n = N,
                    .y_stride = N, .block = PANEL * 2, .columns = N, .column_parts = 1, .y_is_float = 1};
  tiles_on();
  const int failed = linear_item(&l, 0);
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
