// Runs every call of the native kernels without XLA: on call frames made by hand, with operands in
// heap buffers of exactly their size, beside a plain reference. It is compiled with sanitizers, which
// end the process where a kernel reads or writes beside a buffer. Then slips, each of which must be
// refused. Prints what it ran.

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

typedef uint16_t bf16;

XLA_FFI_Handler jaxembed_linear, jaxembed_attention, jaxembed_joint_attention,
    jaxembed_self_attention, jaxembed_mlp;
const char* jaxembed_operand(const char* call, int64_t mode, int64_t i);
int jaxembed_prepare(void);
int jaxembed_check(void);

#define CHECK(is_true, ...) \
  do {                      \
    if (!(is_true)) {       \
      printf(__VA_ARGS__);  \
      printf("\n");         \
      exit(1);              \
    }                       \
  } while (0)

// ---- numbers

static uint64_t state = 1;

static double drawn(void) {  // from -1 to 1
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (double)(int64_t)state / 9223372036854775808.0;
}

static bf16 narrow(double value) {
  const float single = (float)value;
  uint32_t bits;
  memcpy(&bits, &single, sizeof bits);
  if (single != single) return 0x7fc0;
  return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static double wide(bf16 value) {
  const uint32_t bits = (uint32_t)value << 16;
  float single;
  memcpy(&single, &bits, sizeof single);
  return single;
}

static double rounded(double value) { return wide(narrow(value)); }

// ---- XLA's part

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  char message[1024];
};

enum { MOST_HELPERS = 64 };

typedef struct {
  int64_t threads;  // 0: there is no pool; -1: it says two and takes no work
  int helpers;
  pthread_t started[MOST_HELPERS];
} Pool;

static XLA_FFI_Error* create(XLA_FFI_Error_Create_Args* args) {
  XLA_FFI_Error* error = calloc(1, sizeof *error);
  error->code = args->errc;
  snprintf(error->message, sizeof error->message, "%s", args->message);
  return error;
}

static void destroy(XLA_FFI_Error_Destroy_Args* args) { free(args->error); }

static XLA_FFI_Error* no_pool(void) {
  return create(&(XLA_FFI_Error_Create_Args){.message = "no pool",
                                             .errc = XLA_FFI_Error_Code_UNAVAILABLE});
}

static XLA_FFI_Error* count_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  const Pool* pool = (const Pool*)args->ctx;
  if (!pool->threads) return no_pool();
  *args->num_threads = pool->threads < 0 ? 2 : pool->threads;
  return NULL;
}

typedef struct {
  XLA_FFI_Task* run;
  void* data;
} Task;

static void* run_task(void* argument) {
  Task task = *(Task*)argument;
  free(argument);
  task.run(task.data);
  return NULL;
}

static XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  Pool* pool = (Pool*)args->ctx;
  if (pool->threads <= 0) return no_pool();
  CHECK(pool->helpers < MOST_HELPERS, "too many helpers");
  Task* task = malloc(sizeof *task);
  *task = (Task){args->task, args->data};
  CHECK(!pthread_create(&pool->started[pool->helpers++], NULL, run_task, task), "no thread");
  return NULL;
}

static const XLA_FFI_Api api = {
    .XLA_FFI_Error_Create = create,
    .XLA_FFI_Error_Destroy = destroy,
    .XLA_FFI_ThreadPool_NumThreads = count_threads,
    .XLA_FFI_ThreadPool_Schedule = schedule,
};

// ---- call frames

enum { MOST_OPERANDS = 13, MOST_AXES = 7, MOST_ATTRIBUTES = 6 };
enum { PLAIN, NORM, GELU, GATED_GELU, GATED_SILU, GATED_GELU_TANH, MODES };  // of linear
enum { BIASED = 1, ROTATED = 2 };  // bits of the mode of attention

typedef struct {
  XLA_FFI_Buffer buffers[MOST_OPERANDS], result;
  int64_t dims[MOST_OPERANDS][MOST_AXES], result_dims[MOST_AXES];
  int64_t operands, attributes;
  const char* names[MOST_ATTRIBUTES];
  XLA_FFI_DataType dtypes[MOST_ATTRIBUTES];
  int64_t wholes[MOST_ATTRIBUTES];
  float reals[MOST_ATTRIBUTES];
} Frame;

