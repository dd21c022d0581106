// The C interface: chooses the kernels of a dispatch level when a pool is opened, and calls through them.
#include <cstring>
#include <exception>
#include <new>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "kernel_table.h"

namespace baton {
namespace {

struct Level {
    const KernelTable* table;
    bool runs_here;
};

#if defined(__x86_64__)
// Not every compiler knows this one by name.
bool has_avx_vnni() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1 << 4) != 0;
}
#endif

#if defined(__aarch64__) && defined(__linux__)
bool has_dotprod() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#elif defined(__aarch64__)
bool has_dotprod() { return true; }  // every Mac
#endif

// Best first. Asked for anew each time: this is called when an engine starts.
int levels(const Level** found) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    static const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    static const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    static const bool has_avx512_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
    static const bool has_bf16 =
        has_avx512_vnni && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
    static const Level all[] = {{&kAvx512Bf16, has_bf16}, {&kAvx512Vnni, has_avx512_vnni},
                                {&kAvx512, has_avx512},   {&kAvx2Vnni, has_avx2 && has_avx_vnni()},
                                {&kAvx2, has_avx2},       {&kBaseline, true}};
#elif defined(__aarch64__)
    static const Level all[] = {{&kDotprod, has_dotprod()}, {&kBaseline, true}};
#else
    static const Level all[] = {{&kBaseline, true}};
#endif
    *found = all;
    return sizeof all / sizeof all[0];
}

const KernelTable* find(const char* name) {
    const Level* all;
    for (int number = 0, count = levels(&all); number < count; ++number)
        if (all[number].runs_here && std::strcmp(all[number].table->name, name) == 0) return all[number].table;
    return nullptr;
}

// What of the arguments belongs to the step.
void set_step(BatonLinear& a, const BatonStep&, int64_t num_rows) { a.num_tokens = num_rows; }
void set_step(BatonQuantizedLinear& a, const BatonStep&, int64_t num_rows) { a.num_tokens = num_rows; }
void set_step(BatonRoundRows& a, const BatonStep&, int64_t num_rows) { a.num_rows = num_rows; }
void set_step(BatonRoundedLinear& a, const BatonStep&, int64_t num_rows) { a.num_tokens = num_rows; }
void set_step(BatonAddNorm& a, const BatonStep&, int64_t num_rows) { a.num_rows = num_rows; }
void set_step(BatonNormRotate& a, const BatonStep&, int64_t num_rows) { a.num_tokens = num_rows; }
void set_step(BatonGate& a, const BatonStep&, int64_t num_rows) { a.num_rows = num_rows; }
void set_step(BatonRouting& a, const BatonStep&, int64_t num_rows) { a.num_tokens = num_rows; }
void set_step(BatonExperts& a, const BatonStep&, int64_t num_rows) { a.num_tokens = num_rows; }
void set_step(BatonGather& a, const BatonStep& step, int64_t num_rows) {
    a.rows = a.index == BATON_TOKEN_IDS ? step.token_ids : a.index == BATON_POSITIONS ? step.positions : step.due;
    a.num_rows = num_rows;
}
void set_step(BatonStore& a, const BatonStep& step, int64_t num_rows) {
    a.slots = step.slots;
    a.num_tokens = num_rows;
}
void set_step(BatonAttention& a, const BatonStep& step, int64_t) {
    a.first_token = step.first_token;
    a.start = step.start;
    a.num_tokens = step.num_tokens;
    a.table_begin = step.table_begin;
    a.block_tables = step.block_tables;
    a.num_sequences = step.num_sequences;
    a.scratch = step.scratch;
}

struct Replay {
    BatonPool& pool;
    const BatonStep& step;
    int64_t num_rows;

    template <class Arguments>
    void make(void (*kernel)(Pool&, const Arguments&), void* given) const {
        auto& arguments = *static_cast<Arguments*>(given);
        set_step(arguments, step, num_rows);
        kernel(pool.threads, arguments);
    }

    void operator()(const BatonCall& call) const {
        switch (call.kind) {
            case BATON_LINEAR: return make(pool.table.linear, call.arguments);
            case BATON_STORE: return make(pool.table.store, call.arguments);
            case BATON_ATTENTION: return make(pool.table.attention, call.arguments);
            case BATON_ADD_NORM: return make(pool.table.add_norm, call.arguments);
            case BATON_NORM_ROTATE: return make(pool.table.norm_rotate, call.arguments);
            case BATON_GATE: return make(pool.table.gate, call.arguments);
            case BATON_GATHER: return make(pool.table.gather, call.arguments);
            case BATON_QUANTIZED_LINEAR: return make(pool.table.quantized_linear, call.arguments);
            case BATON_ROUTING: return make(pool.table.route, call.arguments);
            case BATON_EXPERTS: return make(pool.table.experts, call.arguments);
            case BATON_ROUND_ROWS: return make(pool.table.round_rows, call.arguments);
            case BATON_ROUNDED_LINEAR: return make(pool.table.rounded_linear, call.arguments);
        }
    }
};

}  // namespace
}  // namespace baton

