// Attention over a paged KV pool: what a step's tiles are, and who computes them.
//
// A sequence is divided into tiles: of kTileRows query rows of one KV head, or, where there are few rows, of as many KV
// heads as leave enough tiles for all threads. A tile of a long context that is more than a small part of the whole
// step, as for a single sequence that decodes, is divided further into spans of keys, which are joined in a second
// operation of the pool. All that changes nothing of a result: see `attention_softmax.inl` and `attention_few.inl`.

#include "attention_codes.inl"
#include "attention_product.inl"
#include "attention_pack.inl"
#include "attention_coded.inl"
#include "attention_softmax.inl"
#include "attention_tile.inl"
#include "attention_many.inl"
#include "attention_stretch.inl"
#include "attention_few.inl"

constexpr int64_t kTokensPerStoreTile = 16;

// Plain keys and values are moved, whatever they are.
template <class Bits>
void store_tokens(const BatonStore& a, int64_t first, int64_t end) {
    const int64_t size = a.kv.head_dim, block_size = a.kv.block_size;
    for (int64_t token = first; token < end; ++token) {
        const int64_t slot = a.slots[token];
        const int64_t base = slot / block_size * a.kv.block_stride + slot % block_size * size;
        for (int64_t head = 0; head < a.kv.num_kv_heads; ++head) {
            const int64_t to = base + head * block_size * size;
            __builtin_memcpy(static_cast<Bits*>(a.kv.keys) + to,
                             static_cast<const Bits*>(a.k) + token * a.k_stride + head * size, size * sizeof(Bits));
            __builtin_memcpy(static_cast<Bits*>(a.kv.values) + to,
                             static_cast<const Bits*>(a.v) + token * a.v_stride + head * size, size * sizeof(Bits));
        }
    }
}

template <class T>
void store_codes(const BatonStore& a, int64_t first, int64_t end) {
    const int64_t size = a.kv.head_dim;
    for (int64_t token = first; token < end; ++token) {
        const int64_t block = a.slots[token] / a.kv.block_size * a.kv.block_stride;
        const int64_t place = a.slots[token] % a.kv.block_size;
        for (int64_t head = 0; head < a.kv.num_kv_heads; ++head) {
            const int64_t to = block + head * head_stride(a.kv);
            encode_token(a.kv, static_cast<uint8_t*>(a.kv.keys) + to, place,
                         static_cast<const T*>(a.k) + token * a.k_stride + head * size);
            encode_token(a.kv, static_cast<uint8_t*>(a.kv.values) + to, place,
                         static_cast<const T*>(a.v) + token * a.v_stride + head * size);
        }
    }
}

template <class T>
void store_kv_of(Pool& threads, const BatonStore& a) {
    const auto store_plain = sizeof(T) == 4 ? store_tokens<uint32_t> : store_tokens<uint16_t>;
    const auto store_some = a.kv.has_codes ? store_codes<T> : store_plain;
    threads.each((a.num_tokens + kTokensPerStoreTile - 1) / kTokensPerStoreTile, [&](int64_t tile, int) {
        const int64_t first = tile * kTokensPerStoreTile, end = first + kTokensPerStoreTile;
        store_some(a, first, end < a.num_tokens ? end : a.num_tokens);
    });
}

void store_kv(Pool& threads, const BatonStore& arguments) { BATON_BY_DTYPE(arguments.kv.dtype, store_kv_of); }

// A tile that is more than one of so many parts of a thread's share is divided into spans, within these limits.
constexpr int64_t kPartsPerThread = 8;
constexpr int64_t kPartialRowsPerThread = 1024;

// A sequence in a step. Its tiles are those of rows or of spans, for each of `num_parts` parts of the KV heads. Tiles are
// numbered through all entries, and so are those of the second operation.
struct Entry {
    int64_t sequence, num_rows, num_tiles_of_rows, heads_of_part, num_parts;
    int64_t first_span, num_spans;  // num_spans: 0 when tiles are not divided into spans
    int64_t first_tile, first_join, first_partial_row;
};

struct Step {
    const BatonAttention& attention;
    Entry* entries;
    float* partials;
    char* tile_memory;
    int64_t num_entries, num_tiles, num_joins, num_partial_rows, max_partial_rows, divide_above;
};

BATON_INLINE int64_t partial_row_floats(int64_t head_dim) { return rounded_up(head_dim, kPanel) + 16; }

// Scratch is: an entry for each sequence, the partial sums of tiles that are divided, the memory of each thread.
int64_t attention_scratch(int num_threads, int64_t max_sequences, int32_t head_dim) {
    TileMemory memory;
    return rounded_up(max_sequences * static_cast<int64_t>(sizeof(Entry)), 64) +
           num_threads * (kPartialRowsPerThread * partial_row_floats(head_dim) * 4 + tile_memory(&memory, nullptr, head_dim));
}

