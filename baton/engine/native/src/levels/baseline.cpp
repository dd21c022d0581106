// Any processor: what the compiler may use by itself (SSE2 on x86-64, NEON on 64-bit Arm).
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "../kernel_table.h"

#define BATON_LEVEL baseline
#define BATON_VECTOR_BYTES 16
#define BATON_BF16_DOT 0
#define BATON_BYTE_DOT 0

#include "../kernels.inl"

namespace baton {
BATON_TABLE(kBaseline, "baseline");
}
