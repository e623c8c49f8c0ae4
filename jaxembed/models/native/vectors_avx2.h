// Sixteen numbers in two registers of AVX2, see vectors.h.
#pragma once

#include <immintrin.h>

#include "sizes.h"

typedef struct {
  __m256 low, high;
} vec;
typedef struct {
  __m256 low, high;  // all bits of a number are set, or none
} mask;

static inline vec v_all(float value) {
  return (vec){_mm256_set1_ps(value), _mm256_set1_ps(value)};
}
static inline vec v_load(const float* from) {
  return (vec){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}
static inline void v_store(float* to, vec x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}
static inline vec v_add(vec x, vec y) {
  return (vec){_mm256_add_ps(x.low, y.low), _mm256_add_ps(x.high, y.high)};
}
static inline vec v_sub(vec x, vec y) {
  return (vec){_mm256_sub_ps(x.low, y.low), _mm256_sub_ps(x.high, y.high)};
}
static inline vec v_mul(vec x, vec y) {
  return (vec){_mm256_mul_ps(x.low, y.low), _mm256_mul_ps(x.high, y.high)};
}
static inline vec v_div(vec x, vec y) {
  return (vec){_mm256_div_ps(x.low, y.low), _mm256_div_ps(x.high, y.high)};
}
static inline vec v_fma(vec x, vec y, vec z) {  // x * y + z
  return (vec){_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)};
}
static inline vec v_fms(vec x, vec y, vec z) {  // x * y - z
  return (vec){_mm256_fmsub_ps(x.low, y.low, z.low), _mm256_fmsub_ps(x.high, y.high, z.high)};
}
// The second operand if one of the two is NaN.
static inline vec v_max(vec x, vec y) {
  return (vec){_mm256_max_ps(x.low, y.low), _mm256_max_ps(x.high, y.high)};
}
static inline vec v_min(vec x, vec y) {
  return (vec){_mm256_min_ps(x.low, y.low), _mm256_min_ps(x.high, y.high)};
}
static inline vec v_sqrt(vec x) { return (vec){_mm256_sqrt_ps(x.low), _mm256_sqrt_ps(x.high)}; }
// The nearest whole number.
static inline vec v_round(vec x) {
  enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
  return (vec){_mm256_round_ps(x.low, NEAREST), _mm256_round_ps(x.high, NEAREST)};
}
// x * 2^power of eight numbers. Powers below -126 give zeros, which denormal numbers would be near.
static inline __m256 scale_half(__m256 x, __m256 power) {
  const __m256 least = _mm256_set1_ps(-126.0f), most = _mm256_set1_ps(127.0f);
  const __m256 tiny = _mm256_cmp_ps(power, least, _CMP_LT_OQ);
  const __m256 limited = _mm256_min_ps(most, _mm256_max_ps(least, power));
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(limited), _mm256_set1_epi32(127));
  const __m256 factor = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  // 2^128 is no float32: what is left of larger powers is multiplied too, and gives infinity
  const __m256 large = _mm256_cmp_ps(power, most, _CMP_GT_OQ);
  const __m256 rest = _mm256_blendv_ps(_mm256_set1_ps(1.0f), _mm256_set1_ps(1.7014118e38f), large);
  return _mm256_andnot_ps(tiny, _mm256_mul_ps(_mm256_mul_ps(x, factor), rest));
}
// x * 2^power, where power is whole.
static inline vec v_scale(vec x, vec power) {
  return (vec){scale_half(x.low, power.low), scale_half(x.high, power.high)};
}
static inline float v_sum(vec x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
static inline float v_largest(vec x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

static inline mask m_none(void) { return (mask){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline mask m_and(mask x, mask y) {
  return (mask){_mm256_and_ps(x.low, y.low), _mm256_and_ps(x.high, y.high)};
}
// Which of sixteen int32 equal a value.
static inline mask m_equal(const int32_t* from, int32_t value) {
  const __m256i* eight = (const __m256i*)from;
  const __m256i wanted = _mm256_set1_epi32(value);
  return (mask){_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_loadu_si256(eight), wanted)),
                _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_loadu_si256(eight + 1), wanted))};
}
static inline __m256 between_half(int32_t first, int32_t low, int32_t high) {
  const __m256i counted = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  const __m256i place = _mm256_add_epi32(counted, _mm256_set1_epi32(first));
  const __m256i outside = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), place),
                                          _mm256_cmpgt_epi32(place, _mm256_set1_epi32(high)));
  return _mm256_castsi256_ps(_mm256_xor_si256(outside, _mm256_set1_epi32(-1)));
}
// Which of sixteen whole numbers from `first` on are in [low, high].
static inline mask m_between(int32_t first, int32_t low, int32_t high) {
  return (mask){between_half(first, low, high), between_half(first + 8, low, high)};
}
// One bit for each truth value, the lowest one first.
static inline unsigned m_bits(mask which) {
  return (unsigned)_mm256_movemask_ps(which.low) | (unsigned)_mm256_movemask_ps(which.high) << 8;
}
// x where the mask is true, else y.
static inline vec v_choose(mask which, vec x, vec y) {
  return (vec){_mm256_blendv_ps(y.low, x.low, which.low),
               _mm256_blendv_ps(y.high, x.high, which.high)};
}

// Round sixteen float32 from 0 to 255 to u8.
static inline void store_u8(uint8_t* to, vec x) {
  const __m256i low = _mm256_cvtps_epi32(x.low), high = _mm256_cvtps_epi32(x.high);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  const __m128i first = _mm256_castsi256_si128(words);
  _mm_storeu_si128((__m128i*)to, _mm_packus_epi16(first, _mm256_extracti128_si256(words, 1)));
}

typedef struct {
  __m256i low, high;
} ints;  // sixteen int32

static inline ints i_none(void) { return (ints){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline vec v_from(ints x) {
  return (vec){_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
}
// Four s8 of each of sixteen columns; four u8, the same for all columns; and the sum of their
// products added to that of each column.
#ifdef __AVXVNNI__
typedef ints Signed;
typedef __m256i Unsigned;
static inline Signed load_signed(const int8_t* from) {
  const __m256i* eight = (const __m256i*)from;
  return (Signed){_mm256_loadu_si256(eight), _mm256_loadu_si256(eight + 1)};
}
static inline Unsigned all_unsigned(const uint8_t* from) {
  int32_t four;
  memcpy(&four, from, sizeof four);
  return _mm256_set1_epi32(four);
}
static inline ints i_dot(ints sum, Unsigned x, Signed y) {
  return (ints){_mm256_dpbusd_avx_epi32(sum.low, x, y.low),
                _mm256_dpbusd_avx_epi32(sum.high, x, y.high)};
}
#else
typedef struct {
  ints even, odd;  // as s16, because sums of two products exceed s16
} Signed;
typedef struct {
  __m256i even, odd;
} Unsigned;
static inline Signed load_signed(const int8_t* from) {
  const __m256i* eight = (const __m256i*)from;
  const __m256i low = _mm256_loadu_si256(eight), high = _mm256_loadu_si256(eight + 1);
  return (Signed){{_mm256_srai_epi16(_mm256_slli_epi16(low, 8), 8),
                   _mm256_srai_epi16(_mm256_slli_epi16(high, 8), 8)},
                  {_mm256_srai_epi16(low, 8), _mm256_srai_epi16(high, 8)}};
}
static inline Unsigned all_unsigned(const uint8_t* from) {
  int32_t four;
  memcpy(&four, from, sizeof four);
  return (Unsigned){_mm256_set1_epi32(four & 0x00ff00ff), _mm256_set1_epi32(four >> 8 & 0x00ff00ff)};
}
static inline __m256i dot_half(__m256i sum, Unsigned x, __m256i even, __m256i odd) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x.even, even));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(x.odd, odd));
}
static inline ints i_dot(ints sum, Unsigned x, Signed y) {
  return (ints){dot_half(sum.low, x, y.even.low, y.odd.low),
                dot_half(sum.high, x, y.even.high, y.odd.high)};
}
#endif

// Transpose eight lines of eight units.
static inline void transpose_eight(const int32_t* from, int64_t stride, int32_t* to) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps((const float*)from + i * stride);
  for (int i = 0; i < 4; i++) {
    b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    a[4 * i] = _mm256_shuffle_ps(b[4 * i], b[4 * i + 2], 0x44);
    a[4 * i + 1] = _mm256_shuffle_ps(b[4 * i], b[4 * i + 2], 0xee);
    a[4 * i + 2] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], 0x44);
    a[4 * i + 3] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps((float*)to + i * TILE, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps((float*)to + (i + 4) * TILE, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}
// Transpose sixteen lines of sixteen units: line p of `to` gets unit p of each line of `from`.
// Strides are in units.
static inline void transpose(const void* from, int64_t stride, void* to) {
  for (int line = 0; line < TILE; line += 8)
    for (int unit = 0; unit < TILE; unit += 8)
      transpose_eight((const int32_t*)from + line * stride + unit, stride,
                      (int32_t*)to + unit * TILE + line);
}
