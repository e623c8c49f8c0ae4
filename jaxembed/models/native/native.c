// The products and the attention of a transformer in bfloat16 on x86-64, called by XLA:CPU programs.
//
// Needs AVX512_BF16; AMX_BF16 is used where the compiler targets it. Operands are bfloat16, sums,
// softmax and norms are float32. Shapes are checked before a program is made (__init__.py).
//
// A kernel [K, N] lies in panels of 32 columns: [N / 32][K / 32][2][16][16][2], that is, for 32 of
// K and 16 columns a tile of AMX, whose 16 lines hold two neighbours of K for each column.

#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "xla/ffi/api/c_api.h"

typedef uint16_t bf16;

enum { TILE = 16, PANEL = 32, STEP = 32, TILE_ELEMENTS = TILE * STEP, CHUNK = 384 };

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

// ---- scratch memory: one growing piece per thread, in huge pages ----------------------------------

// Walking the tables of small pages takes longer than the products (2.5 times, in a virtual machine).

enum { HUGE = 2 << 20 };

static __thread char* scratch_memory;
static __thread size_t scratch_size;
static pthread_key_t at_exit;  // of a thread: frees its scratch memory
static pthread_once_t at_exit_made = PTHREAD_ONCE_INIT;

static int at_exit_failed;

static void make_at_exit(void) { at_exit_failed = pthread_key_create(&at_exit, free); }

static void* scratch(size_t size) {
  if (size <= scratch_size) return scratch_memory;
  pthread_once(&at_exit_made, make_at_exit);
  free(scratch_memory);
  const size_t rounded = (size + HUGE - 1) / HUGE * HUGE;
  scratch_memory = aligned_alloc(HUGE, rounded);
  scratch_size = scratch_memory ? rounded : 0;
  if (!at_exit_failed) pthread_setspecific(at_exit, scratch_memory);
  if (scratch_memory) madvise(scratch_memory, rounded, MADV_HUGEPAGE);
  return scratch_memory;
}

// ---- the threads of XLA:CPU ---------------------------------------------------------------------

typedef int Work(const void* arguments, int64_t item);  // 0, or -1 where memory is short

typedef struct {
  atomic_int owners;  // the call, and every helper that was scheduled
  atomic_int failed;
  atomic_llong next, done;
  int64_t items;
  Work* work;
  char arguments[];
} Job;

static atomic_int running;  // calls at this moment, of all programs

static void run_items(Job* job) {
  for (;;) {
    int64_t item = atomic_fetch_add(&job->next, 1);
    if (item >= job->items) return;
    if (job->work(job->arguments, item)) atomic_store(&job->failed, 1);
    atomic_fetch_add(&job->done, 1);
  }
}

static void disown(Job* job) {
  if (atomic_fetch_sub(&job->owners, 1) == 1) free(job);
}

#ifdef __AMX_BF16__
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} TileConfig;

static const TileConfig all_whole = {
    .palette = 1,
    .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE},
};

static void tiles_on(void) { _tile_loadconfig(&all_whole); }

static void tiles_off(void) { _tile_release(); }
#else
static void tiles_on(void) {}
static void tiles_off(void) {}
#endif

static void help(void* data) {
  Job* job = data;
  if (atomic_load(&job->next) < job->items) {
    tiles_on();
    run_items(job);
    tiles_off();
  }
  disown(job);
}

static void forget(XLA_FFI_CallFrame* frame, XLA_FFI_Error* error) {
  XLA_FFI_Error_Destroy_Args args = {.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE,
                                     .error = error};
  frame->api->XLA_FFI_Error_Destroy(&args);
}

// The threads that a call may use now, the calling one among them: others may be running too.
static int64_t share_of_threads(XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {
      .struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE,
      .ctx = frame->ctx,
      .num_threads = &threads};
  XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (error) forget(frame, error), threads = 1;  // no pool: the calling thread does it all
  return max64(1, threads / (atomic_load(&running) + 1));
}

