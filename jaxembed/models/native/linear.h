// Computes linear layers: products with a whole weight, then bias, activation or layer norm.
#pragma once

#include <stdatomic.h>
#include <unistd.h>

#include "adapters.h"
#include "numbers.h"
#include "product.h"
#include "quantized.h"
#include "scratch.h"

enum { CHUNK = 768 / sizeof(element) };  // features of a panel that stay in the first-level cache
// What follows the product. NORM: layer norm of the sum with `residual`. GELU and the next two: this
// activation. GATED: the weight has twice the columns, and the first half, activated, is multiplied
// with the second half.
enum {
  PLAIN,
  NORM,
  GELU,
  GELU_TANH,
  QUICK_GELU,
  GATED_GELU,
  GATED_SILU,
  GATED_GELU_TANH,
  MODES
};

// Rows, divided into blocks with nearly equal numbers of live rows: a row is live unless it is
// padding.
typedef struct {
  int64_t rows;
  const int32_t* segments;  // of each row; rows of segment 0 are padding. NULL: all rows are live
  int64_t live;             // the number of live rows
  int64_t count;            // the number of blocks
  int64_t most;  // the largest number of live rows of a block, rounded up to whole panels
} Blocks;

// The number of live rows.
static int64_t live_of(int64_t rows, const int32_t* segments) {
  if (!segments) return rows;
  int64_t live = 0;
  for (int64_t row = 0; row < rows; row++) live += segments[row] != 0;
  return live;
}

// Divide rows into blocks with about `size` live rows. If there are more blocks than threads, each
// thread gets as many as the others, of up to 1.5 times this size.
static Blocks even_blocks(int64_t rows, const int32_t* segments, int64_t size, int64_t threads) {
  const int64_t live = live_of(rows, segments), groups = max64(1, parts(live, GROUP));
  int64_t count = parts(live, size);
  if (count > threads) count = (live + size * threads / 2) / (size * threads) * threads;
  count = max64(1, min64(count, groups));
  return (Blocks){rows, segments, live, count, parts(parts(groups, count) * GROUP, PANEL) * PANEL};
}

// The first row of a block, which is that after the last one of the block before.
static int64_t first_of_block(Blocks blocks, int64_t block) {
  if (block == 0) return 0;
  int64_t before = min64(blocks.live, parts(blocks.live, GROUP) * block / blocks.count * GROUP);
  if (before == blocks.live) return blocks.rows;
  if (!blocks.segments) return before;
  int64_t row = 0;
  for (; before || !blocks.segments[row]; row++) before -= blocks.segments[row] != 0;
  return row;
}

typedef struct {
  const void* x;  // [rows, k]
  const element* kernel;  // the weight, in panels, unless it is quantized
  Quantized quantized;
  const float *bias, *residual, *scale, *shift;
  const int32_t* segments;  // of each row; those of 0 are padding: see Rows. NULL: none is padding
  void* y;             // [rows, n], starting at column `y_column`
  int64_t rows, k, n;  // n: columns of y
  int64_t y_stride, y_column;
  Blocks blocks;         // of rows
  int64_t columns;       // columns of an item, a multiple of 32
  int64_t column_parts;  // number of items that share a block
  int x_is_float, y_is_float, y_in_tiles, mode;
  int x_is_live, y_is_live;  // whether x or y holds only the live rows of a block
  float eps;
  Adapters adapters;
  atomic_int* unfinished;  // number of unfinished items of each block; the last computes the norm
} Linear;

// Rows that are computed, in order. Padding is not computed: its input may be NaN.
typedef struct {
  const int32_t* at;
  int64_t count;
} Rows;

// Write those of the rows [first, last) that are no padding to `at`.
static Rows live_rows(const Linear* l, int64_t first, int64_t last, int32_t* at) {
  Rows rows = {at, 0};
  for (int64_t row = first; row < last; row++)
    if (!l->segments || l->segments[row]) at[rows.count++] = (int32_t)row;
  return rows;
}

// The bytes of memory that the rows of a block take, in whole lines of the cache.
static size_t bytes_of_rows(int64_t block) { return parts(block * sizeof(int32_t), 64) * 64; }

// Set the columns [start, end) of y to zeros in those of the rows [first, last) that are padding.
static void clear_padding(const Linear* l, int64_t first, int64_t last, int64_t start, int64_t end) {
  const int64_t size = l->y_is_float ? sizeof(float) : sizeof(element);
  for (int64_t row = first; row < last; row++)
    if (l->segments && !l->segments[row])
      memset((char*)l->y + (row * l->y_stride + start) * size, 0, (end - start) * size);
}

