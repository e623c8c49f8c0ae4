// Stands in for the compiler's header of this name, so that every x86-64 CPU runs the native
// kernels: what they use of AVX512_BF16, where the CPU lacks it, and the tiles of AMX, where
// EMULATE_AMX is defined. Written with GCC's vectors, and checked against the real instructions by
// the tests that run on CPUs that have them.
#pragma once

#ifdef __AVX512BF16__
#include_next <immintrin.h>
#else
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef __AVX512F__
#define __AVX512F__ 1  // by which vectors.h chooses its registers
#endif
#define V(type, bytes) type __attribute__((vector_size(bytes), may_alias, aligned(bytes)))
typedef V(float, 64) __m512;
typedef V(long long, 64) __m512i;
typedef V(long long, 32) __m256i;
typedef V(long long, 16) __m128i;
typedef V(int32_t, 64) I32;
typedef V(uint8_t, 16) B16;
typedef V(uint32_t, 64) U32;
typedef V(int16_t, 64) I16;
typedef V(uint16_t, 64) U16;
typedef V(uint16_t, 32) H16;
typedef uint16_t __mmask16;

#define EACH(n) for (int i = 0; i < (n); i++)
#define _MM_FROUND_TO_NEAREST_INT 0
#define _MM_FROUND_NO_EXC 8
#define OP static inline __attribute__((always_inline))

#define LOAD(name, type)         \
  OP type name(const void* p) {  \
    type x;                      \
    memcpy(&x, p, sizeof x);     \
    return x;                    \
  }
LOAD(_mm512_loadu_ps, __m512)
LOAD(_mm512_load_ps, __m512)
LOAD(_mm512_loadu_si512, __m512i)
LOAD(_mm256_loadu_si256, __m256i)
OP void _mm512_storeu_ps(void* p, __m512 x) { memcpy(p, &x, sizeof x); }
OP void _mm512_storeu_si512(void* p, __m512i x) { memcpy(p, &x, sizeof x); }
OP void _mm256_storeu_si256(void* p, __m256i x) { memcpy(p, &x, sizeof x); }

OP __m512 _mm512_setzero_ps(void) { return (__m512){0}; }
OP __m512i _mm512_setzero_si512(void) { return (__m512i){0}; }
OP __m512 _mm512_set1_ps(float x) { return x - (__m512){0}; }
OP __m512i _mm512_set1_epi32(int x) { return (__m512i)(x + (I32){0}); }
OP __m512i _mm512_set1_epi16(short x) { return (__m512i)(x + (I16){0}); }
OP __m512i reversed(const void* from, int size) {  // _mm512_set_* begin with the last element
  char to[64];
  for (int i = 0; i < 64; i += size) memcpy(to + i, (const char*)from + 64 - size - i, size);
  return _mm512_loadu_si512(to);
}
#define _mm512_set_epi32(...) reversed((int32_t[16]){__VA_ARGS__}, 4)
#define _mm512_set_epi16(...) reversed((int16_t[32]){__VA_ARGS__}, 2)

OP __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
OP __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
OP __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
OP __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
#define BY_LANE(name, value, ...)   \
  OP __m512 name(__VA_ARGS__) {     \
    __m512 r;                       \
    EACH(16) r[i] = value;          \
    return r;                       \
  }
