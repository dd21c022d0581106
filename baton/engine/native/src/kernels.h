// The interface of Baton's CPU kernels: plain C over data pointers, so that any Python and any torch can load it.
//
// Each call gets a pool of threads and one block of arguments. The caller owns all memory, and it owns the arguments
// for the time of the call only. No call allocates, keeps a pointer, prints, or fails: what a kernel cannot do is asked
// for before (`baton_supports_*`). Sizes and strides count elements unless a name says bytes. Strides are distances
// between rows; what lies within a row is contiguous.
//
// What is computed within an operation is float32. A result is rounded to the dtype to nearest, ties to even.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

enum BatonDtype : int32_t { BATON_FLOAT32 = 0, BATON_BFLOAT16 = 1, BATON_FLOAT16 = 2 };

// Raise it with every change of what follows: `baton/engine/native/library.py` loads no other version.
constexpr int32_t BATON_INTERFACE = 10;
int32_t baton_interface(void);

// The dispatch levels that this processor can run, best first, as a list of names separated by commas.
const char* baton_levels(void);

// Threads that compute with the caller's. `level`: a name of `baton_levels`. NULL when there is no such level or no
// thread could be started. One call at a time may use a pool.
//
// `guests`: threads beside those, one for each core of another node of this machine, which takes a tile only while the
// other node lends its cores. `loan` is the line in which it says so, aligned memory that all nodes have mapped, and
// `own` the line of this node; they must outlive the pool.
struct BatonGuest {
    void* loan;
    void* own;
    int32_t core;
};
struct BatonPool;
BatonPool* baton_pool_open(int32_t num_threads, const char* level, const BatonGuest* guests, int32_t num_guests);
void baton_pool_close(BatonPool* pool);

// Lend the cores of this node for so long, until they are taken back when it is negative. Memory of zeros is a loan that
// has not been given.
constexpr int64_t BATON_LOAN_BYTES = 64;
void baton_loan_give(void* loan, int64_t for_ns);
void baton_loan_take_back(void* loan);
// How long ago this was called last, as by a node that computes; negative when the cores are lent now, or when the node
// has no use for those of others, because its guests lose them to other programs.
int64_t baton_loan_computing_ns(const void* loan);

// --- products: out[t][n] = bias[n] + sum over k of x[t][k] * weight[n][k]

// The bytes of a packed weight [num_out, num_in], 0 when the level has no product for the dtype.
int64_t baton_packed_bytes(const BatonPool* pool, int32_t dtype, int64_t num_out, int64_t num_in);
// Pack rows of `weight` (`weight_stride` apart) into `packed`, aligned to 64 bytes.
struct BatonPack {
    void* packed;
    const void* weight;
    int64_t num_out, num_in, weight_stride;
    int32_t dtype;
};
void baton_pack(BatonPool* pool, const BatonPack* arguments);

struct BatonLinear {
    void* out;
    const void* x;
    const void* packed;
    const void* bias;  // NULL for none
    int64_t num_tokens, num_out, num_in, out_stride, x_stride;
    int32_t dtype;
    int32_t out_is_float32;  // the result is not rounded to the dtype
};
void baton_linear(BatonPool* pool, const BatonLinear* arguments);

// --- products with quantized weights: weight[n][k] = scales[n][g] * code[n][k] + offsets[n][g], g = k / group_size

// INT8: -128 .. 127. INT4: 0 .. 15 for -8 .. 7. E4M3: floats of 8 bits without infinities. E2M1: floats of 4 bits, a
// sign and 0, 0.5, 1, 1.5, 2, 3, 4 or 6.
enum BatonCodes : int32_t { BATON_INT8 = 0, BATON_INT4 = 1, BATON_E4M3 = 2, BATON_E2M1 = 3 };
// As a scale_dtype: powers of two, 2^-126 .. 2^127, by the exponent of a float32 in one byte.
constexpr int32_t BATON_E8M0 = 3;

