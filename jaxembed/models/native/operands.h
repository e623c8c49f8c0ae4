// Declares what each call takes and returns: operands in order, dtypes, shapes, attributes. These
// tables are the only place: Python reads the order from here, and each call is checked against its
// table before any data is read.
#pragma once

#include <string.h>

#include "linear.h"
#include "sizes.h"
#include "xla/ffi/api/c_api.h"

// The names of sizes. A name has the same value in all operands of a call.
typedef enum {
  NO_SIZE,
  LEADING,  // any number of axes; the value is the product of their sizes
  ROWS,
  LENGTH,
  THREE,
  HEADS,
  GROUPS,
  WIDTH,
  DIM,
  JOINT,
  INNER,
  IN,
  OUT,
  COLUMNS,
  DISTANCES,
  HALF,
  NARROW,
  OUT_NARROW,
  UP_NARROW,
  DOWN_NARROW,
  SIZES
} Size;

static const struct {
  const char* name;
  int64_t multiple;  // the size must be a multiple of this
} size_rules[SIZES] = {
    [LEADING] = {"...", 1},  [ROWS] = {"rows", 1},      [LENGTH] = {"length", TILE},
    [THREE] = {"three", 3},  [HEADS] = {"heads", 1},    [GROUPS] = {"groups", 1},
    [WIDTH] = {"width", STEP}, [DIM] = {"dim", PANEL},  [JOINT] = {"joint", PANEL},
    [INNER] = {"inner", PANEL}, [IN] = {"in", PANEL},   [OUT] = {"out", PANEL},
    [COLUMNS] = {"columns", PANEL}, [DISTANCES] = {"distances", 1}, [HALF] = {"half", STEP / 2},
    [NARROW] = {"narrow", PANEL},           [OUT_NARROW] = {"out_narrow", PANEL},
    [UP_NARROW] = {"up_narrow", PANEL},     [DOWN_NARROW] = {"down_narrow", PANEL},
};

#define DTYPE(name) ((uint64_t)1 << XLA_FFI_DataType_##name)
#ifdef ELEMENTS_ARE_FLOAT32
enum { XLA_FFI_DataType_ELEMENT = XLA_FFI_DataType_F32 };
#else
enum { XLA_FFI_DataType_ELEMENT = XLA_FFI_DataType_BF16 };
#endif

enum { MOST_OPERANDS = 26, MOST_AXES = 6, MOST_ATTRIBUTES = 5, MOST_RELATIONS = 4 };

// Bits of the mode of attention: what comes with the call.
enum { BIASED = 1, ROTATED = 2 };
// Bits of any mode: whether numbers of adapters come, and in mlp for which products they do.
enum { ADAPTED = 8, ADAPTS_OUT = 16, ADAPTS_UP = 32, ADAPTS_DOWN = 64 };
// Another one: the weights of all products but adapters are quantized (quantized.h), and scales come.
enum { QUANTIZED = 128 };
// Another one, in linear and mlp: segments come, and padding is not computed.
enum { PADDED = 256 };
enum { BITS_OF_LINEAR = ADAPTED | QUANTIZED | PADDED };
enum { BITS_OF_MLP = BITS_OF_LINEAR | ADAPTS_OUT | ADAPTS_UP | ADAPTS_DOWN };

// How an operand with the shape of its table is stored.
typedef enum {
  PLAIN_ARRAY,
  PANELS,  // packed into panels
  WEIGHT,  // the same, and of s8 if the mode has QUANTIZED
  SCALES,  // the scales of a quantized weight of that shape
} Layout;

typedef struct {
  const char* name;
  uint64_t dtypes;  // one bit for each dtype that is taken
  Size shape[MOST_AXES];
  Layout layout;
  int64_t only_with;  // bits of the mode without which it does not come
} Operand;

typedef struct {
  const char* name;
  XLA_FFI_DataType dtype;  // F32, finite and not negative; or S64 from `least` to `most`
  int64_t least, most;
  Size size;     // the size that the value gives, or NO_SIZE
  int64_t bits;  // that it may have besides
} Attribute;

// A rule between sizes: times * part divides `of`, or times * part * by - less equals it if is_equal
// is set. Without `by` that factor is one. It holds for the sizes of operands that come.
typedef struct {
  int64_t times;
  Size part, of;
  int is_equal;
  Size by;
  int64_t less;
} Relation;

// The table of a call. Each array ends with an element whose name or size is zero.
typedef struct {
  const char* name;
  Operand operands[MOST_OPERANDS + 1], result;
  Attribute attributes[MOST_ATTRIBUTES + 1];
  Relation relations[MOST_RELATIONS + 1];
} Call;