static int64_t elements(const XLA_FFI_Buffer* buffer) {
  int64_t product = 1;
  for (int64_t i = 0; i < buffer->rank; i++) product *= buffer->dims[i];
  return product;
}

static void* made(XLA_FFI_Buffer* buffer, int64_t* dims, XLA_FFI_DataType dtype, int64_t rank,
                  va_list sizes) {
  for (int64_t i = 0; i < rank; i++) dims[i] = va_arg(sizes, int64_t);
  *buffer = (XLA_FFI_Buffer){.struct_size = XLA_FFI_Buffer_STRUCT_SIZE,
                             .dtype = dtype, .rank = rank, .dims = dims};
  const int64_t count = elements(buffer);
  buffer->data = malloc((size_t)count * (dtype == XLA_FFI_DataType_BF16 ? 2 : 4));
  for (int64_t i = 0; i < count; i++) {
    if (dtype == XLA_FFI_DataType_BF16) ((bf16*)buffer->data)[i] = narrow(drawn());
    else if (dtype == XLA_FFI_DataType_F32) ((float*)buffer->data)[i] = (float)drawn();
    else ((int32_t*)buffer->data)[i] = 1;
  }
  return buffer->data;
}

// The sizes are int64_t.
static void* operand(Frame* f, XLA_FFI_DataType dtype, int64_t rank, ...) {
  va_list sizes;
  va_start(sizes, rank);
  const int64_t i = f->operands++;
  void* data = made(&f->buffers[i], f->dims[i], dtype, rank, sizes);
  va_end(sizes);
  return data;
}

static void* result(Frame* f, XLA_FFI_DataType dtype, int64_t rank, ...) {
  va_list sizes;
  va_start(sizes, rank);
  void* data = made(&f->result, f->result_dims, dtype, rank, sizes);
  va_end(sizes);
  return data;
}

static void whole(Frame* f, const char* name, int64_t value) {
  f->names[f->attributes] = name;
  f->dtypes[f->attributes] = XLA_FFI_DataType_S64;
  f->wholes[f->attributes++] = value;
}

static void real(Frame* f, const char* name, float value) {
  f->names[f->attributes] = name;
  f->dtypes[f->attributes] = XLA_FFI_DataType_F32;
  f->reals[f->attributes++] = value;
}

// A weight [k, n] with small numbers, in panels: its plain form, which the caller frees.
static double* weight(Frame* f, int64_t k, int64_t n) {
  bf16* panels = operand(f, XLA_FFI_DataType_BF16, 6, n / 32, k / 32, (int64_t)2, (int64_t)16,
                         (int64_t)16, (int64_t)2);
  double* plain = malloc((size_t)(k * n) * sizeof *plain);
  for (int64_t row = 0; row < k; row++)
    for (int64_t column = 0; column < n; column++) {
      const int64_t at = (((column / 32 * (k / 32) + row / 32) * 2 + column / 16 % 2) * 16 +
                          row % 32 / 2) * 32 + column % 16 * 2 + row % 2;
      panels[at] = narrow(drawn() / sqrt((double)k));
      plain[row * n + column] = wide(panels[at]);
    }
  return plain;
}

