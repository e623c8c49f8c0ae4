// Sixteen numbers in one register of AVX512, see vectors.h.
#pragma once

#include <immintrin.h>

#include "sizes.h"

typedef __m512 vec;     // sixteen float32
typedef __mmask16 mask;  // one truth value for each of them

static inline vec v_all(float value) { return _mm512_set1_ps(value); }
static inline vec v_load(const float* from) { return _mm512_loadu_ps(from); }
static inline void v_store(float* to, vec x) { _mm512_storeu_ps(to, x); }
static inline vec v_add(vec x, vec y) { return _mm512_add_ps(x, y); }
static inline vec v_sub(vec x, vec y) { return _mm512_sub_ps(x, y); }
static inline vec v_mul(vec x, vec y) { return _mm512_mul_ps(x, y); }
static inline vec v_div(vec x, vec y) { return _mm512_div_ps(x, y); }
static inline vec v_fma(vec x, vec y, vec z) { return _mm512_fmadd_ps(x, y, z); }  // x * y + z
static inline vec v_fms(vec x, vec y, vec z) { return _mm512_fmsub_ps(x, y, z); }  // x * y - z
// The second operand if one of the two is NaN.
static inline vec v_max(vec x, vec y) { return _mm512_max_ps(x, y); }
static inline vec v_min(vec x, vec y) { return _mm512_min_ps(x, y); }
static inline vec v_sqrt(vec x) { return _mm512_sqrt_ps(x); }
// The nearest whole number.
static inline vec v_round(vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^power, where power is whole.
static inline vec v_scale(vec x, vec power) { return _mm512_scalef_ps(x, power); }
static inline float v_sum(vec x) { return _mm512_reduce_add_ps(x); }
static inline float v_largest(vec x) { return _mm512_reduce_max_ps(x); }

static inline mask m_none(void) { return 0; }
static inline mask m_and(mask x, mask y) { return x & y; }
// Which of sixteen int32 equal a value.
static inline mask m_equal(const int32_t* from, int32_t value) {
  return _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(from), _mm512_set1_epi32(value));
}
// Which of sixteen whole numbers from `first` on are in [low, high].
static inline mask m_between(int32_t first, int32_t low, int32_t high) {
  const __m512i counted = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i place = _mm512_add_epi32(counted, _mm512_set1_epi32(first));
  return _mm512_cmpge_epi32_mask(place, _mm512_set1_epi32(low)) &
         _mm512_cmple_epi32_mask(place, _mm512_set1_epi32(high));
}
// One bit for each truth value, the lowest one first.
static inline unsigned m_bits(mask which) { return which; }
// x where the mask is true, else y.
static inline vec v_choose(mask which, vec x, vec y) { return _mm512_mask_mov_ps(y, which, x); }

// Round sixteen float32 from 0 to 255 to u8.
static inline void store_u8(uint8_t* to, vec x) {
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

typedef __m512i ints;  // sixteen int32

static inline ints i_none(void) { return _mm512_setzero_si512(); }
static inline vec v_from(ints x) { return _mm512_cvtepi32_ps(x); }
// Four s8 of each of sixteen columns; four u8, the same for all columns; and the sum of their
// products added to that of each column.
#ifdef __AVX512VNNI__
typedef __m512i Signed;
typedef __m512i Unsigned;
static inline Signed load_signed(const int8_t* from) { return _mm512_loadu_si512(from); }
static inline Unsigned all_unsigned(const uint8_t* from) {
  int32_t four;
  memcpy(&four, from, sizeof four);
  return _mm512_set1_epi32(four);
}
static inline ints i_dot(ints sum, Unsigned x, Signed y) {
  // gcc 12 copies the sums of its intrinsic from register to register
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
  return sum;
}
#else
typedef struct {
  __m512i even, odd;  // as s16, because sums of two products exceed s16
} Signed, Unsigned;
static inline Signed load_signed(const int8_t* from) {
  const __m512i bytes = _mm512_loadu_si512(from);
  return (Signed){_mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8), _mm512_srai_epi16(bytes, 8)};
}
static inline Unsigned all_unsigned(const uint8_t* from) {
  int32_t four;
  memcpy(&four, from, sizeof four);
  return (Unsigned){_mm512_set1_epi32(four & 0x00ff00ff), _mm512_set1_epi32(four >> 8 & 0x00ff00ff)};
}
static inline ints i_dot(ints sum, Unsigned x, Signed y) {
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(x.even, y.even));
  return _mm512_add_epi32(sum, _mm512_madd_epi16(x.odd, y.odd));
}
#endif

// Transpose sixteen lines of sixteen units: line p of `to` gets unit p of each line of `from`.
// Strides are in units.
static inline void transpose(const void* from, int64_t stride, void* to) {
  const int32_t* lines = from;
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(lines + i * stride);
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
  for (int i = 0; i < 16; i++) _mm512_storeu_si512((int32_t*)to + i * TILE, a[i]);
}
