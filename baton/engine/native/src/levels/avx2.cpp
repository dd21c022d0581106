// x86-64 with AVX2 and FMA (Haswell, Zen and later).
#if defined(__x86_64__)
#include <immintrin.h>

#include "../kernel_table.h"

#define BATON_TARGET "avx2,fma,f16c"
#include "target_begin.h"
#define BATON_LEVEL avx2
#define BATON_VECTOR_BYTES 32
#define BATON_BF16_DOT 0
#define BATON_BYTE_DOT 0

#include "../kernels.inl"

namespace baton {
BATON_TABLE(kAvx2, "avx2");
}
#include "target_end.h"
#endif