// NaN in either operand gives the second one, as the instructions do
BY_LANE(_mm512_max_ps, a[i] > b[i] ? a[i] : b[i], __m512 a, __m512 b)
BY_LANE(_mm512_min_ps, a[i] < b[i] ? a[i] : b[i], __m512 a, __m512 b)
BY_LANE(_mm512_fmadd_ps, fmaf(a[i], b[i], c[i]), __m512 a, __m512 b, __m512 c)
BY_LANE(_mm512_fmsub_ps, fmaf(a[i], b[i], -c[i]), __m512 a, __m512 b, __m512 c)
BY_LANE(_mm512_sqrt_ps, sqrtf(a[i]), __m512 a)
BY_LANE(_mm512_scalef_ps, a[i] * exp2f(floorf(b[i])), __m512 a, __m512 b)
BY_LANE(nearest, nearbyintf(a[i]), __m512 a)
#define _mm512_roundscale_ps(x, mode) nearest(x)
BY_LANE(_mm512_mask_mov_ps, mask >> i & 1 ? b[i] : a[i], __m512 a, __mmask16 mask, __m512 b)
BY_LANE(_mm512_maskz_loadu_ps, mask >> i & 1 ? p[i] : 0, __mmask16 mask, const float* p)
#define REDUCED(name, step)                \
  OP float name(__m512 x) {                \
    for (int n = 8; n; n /= 2)             \
      for (int i = 0; i < n; i++) {        \
        const float a = x[i], b = x[i + n]; \
        x[i] = step;                       \
      }                                    \
    return x[0];                           \
  }
REDUCED(_mm512_reduce_add_ps, a + b)
REDUCED(_mm512_reduce_max_ps, a > b ? a : b)

OP __m512i _mm512_add_epi32(__m512i a, __m512i b) { return (__m512i)((I32)a + (I32)b); }
OP __m512i _mm512_add_epi16(__m512i a, __m512i b) { return (__m512i)((I16)a + (I16)b); }
OP __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  const I32 x = (I32)a, y = (I32)b;
  return (__m512i)((x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16));
}
OP __m512i _mm512_slli_epi16(__m512i a, int n) { return (__m512i)((U16)a << n); }
OP __m512i _mm512_srai_epi16(__m512i a, int n) { return (__m512i)((I16)a >> n); }
OP __m512i _mm512_cvtps_epi32(__m512 x) {
  I32 r;
  EACH(16) r[i] = (int32_t)nearbyintf(x[i]);
  return (__m512i)r;
}
OP __m512 _mm512_cvtepi32_ps(__m512i x) { return __builtin_convertvector((I32)x, __m512); }
OP __m128i _mm512_cvtepi32_epi8(__m512i x) {
  return (__m128i)__builtin_convertvector((U32)x, B16);
}
OP void _mm_storeu_si128(__m128i* to, __m128i x) { memcpy(to, &x, sizeof x); }
OP __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
OP __m512i _mm512_slli_epi32(__m512i a, int n) { return (__m512i)((U32)a << n); }
OP __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return (__m512i)__builtin_convertvector((H16)a, U32);
}
#define COMPARED(name, comparison)                                  \
  OP __mmask16 name(__m512i a, __m512i b) {                         \
    const I32 x = (I32)a, y = (I32)b;                               \
    __mmask16 mask = 0;                                             \
    EACH(16) mask |= (x[i] comparison y[i]) << i;                   \
    return mask;                                                    \
  }
COMPARED(_mm512_cmpeq_epi32_mask, ==)
COMPARED(_mm512_cmpge_epi32_mask, >=)
COMPARED(_mm512_cmple_epi32_mask, <=)
OP __mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b) {
  const I32 both = (I32)(a & b);
  __mmask16 mask = 0;
  EACH(16) mask |= (both[i] != 0) << i;
  return mask;
}
OP __m512i _mm512_permutex2var_epi16(__m512i a, __m512i at, __m512i b) {
  const U16 x = (U16)a, y = (U16)b, k = (U16)at;
  U16 r;
  EACH(32) r[i] = k[i] & 32 ? y[k[i] & 31] : x[k[i] & 31];
  return (__m512i)r;
}
OP __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int places) {
  const I32 x = (I32)a, y = (I32)b;
  I32 r;
  EACH(16) {
    const int from = 4 * (places >> 2 * (i / 4) & 3) + i % 4;
    r[i] = i < 8 ? x[from] : y[from];
  }
  return (__m512i)r;
}
#define UNPACKED(name, type, step, first)                                     \
  OP __m512i name(__m512i a, __m512i b) {                                     \
    const type x = (type)a, y = (type)b;                                      \
    type r;                                                                   \
    EACH(64 / (int)sizeof x[0]) {                                             \
      const int from = i / (2 * step) * (2 * step) + first + i % (2 * step) / 2; \
      r[i] = i % 2 ? y[from] : x[from];                                       \
    }                                                                         \
    return (__m512i)r;                                                        \
  }
UNPACKED(_mm512_unpacklo_epi32, I32, 2, 0)
UNPACKED(_mm512_unpackhi_epi32, I32, 2, 2)
UNPACKED(_mm512_unpacklo_epi64, __m512i, 1, 0)
UNPACKED(_mm512_unpackhi_epi64, __m512i, 1, 1)

OP uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
OP uint16_t to_bf16(float x) {  // to the nearest, ties to even; subnormals are zero
  const uint32_t bits = bits_of(x);
  if (x != x) return bits >> 16 | 0x40;
  if ((bits & 0x7f800000) == 0) return bits >> 16 & 0x8000;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
OP float from_bf16(uint16_t x) {
  const uint32_t bits = x & 0x7f80 ? (uint32_t)x << 16 : (uint32_t)(x & 0x8000) << 16;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}
OP __m256i _mm512_cvtneps_pbh(__m512 x) {
  H16 r;
  EACH(16) r[i] = to_bf16(x[i]);
  return (__m256i)r;
}
OP __m512i _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  U16 r;
  EACH(32) r[i] = to_bf16(i < 16 ? low[i] : high[i - 16]);
  return (__m512i)r;
}
typedef __m512i __m512bh;
OP __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const U32 x = (U32)a, y = (U32)b;
  sum += (__m512)(x & 0xffff0000) * (__m512)(y & 0xffff0000);
  return sum + (__m512)(x << 16) * (__m512)(y << 16);
}
#define _mm_pause() __builtin_ia32_pause()
#endif

#ifdef EMULATE_AMX
#include <string.h>
#include <unistd.h>
#include <stdint.h>
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#define syscall(...) 0  // the permission to use AMX
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbusd
static __thread char tile_memory[8][16][64] __attribute__((aligned(64)));
#define _tile_loadconfig(config) ((void)(config))
#define _tile_release() ((void)0)
#define _tile_zero(t) memset(tile_memory[t], 0, sizeof tile_memory[t])
#define _tile_loadd(t, from, stride)                                                \
  for (int line = 0; line < 16; line++)                                             \
  memcpy(tile_memory[t][line], (const char*)(from) + line * (int64_t)(stride), 64)
#define _tile_stored(t, to, stride)                                                 \
  for (int line = 0; line < 16; line++)                                             \
  memcpy((char*)(to) + line * (int64_t)(stride), tile_memory[t][line], 64)
#define _tile_dpbusd(c, a, b) tile_product_of_bytes(tile_memory[c], tile_memory[a], tile_memory[b])
static inline void tile_product_of_bytes(char (*c)[64], char (*a)[64], char (*b)[64]) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) {
      int32_t sum;
      memcpy(&sum, c[i] + 4 * j, sizeof sum);
      for (int k = 0; k < 64; k++)
        sum += (uint8_t)a[i][k] * (int8_t)b[k / 4][4 * j + k % 4];
      memcpy(c[i] + 4 * j, &sum, sizeof sum);
    }
}
#define _tile_dpbf16ps(c, a, b) tile_product(tile_memory[c], tile_memory[a], tile_memory[b])
static inline void tile_product(char (*c)[64], char (*a)[64], char (*b)[64]) {
  for (int i = 0; i < 16; i++) {
    __m512 sum = _mm512_loadu_ps(c[i]);
    for (int k = 0; k < 16; k++) {  // a pair of features
      int32_t pair;
      memcpy(&pair, a[i] + 4 * k, sizeof pair);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair),
                             (__m512bh)_mm512_loadu_si512(b[k]));
    }
    _mm512_storeu_ps(c[i], sum);
  }
}
#endif
