// Products and attention of a transformer on x86-64 or Arm, called by programs of XLA:CPU.
//
// Operands are elements, which sizes.h defines; sums, softmax and norms are float32. On x86-64 the
// kernels for bfloat16 need AVX512_BF16, and use AMX_BF16 if they are compiled for it; those for
// float32 need AVX512F, or AVX2 and FMA. On Arm they need NEON, and BF16 for bfloat16. All files are
// one translation unit, so that the compiler can inline what is called in loops.

#define _GNU_SOURCE
#include "calls.h"
#include "check.h"

// The hash of the sources and flags of this library, which Python looks for in the file.
const char jaxembed_source[] = JAXEMBED_SOURCE;