// Apply layer norm to some rows of y in place.
static void norm_rows(const Linear* l, Rows rows) {
  const int64_t n = l->n;
  for (int64_t i = 0; i < rows.count; i++) {
    float* y = (float*)l->y + rows.at[i] * l->y_stride;
    vec sum = v_all(0.0f), squares = v_all(0.0f);
    for (int64_t j = 0; j < n; j += TILE) sum = v_add(sum, v_load(y + j));
    vec mean = v_all(v_sum(sum) / n);
    for (int64_t j = 0; j < n; j += TILE) {
      vec centred = v_sub(v_load(y + j), mean);
      squares = v_fma(centred, centred, squares);
    }
    vec variance = v_all(v_sum(squares) / n + l->eps);
    vec inverse = v_div(v_all(1.0f), v_sqrt(variance));
    for (int64_t j = 0; j < n; j += TILE) {
      vec centred = v_sub(v_load(y + j), mean);
      vec scaled = v_mul(v_mul(centred, inverse), v_load(l->scale + j));
      v_store(y + j, v_add(scaled, v_load(l->shift + j)));
    }
  }
}

static inline int is_gated(const Linear* l) { return l->mode >= GATED_GELU; }

// The number of floats of scratch memory that `multiply` needs for a block of rows.
static int64_t sums_of(const Linear* l, int64_t block) { return block * PANEL * (1 + is_gated(l)); }

// Rows of x as products take them.
typedef struct {
  element* tiles;     // [rows / 16][k / STEP][16][STEP]; with y_in_tiles, y has this layout too
  element* narrow;    // what adapters add before `up`, in tiles
  Taken* taken;       // the columns that adapters take, of each group of rows
  uint8_t* bytes;     // quantized, [rows / 16][k / 64][16][64]
  RowScale* scales;   // [rows][groups]
} Laid;

static inline int64_t groups_of(const Linear* l) { return l->k / l->quantized.group; }

// Divide memory for `rows` rows. Returns the number of bytes.
static inline size_t divide(const Linear* l, int64_t rows, char* memory, Laid* laid) {
  const int64_t padded = parts(rows, TILE) * TILE;
  const int is_quantized = l->quantized.values != NULL;
  const size_t of_tiles = is_quantized && !l->adapters.width ? 0 : padded * l->k * sizeof(element);
  const size_t of_bytes = is_quantized ? padded * l->k : 0;
  const size_t of_narrow = padded * l->adapters.width * sizeof(element);
  const size_t of_scales = is_quantized ? padded * groups_of(l) * sizeof(RowScale) : 0;
  *laid = (Laid){.tiles = (element*)memory,
                 .bytes = (uint8_t*)memory + of_tiles,
                 .narrow = (element*)(memory + of_tiles + of_bytes),
                 .scales = (RowScale*)(memory + of_tiles + of_bytes + of_narrow),
                 .taken = (Taken*)(memory + of_tiles + of_bytes + of_narrow + of_scales)};
  return of_tiles + of_bytes + of_narrow + of_scales + padded * sizeof(Taken);
}

// The bytes of memory that a block of rows takes, in whole lines of the cache.
static size_t laid_bytes(const Linear* l, int64_t block) {
  Laid laid;
  return parts(divide(l, block, NULL, &laid), 64) * 64;
}

// The row of x that is number `i` of `rows`.
static inline int64_t row_of_x(const Linear* l, Rows rows, int64_t i) {
  return l->x_is_live ? i : rows.at[i];
}

// Copy rows of x into tiles. Float32 is rounded to elements, and missing rows of the last tile
// become zeros.
static void lay_in_tiles(const Linear* l, Rows rows, element* tiles) {
  const int64_t k = l->k, padded = parts(rows.count, TILE) * TILE;
  for (int64_t i = 0; i < padded; i++) {
    element* line = tiles + i / TILE * TILE * k + i % TILE * STEP;
    const int64_t from = i < rows.count ? row_of_x(l, rows, i) * k : 0;
    for (int64_t at = 0; at < k; at += STEP, line += TILE_ELEMENTS) {
      if (i >= rows.count) {
        memset(line, 0, STEP * sizeof(element));
      } else if (l->x_is_float) {
        store_step(line, (const float*)l->x + from + at);
      } else {
        memcpy(line, (const element*)l->x + from + at, STEP * sizeof(element));
      }
    }
  }
}

// Quantize rows of x. Missing rows of the last tile become zeros.
static void lay_in_bytes(const Linear* l, Rows rows, const Laid* laid) {
  const int64_t k = l->k, group = l->quantized.group, padded = parts(rows.count, TILE) * TILE;
  RowScale* scale = laid->scales;
  for (int64_t i = 0; i < padded; i++) {
    uint8_t* line = laid->bytes + i / TILE * TILE * k + i % TILE * BYTES_STEP;
    for (int64_t at = 0; at < k; at += group, scale++, line += group * TILE) {
      if (i < rows.count) {
        *scale = quantize(l->x, l->x_is_float, row_of_x(l, rows, i) * k + at, group, line);
        continue;
      }
      *scale = (RowScale){0, 0};
      for (int64_t j = 0; j < group; j += BYTES_STEP) memset(line + j * TILE, 0, BYTES_STEP);
    }
  }
}

// Lay out some rows of x, which are not in tiles yet if `x_in_tiles` is not set, and compute what
// adapters add to them, before `up`. `sums` has room for 32 rows of a panel.
static void lay_out(const Linear* l, Rows rows, int x_in_tiles, const Laid* laid, float* sums) {
  if (l->quantized.values) lay_in_bytes(l, rows, laid);
  if (!x_in_tiles && (!l->quantized.values || l->adapters.width))
    lay_in_tiles(l, rows, laid->tiles);
  if (l->adapters.width)
    narrow_rows(&l->adapters, l->k, laid->tiles, rows.at, rows.count, laid->narrow, laid->taken,
                sums);
}

// Apply the activation of a mode.
static inline vec activated(int mode, vec x) {
  switch (mode) {
    case GATED_SILU: return silu_vector(x);
    case QUICK_GELU: return quick_gelu_vector(x);
    case GELU_TANH:
    case GATED_GELU_TANH: return gelu_tanh_vector(x);
    default: return gelu_vector(x);
  }
}

// What 16 columns of a gated product are multiplied with: the sums of their gate, activated.
static inline vec gate_of(const Linear* l, const float* sums, const float* bias) {
  return activated(l->mode, v_add(v_load(sums), v_load(bias)));
}

// Add bias and residual, activate, or multiply with `gates`, the sums of 32 columns, and store
// them in y, for at most 32 rows from number `first` of `rows` on. Only a gated product has gates.
static inline void finish_columns(const Linear* l, Rows rows, int64_t first, int64_t column,
                                  const float* sums, const float* gates) {
  const float *of_gates = l->bias + column, *of_sums = of_gates + (gates ? l->n : 0);
  const vec bias[2] = {v_load(of_sums), v_load(of_sums + TILE)};
  for (int64_t i = 0; i < min64(PANEL, rows.count - first); i++) {
    const int64_t row = l->y_is_live ? first + i : rows.at[first + i];
    int64_t at = row * l->y_stride + column - l->y_column;
    vec low = v_add(v_load(sums + i * PANEL), bias[0]);
    vec high = v_add(v_load(sums + i * PANEL + TILE), bias[1]);
    if (gates) {
      low = v_mul(low, gate_of(l, gates + i * PANEL, of_gates));
      high = v_mul(high, gate_of(l, gates + i * PANEL + TILE, of_gates + TILE));
    } else if (l->mode >= GELU) {
      low = activated(l->mode, low), high = activated(l->mode, high);
    } else if (l->mode == NORM) {
      low = v_add(low, v_load(l->residual + at));
      high = v_add(high, v_load(l->residual + at + TILE));
    }
    if (l->y_is_float) {
      v_store((float*)l->y + at, low);
      v_store((float*)l->y + at + TILE, high);
      continue;
    }
    if (l->y_in_tiles) {
      at = (first + i) / TILE * TILE * l->n + column * TILE + (first + i) % TILE * STEP;
      store_in_tiles((element*)l->y + at, low, high);
      continue;
    }
    store_elements((element*)l->y + at, low, high);
  }
}

// Multiply the rows that are laid out with the panel of the weight that begins at column `from`.
// Unless it is a panel of gates (`column` is negative), the sums are finished as those of `column`.
static inline void multiply_panel(const Linear* l, const Laid* laid, Rows rows, int64_t from,
                                  int64_t column, float* sums, const float* gates) {
  const int64_t k = l->k;
  const Quantized* q = &l->quantized;
  const int64_t chunk = q->values ? q->group : CHUNK;
  // a chunk of the panel stays in the first-level cache while it is multiplied with all rows
  for (int64_t at = 0; at < k; at += chunk) {
    for (int64_t row = 0; row < rows.count; row += PANEL) {
      const int64_t some = min64(PANEL, rows.count - row), of_row = row * k;
      const int64_t ahead = row ? 0 : AHEAD;
      float* to = sums + row * PANEL;
      if (q->values) {
        const int64_t groups = groups_of(l), group = at / chunk;
        quantized_product(laid->bytes + of_row + at * TILE, TILE * k, whole_rows(some),
                          laid->scales + row * groups + group, groups,
                          q->values + from * k + at * PANEL,
                          q->scales + (from / PANEL * groups + group) * 2 * PANEL, chunk / BYTES_STEP,
                          ahead, at > 0, to);
      } else {
        product(laid->tiles + of_row + at * TILE, STEP, TILE_ELEMENTS, TILE * k, whole_rows(some),
                l->kernel + from * k + at * PANEL, min64(chunk, k - at) / STEP, ahead, at > 0, to,
                PANEL);
      }
      if (at + chunk < k) continue;
      if (l->adapters.width)
        widen_rows(&l->adapters, laid->narrow, laid->taken, row, some,
                   l->adapters.up + from * l->adapters.width, to);
      if (column >= 0)
        finish_columns(l, rows, row, column, to, gates ? gates + (to - sums) : NULL);
    }
  }
}

// Compute the columns [start, end) of the rows that are laid out. `sums` has room for sums_of a block
// of so many rows.
static void multiply(const Linear* l, const Laid* laid, Rows rows, int64_t start, int64_t end,
                     float* sums) {
  float* gates = is_gated(l) ? sums + sums_of(l, parts(rows.count, PANEL) * PANEL) / 2 : NULL;
  for (int64_t column = start; column < end; column += PANEL) {
    if (gates) multiply_panel(l, laid, rows, column, -1, gates, NULL);
    multiply_panel(l, laid, rows, column + (gates ? l->n : 0), column, sums, gates);
  }
}

// A work item of a linear layer: some columns of a block of rows. See Work for the rest.
static int linear_item(const void* arguments, int64_t item, int64_t before) {
  const Linear* l = arguments;
  const int64_t block = item / l->column_parts, part = item % l->column_parts;
  const int64_t first = first_of_block(l->blocks, block), most = l->blocks.most;
  const int64_t last = first_of_block(l->blocks, block + 1);
  const int64_t start = part * l->columns, end = min64(start + l->columns, l->n);
  Laid laid;
  float* sums =
      scratch(sums_of(l, most) * sizeof(float) + laid_bytes(l, most) + bytes_of_rows(most));
  if (!sums) return -1;
  char* memory = (char*)(sums + sums_of(l, most));
  const Rows rows = live_rows(l, first, last, (int32_t*)(memory + laid_bytes(l, most)));
  divide(l, rows.count, memory, &laid);
  clear_padding(l, first, last, start, end);
  const int is_laid_out = before >= 0 && before / l->column_parts == block;
  if (!is_laid_out) lay_out(l, rows, 0, &laid, sums);
  multiply(l, &laid, rows, start, end, sums);
  if (l->mode == NORM &&
      (l->column_parts == 1 || atomic_fetch_sub(&l->unfinished[block], 1) == 1))
    norm_rows(l, rows);
  return 0;
}

enum { MOST_SHARED = 64 };  // with more blocks than this, threads do not share a block's columns

// The bytes of a block of rows of x: the size of the second-level cache, if it is known. The weight
// is read once for each block.
static int64_t block_bytes(void) {
  static _Atomic int64_t bytes;  // asking takes long in virtual machines
  if (!bytes) {
    int64_t size = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
    size = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    bytes = max64(size, 1 << 18);
  }
  return bytes;
}

// Divide a linear layer into items for some threads, and return their number. With few blocks,
// threads share the columns of each.
static int64_t divide_into_items(Linear* l, int64_t threads, atomic_int unfinished[MOST_SHARED]) {
  const int64_t in_cache = block_bytes() / (int64_t)sizeof(element) / l->k / PANEL * PANEL;
  l->blocks = even_blocks(l->rows, l->segments, max64(PANEL, min64(128, in_cache)), threads);
  const int64_t blocks = l->blocks.count;
  l->columns = l->n;
  if (blocks < threads && blocks <= MOST_SHARED)
    l->columns = parts(parts(l->n, PANEL), parts(2 * threads, blocks)) * PANEL;
  l->column_parts = parts(l->n, l->columns);
  if (l->column_parts > 1) {
    for (int64_t i = 0; i < blocks; i++) atomic_init(&unfinished[i], (int)l->column_parts);
    l->unfinished = unfinished;
  }
  return blocks * l->column_parts;
}
