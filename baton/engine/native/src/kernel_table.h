// The kernels of one dispatch level, and the pool that runs them.
#pragma once

#include "kernels.h"
#include "pool.h"

namespace baton {

// Of rows of so many numbers between the products of experts: no power of two, so that rows do not push each other out of
// a cache.
// The bytes of a row of inputs rounded to 8 bits: its numbers, a scale for each 32, and a sum for each 16.
constexpr int64_t rounded_row_bytes(int64_t size) {
    const int64_t padded = (size + 31) / 32 * 32;
    return (padded + padded / 32 * 4 + padded / 16 * 4 + 63) / 64 * 64;
}

constexpr int64_t expert_row_stride(int64_t size) { return (size + 31) / 32 * 32 + 32; }

struct KernelTable {
    const char* name;
    int64_t (*packed_bytes)(int32_t dtype, int64_t num_out, int64_t num_in);
    void (*pack)(Pool&, const BatonPack&);
    void (*linear)(Pool&, const BatonLinear&);
    void (*store)(Pool&, const BatonStore&);
    int64_t (*attention_scratch)(int num_threads, int64_t max_sequences, int32_t head_dim);
    void (*attention)(Pool&, const BatonAttention&);
    void (*add_norm)(Pool&, const BatonAddNorm&);
    void (*norm_rotate)(Pool&, const BatonNormRotate&);
    void (*gate)(Pool&, const BatonGate&);
    void (*gather)(Pool&, const BatonGather&);
    void (*argmax)(Pool&, const BatonArgmax&);
    void (*sample)(Pool&, const BatonSample&);
    int64_t (*quantized_bytes)(const BatonQuantizedPack&);
    void (*quantized_pack)(Pool&, const BatonQuantizedPack&);
    void (*quantized_linear)(Pool&, const BatonQuantizedLinear&);
    void (*quantize)(Pool&, const BatonQuantize&);
    void (*route)(Pool&, const BatonRouting&);
    void (*experts)(Pool&, const BatonExperts&);
    int64_t (*rounded_bytes)(int64_t size);
    void (*round_rows)(Pool&, const BatonRoundRows&);
    int64_t (*rounded_pack_bytes)(const BatonQuantizedPack&);
    void (*rounded_pack)(Pool&, const BatonQuantizedPack&);
    void (*rounded_linear)(Pool&, const BatonRoundedLinear&);
    void (*delta_rule)(Pool&, const BatonDeltaRule&);
};

#if defined(__x86_64__)
extern const KernelTable kAvx512Bf16, kAvx512Vnni, kAvx512, kAvx2Vnni, kAvx2;
#elif defined(__aarch64__)
extern const KernelTable kDotprod;
#endif
extern const KernelTable kBaseline;

}  // namespace baton

struct BatonPool {
    BatonPool(int num_threads, const std::vector<baton::Guest>& guests, const baton::KernelTable& kernels)
        : threads(num_threads, guests), table(kernels) {}
    baton::Pool threads;
    const baton::KernelTable& table;
};
