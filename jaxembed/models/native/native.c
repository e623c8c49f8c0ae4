// The products and the attention of a transformer in bfloat16 on x86-64, called by XLA:CPU programs.
//
// Needs AVX512_BF16; AMX_BF16 is used where the compiler targets it. Operands are bfloat16, sums,
// softmax and norms are float32. One unit for the compiler: what is called in loops is inlined.

#define _GNU_SOURCE
#include "calls.h"
#include "check.h"

// Which sources and flags this was made of, to be found in the file.
const char jaxembed_source[] = JAXEMBED_SOURCE;