// Run the items on some threads. Helpers that come too late find nothing left to do, and nobody
// waits for them: they may stand behind another program's work.
static int on_threads(XLA_FFI_CallFrame* frame, Work* work, const void* arguments, size_t size,
                      int64_t items, int64_t threads) {
  Job* job = malloc(sizeof(Job) + size);
  if (!job) return -1;
  atomic_init(&job->owners, 1);
  atomic_init(&job->failed, 0);
  atomic_init(&job->next, 0);
  atomic_init(&job->done, 0);
  job->items = items;
  job->work = work;
  memcpy(job->arguments, arguments, size);
  atomic_fetch_add(&running, 1);
  for (int64_t helper = 1; helper < min64(threads, items); helper++) {
    atomic_fetch_add(&job->owners, 1);
    XLA_FFI_ThreadPool_Schedule_Args scheduled = {
        .struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE,
        .ctx = frame->ctx,
        .task = help,
        .data = job};
    XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_Schedule(&scheduled);
    if (error) {
      forget(frame, error);
      disown(job);
      break;
    }
  }
  tiles_on();
  run_items(job);
  tiles_off();
  for (int spins = 0; atomic_load(&job->done) < items; spins++) {
    if (spins < 200) _mm_pause();
    else sched_yield();
  }
  atomic_fetch_sub(&running, 1);
  int failed = atomic_load(&job->failed);
  disown(job);
  return failed;
}

// ---- numbers ------------------------------------------------------------------------------------

static inline void store_bf16(bf16* to, __m512 low, __m512 high) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// 2^x for x <= 0, also -infinity: a polynomial of degree 4, relative error 2.6e-6.
static inline __m512 exp2_vector(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-1000.0f), x);  // in this order NaN stays
  __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(0.009570096619427204f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.05591785907745361f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.240247443318367f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.6931217908859253f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.9999992847442627f));
  return _mm512_scalef_ps(y, whole);
}

