// Defines the numbers that operands of products consist of, the sizes that all kernels share, and
// integer functions.
//
// A library has one kind of numbers: bfloat16, or float32 if ELEMENTS_ARE_FLOAT32 is defined. A unit
// is 32 bits: one float32, or two bfloat16 of neighbouring features. Tiles and panels are arrays of
// units, so that their layouts do not depend on the kind.
#pragma once

#include <stdint.h>

#ifdef ELEMENTS_ARE_FLOAT32
typedef float element;
enum { UNIT = 1 };  // elements of a unit
#else
typedef uint16_t element;
enum { UNIT = 2 };
#endif

enum { TILE = 16, PANEL = 32, STEP = TILE * UNIT, TILE_ELEMENTS = TILE * STEP };

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
// n / size, rounded up.
static inline int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }
