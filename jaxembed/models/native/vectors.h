// Sixteen float32 or int32 at a time: one register of AVX512, two of AVX2, or four of NEON. Each of
// the files below defines the types `vec` (sixteen float32) and `mask` (a truth value for each of
// them) and the same functions.
#pragma once

#ifdef __aarch64__
#include "vectors_neon.h"
#else
#include <immintrin.h>  // may define __AVX512F__: tests emulate it
#ifdef __AVX512F__
#include "vectors_avx512.h"
#else
#include "vectors_avx2.h"
#endif
#endif