// x * Phi(x) by erf(z) = z p(z^2), of degree 10 on |z| < 3.25 and constant outside: off by 6e-6.
static inline __m512 gelu_vector(__m512 x) {
  const __m512 edge = _mm512_set1_ps(3.25f);
  __m512 z = _mm512_mul_ps(x, _mm512_set1_ps(0.70710678f));
  z = _mm512_max_ps(_mm512_min_ps(z, edge), _mm512_sub_ps(_mm512_setzero_ps(), edge));
  __m512 t = _mm512_fmsub_ps(_mm512_mul_ps(z, z), _mm512_set1_ps(2 / (3.25f * 3.25f)),
                             _mm512_set1_ps(1.0f));
  __m512 y = _mm512_set1_ps(0.003015643684193492f);
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(-0.008044902235269547f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(0.010106154717504978f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(-0.01680687628686428f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(0.034431952983140945f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(-0.05684914067387581f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(0.08259017765522003f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(-0.11417578905820847f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(0.15324343740940094f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(-0.2144598662853241f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(0.4346407949924469f));
  __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
  return _mm512_fmadd_ps(half, _mm512_mul_ps(z, y), half);
}

// ---- products -----------------------------------------------------------------------------------

// c[rows, 32] = a[rows, 32 * steps] . one panel, for 16 or 32 rows; added to c where `add` is set.
// From step to step a moves by `a_step` elements, and by `a_lower` to its second 16 rows.
#ifdef __AMX_BF16__
static inline void product(const bf16* a, int64_t a_stride, int64_t a_step, int64_t a_lower,
                           int rows, const bf16* panel, int64_t steps, int add, float* c,
                           int64_t c_stride) {
  const int64_t a_bytes = a_stride * 2, c_bytes = c_stride * 4;
  __asm__ volatile("" ::: "memory");  // gcc does not see what loads of tiles read
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

// ---- linear layers ------------------------------------------------------------------------------

enum { PLAIN = 0, GELU = 1, NORM = 2 };  // NORM: layer norm of the sum with `residual`

typedef struct {
  const void* x;  // [rows, k]
  const bf16* kernel;
  const float *bias, *residual, *scale, *shift;
  void* y;             // [rows, n], its first column being `y_column`
  int64_t rows, k, n;
  int64_t y_stride, y_column;
  int64_t block;         // rows of an item, a multiple of 32
  int64_t columns;       // of an item, a multiple of 32
  int64_t column_parts;  // items that share a block
  int x_is_float, y_is_float, y_in_tiles, mode;
  float eps;
  atomic_int* unfinished;  // of each block, its items; the last one does the norm
} Linear;

static void norm_rows(const Linear* l, int64_t first, int64_t last) {
  const int64_t n = l->n;
  for (int64_t row = first; row < last; row++) {
    float* y = (float*)l->y + row * l->y_stride;
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    for (int64_t j = 0; j < n; j += TILE) sum = _mm512_add_ps(sum, _mm512_loadu_ps(y + j));
    __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / n);
    for (int64_t j = 0; j < n; j += TILE) {
      __m512 centred = _mm512_sub_ps(_mm512_loadu_ps(y + j), mean);
      squares = _mm512_fmadd_ps(centred, centred, squares);
    }
    __m512 variance = _mm512_set1_ps(_mm512_reduce_add_ps(squares) / n + l->eps);
    __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_sqrt_ps(variance));
    for (int64_t j = 0; j < n; j += TILE) {
      __m512 centred = _mm512_sub_ps(_mm512_loadu_ps(y + j), mean);
      __m512 scaled = _mm512_mul_ps(_mm512_mul_ps(centred, inverse), _mm512_loadu_ps(l->scale + j));
      _mm512_storeu_ps(y + j, _mm512_add_ps(scaled, _mm512_loadu_ps(l->shift + j)));
    }
  }
}

// Rows as tiles of 16 rows and 32 features, one behind the other: [rows / 16][k / 32][16][32].
// The copy is where float32 is rounded and missing rows become zeros; gelu's result is stored so.
static void lay_in_tiles(const Linear* l, int64_t first, int64_t last, bf16* tiles) {
  const int64_t k = l->k, padded = parts(last - first, TILE) * TILE;
  for (int64_t row = 0; row < padded; row++) {
    bf16* line = tiles + row / TILE * TILE * k + row % TILE * STEP;
    const int64_t from = (first + row) * k;
    for (int64_t at = 0; at < k; at += STEP, line += TILE_ELEMENTS) {
      if (first + row >= last) {
        _mm512_storeu_si512(line, _mm512_setzero_si512());
      } else if (l->x_is_float) {
        const float* x = (const float*)l->x + from + at;
        store_bf16(line, _mm512_loadu_ps(x), _mm512_loadu_ps(x + TILE));
      } else {
        _mm512_storeu_si512(line, _mm512_loadu_si512((const bf16*)l->x + from + at));
      }
    }
  }
}

static inline void finish_columns(const Linear* l, int64_t row, int rows, int64_t column,
                                  const float* sums) {
  const __m512 bias[2] = {_mm512_loadu_ps(l->bias + column),
                          _mm512_loadu_ps(l->bias + column + TILE)};
  for (int i = 0; i < rows; i++) {
    int64_t at = (row + i) * l->y_stride + column - l->y_column;
    __m512 low = _mm512_add_ps(_mm512_load_ps(sums + i * PANEL), bias[0]);
    __m512 high = _mm512_add_ps(_mm512_load_ps(sums + i * PANEL + TILE), bias[1]);
    if (l->mode == GELU) {
      low = gelu_vector(low), high = gelu_vector(high);
    } else if (l->mode == NORM) {
      low = _mm512_add_ps(low, _mm512_loadu_ps(l->residual + at));
      high = _mm512_add_ps(high, _mm512_loadu_ps(l->residual + at + TILE));
    }
    if (l->y_is_float) {
      _mm512_storeu_ps((float*)l->y + at, low);
      _mm512_storeu_ps((float*)l->y + at + TILE, high);
      continue;
    }
    if (l->y_in_tiles)
      at = (row + i) / TILE * TILE * l->n + column * TILE + (row + i) % TILE * STEP;
    store_bf16((bf16*)l->y + at, low, high);
  }
}

// The columns [start, end) of rows [first, last), which lie in tiles; sums has room for 32 columns.
static void multiply(const Linear* l, const bf16* tiles, int64_t first, int64_t last, int64_t start,
                     int64_t end, float* sums) {
  const int64_t k = l->k;
  for (int64_t column = start; column < end; column += PANEL)
    // so much of a panel as stays in the first-level cache while the rows pass by
    for (int64_t from = 0; from < k; from += CHUNK) {
      const int64_t steps = min64(CHUNK, k - from) / STEP;
      const bf16* panel = l->kernel + column * k + from * PANEL;
      for (int64_t row = first; row < last; row += PANEL) {
        const int64_t rows = min64(PANEL, last - row);
        float* of_rows = sums + (row - first) * PANEL;
        product(tiles + (row - first) * k + from * TILE, STEP, TILE_ELEMENTS, TILE * k,
                rows > TILE ? PANEL : TILE, panel, steps, from > 0, of_rows, PANEL);
        if (from + CHUNK >= k) finish_columns(l, row, (int)rows, column, of_rows);
      }
    }
}

static int linear_item(const void* arguments, int64_t item) {
  const Linear* l = arguments;
  const int64_t block = item / l->column_parts, part = item % l->column_parts;
  const int64_t first = block * l->block, last = min64(first + l->block, l->rows);
  const int64_t start = part * l->columns, end = min64(start + l->columns, l->n);
  float* sums = scratch(l->block * (PANEL * sizeof(float) + l->k * sizeof(bf16)));
  if (!sums) return -1;
  bf16* tiles = (bf16*)(sums + l->block * PANEL);
  lay_in_tiles(l, first, last, tiles);
  multiply(l, tiles, first, last, start, end, sums);
  if (l->mode == NORM &&
      (l->column_parts == 1 || atomic_fetch_sub(&l->unfinished[block], 1) == 1))
    norm_rows(l, first, last);
  return 0;
}

// Everything behind the attention of a layer: hidden <- norm(hidden + mixed . out), then
// norm(hidden + gelu(hidden . up) . down), a block of rows at a time: what lies between stays in the
// second-level cache.
typedef struct {
  Linear out, up, down;
  int64_t rows, block;
} Mlp;

static int mlp_item(const void* arguments, int64_t item) {
  const Mlp* m = arguments;
  const int64_t first = item * m->block, rows = min64(m->block, m->rows - first);
  const int64_t dim = m->out.n, width = m->up.n, block = m->block;
  float* sums = scratch(
      block * ((PANEL + dim) * sizeof(float) + (dim + width) * sizeof(bf16)));
  if (!sums) return -1;
  float* hidden = sums + block * PANEL;
  bf16* tiles = (bf16*)(hidden + block * dim);
  bf16* inner = tiles + block * dim;

  Linear out = m->out, up = m->up, down = m->down;
  out.x = (const bf16*)out.x + first * dim;
  out.residual += first * dim;
  out.y = hidden;
  lay_in_tiles(&out, 0, rows, tiles);
  multiply(&out, tiles, 0, rows, 0, dim, sums);
  norm_rows(&out, 0, rows);

  up.x = hidden;
  up.y = inner;
  if (rows % TILE) memset(inner, 0, block * width * sizeof(bf16));
  lay_in_tiles(&up, 0, rows, tiles);
  multiply(&up, tiles, 0, rows, 0, width, sums);

  down.residual = hidden;
  down.y = (float*)down.y + first * dim;
  multiply(&down, inner, 0, rows, 0, dim, sums);
  norm_rows(&down, 0, rows);
  return 0;
}

// ---- attention ----------------------------------------------------------------------------------

typedef struct {
  const bf16 *query, *key, *value;  // of the first head
  const int32_t* segments;
  bf16* mixed;
  int64_t query_stride, key_stride, value_stride, mixed_stride;  // from token to token
  int64_t rows, length, heads, groups, width;
  int64_t heads_per_item;  // of keys and values
  int causal;
  int64_t reach;  // the length, where it does not matter
} Attention;

// 16 lines of 16 pairs, turned: line p of `to` gets pair p of each line.
static inline void turn(const bf16* from, int64_t stride, bf16* to) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * stride);
  for (int i = 0; i < 8; i++) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
    a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
  }
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * STEP, a[i]);
}

// Keys as the panels that queries are multiplied with: [length / 32][width / 32][2 tiles].
static void turn_keys(const Attention* t, const bf16* key, int64_t padded, bf16* panels) {
  for (int64_t first = 0; first < padded; first += TILE)
    for (int64_t step = 0; step < t->width / STEP; step++) {
      bf16* tile = panels + ((first / PANEL) * (t->width / STEP) + step) * 2 * TILE_ELEMENTS +
                   (first / TILE % 2) * TILE_ELEMENTS;
      if (first < t->length) turn(key + first * t->key_stride + step * STEP, t->key_stride, tile);
      else memset(tile, 0, TILE_ELEMENTS * sizeof(bf16));
    }
}

// Values as the panels that weights are multiplied with: [width / 32][length / 32][2 tiles], zeros
// in padding, where there may be NaN.
static void pair_values(const Attention* t, const bf16* value, const int32_t* segments,
                        int64_t padded, bf16* panels) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t at = 0; at < padded; at += 2)
    for (int64_t column = 0; column < t->width; column += PANEL) {
      __m512i two[2];
      for (int i = 0; i < 2; i++)
        two[i] = at + i < t->length && segments[at + i]
                     ? _mm512_loadu_si512(value + (at + i) * t->value_stride + column)
                     : _mm512_setzero_si512();
      bf16* line = panels + ((column / PANEL) * (padded / STEP) + at / STEP) * 2 * TILE_ELEMENTS +
                   (at % STEP) / 2 * PANEL;
      _mm512_storeu_si512(line, _mm512_permutex2var_epi16(two[0], low, two[1]));
      _mm512_storeu_si512(line + TILE_ELEMENTS, _mm512_permutex2var_epi16(two[0], high, two[1]));
    }
}

// softmax of one query's scores over the keys [low, high) into weights, and one over their sum.
static inline float softmax_row(const Attention* t, const int32_t* segments, int64_t at, int64_t low,
                                int64_t high, float* scores, bf16* weights) {
  if (!segments[at]) {  // padding among the queries: all of it may be NaN
    memset(weights + low, 0, (high - low) * sizeof(bf16));
    return 0.0f;
  }
  const __m512 masked = _mm512_set1_ps(-1e30f);
  const __m512i segment = _mm512_set1_epi32(segments[at]);
  const int64_t after = t->causal ? 0 : t->reach;
  const int64_t nearest = max64(at - t->reach, 0), furthest = min64(at + after, t->length - 1);
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const int bounded = t->causal || t->reach < t->length;
  __m512 largest = masked;
  for (int64_t j = low; j < high; j += TILE) {
    __mmask16 seen = 0;
    if (j < t->length) {
      seen = _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(segments + j), segment);
      if (bounded) {
        __m512i place = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)j));
        seen &= _mm512_cmpge_epi32_mask(place, _mm512_set1_epi32((int)nearest));
        seen &= _mm512_cmple_epi32_mask(place, _mm512_set1_epi32((int)furthest));
      }
    }
    __m512 score = _mm512_mask_mov_ps(masked, seen, _mm512_loadu_ps(scores + j));
    _mm512_storeu_ps(scores + j, score);
    largest = _mm512_max_ps(largest, score);
  }
  // softmax(s / sqrt(width)) by powers of two
  const __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.4426950408889634f),
                                      _mm512_sqrt_ps(_mm512_set1_ps((float)t->width)));
  const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  __m512 sum = _mm512_setzero_ps();
  for (int64_t j = low; j < high; j += PANEL) {
    __m512 pair[2];
    for (int i = 0; i < 2; i++) {
      __m512 below = _mm512_sub_ps(_mm512_loadu_ps(scores + j + i * TILE), most);
      pair[i] = exp2_vector(_mm512_mul_ps(below, factor));
      sum = _mm512_add_ps(sum, pair[i]);
    }
    store_bf16(weights + j, pair[0], pair[1]);
  }
  return 1.0f / _mm512_reduce_add_ps(sum);
}

// From one query's scores to the next one's: with a power of two, those of sixteen queries would
// have a few lines of the first-level cache between them.
static int64_t stride_of_scores(int64_t padded) { return padded + PANEL; }

static size_t attention_memory(int64_t length, int64_t width) {
  const size_t padded = parts(length, STEP) * STEP;
  return 2 * padded * width * sizeof(bf16) +                                  // keys and values
         PANEL * stride_of_scores(padded) * (sizeof(float) + sizeof(bf16)) +  // scores, weights
         PANEL * PANEL * sizeof(float);
}

// Some heads of keys and values of a row, and the queries that they serve.
static void attend(const Attention* t, int64_t row, int64_t first_group, int64_t last_group,
                   char* memory) {
  const int64_t length = t->length, width = t->width, per_group = t->heads / t->groups;
  const int64_t padded = parts(length, STEP) * STEP, stride = stride_of_scores(padded);
  const int32_t* segments = t->segments + row * length;
  float* sums = (float*)memory;
  float* scores = sums + PANEL * PANEL;
  bf16* weights = (bf16*)(scores + PANEL * stride);
  bf16* keys = weights + PANEL * stride;
  bf16* values = keys + padded * width;

  for (int64_t group = first_group; group < last_group; group++) {
    turn_keys(t, t->key + row * length * t->key_stride + group * width, padded, keys);
    pair_values(t, t->value + row * length * t->value_stride + group * width, segments, padded,
                values);
    for (int64_t first = 0; first < length; first += PANEL) {
      const int rows = (int)min64(PANEL, length - first);
      // a segment's tokens lie side by side: the keys that these queries see are one stretch
      int64_t real = 0, low = length, high = 0;
      for (int64_t at = first; at < first + rows; at++) {
        if (!segments[at]) continue;
        real++;
        if (at < low) low = at;
        high = at + 1;
      }
      if (real) {
        while (low > 0 && segments[low - 1] == segments[low]) low--;
        while (high < length && segments[high] == segments[high - 1]) high++;
        low = max64(low, first - t->reach);
        high = min64(high, first + rows + (t->causal ? 0 : t->reach));
        low = low / PANEL * PANEL, high = parts(high, PANEL) * PANEL;
      }
      for (int64_t head = group * per_group; head < (group + 1) * per_group; head++) {
        bf16* mixed = t->mixed + (row * length + first) * t->mixed_stride + head * width;
        if (!real) {
          for (int i = 0; i < rows; i++)
            memset(mixed + i * t->mixed_stride, 0, width * sizeof(bf16));
          continue;
        }
        const bf16* query = t->query + (row * length + first) * t->query_stride + head * width;
        for (int64_t j = low; j < high; j += PANEL)
          product(query, t->query_stride, STEP, TILE * t->query_stride, rows, keys + j * width,
                  width / STEP, 0, scores + j, stride);
        float inverse[PANEL];
        for (int i = 0; i < rows; i++)
          inverse[i] = softmax_row(t, segments, first + i, low, high, scores + i * stride,
                                   weights + i * stride);
        for (int64_t column = 0; column < width; column += PANEL) {
          product(weights + low, stride, STEP, TILE * stride, rows,
                  values + column * padded + low * PANEL, (high - low) / STEP, 0, sums, PANEL);
          for (int i = 0; i < rows; i++) {
            const __m512 by = _mm512_set1_ps(inverse[i]);
            store_bf16(mixed + i * t->mixed_stride + column,
                       _mm512_mul_ps(_mm512_load_ps(sums + i * PANEL), by),
                       _mm512_mul_ps(_mm512_load_ps(sums + i * PANEL + TILE), by));
          }
        }
      }
    }
  }
}

static int attention_item(const void* arguments, int64_t item) {
  const Attention* t = arguments;
  const int64_t parts_of_row = parts(t->groups, t->heads_per_item);
  const int64_t first = item % parts_of_row * t->heads_per_item;
  char* memory = scratch(attention_memory(t->length, t->width));
  if (!memory) return -1;
  attend(t, item / parts_of_row, first, min64(first + t->heads_per_item, t->groups), memory);
  return 0;
}

// Attention from the hidden states: some heads of some rows, whose queries, keys and values stay in
// the second-level cache.
typedef struct {
  Linear qkv;
  Attention attention;
  int64_t rows_per_item;
} SelfAttention;

static int self_attention_item(const void* arguments, int64_t item) {
  const SelfAttention* s = arguments;
  Attention t = s->attention;
  Linear l = s->qkv;
  const int64_t dim = t.heads * t.width, head_parts = parts(t.heads, t.heads_per_item);
  const int64_t first_row = item / head_parts * s->rows_per_item;
  const int64_t rows = min64(s->rows_per_item, t.rows - first_row);
  const int64_t first_head = item % head_parts * t.heads_per_item;
  const int64_t heads = min64(t.heads_per_item, t.heads - first_head);
  const int64_t tokens = rows * t.length, most = s->rows_per_item * t.length;
  const int64_t wide = heads * t.width, block = parts(most, PANEL) * PANEL;

  char* memory = scratch(attention_memory(t.length, t.width) + block * PANEL * sizeof(float) +
                         block * (l.k + 3 * t.heads_per_item * t.width) * sizeof(bf16));
  if (!memory) return -1;
  float* sums = (float*)(memory + attention_memory(t.length, t.width));
  bf16* tiles = (bf16*)(sums + block * PANEL);
  bf16* joint = tiles + block * l.k;

  l.x = (const float*)l.x + first_row * t.length * l.k;
  l.y_stride = 3 * wide;
  lay_in_tiles(&l, 0, tokens, tiles);
  for (int of = 0; of < 3; of++) {  // queries, keys, values
    l.y = joint + of * wide;
    l.y_column = of * dim + first_head * t.width;
    multiply(&l, tiles, 0, tokens, l.y_column, l.y_column + wide, sums);
  }
  t.query = joint, t.key = joint + wide, t.value = joint + 2 * wide;
  t.query_stride = t.key_stride = t.value_stride = 3 * wide;
  t.heads = t.groups = heads;
  t.segments += first_row * t.length;
  t.mixed += first_row * t.length * dim + first_head * t.width;
  for (int64_t row = 0; row < rows; row++) attend(&t, row, 0, heads, memory);
  return 0;
}

// ---- what XLA calls -----------------------------------------------------------------------------

static XLA_FFI_Error* error_of(XLA_FFI_CallFrame* frame, const char* message) {
  XLA_FFI_Error_Create_Args args = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE,
                                    .message = message,
                                    .errc = XLA_FFI_Error_Code_RESOURCE_EXHAUSTED};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// XLA first asks for which version of its interface this was compiled.
static int asks_for_metadata(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Extension_Base* extension = frame->extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  return 1;
}

static XLA_FFI_Buffer* argument(XLA_FFI_CallFrame* frame, int i) { return frame->args.args[i]; }
static XLA_FFI_Buffer* result(XLA_FFI_CallFrame* frame, int i) { return frame->rets.rets[i]; }

static XLA_FFI_Scalar* attribute(XLA_FFI_CallFrame* frame, const char* name) {
  for (int64_t i = 0; i < frame->attrs.size; i++) {
    const XLA_FFI_ByteSpan* span = frame->attrs.names[i];
    if (span->len == strlen(name) && !memcmp(span->ptr, name, span->len)) return frame->attrs.attrs[i];
  }
  return NULL;
}

static int64_t whole(XLA_FFI_CallFrame* frame, const char* name) {
  return *(int64_t*)attribute(frame, name)->value;
}