#define MODE(least, most, bits) {"mode", XLA_FFI_DataType_S64, least, most, NO_SIZE, bits}
#define EPS {"eps", XLA_FFI_DataType_F32, 0, 0, NO_SIZE}
#define CAUSAL {"causal", XLA_FFI_DataType_S64, 0, 1, NO_SIZE}
#define REACH {"reach", XLA_FFI_DataType_S64, -1, INT64_MAX, NO_SIZE}
#define CAP {"cap", XLA_FFI_DataType_F32, 0, 0, NO_SIZE}
#define DISTANCE_BIAS {"distance_bias", DTYPE(F32), {HEADS, DISTANCES}, .only_with = BIASED}
#define COS {"cos", DTYPE(F32), {ROWS, LENGTH, HALF}, .only_with = ROTATED}
#define SIN {"sin", DTYPE(F32), {ROWS, LENGTH, HALF}, .only_with = ROTATED}
#define SEGMENTS_OF_ROWS {"segments", DTYPE(S32), {LEADING}, .only_with = PADDED}
#define NUMBERS(...) {"numbers", DTYPE(S32), {__VA_ARGS__}, .only_with = ADAPTED}
// The weight of a product [in, out]; if it is quantized, with its scales.
#define WEIGHT_OF(of, in, out)                                  \
  {of "kernel", DTYPE(ELEMENT), {in, out}, .layout = WEIGHT},    \
  {of "kernel_scales", DTYPE(F32), {in, out}, .layout = SCALES, .only_with = QUANTIZED}
// The adapters of a product [in, out], see adapters.h.
#define ADAPTERS(of, bits, in, narrow, out)                                                        \
  {of "adapter_down", DTYPE(ELEMENT), {in, narrow}, .layout = PANELS, .only_with = ADAPTED | (bits)},   \
  {of "adapter_up", DTYPE(ELEMENT), {narrow, out}, .layout = PANELS, .only_with = ADAPTED | (bits)},    \
  {of "adapter_owners", DTYPE(S32), {narrow}, .only_with = ADAPTED | (bits)}
#define DISTANCES_OF_ROW {2, LENGTH, DISTANCES, .is_equal = 1, .less = 1}

static const Call linear_call = {
    .name = "linear",
    .operands = {{"x", DTYPE(F32) | DTYPE(ELEMENT), {LEADING, IN}},
                 WEIGHT_OF("", IN, OUT),
                 {"bias", DTYPE(F32), {OUT}},
                 NUMBERS(LEADING), ADAPTERS("", 0, IN, NARROW, OUT), SEGMENTS_OF_ROWS},
    .result = {"y", DTYPE(F32) | DTYPE(ELEMENT), {LEADING, OUT}},
    .attributes = {MODE(PLAIN, MODES - 1, BITS_OF_LINEAR), EPS},
};

static const Call gated_linear_call = {  // linear with a gated mode
    .name = "linear",
    .operands = {{"x", DTYPE(F32) | DTYPE(ELEMENT), {LEADING, IN}},
                 WEIGHT_OF("", IN, COLUMNS),
                 {"bias", DTYPE(F32), {COLUMNS}},
                 NUMBERS(LEADING), ADAPTERS("", 0, IN, NARROW, COLUMNS), SEGMENTS_OF_ROWS},
    .result = {"y", DTYPE(F32) | DTYPE(ELEMENT), {LEADING, OUT}},
    .attributes = {MODE(PLAIN, MODES - 1, BITS_OF_LINEAR), EPS},
    .relations = {{2, OUT, COLUMNS, .is_equal = 1}},
};

static const Call linear_norm_call = {  // linear with mode NORM
    .name = "linear",
    .operands = {{"x", DTYPE(F32) | DTYPE(ELEMENT), {LEADING, IN}},
                 WEIGHT_OF("", IN, OUT),
                 {"bias", DTYPE(F32), {OUT}},
                 {"residual", DTYPE(F32), {LEADING, OUT}},
                 {"scale", DTYPE(F32), {OUT}},
                 {"shift", DTYPE(F32), {OUT}},
                 NUMBERS(LEADING), ADAPTERS("", 0, IN, NARROW, OUT), SEGMENTS_OF_ROWS},
    .result = {"y", DTYPE(F32), {LEADING, OUT}},
    .attributes = {MODE(PLAIN, MODES - 1, BITS_OF_LINEAR), EPS},
};

static const Call attention_call = {
    .name = "attention",
    .operands = {{"query", DTYPE(ELEMENT), {ROWS, LENGTH, HEADS, WIDTH}},
                 {"key", DTYPE(ELEMENT), {ROWS, LENGTH, GROUPS, WIDTH}},
                 {"value", DTYPE(ELEMENT), {ROWS, LENGTH, GROUPS, WIDTH}},
                 {"segments", DTYPE(S32), {ROWS, LENGTH}},
                 DISTANCE_BIAS},
    .result = {"mixed", DTYPE(ELEMENT), {ROWS, LENGTH, HEADS, WIDTH}},
    .attributes = {MODE(0, BIASED, 0), CAUSAL, REACH, CAP},
    .relations = {{1, GROUPS, HEADS}, DISTANCES_OF_ROW},
};

