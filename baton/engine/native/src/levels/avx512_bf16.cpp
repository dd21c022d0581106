// x86-64 with AVX-512 and its dot products of bfloat16 and byte permutations (Sapphire Rapids, Zen 4
// and later).
#if defined(__x86_64__)
#include <immintrin.h>

#include "../kernel_table.h"

#define BATON_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512vnni,avx2,fma,f16c"
#include "target_begin.h"
#define BATON_LEVEL avx512_bf16
#define BATON_VECTOR_BYTES 64
#define BATON_BF16_DOT 1
#define BATON_BYTE_DOT 1

#include "../kernels.inl"

namespace baton {
BATON_TABLE(kAvx512Bf16, "avx512_bf16");
}
#include "target_end.h"
#endif
