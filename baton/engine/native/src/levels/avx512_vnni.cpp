// x86-64 with AVX-512 and its dot products of bytes (Cascade Lake, Ice Lake and later).
#if defined(__x86_64__)
#include <immintrin.h>

#include "../kernel_table.h"

#define BATON_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
#include "target_begin.h"
#define BATON_LEVEL avx512_vnni
#define BATON_VECTOR_BYTES 64
#define BATON_BF16_DOT 0
#define BATON_BYTE_DOT 1

#include "../kernels.inl"

namespace baton {
BATON_TABLE(kAvx512Vnni, "avx512_vnni");
}
#include "target_end.h"
#endif