static const Call joint_attention_call = {  // query, key and value side by side
    .name = "joint_attention",
    .operands = {{"joint", DTYPE(ELEMENT), {ROWS, LENGTH, THREE, HEADS, WIDTH}},
                 {"segments", DTYPE(S32), {ROWS, LENGTH}},
                 DISTANCE_BIAS, COS, SIN},
    .result = {"mixed", DTYPE(ELEMENT), {ROWS, LENGTH, HEADS, WIDTH}},
    .attributes = {MODE(0, BIASED | ROTATED, 0), CAUSAL, REACH, CAP},
    .relations = {DISTANCES_OF_ROW, {2, HALF, WIDTH, .is_equal = 1}},
};

static const Call self_attention_call = {
    .name = "self_attention",
    .operands = {{"hidden", DTYPE(F32), {ROWS, LENGTH, DIM}},
                 WEIGHT_OF("", DIM, JOINT),
                 {"bias", DTYPE(F32), {JOINT}},
                 {"segments", DTYPE(S32), {ROWS, LENGTH}},
                 DISTANCE_BIAS, COS, SIN,
                 NUMBERS(ROWS, LENGTH), ADAPTERS("", 0, DIM, NARROW, JOINT)},
    .result = {"mixed", DTYPE(ELEMENT), {ROWS, LENGTH, DIM}},
    .attributes = {MODE(0, BIASED | ROTATED, ADAPTED | QUANTIZED),
                   {"heads", XLA_FFI_DataType_S64, 1, INT64_MAX, HEADS},
                   CAUSAL, REACH, CAP},
    .relations = {{3, DIM, JOINT, .is_equal = 1},
                  {PANEL, HEADS, DIM},
                  DISTANCES_OF_ROW,
                  {2, HALF, DIM, .is_equal = 1, .by = HEADS}},
};

#define MLP_OF(columns)                                                     \
  .name = "mlp",                                                            \
  .operands = {{"mixed", DTYPE(ELEMENT), {LEADING, DIM}},                      \
               {"hidden", DTYPE(F32), {LEADING, DIM}},                      \
               WEIGHT_OF("out_", DIM, DIM),                                  \
               {"out_bias", DTYPE(F32), {DIM}},                             \
               {"out_scale", DTYPE(F32), {DIM}},                            \
               {"out_shift", DTYPE(F32), {DIM}},                            \
               WEIGHT_OF("up_", DIM, columns),                               \
               {"up_bias", DTYPE(F32), {columns}},                          \
               WEIGHT_OF("down_", INNER, DIM),                               \
               {"down_bias", DTYPE(F32), {DIM}},                            \
               {"down_scale", DTYPE(F32), {DIM}},                           \
               {"down_shift", DTYPE(F32), {DIM}},                           \
               NUMBERS(LEADING),                                            \
               ADAPTERS("out_", ADAPTS_OUT, DIM, OUT_NARROW, DIM),          \
               ADAPTERS("up_", ADAPTS_UP, DIM, UP_NARROW, columns),         \
               ADAPTERS("down_", ADAPTS_DOWN, INNER, DOWN_NARROW, DIM),     \
               SEGMENTS_OF_ROWS},                                           \
  .result = {"hidden", DTYPE(F32), {LEADING, DIM}},                         \
  .attributes = {MODE(GELU, MODES - 1, BITS_OF_MLP), EPS}

static const Call mlp_call = {MLP_OF(INNER)};

static const Call gated_mlp_call = {  // mlp with a gated mode
    MLP_OF(COLUMNS),
    .relations = {{2, INNER, COLUMNS, .is_equal = 1}},
};

// Whether an operand comes with a call of this mode.
static int comes(const Operand* operand, int64_t mode) {
  return (mode & operand->only_with) == operand->only_with;
}

// What follows the product of `linear` or mlp's first one: a mode without the bits of adapters.
static inline int end_of(int64_t mode) { return (int)(mode & (ADAPTED - 1)); }

// The name of operand `i` of a call in a mode; NULL after the last one, or for an unknown call.
const char* jaxembed_operand(const char* call, int64_t mode, int64_t i) {
  static const Call* const calls[] = {&linear_call, &attention_call, &joint_attention_call,
                                      &self_attention_call, &mlp_call};
  const Call* found = NULL;
  for (size_t at = 0; at < sizeof calls / sizeof *calls; at++)
    if (!strcmp(calls[at]->name, call)) found = calls[at];
  if (found == &linear_call && end_of(mode) == NORM) found = &linear_norm_call;
  if (!found || i < 0) return NULL;
  for (const Operand* operand = found->operands; operand->name; operand++)
    if (comes(operand, mode) && i-- == 0) return operand->name;
  return NULL;
}