// Pack `codes` [num_out][num_in], rows codes_stride bytes apart (of 4 bits: two in a byte, the first in its lower half),
// with `scales` and `offsets` (NULL for none) [num_out][num_in / group_size], contiguous and float32. They are kept as
// `scale_dtype`, float32, float16 or E8M0. Groups have an even number of inputs, unless one group is all of them.
struct BatonQuantizedPack {
    void* packed;
    const void* codes;
    const void* scales;
    const void* offsets;
    int64_t num_out, num_in, group_size, codes_stride;
    int32_t dtype, codes_kind, scale_dtype;
};
// The bytes that `packed` needs, 0 when the level has no product for the dtype. Reads no pointer.
int64_t baton_quantized_bytes(const BatonPool* pool, const BatonQuantizedPack* arguments);
void baton_quantized_pack(BatonPool* pool, const BatonQuantizedPack* arguments);

// Make codes, scales and offsets of `weight`, num_groups groups of group_size numbers one after another. INT4 (groups of
// 32) or INT8, which has no offsets. See `quantize.inl`.
struct BatonQuantize {
    void* codes;
    float* scales;
    float* offsets;
    const void* weight;
    int64_t num_groups, group_size;
    int32_t dtype, codes_kind;
};
void baton_quantize(BatonPool* pool, const BatonQuantize* arguments);

// As BatonLinear; what is named like a field of BatonQuantizedPack is the same there.
struct BatonQuantizedLinear {
    void* out;
    const void* x;
    const void* packed;
    const void* bias;
    int64_t num_tokens, num_out, num_in, out_stride, x_stride, group_size;
    int32_t dtype, out_is_float32, codes_kind, scale_dtype, has_offsets;
};
void baton_quantized_linear(BatonPool* pool, const BatonQuantizedLinear* arguments);

// --- experts of a sparse MLP

// How a token's experts follow from its logits [num_tokens][num_experts], at most 1024 experts. Scores are probabilities
// over all experts, one of each for itself, or over the chosen ones alone. Experts are chosen by score + correction (NULL
// for none), from the best `num_chosen_groups` of `num_groups` groups, each as good as the sum of its best
// `num_best_of_group`. `weights`, in the dtype: their scores, with `normalizes` over their sum, times `scaling`.
enum BatonScoring : int32_t { BATON_SOFTMAX = 0, BATON_SIGMOID = 1, BATON_SOFTMAX_OF_CHOSEN = 2 };
struct BatonRouting {
    int64_t* chosen;  // [num_tokens][num_chosen]
    void* weights;    // [num_tokens][num_chosen]
    const void* logits;
    const float* correction;
    int64_t num_tokens, num_experts, num_chosen, logit_stride;
    int64_t num_groups, num_chosen_groups, num_best_of_group;
    float scaling;
    int32_t dtype, logits_are_float32, scoring, normalizes;
};
void baton_route(BatonPool* pool, const BatonRouting* arguments);

// One expert's packed weight; `codes_kind` BATON_PLAIN for what baton_pack has made. `bias`: NULL for none. `is_rounded`:
// of baton_rounded_pack.
constexpr int32_t BATON_PLAIN = -1;
struct BatonExpertWeight {
    const void* packed;
    const void* bias;
    int64_t group_size;
    int32_t codes_kind, scale_dtype, has_offsets, is_rounded;
};
// out [num_tokens][size] = for each token the sum of its experts' results, each rounded, times its weight, rounded; added
// and rounded one by one, in the order of the experts. Of an expert: gate and up of x by gate_up [2 inner][size], whose
// rows take turns; the gate of both, rounded; down [size][inner] of that.
//
// SILU: as BatonGate. CLAMPED: gate at most `gate_limit`, up within it; (up + 1) * (gate * sigmoid(gate_slope * gate)),
// rounded after each operation. `chosen`: see BatonRouting; no expert twice.
enum BatonGateKind : int32_t { BATON_SILU = 0, BATON_CLAMPED = 1 };
struct BatonExperts {
    void* out;
    const void* x;
    const int64_t* chosen;
    const void* weights;
    void* scratch;  // of baton_expert_scratch bytes for each token, aligned to 8
    const BatonExpertWeight* gate_up;
    const BatonExpertWeight* down;
    int64_t num_tokens, size, inner, num_experts, num_chosen, x_stride;
    float gate_limit, gate_slope;
    int32_t dtype, gate;
};
int64_t baton_expert_scratch(int32_t dtype, int64_t size, int64_t inner, int64_t num_chosen, int32_t rounds);
void baton_experts(BatonPool* pool, const BatonExperts* arguments);
// --- the same with x rounded to 8 bits: INT8, INT4 and E2M1, in groups of a multiple of 16 inputs, or of all of them

