// x86-64 with AVX2 and dot products of bytes (AVX-VNNI: Alder Lake, Zen 5 and later).
#if defined(__x86_64__)
#include <immintrin.h>

#include "../kernel_table.h"

#define BATON_TARGET "avx2,avxvnni,fma,f16c"
#include "target_begin.h"
#define BATON_LEVEL avx2_vnni
#define BATON_VECTOR_BYTES 32
#define BATON_BF16_DOT 0
#define BATON_BYTE_DOT 1

#include "../kernels.inl"

namespace baton {
BATON_TABLE(kAvx2Vnni, "avx2_vnni");
}
#include "target_end.h"
#endif
