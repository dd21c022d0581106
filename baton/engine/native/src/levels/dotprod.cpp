// 64-bit Arm with dot products of bytes (Armv8.4, Neoverse N1, Apple M1 and later).
#if defined(__aarch64__)
#include <arm_neon.h>

#include "../kernel_table.h"

#define BATON_TARGET "arch=armv8.2-a+dotprod"
#include "target_begin.h"
#define BATON_LEVEL dotprod
#define BATON_VECTOR_BYTES 16
#define BATON_BF16_DOT 0
#define BATON_BYTE_DOT 1

#include "../kernels.inl"

namespace baton {
BATON_TABLE(kDotprod, "dotprod");
}
#include "target_end.h"
#endif