// What the handler answers, once all of its helpers have ended: NULL, or an error to free.
static XLA_FFI_Error* ask(XLA_FFI_Handler* handler, Frame* f, int64_t threads) {
  Pool pool = {.threads = threads};
  void *args[MOST_OPERANDS], *rets[1] = {&f->result}, *attrs[MOST_ATTRIBUTES];
  XLA_FFI_ArgType types[MOST_OPERANDS];
  XLA_FFI_RetType ret_types[1] = {XLA_FFI_RetType_BUFFER};
  XLA_FFI_AttrType attr_types[MOST_ATTRIBUTES];
  XLA_FFI_ByteSpan spans[MOST_ATTRIBUTES], *span_of[MOST_ATTRIBUTES];
  XLA_FFI_Scalar scalars[MOST_ATTRIBUTES];
  for (int64_t i = 0; i < f->operands; i++) {
    args[i] = &f->buffers[i];
    types[i] = XLA_FFI_ArgType_BUFFER;
  }
  for (int64_t i = 0; i < f->attributes; i++) {
    const int is_real = f->dtypes[i] == XLA_FFI_DataType_F32;
    void* value = is_real ? (void*)&f->reals[i] : (void*)&f->wholes[i];
    scalars[i] = (XLA_FFI_Scalar){f->dtypes[i], value};
    spans[i] = (XLA_FFI_ByteSpan){f->names[i], strlen(f->names[i])};
    span_of[i] = &spans[i], attrs[i] = &scalars[i], attr_types[i] = XLA_FFI_AttrType_SCALAR;
  }
  XLA_FFI_CallFrame frame = {.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE,
                             .api = &api,
                             .ctx = (XLA_FFI_ExecutionContext*)&pool,
                             .stage = XLA_FFI_ExecutionStage_EXECUTE,
                             .args = {.size = f->operands, .types = types, .args = args},
                             .rets = {.size = 1, .types = ret_types, .rets = rets},
                             .attrs = {.size = f->attributes, .types = attr_types,
                                       .names = span_of, .attrs = attrs}};
  XLA_FFI_Error* error = handler(&frame);
  for (int i = 0; i < pool.helpers; i++) pthread_join(pool.started[i], NULL);
  return error;
}

static void forget(Frame* f) {
  for (int64_t i = 0; i < f->operands; i++) free(f->buffers[i].data);
  free(f->result.data);
}

// ---- slips: what a frame is changed to, of which one is right

static int slips;

static void refused(XLA_FFI_Handler* handler, Frame* f, const char* call, const char* what) {
  XLA_FFI_Error* error = ask(handler, f, 2);
  CHECK(error, "%s: %s was not refused", call, what);
  CHECK(error->code == XLA_FFI_Error_Code_INVALID_ARGUMENT && strstr(error->message, call),
        "%s: %s: %s", call, what, error->message);
  if (getenv("SLIPS")) printf("%s\n", error->message);
  free(error);
  slips++;
}

static void refused_buffer(XLA_FFI_Handler* handler, Frame* f, const char* call,
                           XLA_FFI_Buffer* buffer) {
  const XLA_FFI_Buffer right = *buffer;
  buffer->dtype = XLA_FFI_DataType_F16;
  refused(handler, f, call, "a dtype");
  *buffer = right;
  for (int64_t rank = 0; rank < MOST_AXES; rank++) {
    if (rank == right.rank) continue;
    buffer->rank = rank;
    refused(handler, f, call, "a rank");
  }
  *buffer = right;
  const int64_t sizes[] = {-1, 0, 1, 7};
  for (int64_t axis = 0; axis < right.rank; axis++)
    for (int change = 0; change < 4; change++) {
      const int64_t before = buffer->dims[axis];
      buffer->dims[axis] = change == 2 ? before + 1 : change == 3 ? before * 7 : sizes[change];
      refused(handler, f, call, "a size");
      buffer->dims[axis] = before;
    }
}

static void refuse_slips(XLA_FFI_Handler* handler, Frame* f, const char* call) {
  for (int64_t axis = 0; axis < MOST_AXES; axis++) {  // read where a rank is too high
    for (int64_t i = 0; i < MOST_OPERANDS; i++)
      if (axis >= f->buffers[i].rank) f->dims[i][axis] = 32;
    if (axis >= f->result.rank) f->result_dims[axis] = 32;
  }
  for (int64_t i = 0; i < f->operands; i++) refused_buffer(handler, f, call, &f->buffers[i]);
  refused_buffer(handler, f, call, &f->result);
  f->operands--;
  refused(handler, f, call, "an operand too few");
  f->operands += 2;
  f->buffers[f->operands - 1] = f->buffers[0];
  refused(handler, f, call, "an operand too many");
  f->operands--;
  for (int64_t i = 0; i < f->attributes; i++) {
    Frame other = *f;
    other.names[i] = "other";
    refused(handler, &other, call, "an attribute of another name");
    other = *f;
    other.dtypes[i] = XLA_FFI_DataType_S32;
    refused(handler, &other, call, "an attribute of another type");
    other = *f;
    other.wholes[i] = -2, other.reals[i] = -2;
    refused(handler, &other, call, "an attribute out of range");
    other.wholes[i] = INT64_MAX, other.reals[i] = NAN;
    if (strcmp(f->names[i], "reach")) refused(handler, &other, call, "an attribute out of range");
    if (strcmp(f->names[i], "mode") || strstr(call, "attention")) continue;
    other.wholes[i] = MODES;
    refused(handler, &other, call, "an unknown mode");
  }
  whole(f, "other", 1);
  refused(handler, f, call, "an attribute too many");
  f->attributes--;
}