BATON_INLINE int64_t first_key_of(const BatonAttention& a, int64_t sequence) {
    return a.window > 0 && a.start[sequence] >= a.window ? a.start[sequence] + 1 - a.window : 0;
}

// The keys that a tile of the sequence goes through.
BATON_INLINE int64_t num_keys_of(const BatonAttention& a, int64_t sequence) {
    return a.start[sequence] + a.num_tokens[sequence] - first_key_of(a, sequence);
}

// How many KV heads a tile takes of a sequence with so many rows a head, each of them `head_work`.
int64_t choose_heads(const Step& step, int64_t num_rows, int64_t head_work) {
    const BatonPagedKv& kv = step.attention.kv;
    if (!suits_few(kv, num_rows)) return 1;
    int64_t most = step.divide_above / head_work;
    if (most > kTileRows / num_rows) most = kTileRows / num_rows;
    const int64_t num_parts = most > 1 ? (kv.num_kv_heads + most - 1) / most : kv.num_kv_heads;
    return (kv.num_kv_heads + num_parts - 1) / num_parts;
}

void add_entry(Step& step, int64_t sequence) {
    const BatonAttention& a = step.attention;
    const int64_t num_rows = a.num_tokens[sequence] * (a.num_heads / a.kv.num_kv_heads);
    const int64_t first_span = first_key_of(a, sequence) / kSpan;
    const int64_t end_span = (a.start[sequence] + a.num_tokens[sequence] + kSpan - 1) / kSpan;
    const int64_t num_tiles_of_rows = (num_rows + kTileRows - 1) / kTileRows;
    const int64_t head_work = num_rows * num_keys_of(a, sequence), heads = choose_heads(step, num_rows, head_work);
    const int64_t num_parts = (a.kv.num_kv_heads + heads - 1) / heads;
    Entry entry = {sequence,   num_rows, num_tiles_of_rows, heads,          num_parts,
                   first_span, 0,        step.num_tiles,    step.num_joins, step.num_partial_rows};
    const int64_t partial_rows = num_parts * (end_span - first_span) * heads * num_rows;
    if (num_tiles_of_rows == 1 && end_span - first_span > 1 && head_work * heads > step.divide_above &&
        step.num_partial_rows + partial_rows <= step.max_partial_rows) {
        entry.num_spans = end_span - first_span;
        step.num_partial_rows += partial_rows;
        step.num_joins += num_parts;
    }
    step.num_tiles += num_parts * (entry.num_spans > 0 ? entry.num_spans : num_tiles_of_rows);
    step.entries[step.num_entries++] = entry;
}

// Long tiles come first, so that all threads end at about the same time: those of prompts, their last ones first.
void plan_step(Step& step, int num_threads) {
    const BatonAttention& a = step.attention;
    const int64_t group = a.num_heads / a.kv.num_kv_heads;
    int64_t work = 0;
    for (int64_t sequence = 0; sequence < a.num_sequences; ++sequence)
        work += a.num_tokens[sequence] * group * a.kv.num_kv_heads * num_keys_of(a, sequence);
    step.divide_above = num_threads == 1 ? work : work / (num_threads * kPartsPerThread);
    for (const bool prompts : {true, false})
        for (int64_t sequence = 0; sequence < a.num_sequences; ++sequence)
            if ((a.num_tokens[sequence] * group > kTileRows) == prompts) add_entry(step, sequence);
}

// The last entry that begins at or before `number`.
template <int64_t Entry::*kFirst>
BATON_INLINE const Entry& find_entry(const Step& step, int64_t number) {
    int64_t low = 0, high = step.num_entries;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (step.entries[middle].*kFirst <= number ? low : high) = middle;
    }
    return step.entries[low];
}

BATON_INLINE Tile tile_of(const Step& step, const Entry& entry, int64_t part, int64_t tile_of_rows) {
    const BatonAttention& a = step.attention;
    const int64_t first_row = tile_of_rows * kTileRows, num_rows = entry.num_rows - first_row;
    const int64_t first_head = part * entry.heads_of_part, num_heads = a.kv.num_kv_heads - first_head;
    return {a,
            a.block_tables + a.table_begin[entry.sequence],
            a.first_token[entry.sequence],
            a.start[entry.sequence],
            a.num_heads / a.kv.num_kv_heads,
            first_head,
            num_heads < entry.heads_of_part ? num_heads : entry.heads_of_part,
            first_row,
            num_rows < kTileRows ? num_rows : kTileRows};
}

BATON_INLINE Partial partial_of(const Step& step, const Entry& entry, int64_t part, int64_t span) {
    const int64_t head_dim = step.attention.kv.head_dim, stride = rounded_up(head_dim, kPanel);
    const int64_t num_rows = entry.heads_of_part * entry.num_rows;
    const int64_t row = entry.first_partial_row + (part * entry.num_spans + span) * num_rows;
    float* sums = step.partials + row * partial_row_floats(head_dim);
    float* highest = sums + num_rows * stride;
    return {sums, highest, highest + num_rows, stride};
}

