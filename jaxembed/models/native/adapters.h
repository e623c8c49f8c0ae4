// Low-rank adapters beside a linear layer: each row of x has a number, and takes the columns of
// x . down that belong to the adapter of that number. They are multiplied with `up` and added to
// the sums of the layer.
//
// Rows are taken in groups. Columns that no row of a group takes are skipped: they are zeros, which
// change no sum.
#pragma once

#include "numbers.h"
#include "product.h"

typedef struct {
  const element *down, *up;   // [k, width] and [width, n], in panels
  const int32_t* numbers;  // of the adapter of each row
  const int32_t* owners;   // the number of the adapter that each column belongs to
  int64_t width;           // 0: there are no adapters
} Adapters;

// The adapters for the rows from `first` on.
static inline Adapters of_rows(Adapters adapters, int64_t first) {
  if (adapters.width) adapters.numbers += first;
  return adapters;
}

// The columns that some row of a group takes: [low, high), rounded to pairs.
typedef struct {
  int32_t low, high;
} Taken;

// Which of 16 columns a row takes.
static inline mask columns_of(const Adapters* a, int64_t row, int64_t column) {
  return m_equal(a->owners + column, a->numbers[row]);
}

// The columns that some of the rows in `at` take.
static inline Taken taken_by(const Adapters* a, const int32_t* at, int64_t rows) {
  Taken taken = {0, 0};
  for (int64_t column = 0; column < a->width; column += TILE) {
    unsigned some = 0;
    for (int64_t i = 0; i < rows; i++) some |= m_bits(columns_of(a, at[i], column));
    if (!some) continue;
    if (!taken.high) taken.low = (int32_t)column + __builtin_ctz(some) / 2 * 2;
    taken.high = (int32_t)column + (33 - __builtin_clz(some)) / 2 * 2;
  }
  return taken;
}

// The place of a row and a feature in tiles, [rows / 16][k / STEP][16][STEP]; the feature is the first
// of a step.
static inline int64_t in_tiles(int64_t k, int64_t row, int64_t feature) {
  return row / TILE * TILE * k + feature / STEP * TILE_ELEMENTS + row % TILE * STEP;
}

// Compute what the adapters add for the `count` rows in `at`, before `up`. `x` has their k features
// in tiles; the result goes to `narrow`, in tiles too, and for each group to `taken`. `sums` has room
// for 32 rows of a panel.
static void narrow_rows(const Adapters* a, int64_t k, const element* x, const int32_t* at,
                        int64_t count, element* narrow, Taken* taken, float* sums) {
  for (int64_t row = 0; row < count; row += GROUP, taken++) {
    const int64_t rows = min64(GROUP, count - row);
    const int padded = rows > TILE ? GROUP : (int)min64(GROUP, TILE);
    *taken = taken_by(a, at + row, rows);
    for (int64_t column = taken->low / PANEL * PANEL; column < taken->high; column += PANEL) {
      product_of_columns(x + in_tiles(k, row, 0), TILE * k, padded, a->down + column * k, k / STEP,
                         taken->low - column, taken->high - column, sums);
      for (int i = 0; i < padded; i++) {
        const mask low = i < rows ? columns_of(a, at[row + i], column) : m_none();
        const mask high = i < rows ? columns_of(a, at[row + i], column + TILE) : m_none();
        const vec none = v_all(0.0f);
        store_in_tiles(narrow + in_tiles(a->width, row + i, column),
                       v_choose(low, v_load(sums + i * PANEL), none),
                       v_choose(high, v_load(sums + i * PANEL + TILE), none));
      }
    }
  }
}

// Whether a panel of `up` has only zeros for a pair of features, as the panels of queries have for
// the adapters of keys.
static inline int is_zero(const element* up, int64_t feature) {
  up += feature / STEP * 2 * TILE_ELEMENTS + feature % STEP * TILE;
  for (int i = 0; i < PANEL; i++)  // as many elements in either tile are two features of 16 columns
    if (up[i] != 0 || up[i + TILE_ELEMENTS] != 0) return 0;
  return 1;
}

// The columns of a group without those at either end for which a panel of `up` has only zeros.
static inline Taken without_zeros(Taken taken, const element* up) {
  while (taken.low < taken.high && is_zero(up, taken.low)) taken.low += 2;
  while (taken.low < taken.high && is_zero(up, taken.high - 2)) taken.high -= 2;
  return taken;
}

// Add what the adapters add to `sums`, those of a panel of the weight, for `rows` rows after `row`,
// which is counted from the first row of `narrow`. `up` is the panel for the same columns.
static inline void widen_rows(const Adapters* a, const element* narrow, const Taken* taken,
                              int64_t row, int64_t rows, const element* up, float* sums) {
  Taken before = {0, 0}, wanted = before;
  for (int64_t at = row; at < row + rows; at += GROUP, sums += GROUP * PANEL) {
    const int padded = row + rows - at > TILE ? GROUP : (int)min64(GROUP, TILE);
    const Taken now = taken[at / GROUP];
    if (now.low != before.low || now.high != before.high) {
      wanted = without_zeros(now, up);
      before = now;
    }
    if (wanted.low < wanted.high)
      add_product_of_features(narrow + in_tiles(a->width, at, 0), TILE * a->width, padded, up,
                              wanted.low, wanted.high, sums);
  }
}