extern "C" {

int32_t baton_interface(void) { return BATON_INTERFACE; }

const char* baton_levels(void) {
    static char names[128];
    const baton::Level* all;
    char* end = names;
    for (int number = 0, count = baton::levels(&all); number < count; ++number) {
        if (!all[number].runs_here) continue;
        if (end != names) *end++ = ',';
        std::strcpy(end, all[number].table->name);
        end += std::strlen(end);
    }
    return names;
}

BatonPool* baton_pool_open(int32_t num_threads, const char* level, const BatonGuest* guests, int32_t num_guests) {
    const baton::KernelTable* table = baton::find(level);
    if (table == nullptr || num_threads < 1) return nullptr;
    try {
        std::vector<baton::Guest> with;
        for (const BatonGuest* guest = guests; guest != guests + num_guests; ++guest)
            with.push_back({baton::loan_at(guest->loan), baton::loan_at(guest->own), guest->core});
        return new BatonPool(num_threads, with, *table);
    } catch (const std::exception&) {  // no memory, or no more threads
        return nullptr;
    }
}

void baton_pool_close(BatonPool* pool) { delete pool; }

void baton_loan_give(void* loan, int64_t for_ns) { baton::loan_at(loan)->give(for_ns); }
void baton_loan_take_back(void* loan) { baton::loan_at(loan)->take_back(); }
int64_t baton_loan_computing_ns(const void* loan) { return static_cast<const baton::Loan*>(loan)->computing_ns(); }

int64_t baton_packed_bytes(const BatonPool* pool, int32_t dtype, int64_t num_out, int64_t num_in) {
    return pool->table.packed_bytes(dtype, num_out, num_in);
}
void baton_pack(BatonPool* pool, const BatonPack* arguments) { pool->table.pack(pool->threads, *arguments); }
void baton_linear(BatonPool* pool, const BatonLinear* arguments) { pool->table.linear(pool->threads, *arguments); }
int64_t baton_quantized_bytes(const BatonPool* pool, const BatonQuantizedPack* arguments) {
    return pool->table.quantized_bytes(*arguments);
}
void baton_quantized_pack(BatonPool* pool, const BatonQuantizedPack* arguments) {
    pool->table.quantized_pack(pool->threads, *arguments);
}
void baton_quantized_linear(BatonPool* pool, const BatonQuantizedLinear* arguments) {
    pool->table.quantized_linear(pool->threads, *arguments);
}
void baton_quantize(BatonPool* pool, const BatonQuantize* arguments) {
    pool->table.quantize(pool->threads, *arguments);
}
void baton_route(BatonPool* pool, const BatonRouting* arguments) { pool->table.route(pool->threads, *arguments); }
int64_t baton_expert_scratch(int32_t dtype, int64_t size, int64_t inner, int64_t num_chosen, int32_t rounds) {
    const int64_t numbers = baton::expert_row_stride(size) + baton::expert_row_stride(inner);
    const int64_t rounded = rounds ? baton::rounded_row_bytes(size > inner ? size : inner) : 0;
    return num_chosen * (8 + numbers * (dtype == BATON_FLOAT32 ? 4 : 2) + rounded);
}
void baton_experts(BatonPool* pool, const BatonExperts* arguments) { pool->table.experts(pool->threads, *arguments); }
int64_t baton_rounded_bytes(const BatonPool* pool, int64_t size) { return pool->table.rounded_bytes(size); }
void baton_round_rows(BatonPool* pool, const BatonRoundRows* arguments) {
    pool->table.round_rows(pool->threads, *arguments);
}
int64_t baton_rounded_pack_bytes(const BatonPool* pool, const BatonQuantizedPack* arguments) {
    return pool->table.rounded_pack_bytes(*arguments);
}
void baton_rounded_pack(BatonPool* pool, const BatonQuantizedPack* arguments) {
    pool->table.rounded_pack(pool->threads, *arguments);
}
void baton_rounded_linear(BatonPool* pool, const BatonRoundedLinear* arguments) {
    pool->table.rounded_linear(pool->threads, *arguments);
}
void baton_delta_rule(BatonPool* pool, const BatonDeltaRule* arguments) {
    pool->table.delta_rule(pool->threads, *arguments);
}
void baton_store(BatonPool* pool, const BatonStore* arguments) { pool->table.store(pool->threads, *arguments); }
int64_t baton_attention_scratch(const BatonPool* pool, int64_t max_sequences, int32_t head_dim) {
    return pool->table.attention_scratch(pool->threads.max_threads(), max_sequences, head_dim);
}
void baton_attention(BatonPool* pool, const BatonAttention* arguments) {
    pool->table.attention(pool->threads, *arguments);
}
void baton_add_norm(BatonPool* pool, const BatonAddNorm* arguments) { pool->table.add_norm(pool->threads, *arguments); }
void baton_norm_rotate(BatonPool* pool, const BatonNormRotate* arguments) {
    pool->table.norm_rotate(pool->threads, *arguments);
}
void baton_gate(BatonPool* pool, const BatonGate* arguments) { pool->table.gate(pool->threads, *arguments); }
void baton_gather(BatonPool* pool, const BatonGather* arguments) { pool->table.gather(pool->threads, *arguments); }
void baton_argmax(BatonPool* pool, const BatonArgmax* arguments) { pool->table.argmax(pool->threads, *arguments); }
void baton_sample(BatonPool* pool, const BatonSample* arguments) { pool->table.sample(pool->threads, *arguments); }

void baton_replay(BatonPool* pool, const BatonCall* calls, int64_t num_calls, const BatonStep* step, int64_t num_rows) {
    const baton::Replay replay = {*pool, *step, num_rows};
    for (int64_t i = 0; i < num_calls; ++i) replay(calls[i]);
}

}  // extern "C"
