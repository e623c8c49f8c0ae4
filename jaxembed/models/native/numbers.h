// Mathematical functions of sixteen float32 at a time, and their conversion to elements and back.
#pragma once

#include "vectors.h"

#ifdef ELEMENTS_ARE_FLOAT32
// Store 16 elements.
static inline void store_half(element* to, vec values) { v_store(to, values); }

// Store 32 elements.
static inline void store_elements(element* to, vec low, vec high) {
  v_store(to, low);
  v_store(to + TILE, high);
}

// Store a unit of each of 32 columns, 16 of them at `low` and 16 at `high`. Its element i comes from
// line i, or is zero.
static inline void store_units(element* low, element* high, const element* lines[UNIT]) {
  v_store(low, lines[0] ? v_load(lines[0]) : v_all(0.0f));
  v_store(high, lines[0] ? v_load(lines[0] + TILE) : v_all(0.0f));
}

// Store a step of elements.
static inline void store_step(element* to, const float* from) { v_store(to, v_load(from)); }

// Store 32 elements of a row in tiles, where a step has 16 of them.
static inline void store_in_tiles(element* to, vec low, vec high) {
  v_store(to, low);
  v_store(to + TILE_ELEMENTS, high);
}

// Load 16 elements.
static inline vec load_elements(const element* from) { return v_load(from); }
#else
#ifdef __aarch64__
// Round 16 float32 to elements and store them.
static inline void store_half(element* to, vec values) {
  const bfloat16x8_t low = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(values.a), values.b);
  const bfloat16x8_t high = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(values.c), values.d);
  vst1q_u16(to, vreinterpretq_u16_bf16(low));
  vst1q_u16(to + 8, vreinterpretq_u16_bf16(high));
}

// Round 32 float32 to elements and store them.
static inline void store_elements(element* to, vec low, vec high) {
  store_half(to, low);
  store_half(to + TILE, high);
}

// Store a unit of each of 32 columns, 16 of them at `low` and 16 at `high`. Its element i comes from
// line i, or is zero.
static inline void store_units(element* low, element* high, const element* lines[UNIT]) {
  for (int column = 0; column < PANEL; column += 8) {
    uint16x8_t two[UNIT];
    for (int i = 0; i < UNIT; i++) two[i] = lines[i] ? vld1q_u16(lines[i] + column) : vdupq_n_u16(0);
    element* to = (column < TILE ? low : high) + column % TILE * UNIT;
    vst1q_u16(to, vzip1q_u16(two[0], two[1]));
    vst1q_u16(to + 8, vzip2q_u16(two[0], two[1]));
  }
}
#else
// Round 16 float32 to elements and store them.
static inline void store_half(element* to, vec values) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(values));
}

// Round 32 float32 to elements and store them.
static inline void store_elements(element* to, vec low, vec high) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// Store a unit of each of 32 columns, 16 of them at `low` and 16 at `high`. Its element i comes from
// line i, or is zero.
static inline void store_units(element* low, element* high, const element* lines[UNIT]) {
  const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  __m512i two[UNIT];
  for (int i = 0; i < UNIT; i++)
    two[i] = lines[i] ? _mm512_loadu_si512(lines[i]) : _mm512_setzero_si512();
  _mm512_storeu_si512(low, _mm512_permutex2var_epi16(two[0], first, two[1]));
  _mm512_storeu_si512(high, _mm512_permutex2var_epi16(two[0], second, two[1]));
}
#endif

// Round a step of float32 to elements and store them.
static inline void store_step(element* to, const float* from) {
  store_elements(to, v_load(from), v_load(from + TILE));
}

// Round 32 float32 of a row and store them in tiles, where they are one step.
static inline void store_in_tiles(element* to, vec low, vec high) { store_elements(to, low, high); }

// Load 16 elements as float32.
static inline vec load_elements(const element* from) {
#ifdef __aarch64__
  const uint16x8_t low = vld1q_u16(from), high = vld1q_u16(from + 8);
  return (vec){vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(low), 16)),
               vreinterpretq_f32_u32(vshll_high_n_u16(low, 16)),
               vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(high), 16)),
               vreinterpretq_f32_u32(vshll_high_n_u16(high, 16))};
#else
  const __m256i halves = _mm256_loadu_si256((const __m256i*)from);
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#endif
}
#endif