// Round rows of x, for all products that they go into. Rows of `out` are out_stride bytes apart and have
// baton_rounded_bytes(size) bytes. See `rounded.inl`.
struct BatonRoundRows {
    void* out;
    const void* x;
    int64_t num_rows, size, out_stride, x_stride;
    int32_t dtype;
};
int64_t baton_rounded_bytes(const BatonPool* pool, int64_t size);
void baton_round_rows(BatonPool* pool, const BatonRoundRows* arguments);

// As baton_quantized_bytes and baton_quantized_pack; 0 for what has no such product.
int64_t baton_rounded_pack_bytes(const BatonPool* pool, const BatonQuantizedPack* arguments);
void baton_rounded_pack(BatonPool* pool, const BatonQuantizedPack* arguments);

// As BatonQuantizedLinear; `x` are rounded rows, x_stride bytes apart, and `packed` is of baton_rounded_pack. Results are
// the same at every level, bit for bit.
struct BatonRoundedLinear {
    void* out;
    const void* x;
    const void* packed;
    const void* bias;
    int64_t num_tokens, num_out, num_in, out_stride, x_stride, group_size;
    int32_t dtype, out_is_float32, codes_kind, scale_dtype, has_offsets;
};
void baton_rounded_linear(BatonPool* pool, const BatonRoundedLinear* arguments);

// --- attention over a paged KV pool

// Keys and values of a layer begin at `keys` and `values`. Block b of them begins b * block_stride further; within a
// block they are [num_kv_heads][block_size][head_dim] of `dtype`, which is that of queries and results too. With
// `has_codes` they are floats of 8 bits (E4M3), each head's followed by block_size scales: see `attention_codes.inl`.
struct BatonPagedKv {
    void* keys;
    void* values;
    int64_t block_stride;
    int32_t num_kv_heads, block_size, head_dim;
    int32_t dtype, has_codes;
};

// Write k and v [num_tokens][num_kv_heads][head_dim] of a step to their slots (block * block_size + place).
struct BatonStore {
    BatonPagedKv kv;
    const void* k;
    const void* v;
    int64_t k_stride, v_stride;
    const int64_t* slots;
    int64_t num_tokens;
};
void baton_store(BatonPool* pool, const BatonStore* arguments);

// Causal attention of all sequences of a step. Sequence i has the tokens first_token[i] .. first_token[i] +
// num_tokens[i] - 1 of q and out, at the positions start[i] ...; its blocks are block_tables[table_begin[i]] ... A token
// at position p sees the keys at max(0, p - window + 1) .. p; window 0: no bound. Nothing behind the context is read,
// whatever a block holds there.
//
// With cap above 0 a score x, scaled already, is cap * tanh(x / cap). `sinks` [num_heads] of the dtype, NULL for none: one
// more score of each query head, whose weight goes nowhere.
struct BatonAttention {
    BatonPagedKv kv;
    void* out;  // [T][num_heads][head_dim], contiguous
    const void* q;
    int64_t q_stride;
    const int64_t* first_token;
    const int64_t* start;
    const int64_t* num_tokens;
    const int64_t* table_begin;
    const int64_t* block_tables;
    int64_t num_sequences;
    void* scratch;  // of baton_attention_scratch bytes, aligned to 64
    float scale;
    int32_t num_heads;
    int64_t window;
    const void* sinks;
    float cap;
};
// Scratch for any step of at most so many sequences, however many tokens they have.
int64_t baton_attention_scratch(const BatonPool* pool, int64_t max_sequences, int32_t head_dim);
void baton_attention(BatonPool* pool, const BatonAttention* arguments);

