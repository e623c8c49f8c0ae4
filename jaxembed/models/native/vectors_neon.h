// Sixteen numbers in four registers of NEON, see vectors.h.
#pragma once

#include <arm_neon.h>
#include <string.h>

#include "sizes.h"

typedef struct {
  float32x4_t a, b, c, d;
} vec;
typedef struct {
  uint32x4_t a, b, c, d;  // all bits of a number are set, or none
} mask;

// A function of one, two or three vectors by that of their quarters.
#define QUARTERS_1(type, of, x) ((type){of((x).a), of((x).b), of((x).c), of((x).d)})
#define QUARTERS_2(type, of, x, y) \
  ((type){of((x).a, (y).a), of((x).b, (y).b), of((x).c, (y).c), of((x).d, (y).d)})
#define QUARTERS_3(type, of, x, y, z)                         \
  ((type){of((x).a, (y).a, (z).a), of((x).b, (y).b, (z).b), \
          of((x).c, (y).c, (z).c), of((x).d, (y).d, (z).d)})

static inline vec v_all(float value) {
  const float32x4_t four = vdupq_n_f32(value);
  return (vec){four, four, four, four};
}
static inline vec v_load(const float* from) {
  return (vec){vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)};
}
static inline void v_store(float* to, vec x) {
  vst1q_f32(to, x.a);
  vst1q_f32(to + 4, x.b);
  vst1q_f32(to + 8, x.c);
  vst1q_f32(to + 12, x.d);
}
static inline vec v_add(vec x, vec y) { return QUARTERS_2(vec, vaddq_f32, x, y); }
static inline vec v_sub(vec x, vec y) { return QUARTERS_2(vec, vsubq_f32, x, y); }
static inline vec v_mul(vec x, vec y) { return QUARTERS_2(vec, vmulq_f32, x, y); }
static inline vec v_div(vec x, vec y) { return QUARTERS_2(vec, vdivq_f32, x, y); }
static inline vec v_fma(vec x, vec y, vec z) {  // x * y + z
  return QUARTERS_3(vec, vfmaq_f32, z, x, y);
}
static inline vec v_fms(vec x, vec y, vec z) {  // x * y - z
  return v_fma(x, y, QUARTERS_1(vec, vnegq_f32, z));
}
// Comparisons, because vmaxq_f32 and vminq_f32 give NaN if either operand is NaN.
static inline float32x4_t larger_of(float32x4_t x, float32x4_t y) {
  return vbslq_f32(vcgtq_f32(x, y), x, y);
}
static inline float32x4_t smaller_of(float32x4_t x, float32x4_t y) {
  return vbslq_f32(vcltq_f32(x, y), x, y);
}
// The second operand if one of the two is NaN.
static inline vec v_max(vec x, vec y) { return QUARTERS_2(vec, larger_of, x, y); }
static inline vec v_min(vec x, vec y) { return QUARTERS_2(vec, smaller_of, x, y); }
static inline vec v_sqrt(vec x) { return QUARTERS_1(vec, vsqrtq_f32, x); }
// The nearest whole number.
static inline vec v_round(vec x) { return QUARTERS_1(vec, vrndnq_f32, x); }
// x * 2^power of four numbers. Powers below -126 give zeros, which denormal numbers would be near.
static inline float32x4_t scale_four(float32x4_t x, float32x4_t power) {
  const float32x4_t least = vdupq_n_f32(-126.0f), most = vdupq_n_f32(127.0f);
  const uint32x4_t tiny = vcltq_f32(power, least);
  const float32x4_t limited = smaller_of(most, larger_of(least, power));
  const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(limited), vdupq_n_s32(127));
  const float32x4_t factor = vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
  // 2^128 is no float32: what is left of larger powers is multiplied too, and gives infinity
  const float32x4_t rest =
      vbslq_f32(vcgtq_f32(power, most), vdupq_n_f32(1.7014118e38f), vdupq_n_f32(1.0f));
  const float32x4_t scaled = vmulq_f32(vmulq_f32(x, factor), rest);
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(scaled), tiny));
}
// x * 2^power, where power is whole.
static inline vec v_scale(vec x, vec power) { return QUARTERS_2(vec, scale_four, x, power); }
static inline float v_sum(vec x) {
  return vaddvq_f32(vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d)));
}
static inline float v_largest(vec x) {
  return vmaxvq_f32(larger_of(larger_of(x.a, x.c), larger_of(x.b, x.d)));
}