enum { MOST_SHARED = 64 };  // blocks whose columns are shared out

// x, kernel, bias, and with mode NORM residual, scale, shift -> y
XLA_FFI_Error* jaxembed_linear(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  XLA_FFI_Buffer *x = argument(frame, 0), *y = result(frame, 0);
  Linear l = {.x = x->data,
              .kernel = argument(frame, 1)->data,
              .bias = argument(frame, 2)->data,
              .y = y->data,
              .k = x->dims[x->rank - 1],
              .n = y->dims[y->rank - 1],
              .y_stride = y->dims[y->rank - 1],
              .rows = 1,
              .x_is_float = x->dtype == XLA_FFI_DataType_F32,
              .y_is_float = y->dtype == XLA_FFI_DataType_F32,
              .mode = (int)whole(frame, "mode")};
  for (int64_t i = 0; i < x->rank - 1; i++) l.rows *= x->dims[i];
  if (l.mode == NORM) {
    l.residual = argument(frame, 3)->data;
    l.scale = argument(frame, 4)->data;
    l.shift = argument(frame, 5)->data;
    l.eps = *(float*)attribute(frame, "eps")->value;
  }
  // Blocks that stay in the second-level cache; where there are few rows, the columns are shared out
  const int worth_sharing = (double)l.rows * l.k * l.n > 2e6;
  const int64_t threads = worth_sharing ? share_of_threads(frame) : 1;
  l.block = max64(PANEL, min64(128, 131072 / l.k / PANEL * PANEL));
  const int64_t blocks = parts(l.rows, l.block);
  l.columns = l.n;
  if (blocks < threads && blocks <= MOST_SHARED)
    l.columns = parts(parts(l.n, PANEL), parts(2 * threads, blocks)) * PANEL;
  l.column_parts = parts(l.n, l.columns);
  atomic_int unfinished[MOST_SHARED];
  if (l.column_parts > 1) {
    for (int64_t i = 0; i < blocks; i++) atomic_init(&unfinished[i], (int)l.column_parts);
    l.unfinished = unfinished;
  }
  if (on_threads(frame, linear_item, &l, sizeof l, blocks * l.column_parts, threads))
    return error_of(frame, "jaxembed_linear: out of memory");
  return NULL;
}

static XLA_FFI_Error* attention_of(XLA_FFI_CallFrame* frame, Attention* t) {
  XLA_FFI_Buffer* y = result(frame, 0);
  t->mixed = y->data;
  t->rows = y->dims[0], t->length = y->dims[1], t->heads = y->dims[2], t->width = y->dims[3];
  t->mixed_stride = t->heads * t->width;
  t->causal = (int)whole(frame, "causal");
  t->reach = whole(frame, "reach");
  if (t->reach < 0) t->reach = t->length;
  const int worth_sharing = (double)t->rows * t->heads * t->length * t->length > 1e5;
  const int64_t threads = worth_sharing ? share_of_threads(frame) : 1;
  t->heads_per_item = t->rows >= 4 * threads ? t->groups : 1;
  const int64_t items = t->rows * parts(t->groups, t->heads_per_item);
  if (on_threads(frame, attention_item, t, sizeof *t, items, threads))
    return error_of(frame, "jaxembed_attention: out of memory");
  return NULL;
}

// query [rows, length, heads, width], key and value [rows, length, groups, width], segments
XLA_FFI_Error* jaxembed_attention(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  XLA_FFI_Buffer *query = argument(frame, 0), *key = argument(frame, 1);
  Attention t = {.query = query->data,
                 .key = key->data,
                 .value = argument(frame, 2)->data,
                 .segments = argument(frame, 3)->data,
                 .groups = key->dims[2]};
  t.query_stride = query->dims[2] * query->dims[3];
  t.key_stride = t.value_stride = key->dims[2] * key->dims[3];
  return attention_of(frame, &t);
}