// The recurrence of a gated delta net over the tokens of a step, float32. q, k: [num_tokens][num_heads][key_dim]; v and
// out: [num_tokens][num_heads][value_dim]; keep, beta: [num_tokens][num_heads]. A token makes M to keep * M + k (beta * (v -
// k keep * M)), and reads q M. The matrix M [key_dim][value_dim] of a head of the block b lies at b * stride of `matrices`,
// head behind head.
//
// A piece are the tokens from `first` to `last`; their matrices are those of the block `before`, zeros where that is
// negative, and those behind them go into `block`. Those of sequence i are pieces[sequence_begin[i]] ... in their order.
struct BatonDeltaPiece {
    int64_t first, last, before, block;
};
struct BatonDeltaRule {
    float* out;
    const float* q;
    const float* k;
    const float* v;
    const float* beta;
    const float* keep;
    float* matrices;
    const BatonDeltaPiece* pieces;
    const int64_t* sequence_begin;
    int64_t num_sequences, stride;
    int32_t num_heads, key_dim, value_dim;  // key_dim: at most 256
};
void baton_delta_rule(BatonPool* pool, const BatonDeltaRule* arguments);

// The index arrays of a step: those of BatonAttention, and the slots of its tokens.
struct BatonSequence {
    int64_t start, num_tokens;
    const int32_t* blocks;
    int64_t num_blocks;  // that the sequence has; at least as many as its tokens use
};
struct BatonPlan {
    const BatonSequence* sequences;
    int64_t num_sequences, block_size;
    int64_t max_tokens, max_sequences, max_blocks;  // that there is room for
    // written
    int64_t* slots;
    int64_t* first_token;
    int64_t* start;
    int64_t* counts;
    int64_t* table_begin;
    int64_t* block_tables;
    int64_t num_tokens, num_blocks, num_positions;  // of the step, also when there is no room for it
};
enum BatonPlanned : int32_t { BATON_PLANNED = 0, BATON_PLAN_TOO_LARGE = 1, BATON_PLAN_WRONG = 2 };
// Computed by the caller's thread: no pool is needed.
int32_t baton_plan(BatonPlan* plan);

// --- what lies between products. Rounding as `baton/engine/models/ops/base.py` says: after each step that it names.

// residual += delta (unless it is NULL), rounded; out = RMS norm of the residual, rounded, times weight, rounded.
struct BatonAddNorm {
    void* out;
    void* residual;
    const void* delta;
    const void* weight;
    int64_t num_rows, size, out_stride, residual_stride, delta_stride;
    float eps;
    int32_t dtype;
};
void baton_add_norm(BatonPool* pool, const BatonAddNorm* arguments);

// Norm (unless weight [num_heads][head_dim] is NULL) and rotation of x [num_tokens][num_heads][head_dim]; cos and
// signed_sin: [num_tokens][head_dim]; out is contiguous.
struct BatonNormRotate {
    void* out;
    const void* x;
    const void* weight;
    const void* cos;
    const void* signed_sin;
    int64_t num_tokens, x_stride;
    int32_t num_heads, head_dim;
    float eps;
    int32_t dtype;
};
void baton_norm_rotate(BatonPool* pool, const BatonNormRotate* arguments);

// out[t][i] = silu(x[t][i]), rounded, times x[t][size + i], rounded; out is contiguous.
struct BatonGate {
    void* out;
    const void* x;
    int64_t num_rows, size, x_stride;
    int32_t dtype;
};
void baton_gate(BatonPool* pool, const BatonGate* arguments);

