// Mathematical functions of sixteen float32 at a time.
#pragma once

#include <immintrin.h>

#include "sizes.h"

// Round 32 float32 to bfloat16 and store them.
static inline void store_bf16(bf16* to, __m512 low, __m512 high) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// 2^x for x <= 0, also -infinity: a polynomial of degree 4, relative error 2.6e-6.
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