// ---- references

static void near(const char* what, double got, double wanted, double tolerance) {
  CHECK(fabs(got - wanted) <= tolerance * (1 + fabs(wanted)), "%s: %.9g, wanted %.9g", what, got,
        wanted);
}

static double gelu(double x) { return x / 2 * (1 + erf(x / sqrt(2))); }

static double activated(int mode, double x) {
  if (mode == GATED_SILU) return x / (1 + exp(-x));
  if (mode == GATED_GELU_TANH) return x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  return gelu(x);
}

// Replace [rows, 2 * n] by [rows, n]: the first half of each line, activated, times the second half.
static void gate(int mode, double* sums, int64_t rows, int64_t n) {
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < n; i++)
      sums[row * n + i] = activated(mode, sums[2 * row * n + i]) * sums[(2 * row + 1) * n + i];
}

// sums[rows, n] = bias + x . weight; x is rounded in its place
static double* products(double* x, int64_t rows, int64_t k, const double* plain,
                        const float* bias, int64_t n) {
  double* sums = malloc((size_t)(rows * n) * sizeof *sums);
  for (int64_t i = 0; i < rows * k; i++) x[i] = rounded(x[i]);
  for (int64_t row = 0; row < rows; row++) {
    double* line = sums + row * n;
    for (int64_t column = 0; column < n; column++) line[column] = bias[column];
    for (int64_t i = 0; i < k; i++)
      for (int64_t column = 0; column < n; column++)
        line[column] += x[row * k + i] * plain[i * n + column];
  }
  return sums;
}

static void norm(double* sums, int64_t rows, int64_t n, const double* residual, const float* scale,
                 const float* shift, double eps) {
  for (int64_t row = 0; row < rows; row++) {
    double *line = sums + row * n, mean = 0, variance = 0;
    for (int64_t i = 0; i < n; i++) line[i] += residual[row * n + i], mean += line[i] / n;
    for (int64_t i = 0; i < n; i++) variance += (line[i] - mean) * (line[i] - mean) / n;
    for (int64_t i = 0; i < n; i++)
      line[i] = (line[i] - mean) / sqrt(variance + eps) * scale[i] + shift[i];
  }
}

static double* widened(const void* data, int is_float, int64_t count) {
  double* plain = malloc((size_t)count * sizeof *plain);
  for (int64_t i = 0; i < count; i++)
    plain[i] = is_float ? ((const float*)data)[i] : wide(((const bf16*)data)[i]);
  return plain;
}

typedef struct {
  int64_t rows, length, heads, groups, width;
  int causal;
  int64_t reach;
  int mode;
  float cap;
} Shape;

// The operands of a mode of attention, or NULL.
typedef struct {
  const float *bias, *cos, *sin;
} Places;

static Places places(Frame* f, const Shape* s, int64_t width) {
  Places p = {0};
  if (s->mode & BIASED) p.bias = operand(f, XLA_FFI_DataType_F32, 2, s->heads, 2 * s->length - 1);
  if (!(s->mode & ROTATED)) return p;
  p.cos = operand(f, XLA_FFI_DataType_F32, 3, s->rows, s->length, width / 2);
  p.sin = operand(f, XLA_FFI_DataType_F32, 3, s->rows, s->length, width / 2);
  return p;
}