// The sums of a tile over the keys of one span. `goes_on`: the same thread computes the next one then.
template <class T>
void compute_span(const Tile& tile, const TileMemory& memory, const Partial& partial, int64_t span, bool goes_on) {
    const int64_t last = memory.end[tile.num_rows - 1], end = (span + 1) * kSpan < last ? (span + 1) * kSpan : last;
    const int64_t begin = span * kSpan > memory.begin[0] ? span * kSpan : memory.begin[0];
    const int64_t num_rows = tile.num_heads * tile.num_rows;
    __builtin_memset(partial.sums, 0, num_rows * partial.stride * 4);
    __builtin_memset(memory.lanes, 0, num_rows * kLanes * 4);
    for (int64_t row = 0; row < num_rows; ++row) partial.highest[row] = kNothing;
    using Decoded = typename DecodedAs<T>::Row;
    const bool has_codes = tile.attention.kv.has_codes;
    const auto few = has_codes ? compute_few<Decoded, E4m3> : compute_few<T, T>;
    const auto many = has_codes ? compute_many<Decoded> : compute_many<T>;
    (suits_few(tile.attention.kv, tile.num_rows) ? few : many)(tile, memory, partial, {begin, end},
                                                               goes_on ? last : end);
    for (int64_t row = 0; row < num_rows; ++row)
        partial.totals[row] = sum_of_lanes(load(memory.lanes + row * kLanes));
}

// All spans of a tile, and its result.
template <class T>
void compute_tile(const Tile& tile, const TileMemory& memory) {
    begin_tile<T>(tile, memory);
    const int64_t first_span = memory.begin[0] / kSpan, end = memory.end[tile.num_rows - 1];
    compute_span<T>(tile, memory, memory.all, first_span, true);
    for (int64_t span = first_span + 1; span * kSpan < end; ++span) {
        compute_span<T>(tile, memory, memory.span, span, true);
        join_span(memory.all, memory.span, tile.num_heads * tile.num_rows);
    }
    write_results<T>(tile, memory.all);
}

template <class T>
void compute_number(const Step& step, int64_t number, int thread) {
    TileMemory memory;
    const int64_t bytes = tile_memory(&memory, nullptr, step.attention.kv.head_dim);
    tile_memory(&memory, step.tile_memory + thread * bytes, step.attention.kv.head_dim);
    const Entry& entry = find_entry<&Entry::first_tile>(step, number);
    const int64_t local = number - entry.first_tile;
    if (entry.num_spans == 0) {
        const int64_t tile_of_rows = entry.num_tiles_of_rows - 1 - local / entry.num_parts;
        return compute_tile<T>(tile_of(step, entry, local % entry.num_parts, tile_of_rows), memory);
    }
    const int64_t part = local / entry.num_spans, span = local % entry.num_spans;
    const Tile tile = tile_of(step, entry, part, 0);
    begin_tile<T>(tile, memory);
    compute_span<T>(tile, memory, partial_of(step, entry, part, span), entry.first_span + span, false);
}

template <class T>
void join_number(const Step& step, int64_t number) {
    const Entry& entry = find_entry<&Entry::first_join>(step, number);
    const int64_t part = number - entry.first_join;
    const Tile tile = tile_of(step, entry, part, 0);
    const Partial all = partial_of(step, entry, part, 0);
    for (int64_t span = 1; span < entry.num_spans; ++span)
        join_span(all, partial_of(step, entry, part, span), tile.num_heads * entry.num_rows);
    write_results<T>(tile, all);
}

template <class T>
void attention_of(Pool& threads, const BatonAttention& a) {
    char* scratch = static_cast<char*>(a.scratch);
    const int64_t entry_bytes = rounded_up(a.num_sequences * static_cast<int64_t>(sizeof(Entry)), 64);
    const int num_threads = threads.num_threads();  // once: it may change at any moment
    const int64_t max_partial_rows = num_threads * kPartialRowsPerThread;
    const int64_t partial_bytes = max_partial_rows * partial_row_floats(a.kv.head_dim) * 4;
    Step step = {a,
                 reinterpret_cast<Entry*>(scratch),
                 reinterpret_cast<float*>(scratch + entry_bytes),
                 scratch + entry_bytes + partial_bytes,
                 0, 0, 0, 0, max_partial_rows, 0};
    plan_step(step, num_threads);
    threads.each(step.num_tiles, [&](int64_t tile, int thread) { compute_number<T>(step, tile, thread); });
    threads.each(step.num_joins, [&](int64_t join, int) { join_number<T>(step, join); });
}

void attention(Pool& threads, const BatonAttention& arguments) {
    BATON_BY_DTYPE(arguments.kv.dtype, attention_of);
}