// The terms of polynomials, from the highest power on: 2^f on [-0.5, 0.5], and erf(z) / z on
// |z| < ERF_EDGE by 2 (z / ERF_EDGE)^2 - 1; erf is constant outside. They were fitted for these files.
#ifdef ELEMENTS_ARE_FLOAT32  // relative error of 2^f 1e-7, error of erf 2e-7
static const float exp2_terms[] = {0.00015478022396564484f, 0.001340043148957193f,
                                   0.009617994539439678f,   0.05550327152013779f,
                                   0.24022652208805084f,    0.6931471824645996f,
                                   1.0f};
static const float ERF_EDGE = 3.9f;
static const float erf_terms[] = {
    -0.0007049224805086851f, 0.0018744968110695481f, -0.0015388460597023368f,
    0.002056332305073738f,   -0.007025861646980047f, 0.013396111316978931f,
    -0.019602766260504723f,  0.029246017336845398f,  -0.04276286065578461f,
    0.05787203833460808f,    -0.07380581647157669f,  0.09067483246326447f,
    -0.10953222960233688f,   0.13469082117080688f,   -0.18101108074188232f,
    0.3625839650630951f};
#else  // relative error of 2^f 2.6e-6, error of erf 6e-6
static const float exp2_terms[] = {0.009570096619427204f, 0.05591785907745361f, 0.240247443318367f,
                                   0.6931217908859253f, 0.9999992847442627f};
static const float ERF_EDGE = 3.25f;
static const float erf_terms[] = {
    0.003015643684193492f, -0.008044902235269547f, 0.010106154717504978f, -0.01680687628686428f,
    0.034431952983140945f, -0.05684914067387581f,  0.08259017765522003f,  -0.11417578905820847f,
    0.15324343740940094f,  -0.2144598662853241f,   0.4346407949924469f};
#endif

// The polynomial of x with `count` terms.
static inline vec polynomial(const float* terms, int count, vec x) {
  vec y = v_all(terms[0]);
#pragma GCC unroll 16
  for (int i = 1; i < count; i++) y = v_fma(y, x, v_all(terms[i]));
  return y;
}

#define POLYNOMIAL(terms, x) polynomial(terms, sizeof(terms) / sizeof(float), x)

// 2^x, also of -infinity.
static inline vec exp2_vector(vec x) {
  x = v_max(v_all(-1000.0f), x);  // in this order of operands NaN stays NaN
  const vec whole = v_round(x);
  return v_scale(POLYNOMIAL(exp2_terms, v_sub(x, whole)), whole);
}

// Exact GELU, x * Phi(x), by erf.
static inline vec gelu_vector(vec x) {
  const vec edge = v_all(ERF_EDGE);
  vec z = v_mul(x, v_all(0.70710678f));
  z = v_max(v_min(z, edge), v_sub(v_all(0.0f), edge));
  const vec t = v_fms(v_mul(z, z), v_all(2 / (ERF_EDGE * ERF_EDGE)), v_all(1.0f));
  const vec half = v_mul(x, v_all(0.5f));
  return v_fma(half, v_mul(z, POLYNOMIAL(erf_terms, t)), half);
}

// tanh(x) = 1 - 2 / (1 + e^2x). The error is 2e-6.
static inline vec tanh_vector(vec x) {
  const vec one = v_all(1.0f), edge = v_all(20.0f);
  x = v_min(edge, x);  // in this order of operands NaN stays NaN
  vec power = exp2_vector(v_mul(x, v_all(2 * 1.4426950408889634f)));
  return v_sub(one, v_div(v_all(2.0f), v_add(one, power)));
}

// GELU in its form by tanh.
static inline vec gelu_tanh_vector(vec x) {
  vec inner = v_mul(v_mul(x, x), v_all(0.044715f * 0.7978845608028654f));
  inner = v_mul(x, v_add(inner, v_all(0.7978845608028654f)));
  vec half = v_mul(x, v_all(0.5f));
  return v_fma(half, tanh_vector(inner), half);
}

// x / (1 + e^(-scale * x)).
static inline vec swish_vector(vec x, float scale) {
  vec power = exp2_vector(v_mul(x, v_all(-1.4426950408889634f * scale)));
  return v_div(x, v_add(v_all(1.0f), power));
}

static inline vec silu_vector(vec x) { return swish_vector(x, 1.0f); }

// GELU by a sigmoid.
static inline vec quick_gelu_vector(vec x) { return swish_vector(x, 1.702f); }
