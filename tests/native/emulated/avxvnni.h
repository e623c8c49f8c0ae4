// The product of bytes of AVX-VNNI, for CPUs with AVX2 alone.
#include <immintrin.h>
#define __AVXVNNI__ 1
static inline __m256i emulated_dpbusd(__m256i sum, __m256i x, __m256i y) {
  uint8_t u[32];
  int8_t s[32];
  int32_t sums[8];
  _mm256_storeu_si256((__m256i*)u, x);
  _mm256_storeu_si256((__m256i*)s, y);
  _mm256_storeu_si256((__m256i*)sums, sum);
  for (int i = 0; i < 32; i++) sums[i / 4] += u[i] * s[i];
  return _mm256_loadu_si256((const __m256i*)sums);
}
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd
