// x86-64 with AVX-512 (Skylake server and later).
#if defined(__x86_64__)
#include <immintrin.h>

#include "../kernel_table.h"

#define BATON_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#include "target_begin.h"
#define BATON_LEVEL avx512
#define BATON_VECTOR_BYTES 64
#define BATON_BF16_DOT 0
#define BATON_BYTE_DOT 0

#include "../kernels.inl"

namespace baton {
BATON_TABLE(kAvx512, "avx512");
}
#include "target_end.h"
#endif