// Rotate the heads of one array, whose tokens are `stride` apart, in its place.
static void rotate(const Shape* s, const Places* p, double* x, int64_t heads, int64_t stride) {
  const int64_t half = s->width / 2;
  for (int64_t token = 0; p->cos && token < s->rows * s->length; token++)
    for (int64_t head = 0; head < heads; head++)
      for (int64_t k = 0; k < half; k++) {
        const double cosine = p->cos[token * half + k], sine = p->sin[token * half + k];
        double *one = x + token * stride + head * s->width + k, *other = one + half;
        const double first = *one, second = *other;
        *one = rounded(first * cosine - second * sine);
        *other = rounded(second * cosine + first * sine);
      }
}

// One query's mixed values of one head, in `mixed`; query, key and value begin at the head's own,
// `bias` at the distance 0.
static void mix(const Shape* s, const int32_t* segments, int64_t at, const double* query,
                const double* keys, const double* values, int64_t stride, const float* bias,
                double* mixed) {
  double weights[1024], most = -INFINITY, sum = 0;
  for (int64_t j = 0; j < s->length; j++) {
    const int64_t distance = at - j;
    int is_seen = segments[j] == segments[at] && !(s->causal && distance < 0);
    if (s->reach >= 0 && llabs(distance) > s->reach) is_seen = 0;
    weights[j] = -INFINITY;
    if (!is_seen) continue;
    double score = 0;
    for (int64_t i = 0; i < s->width; i++) score += query[i] * keys[j * stride + i];
    weights[j] = score / sqrt((double)s->width);
    if (s->cap > 0) weights[j] = s->cap * tanh(weights[j] / s->cap);
    if (bias) weights[j] += bias[-distance];
    if (weights[j] > most) most = weights[j];
  }
  for (int64_t i = 0; i < s->width; i++) mixed[i] = 0;
  for (int64_t j = 0; j < s->length; j++) {
    if (weights[j] == -INFINITY) continue;
    const double weight = exp(weights[j] - most);
    sum += weight;
    for (int64_t i = 0; i < s->width; i++) mixed[i] += weight * values[j * stride + i];
  }
  for (int64_t i = 0; i < s->width; i++) mixed[i] /= sum;
}

static void check_attention(const Shape* s, const int32_t* segments, const double* query,
                            int64_t query_stride, const double* key, const double* value,
                            int64_t stride, const float* bias, const bf16* got) {
  double mixed[256];
  const int64_t per_group = s->heads / s->groups;
  for (int64_t row = 0; row < s->rows; row++)
    for (int64_t at = 0; at < s->length; at++)
      for (int64_t head = 0; head < s->heads; head++) {
        const int64_t token = row * s->length + at, group = head / per_group * s->width;
        const int32_t* of_row = segments + row * s->length;
        const bf16* line = got + (token * s->heads + head) * s->width;
        const float* of_head = bias ? bias + head * (2 * s->length - 1) + s->length - 1 : NULL;
        if (of_row[at])
          mix(s, of_row, at, query + token * query_stride + head * s->width,
              key + row * s->length * stride + group, value + row * s->length * stride + group,
              stride, of_head, mixed);
        for (int64_t i = 0; i < s->width; i++)
          if (!of_row[at]) CHECK(line[i] == 0, "padding is not zero");
          else near("attention", wide(line[i]), mixed[i], 0.01);
      }
}

// Full rows, padding alone, one token at the end, two segments with padding between and behind.
static void lay_out(int32_t* segments, int64_t rows, int64_t length) {
  for (int64_t row = 0; row < rows; row++)
    for (int64_t at = 0; at < length; at++) {
      int32_t segment = 1;
      if (row % 4 == 1) segment = 0;
      if (row % 4 == 2) segment = at == length - 1;
      if (row % 4 == 3) segment = at < length / 3 ? 1 : at < length / 2 ? 0 : at < length - 2 ? 2 : 0;
      segments[row * length + at] = segment;
    }
}

static void poison(bf16* data, const int32_t* segments, int64_t tokens, int64_t width) {
  for (int64_t token = 0; token < tokens; token++)
    for (int64_t i = 0; !segments[token] && i < width; i++) data[token * width + i] = 0x7fc0;
}

// ---- cases

static int cases;

static void succeed(XLA_FFI_Handler* handler, Frame* f, int64_t threads, const char* call) {
  XLA_FFI_Error* error = ask(handler, f, threads);
  CHECK(!error, "%s: %s", call, error->message);
  cases++;
}