// query, key and value side by side: [rows, length, 3, heads, width], and segments
XLA_FFI_Error* jaxembed_joint_attention(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  XLA_FFI_Buffer* joint = argument(frame, 0);
  const int64_t dim = joint->dims[3] * joint->dims[4];
  const bf16* first = joint->data;
  Attention t = {.query = first,
                 .key = first + dim,
                 .value = first + 2 * dim,
                 .segments = argument(frame, 1)->data,
                 .groups = joint->dims[3]};
  t.query_stride = t.key_stride = t.value_stride = 3 * dim;
  return attention_of(frame, &t);
}

// hidden [rows, length, dim], kernel and bias of queries, keys and values, segments; heads
XLA_FFI_Error* jaxembed_self_attention(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  XLA_FFI_Buffer* hidden = argument(frame, 0);
  const int64_t rows = hidden->dims[0], length = hidden->dims[1], dim = hidden->dims[2];
  const int64_t heads = whole(frame, "heads");
  SelfAttention s = {.qkv = {.x = hidden->data,
                             .kernel = argument(frame, 1)->data,
                             .bias = argument(frame, 2)->data,
                             .rows = rows * length,
                             .k = dim,
                             .n = 3 * dim,
                             .x_is_float = 1},
                     .attention = {.segments = argument(frame, 3)->data,
                                   .mixed = result(frame, 0)->data,
                                   .mixed_stride = dim,
                                   .rows = rows,
                                   .length = length,
                                   .heads = heads,
                                   .width = dim / heads,
                                   .reach = length}};
  // Enough rows to be worth the reading of the kernel, not so many heads that the cache overflows,
  // and items for several threads.
  s.rows_per_item = max64(1, 128 / length);
  const int64_t row_parts = parts(rows, s.rows_per_item);
  const int64_t tokens = s.rows_per_item * length;
  const int64_t threads = share_of_threads(frame);
  int64_t head_parts = parts(tokens * 3 * dim * (int64_t)sizeof(bf16), 640 * 1024);
  if (row_parts * head_parts < threads) head_parts = parts(threads, row_parts);
  s.attention.heads_per_item = parts(heads, min64(heads, head_parts));
  const int64_t items = row_parts * parts(heads, s.attention.heads_per_item);
  if (on_threads(frame, self_attention_item, &s, sizeof s, items, threads))
    return error_of(frame, "jaxembed_self_attention: out of memory");
  return NULL;
}

// mixed, hidden; kernel, bias, scale and shift of out; kernel and bias of up; as out's of down
XLA_FFI_Error* jaxembed_mlp(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame)) return NULL;
  XLA_FFI_Buffer *hidden = argument(frame, 1), *up_bias = argument(frame, 7);
  const int64_t dim = hidden->dims[2], width = up_bias->dims[0];
  const float eps = *(float*)attribute(frame, "eps")->value;
  Mlp m = {.rows = hidden->dims[0] * hidden->dims[1],
           .out = {.x = argument(frame, 0)->data,
                   .residual = hidden->data,
                   .kernel = argument(frame, 2)->data,
                   .bias = argument(frame, 3)->data,
                   .scale = argument(frame, 4)->data,
                   .shift = argument(frame, 5)->data,
                   .k = dim, .n = dim, .y_stride = dim,
                   .y_is_float = 1, .mode = NORM, .eps = eps},
           .up = {.kernel = argument(frame, 6)->data,
                  .bias = up_bias->data,
                  .k = dim, .n = width,
                  .x_is_float = 1, .y_in_tiles = 1, .mode = GELU},
           .down = {.kernel = argument(frame, 8)->data,
                    .bias = argument(frame, 9)->data,
                    .scale = argument(frame, 10)->data,
                    .shift = argument(frame, 11)->data,
                    .y = result(frame, 0)->data,
                    .k = width, .n = dim, .y_stride = dim,
                    .y_is_float = 1, .mode = NORM, .eps = eps}};
  const int64_t threads = share_of_threads(frame);
  m.block = 128;
  while (m.block > PANEL && parts(m.rows, m.block) < threads) m.block /= 2;
  if (on_threads(frame, mlp_item, &m, sizeof m, parts(m.rows, m.block), threads))
    return error_of(frame, "jaxembed_mlp: out of memory");
  return NULL;
}

// Leave to use AMX's tiles, which a process asks for once: 0 where it is given, or not needed.
int jaxembed_prepare(void) {
#ifdef __AMX_BF16__
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? 1 : 0;
#else
  return 0;
#endif
}

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
