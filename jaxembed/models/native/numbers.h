// Mathematical functions of sixteen float32 at a time.
#pragma once

#include <immintrin.h>

#include "sizes.h"

// Round 32 float32 to bfloat16 and store them.
static inline void store_bf16(bf16* to, __m512 low, __m512 high) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// Round 16 float32 to bfloat16 and store them.
static inline void store_half_bf16(bf16* to, __m512 values) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(values));
}

// Load 16 bfloat16 as float32.
static inline __m512 load_bf16(const bf16* from) {
  const __m256i halves = _mm256_loadu_si256((const __m256i*)from);
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}

// 2^x, also of -infinity: a polynomial of degree 4, relative error 2.6e-6.
static inline __m512 exp2_vector(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-1000.0f), x);  // in this order of operands NaN stays NaN
  __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(0.009570096619427204f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.05591785907745361f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.240247443318367f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.6931217908859253f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.9999992847442627f));
  return _mm512_scalef_ps(y, whole);
}

// Exact GELU, x * Phi(x), by erf(z) = z p(z^2): p has degree 10 on |z| < 3.25, erf is constant
// outside. The error is 6e-6.
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

// tanh(x) = 1 - 2 / (1 + e^2x). The error is 2e-6.
static inline __m512 tanh_vector(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), edge = _mm512_set1_ps(20.0f);
  x = _mm512_min_ps(edge, x);  // in this order of operands NaN stays NaN
  __m512 power = exp2_vector(_mm512_mul_ps(x, _mm512_set1_ps(2 * 1.4426950408889634f)));
  return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(one, power)));
}

// GELU in its form by tanh.
static inline __m512 gelu_tanh_vector(__m512 x) {
  __m512 inner = _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f * 0.7978845608028654f));
  inner = _mm512_mul_ps(x, _mm512_add_ps(inner, _mm512_set1_ps(0.7978845608028654f)));
  __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
  return _mm512_fmadd_ps(half, tanh_vector(inner), half);
}

// SiLU, x / (1 + e^-x).
static inline __m512 silu_vector(__m512 x) {
  __m512 power = exp2_vector(_mm512_mul_ps(x, _mm512_set1_ps(-1.4426950408889634f)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), power));
}
