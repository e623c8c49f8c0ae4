// Defines the sizes that all kernels share, and integer functions.
#pragma once

#include <stdint.h>

typedef uint16_t bf16;

enum { TILE = 16, PANEL = 32, STEP = 32, TILE_ELEMENTS = TILE * STEP };

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
// n / size, rounded up.
static inline int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }
