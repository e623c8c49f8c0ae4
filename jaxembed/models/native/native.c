// Products and attention of a transformer in bfloat16 on x86-64, called by programs of XLA:CPU.
//
// The kernels need AVX512_BF16, and use AMX_BF16 if they are compiled for it. Operands are
// bfloat16; sums, softmax and norms are float32. All files are one translation unit, so that the
// compiler can inline what is called in loops.

#define _GNU_SOURCE
#include "calls.h"
#include "check.h"

// The hash of the sources and flags of this library, which Python looks for in the file.
const char jaxembed_source[] = JAXEMBED_SOURCE;
