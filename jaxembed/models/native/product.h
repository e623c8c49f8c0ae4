// Computes the product of some rows with a panel, from which all other products are built.
//
// A weight [K, N] is packed into panels of 32 columns: [N / 32][K / STEP][2][16][16][UNIT]. STEP
// features of K and 16 columns are one tile, whose 16 lines hold a unit of each column.
#pragma once

#include <string.h>

#include "vectors.h"

// A weight that is read for the first time is prefetched into the second-level cache so many bytes
// ahead, or a lone query would wait for the memory at every step. Builds with AMX do not prefetch.
enum { AHEAD = 1 << 14 };

// Compute c[rows, 32] = a[rows, STEP * steps] . panel for at most 32 rows, or add it to c if `add` is
// set. `rows` must be what `whole_rows` says. `a_step` is the distance in elements from one step of a
// to the next, `a_lower` that to its second 16 rows. The weight `ahead` bytes further on is prefetched.
#ifdef __AMX_BF16__
static inline void product(const element* a, int64_t a_stride, int64_t a_step, int64_t a_lower,
                           int rows, const element* panel, int64_t steps, int64_t ahead, int add,
                           float* c, int64_t c_stride) {
  (void)ahead;
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

// The rows that `product` computes for so many, at most 32: whole tiles.
static inline int whole_rows(int64_t rows) { return rows > TILE ? PANEL : TILE; }

// The rows that the functions below take at once.
enum { GROUP = PANEL };

// Compute sums[rows, 32] = x[rows, STEP * steps] . panel, at least its columns [low, high). `x` is in
// tiles, with `lower` elements from one 16 rows to the next.
static inline void product_of_columns(const element* x, int64_t lower, int rows, const element* panel,
                                      int64_t steps, int64_t low, int64_t high, float* sums) {
  (void)low, (void)high;
  product(x, STEP, TILE_ELEMENTS, lower, rows, panel, steps, 0, 0, sums, PANEL);
}

// Add x[rows, features] . panel to sums[rows, 32] for the features [low, high), which are even. `x`
// is as above; other features of the same steps are zeros.
static inline void add_product_of_features(const element* x, int64_t lower, int rows,
                                           const element* panel, int64_t low, int64_t high,
                                           float* sums) {
  const int64_t step = low / STEP;
  product(x + step * TILE_ELEMENTS, STEP, TILE_ELEMENTS, lower, rows,
          panel + step * 2 * TILE_ELEMENTS, parts(high, STEP) - step, 0, 1, sums, PANEL);
}
#else
// Rows, and halves of a panel, that are multiplied at once, and the most rows of `product`.
#ifdef __AVX512F__
enum { GROUP = 8, HALVES = 2, MOST_ROWS = 8 };
#else
enum { GROUP = 4, HALVES = 1, MOST_ROWS = 6 };
#endif

// Sixteen units, and sum + x * y for each of them.
#ifdef ELEMENTS_ARE_FLOAT32
typedef vec Units;
static inline Units load_units(const element* from) { return v_load(from); }
static inline Units all_units(const element* from) { return v_all(*from); }
static inline vec multiply_units(vec sum, Units x, Units y) { return v_fma(x, y, sum); }
#elif defined(__aarch64__)
typedef struct {
  bfloat16x8_t a, b, c, d;
} Units;
static inline bfloat16x8_t four_units(const element* from) {
  return vreinterpretq_bf16_u32(load_bits(from));
}
static inline Units load_units(const element* from) {
  return (Units){four_units(from), four_units(from + 8), four_units(from + 16),
                 four_units(from + 24)};
}
static inline Units all_units(const element* from) {
  uint32_t unit;
  memcpy(&unit, from, sizeof unit);
  const bfloat16x8_t four = vreinterpretq_bf16_u32(vdupq_n_u32(unit));
  return (Units){four, four, four, four};
}
static inline vec multiply_units(vec sum, Units x, Units y) {
  return QUARTERS_3(vec, vbfdotq_f32, sum, x, y);
}
#else
typedef __m512bh Units;
static inline Units load_units(const element* from) {
  return (__m512bh)_mm512_loadu_si512(from);
}
static inline Units all_units(const element* from) {
  int32_t unit;
  memcpy(&unit, from, sizeof unit);
  return (__m512bh)_mm512_set1_epi32(unit);
}
static inline vec multiply_units(vec sum, Units x, Units y) { return _mm512_dpbf16_ps(sum, x, y); }
#endif

// The rows that `product` computes for so many: just these.
static inline int whole_rows(int64_t rows) { return (int)rows; }

// Make a call with the constant `count`, which is the number of rows, at most MOST_ROWS.
#define CASE_OF_ROWS(number, call) \
  case number:                     \
    if (number <= MOST_ROWS) {     \
      const int count = number;    \
      call;                        \
    }                              \
    break;
#define BY_ROWS(rows, call)                                                                 \
  switch (rows) {                                                                           \
    CASE_OF_ROWS(1, call) CASE_OF_ROWS(2, call) CASE_OF_ROWS(3, call) CASE_OF_ROWS(4, call) \
    CASE_OF_ROWS(5, call) CASE_OF_ROWS(6, call) CASE_OF_ROWS(7, call) CASE_OF_ROWS(8, call) \
  }

// How many of the rows that are left are multiplied next, at most `most`. The last two groups share
// what is left, for a group of few rows would wait for its sums.
static inline int next_group(int left, int most) {
  if (left <= most) return left;
  return left < 2 * most ? (left + 1) / 2 : most;
}

// Compute `halves` times 16 columns of c[rows, 32] = a . panel for the features [low, high), which
// are whole units. There are at most MOST_ROWS rows. The rest is as in `product`.
static inline __attribute__((always_inline)) void multiply_group(
    const element* a, int64_t a_stride, int64_t a_step, const int rows, const element* panel,
    int64_t low, int64_t high, const int halves, int64_t ahead, int add, float* c,
    int64_t c_stride) {
  vec sums[MOST_ROWS][HALVES];
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
    for (int half = 0; half < halves; half++)
      sums[i][half] = add ? v_load(c + i * c_stride + half * TILE) : v_all(0.0f);
  for (int64_t step = low / STEP; step * STEP < high; step++) {
    const element *row = a + step * a_step, *from = panel + step * 2 * TILE_ELEMENTS;
    const int64_t end = min64(high - step * STEP, STEP);
    for (int64_t at = max64(low - step * STEP, 0); at < end; at += UNIT) {
      Units columns[HALVES];
      for (int half = 0; half < halves; half++) {
        const element* line = from + at * TILE + half * TILE_ELEMENTS;
        columns[half] = load_units(line);
        __builtin_prefetch((const char*)line + ahead, 0, 2);
      }
#pragma GCC unroll 8
      for (int i = 0; i < rows; i++) {
        const Units x = all_units(row + i * a_stride + at);
        for (int half = 0; half < halves; half++)
          sums[i][half] = multiply_units(sums[i][half], x, columns[half]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
    for (int half = 0; half < halves; half++)
      v_store(c + i * c_stride + half * TILE, sums[i][half]);
}

// The same for GROUP rows and the halves [first, last) of the panel.
static inline void multiply_halves(const element* a, int64_t a_stride, int64_t a_step,
                                   const element* panel, int64_t low, int64_t high, int first,
                                   int last, int add, float* c, int64_t c_stride) {
  if (HALVES == 2 && last - first == 2) {
    multiply_group(a, a_stride, a_step, GROUP, panel, low, high, HALVES, 0, add, c, c_stride);
    return;
  }
  for (int half = first; half < last; half++)
    multiply_group(a, a_stride, a_step, GROUP, panel + half * TILE_ELEMENTS, low, high, 1, 0, add,
                   c + half * TILE, c_stride);
}

// The same as `product` for the first `halves` halves of the panel.
static inline __attribute__((always_inline)) void product_of_halves(
    const element* a, int64_t a_stride, int64_t a_step, int64_t a_lower, int rows,
    const element* panel, int64_t steps, const int halves, int64_t ahead, int add, float* c,
    int64_t c_stride) {
  const int at_once = halves < HALVES ? halves : HALVES;
  for (; rows > 0; rows -= TILE, a += a_lower, c += TILE * c_stride) {
    const int tile = rows < TILE ? rows : TILE;
    for (int first = 0, number; first < tile; first += number) {
      number = next_group(tile - first, MOST_ROWS);
      for (int half = 0; half < halves; half += at_once)
        BY_ROWS(number, multiply_group(a + first * a_stride, a_stride, a_step, count,
                                       panel + half * TILE_ELEMENTS, 0, steps * STEP, at_once,
                                       ahead, add, c + first * c_stride + half * TILE, c_stride))
    }
  }
}

static void product(const element* a, int64_t a_stride, int64_t a_step, int64_t a_lower, int rows,
                    const element* panel, int64_t steps, int64_t ahead, int add, float* c,
                    int64_t c_stride) {
  product_of_halves(a, a_stride, a_step, a_lower, rows, panel, steps, 2, ahead, add, c, c_stride);
}

#ifdef ELEMENTS_ARE_FLOAT32
// The same for the first half of the panel.
static void half_product(const element* a, int64_t a_stride, int64_t a_step, int64_t a_lower,
                         int rows, const element* panel, int64_t steps, float* c,
                         int64_t c_stride) {
  product_of_halves(a, a_stride, a_step, a_lower, rows, panel, steps, 1, 0, 0, c, c_stride);
}
#endif

// Compute sums[GROUP, 32] = x[GROUP, STEP * steps] . panel, at least its columns [low, high). `x` is
// in tiles.
static inline void product_of_columns(const element* x, int64_t lower, int rows,
                                      const element* panel, int64_t steps, int64_t low,
                                      int64_t high, float* sums) {
  (void)lower, (void)rows;
  multiply_halves(x, STEP, TILE_ELEMENTS, panel, 0, steps * STEP, low >= TILE, 1 + (high > TILE), 0,
                  sums, PANEL);
}

// Add x[GROUP, features] . panel to sums[GROUP, 32] for the features [low, high), which are even.
// `x` is in tiles.
static inline void add_product_of_features(const element* x, int64_t lower, int rows,
                                           const element* panel, int64_t low, int64_t high,
                                           float* sums) {
  (void)lower, (void)rows;
  multiply_halves(x, STEP, TILE_ELEMENTS, panel, low, high, 0, 2, 1, sums, PANEL);
}
#endif