// out[i] = the row of `table` that rows[i] names, and not a number where there is no such row; `rows` are those of the
// step's rows that `index` says. The table has `num_table_rows` rows of `row_bytes`, one behind the other, or, where
// `packed_as` is a BatonDtype, what baton_pack has made of them.
constexpr int32_t BATON_NOT_PACKED = -1;
struct BatonGather {
    void* out;
    const void* table;
    const int64_t* rows;
    int64_t num_rows, row_bytes, num_table_rows;
    int32_t index, packed_as;
};
void baton_gather(BatonPool* pool, const BatonGather* arguments);

// For each row of logits [num_rows][size] its largest value, the first place where it is, and whether it is a number
// above minus infinity (is_valid, a byte). A row that holds something that is not a number has the first of that as its
// largest.
//
// masks[i]: which of the masks [][mask_bytes] in `bits` row i has, -1: none; NULL: no row has one. Bit t of a mask, the
// lowest of a byte first, is 0 where token t is ruled out: minus infinity is added to its logit then. Rows with is_wide
// (NULL: none) are rows of `wide` [num_rows][size] instead, and have what is ruled out written there.
struct BatonArgmax {
    int64_t* token_ids;
    float* largest;
    void* is_valid;
    const void* logits;
    float* wide;
    const void* is_wide;
    const void* bits;
    const int64_t* masks;
    int64_t num_rows, size, stride, mask_bytes;
    int32_t dtype;
};
void baton_argmax(BatonPool* pool, const BatonArgmax* arguments);

// Replaces the token ids of `rows` [num_sampled], of those that baton_argmax has found with these arguments: each row that
// is valid gets the first token at which the sum of weights exp((logit - largest) / temperature) exceeds `noise` times the
// sum of all. What a mask rules out has no weight, nor has what is below min_p.
//
// parameters: [4][parameter_stride], for each of `rows`: temperature, noise, nothing, min_p.
struct BatonSample {
    BatonArgmax found;
    const int64_t* rows;
    const double* parameters;
    int64_t num_sampled, parameter_stride;
};
void baton_sample(BatonPool* pool, const BatonSample* arguments);

// --- a list of calls that is made again and again, for steps of any size

// What differs between two steps: the fields of BatonStore and BatonAttention that have these names, and the rows that
// BatonGather takes: `token_ids` and `positions` of the step's tokens, and the places among them that are `due`.
struct BatonStep {
    const int64_t* slots;
    const int64_t* first_token;
    const int64_t* start;
    const int64_t* num_tokens;
    const int64_t* table_begin;
    const int64_t* block_tables;
    int64_t num_sequences;
    void* scratch;
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* due;
};
enum BatonIndex : int32_t { BATON_TOKEN_IDS = 0, BATON_POSITIONS = 1, BATON_DUE = 2 };
enum BatonKind : int32_t {
    BATON_LINEAR = 0,
    BATON_STORE = 1,
    BATON_ATTENTION = 2,
    BATON_ADD_NORM = 3,
    BATON_NORM_ROTATE = 4,
    BATON_GATE = 5,
    BATON_GATHER = 6,
    BATON_QUANTIZED_LINEAR = 7,
    BATON_ROUTING = 8,
    BATON_EXPERTS = 9,
    BATON_ROUND_ROWS = 10,
    BATON_ROUNDED_LINEAR = 11
};
// `arguments`: those of the kind's own function.
struct BatonCall {
    void* arguments;
    int32_t kind;
};
// Make the calls one after another for the first `num_rows` rows of all their tensors. Writes the step and the number
// of rows into the arguments of each.
void baton_replay(BatonPool* pool, const BatonCall* calls, int64_t num_calls, const BatonStep* step, int64_t num_rows);

}  // extern "C"
#pragma GCC visibility pop