static void run_linear(int64_t rows, int64_t k, int64_t n, int mode, int x_is_float, int y_is_float,
                       int64_t threads) {
  Frame f = {0};
  void* x = operand(&f, x_is_float ? XLA_FFI_DataType_F32 : XLA_FFI_DataType_BF16, 2, rows, k);
  const int64_t columns = mode >= GATED_GELU ? 2 * n : n;
  double* plain = weight(&f, k, columns);
  const float* bias = operand(&f, XLA_FFI_DataType_F32, 1, columns);
  const float *residual = NULL, *scale = NULL, *shift = NULL;
  if (mode == NORM) {
    residual = operand(&f, XLA_FFI_DataType_F32, 2, rows, n);
    scale = operand(&f, XLA_FFI_DataType_F32, 1, n);
    shift = operand(&f, XLA_FFI_DataType_F32, 1, n);
  }
  void* y = result(&f, y_is_float ? XLA_FFI_DataType_F32 : XLA_FFI_DataType_BF16, 2, rows, n);
  real(&f, "eps", 1e-6f);
  whole(&f, "mode", mode);
  succeed(jaxembed_linear, &f, threads, "linear");
  double* from = widened(x, x_is_float, rows * k);
  double* wanted = products(from, rows, k, plain, bias, columns);
  if (mode >= GATED_GELU) gate(mode, wanted, rows, n);
  if (mode == NORM) {
    double* before = widened(residual, 1, rows * n);
    norm(wanted, rows, n, before, scale, shift, 1e-6);
    free(before);
  }
  for (int64_t i = 0; i < rows * n; i++) {
    const double got = y_is_float ? ((float*)y)[i] : wide(((bf16*)y)[i]);
    near("linear", got, mode == GELU ? gelu(wanted[i]) : wanted[i], y_is_float ? 1e-4 : 0.005);
  }
  if (threads == 1) refuse_slips(jaxembed_linear, &f, "jaxembed_linear");
  free(from), free(wanted), free(plain);
  forget(&f);
}

static void sight(Frame* f, const Shape* s) {
  whole(f, "mode", s->mode);
  whole(f, "causal", s->causal);
  whole(f, "reach", s->reach);
  real(f, "cap", s->cap);
}

static void run_attention(Shape s, int64_t threads, int has_slips) {
  Frame f = {0};
  const int64_t tokens = s.rows * s.length, wide_query = s.heads * s.width;
  const int64_t wide_key = s.groups * s.width;
  bf16* query = operand(&f, XLA_FFI_DataType_BF16, 4, s.rows, s.length, s.heads, s.width);
  bf16* key = operand(&f, XLA_FFI_DataType_BF16, 4, s.rows, s.length, s.groups, s.width);
  bf16* value = operand(&f, XLA_FFI_DataType_BF16, 4, s.rows, s.length, s.groups, s.width);
  int32_t* segments = operand(&f, XLA_FFI_DataType_S32, 2, s.rows, s.length);
  s.mode &= BIASED;
  const Places p = places(&f, &s, s.width);
  bf16* got = result(&f, XLA_FFI_DataType_BF16, 4, s.rows, s.length, s.heads, s.width);
  lay_out(segments, s.rows, s.length);
  poison(query, segments, tokens, wide_query);
  poison(key, segments, tokens, wide_key);
  poison(value, segments, tokens, wide_key);
  sight(&f, &s);
  succeed(jaxembed_attention, &f, threads, "attention");
  double* plain[3] = {widened(query, 0, tokens * wide_query), widened(key, 0, tokens * wide_key),
                      widened(value, 0, tokens * wide_key)};
  check_attention(&s, segments, plain[0], wide_query, plain[1], plain[2], wide_key, p.bias, got);
  if (has_slips) refuse_slips(jaxembed_attention, &f, "jaxembed_attention");
  for (int i = 0; i < 3; i++) free(plain[i]);
  forget(&f);
}

static void run_joint(Shape s, int64_t threads, int has_slips) {
  Frame f = {0};
  const int64_t tokens = s.rows * s.length, dim = s.heads * s.width;
  bf16* joint = operand(&f, XLA_FFI_DataType_BF16, 5, s.rows, s.length, (int64_t)3, s.heads, s.width);
  int32_t* segments = operand(&f, XLA_FFI_DataType_S32, 2, s.rows, s.length);
  const Places p = places(&f, &s, s.width);
  bf16* got = result(&f, XLA_FFI_DataType_BF16, 4, s.rows, s.length, s.heads, s.width);
  lay_out(segments, s.rows, s.length);
  poison(joint, segments, tokens, 3 * dim);
  sight(&f, &s);
  succeed(jaxembed_joint_attention, &f, threads, "joint_attention");
  double* plain = widened(joint, 0, tokens * 3 * dim);
  rotate(&s, &p, plain, 2 * s.heads, 3 * dim);
  check_attention(&s, segments, plain, 3 * dim, plain + dim, plain + 2 * dim, 3 * dim, p.bias, got);
  if (has_slips) refuse_slips(jaxembed_joint_attention, &f, "jaxembed_joint_attention");
  free(plain);
  forget(&f);
}

static void run_self_attention(Shape s, int64_t threads, int has_slips) {
  Frame f = {0};
  const int64_t tokens = s.rows * s.length, dim = s.heads * s.width;
  const float* hidden = operand(&f, XLA_FFI_DataType_F32, 3, s.rows, s.length, dim);
  double* plain = weight(&f, dim, 3 * dim);
  const float* bias = operand(&f, XLA_FFI_DataType_F32, 1, 3 * dim);
  int32_t* segments = operand(&f, XLA_FFI_DataType_S32, 2, s.rows, s.length);
  const Places p = places(&f, &s, s.width);
  bf16* got = result(&f, XLA_FFI_DataType_BF16, 3, s.rows, s.length, dim);
  lay_out(segments, s.rows, s.length);
  whole(&f, "heads", s.heads);
  sight(&f, &s);
  succeed(jaxembed_self_attention, &f, threads, "self_attention");
  double* x = widened(hidden, 1, tokens * dim);
  double* joint = products(x, tokens, dim, plain, bias, 3 * dim);
  for (int64_t i = 0; i < tokens * 3 * dim; i++) joint[i] = rounded(joint[i]);
  rotate(&s, &p, joint, 2 * s.heads, 3 * dim);
  check_attention(&s, segments, joint, 3 * dim, joint + dim, joint + 2 * dim, 3 * dim, p.bias, got);
  if (has_slips) refuse_slips(jaxembed_self_attention, &f, "jaxembed_self_attention");
  free(x), free(joint), free(plain);
  forget(&f);
}

static void run_mlp(int64_t rows, int64_t length, int64_t dim, int64_t inner, int mode,
                    int64_t threads, int has_slips) {
  Frame f = {0};
  const int64_t tokens = rows * length;
  const bf16* mixed = operand(&f, XLA_FFI_DataType_BF16, 3, rows, length, dim);
  const float* hidden = operand(&f, XLA_FFI_DataType_F32, 3, rows, length, dim);
  const int64_t columns = mode == GELU ? inner : 2 * inner;
  const int64_t in_of[] = {dim, dim, inner}, out_of[] = {dim, columns, dim};
  double* plain[3] = {0};
  const float* vectors[3][3] = {0};  // bias, scale, shift of out, up, down
  for (int i = 0; i < 3; i++) {
    plain[i] = weight(&f, in_of[i], out_of[i]);
    for (int part = 0; part < (i == 1 ? 1 : 3); part++)
      vectors[i][part] = operand(&f, XLA_FFI_DataType_F32, 1, out_of[i]);
  }
  const float* got = result(&f, XLA_FFI_DataType_F32, 3, rows, length, dim);
  real(&f, "eps", 1e-6f);
  whole(&f, "mode", mode);
  succeed(jaxembed_mlp, &f, threads, "mlp");
  double *x = widened(mixed, 0, tokens * dim), *before = widened(hidden, 1, tokens * dim);
  double* after = products(x, tokens, dim, plain[0], vectors[0][0], dim);
  norm(after, tokens, dim, before, vectors[0][1], vectors[0][2], 1e-6);
  double* inward = malloc((size_t)(tokens * dim) * sizeof *inward);
  memcpy(inward, after, (size_t)(tokens * dim) * sizeof *inward);
  double* up = products(inward, tokens, dim, plain[1], vectors[1][0], columns);
  if (mode != GELU) gate(mode, up, tokens, inner);
  for (int64_t i = 0; mode == GELU && i < tokens * inner; i++) up[i] = gelu(up[i]);
  double* wanted = products(up, tokens, inner, plain[2], vectors[2][0], dim);
  norm(wanted, tokens, dim, after, vectors[2][1], vectors[2][2], 1e-6);
  for (int64_t i = 0; i < tokens * dim; i++) near("mlp", got[i], wanted[i], 0.02);
  if (has_slips) refuse_slips(jaxembed_mlp, &f, "jaxembed_mlp");
  for (int i = 0; i < 3; i++) free(plain[i]);
  free(x), free(before), free(after), free(inward), free(up), free(wanted);
  forget(&f);
}

static void run_all_attention(int64_t length, int64_t threads) {
  const struct {
    int64_t heads, groups, width;
  } heads[] = {{2, 2, 32}, {4, 2, 64}, {3, 1, 32}};
  const int64_t reaches[] = {-1, 0, 3, 40, INT64_MAX};
  int turn = (int)(length / 16 + threads);
  for (int i = 0; i < 3; i++)
    for (int64_t rows = 1; rows <= 9; rows += 4)
      for (int causal = 0; causal < 2; causal++) {
        const int64_t reach = reaches[(i + rows + causal + length / 16 + threads) % 5];
        Shape s = {rows, length, heads[i].heads, heads[i].groups, heads[i].width, causal, reach};
        const int has_slips = i == 1 && rows == 5 && length == 48 && threads == 1;
        s.mode = has_slips ? BIASED | ROTATED : turn++ % 4;
        s.cap = s.mode && turn / 4 % 2 ? 0.5f : 0;
        run_attention(s, threads, has_slips);
        s.groups = s.heads;
        run_joint(s, threads, has_slips);
        run_self_attention(s, threads, has_slips);
      }
}

int main(void) {
  CHECK(!jaxembed_prepare() && !jaxembed_check(), "the check fails");
  CHECK(!strcmp(jaxembed_operand("linear", NORM, 3), "residual"), "the order of operands");
  CHECK(!strcmp(jaxembed_operand("joint_attention", ROTATED, 3), "sin"), "the order of operands");
  CHECK(!jaxembed_operand("linear", 0, 3) && !jaxembed_operand("mlp", 0, 12), "too many operands");
  CHECK(!jaxembed_operand("attention", 0, 4) && !jaxembed_operand("joint_attention", BIASED, 3),
        "too many operands");
  CHECK(!jaxembed_operand("other", 0, 0) && !jaxembed_operand("mlp", 0, -1), "unknown operands");
  const int64_t threads[] = {1, 3, 40, 0, -1}, rows[] = {1, 7, 16, 40, 129};
  const int64_t sizes[][2] = {{32, 32}, {64, 96}, {416, 64}};
  for (int i = 0; i < 5; i++)
    for (int j = 0; j < 3; j++)
      for (int turn = 0; turn < 5; turn++) {
        const int mode = (i + turn + j) % MODES, y_is_float = mode == NORM || turn % 2;
        run_linear(rows[i], sizes[j][0], sizes[j][1], mode, turn / 2 % 2, y_is_float, threads[turn]);
      }
  const int64_t lengths[] = {16, 48, 144};
  for (int i = 0; i < 3; i++)
    for (int turn = 0; turn < 5; turn++) run_all_attention(lengths[i], threads[turn]);
  const int64_t tokens[][2] = {{1, 1}, {1, 17}, {3, 16}, {2, 144}};
  for (int i = 0; i < 4; i++)
    for (int turn = 0; turn < 5; turn++)
      for (int mode = GELU; mode < MODES; mode++)
        run_mlp(tokens[i][0], tokens[i][1], 64, 96, mode, threads[turn], i == 2 && turn == 0);
  printf("%d calls were right, %d slips were refused\n", cases, slips);
  return 0;
}