static inline mask m_none(void) {
  const uint32x4_t none = vdupq_n_u32(0);
  return (mask){none, none, none, none};
}
static inline mask m_and(mask x, mask y) { return QUARTERS_2(mask, vandq_u32, x, y); }
// Which of sixteen int32 equal a value.
static inline mask m_equal(const int32_t* from, int32_t value) {
  const int32x4_t wanted = vdupq_n_s32(value);
  return (mask){vceqq_s32(vld1q_s32(from), wanted), vceqq_s32(vld1q_s32(from + 4), wanted),
                vceqq_s32(vld1q_s32(from + 8), wanted), vceqq_s32(vld1q_s32(from + 12), wanted)};
}
static inline uint32x4_t between_four(int32_t first, int32_t low, int32_t high) {
  static const int32_t counted[] = {0, 1, 2, 3};
  const int32x4_t place = vaddq_s32(vld1q_s32(counted), vdupq_n_s32(first));
  return vandq_u32(vcgeq_s32(place, vdupq_n_s32(low)), vcleq_s32(place, vdupq_n_s32(high)));
}
// Which of sixteen whole numbers from `first` on are in [low, high].
static inline mask m_between(int32_t first, int32_t low, int32_t high) {
  return (mask){between_four(first, low, high), between_four(first + 4, low, high),
                between_four(first + 8, low, high), between_four(first + 12, low, high)};
}
static inline unsigned bits_of_four(uint32x4_t which) {
  static const uint32_t bits[] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(which, vld1q_u32(bits)));
}
// One bit for each truth value, the lowest one first.
static inline unsigned m_bits(mask which) {
  return bits_of_four(which.a) | bits_of_four(which.b) << 4 | bits_of_four(which.c) << 8 |
         bits_of_four(which.d) << 12;
}
// x where the mask is true, else y.
static inline vec v_choose(mask which, vec x, vec y) {
  return QUARTERS_3(vec, vbslq_f32, which, x, y);
}

// Load or store 16 bytes, whatever their type is.
static inline uint32x4_t load_bits(const void* from) {
  uint32x4_t bits;
  memcpy(&bits, from, sizeof bits);
  return bits;
}
static inline void store_bits(void* to, uint32x4_t bits) { memcpy(to, &bits, sizeof bits); }

// Transpose four lines of four units.
static inline void transpose_four(const int32_t* from, int64_t stride, int32_t* to) {
  uint64x2_t pairs[4];  // of units of two lines
  for (int i = 0; i < 4; i += 2) {
    const uint32x4_t even = load_bits(from + i * stride), odd = load_bits(from + (i + 1) * stride);
    pairs[i] = vreinterpretq_u64_u32(vtrn1q_u32(even, odd));
    pairs[i + 1] = vreinterpretq_u64_u32(vtrn2q_u32(even, odd));
  }
  for (int i = 0; i < 2; i++) {
    store_bits(to + i * TILE, vreinterpretq_u32_u64(vtrn1q_u64(pairs[i], pairs[i + 2])));
    store_bits(to + (i + 2) * TILE, vreinterpretq_u32_u64(vtrn2q_u64(pairs[i], pairs[i + 2])));
  }
}
// Transpose sixteen lines of sixteen units: line p of `to` gets unit p of each line of `from`.
// Strides are in units.
static inline void transpose(const void* from, int64_t stride, void* to) {
  for (int line = 0; line < TILE; line += 4)
    for (int unit = 0; unit < TILE; unit += 4)
      transpose_four((const int32_t*)from + line * stride + unit, stride,
                     (int32_t*)to + unit * TILE + line);
}

// Round sixteen float32 from 0 to 255 to u8.
static inline void store_u8(uint8_t* to, vec x) {
  const uint16x8_t low = vcombine_u16(vmovn_u32(vcvtnq_u32_f32(x.a)), vmovn_u32(vcvtnq_u32_f32(x.b)));
  const uint16x8_t high =
      vcombine_u16(vmovn_u32(vcvtnq_u32_f32(x.c)), vmovn_u32(vcvtnq_u32_f32(x.d)));
  vst1q_u8(to, vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
}

typedef struct {
  int32x4_t a, b, c, d;
} ints;  // sixteen int32

static inline ints i_none(void) {
  const int32x4_t none = vdupq_n_s32(0);
  return (ints){none, none, none, none};
}
static inline vec v_from(ints x) { return QUARTERS_1(vec, vcvtq_f32_s32, x); }
// Four s8 of each of sixteen columns; four u8, the same for all columns; and the sum of their
// products added to that of each column.
typedef struct {
  int8x16_t a, b, c, d;
} Signed;
typedef uint8x16_t Unsigned;
static inline Signed load_signed(const int8_t* from) {
  return (Signed){vld1q_s8(from), vld1q_s8(from + 16), vld1q_s8(from + 32), vld1q_s8(from + 48)};
}
static inline Unsigned all_unsigned(const uint8_t* from) {
  uint32_t four;
  memcpy(&four, from, sizeof four);
  return vreinterpretq_u8_u32(vdupq_n_u32(four));
}
static inline int32x4_t dot_four(int32x4_t sum, Unsigned x, int8x16_t y) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  return vusdotq_s32(sum, x, y);
#else
  const int16x8_t wide_x = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(x)));
  const int16x8_t low = vmovl_s8(vget_low_s8(y)), high = vmovl_high_s8(y);  // of two columns each
  const int32x4_t first = vpaddq_s32(vmull_s16(vget_low_s16(wide_x), vget_low_s16(low)),
                                     vmull_high_s16(wide_x, low));
  const int32x4_t second = vpaddq_s32(vmull_s16(vget_low_s16(wide_x), vget_low_s16(high)),
                                      vmull_high_s16(wide_x, high));
  return vaddq_s32(sum, vpaddq_s32(first, second));
#endif
}
static inline ints i_dot(ints sum, Unsigned x, Signed y) {
  return (ints){dot_four(sum.a, x, y.a), dot_four(sum.b, x, y.b), dot_four(sum.c, x, y.c),
                dot_four(sum.d, x, y.d)};
}
