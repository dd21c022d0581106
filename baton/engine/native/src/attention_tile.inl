// One tile of attention: some query rows of one sequence, over all of their keys or one span. What both ways to compute
// one have in common (`attention_many.inl`, `attention_few.inl`).
//
// A row of a KV head is one token and one of the query heads of the group: row r is head r % group of token r / group.
// A tile has the same rows of one or several KV heads that follow one another; all rows of a head come before those of
// the next.

constexpr int64_t kTileRows = 96;

// A thread's memory, in floats; sizes are those of `tile_memory`.
struct TileMemory {
    uint32_t* queries;  // [rows][units]
    uint32_t* packed;   // a panel of keys or of values
    void* decoded;      // rows of kKeysAtOnce keys or values, where they are codes
    float* scores;  // [rows][kKeysAtOnce], then weights
    float* lanes;   // [rows][kLanes], sums of weights
    float* factors;  // [rows], computed kLanes at once
    int64_t* begin;  // [rows of a head], the position of the first key that a row sees
    int64_t* end;
    Partial all, span;
};

BATON_INLINE int64_t rounded_up(int64_t number, int64_t to) { return (number + to - 1) / to * to; }

// Lays the memory out from `start` on (NULL: only the size counts); returns its bytes, a multiple of 64.
int64_t tile_memory(TileMemory* memory, char* start, int64_t head_dim) {
    const int64_t padded = rounded_up(head_dim, kPanel);
    int64_t used = 0;
    const auto take = [&](int64_t num_floats) {
        char* from = start + used;
        used += rounded_up(4 * num_floats, 64);
        return reinterpret_cast<float*>(from);
    };
    memory->queries = reinterpret_cast<uint32_t*>(take(kTileRows * head_dim));
    memory->packed = reinterpret_cast<uint32_t*>(take(kPanel * (head_dim > kKeysAtOnce ? head_dim : kKeysAtOnce)));
    memory->decoded = take(kKeysAtOnce * head_dim);
    memory->scores = take(kTileRows * kKeysAtOnce);
    memory->lanes = take(kTileRows * kLanes);
    memory->factors = take(kTileRows + kLanes);
    memory->begin = reinterpret_cast<int64_t*>(take(kTileRows * 2));
    memory->end = reinterpret_cast<int64_t*>(take(kTileRows * 2));
    for (Partial* partial : {&memory->all, &memory->span})
        *partial = {take(kTileRows * padded), take(kTileRows), take(kTileRows), padded};
    return used;
}

// What a tile computes. `table`: the sequence's blocks; rows are those of each head.
struct Tile {
    const BatonAttention& attention;
    const int64_t* table;
    int64_t first_token, start, group, first_head, num_heads, first_row, num_rows;

    int64_t token(int64_t row) const { return (first_row + row) / group; }
    // Of a row of the tile's KV head `head`.
    int64_t query_head(int64_t head, int64_t row) const {
        return (first_head + head) * group + (first_row + row) % group;
    }
    // Of the query or the result.
    int64_t first_value(int64_t head, int64_t row, int64_t token_stride) const {
        return (first_token + token(row)) * token_stride + query_head(head, row) * attention.kv.head_dim;
    }
};

// Keys from `begin` to `end`; positions, or counted from a position that somebody knows.
struct KeyRange {
    int64_t begin, end;
};

// The units that hold so many values.
template <class Units>
BATON_INLINE int64_t units_of(int64_t num_values) {
    return (num_values + Units::kValues - 1) / Units::kValues;
}

BATON_INLINE void copy_row(uint32_t* to, const float* from, int64_t size) { __builtin_memcpy(to, from, 4 * size); }
template <class T>
BATON_INLINE void copy_row(uint32_t* to, const T* from, int64_t size) {
    if (UnitsFor<T>::Units::kValues == 2) {
        to[(size - 1) / 2] = 0;
        __builtin_memcpy(to, from, 2 * size);
    } else {
        for (int64_t i = 0; i < size; ++i) to[i] = to_bits(widen(from[i]));
    }
}

template <class T>
void begin_tile(const Tile& tile, const TileMemory& memory) {
    const BatonAttention& a = tile.attention;
    for (int64_t row = 0; row < tile.num_rows; ++row) {
        const int64_t end = tile.start + tile.token(row) + 1;
        memory.end[row] = end;
        memory.begin[row] = a.window > 0 && end > a.window ? end - a.window : 0;
    }
    uint32_t* to = memory.queries;
    for (int64_t head = 0; head < tile.num_heads; ++head)
        for (int64_t row = 0; row < tile.num_rows; ++row) {
            copy_row(to, static_cast<const T*>(a.q) + tile.first_value(head, row, a.q_stride), a.kv.head_dim);
            to += units_of<typename UnitsFor<T>::Units>(a.kv.head_dim);
        }
}

// The keys that some rows see, of the kKeysAtOnce from position `first_key` on, from which they are counted.
BATON_INLINE KeyRange seen_keys(const TileMemory& memory, int64_t first_row, int64_t num_rows, int64_t first_key) {
    // later rows see later keys
    const int64_t begin = memory.begin[first_row] - first_key, end = memory.end[first_row + num_rows - 1] - first_key;
    return {begin > 0 ? begin : 0, end < kKeysAtOnce ? end : kKeysAtOnce};
}

// The scores of a head's rows become weights, and its sums so far get factors; all are those of the head. `scales`: by
// which weights are multiplied, as values are; NULL for none.
template <class Units>
void compute_weights(const Tile& tile, const TileMemory& memory, const Partial& partial, int64_t first_key,
                     const Scales* scales = nullptr) {
    const float cap = tile.attention.cap;
    const float scale = (cap > 0.0f ? 1.0f : tile.attention.scale) * kLog2OfE;  // powers of two are taken
    const auto score_row = [&](int64_t row) {
        const KeyRange seen = seen_keys(memory, row, 1, first_key);
        return ScoreRow{memory.scores + row * kKeysAtOnce, seen.begin, seen.end};
    };
    for (int64_t row = 0; row < tile.num_rows; ++row) {
        if (cap > 0.0f) cap_scores(score_row(row), tile.attention.scale, cap);
        const float before = partial.highest[row], here = highest_score(score_row(row)) * scale;
        const float highest = here > before ? here : before;
        partial.highest[row] = highest;
        memory.factors[row] = before - (highest == kNothing ? 0.0f : highest);
    }
    for (int64_t row = 0; row < tile.num_rows; row += kLanes)
        store(memory.factors + row, power_of_two(load(memory.factors + row)));
    float* lanes = memory.lanes;
    for (int64_t row = 0; row < tile.num_rows; ++row, lanes += kLanes) {
        const float highest = partial.highest[row], base = highest == kNothing ? 0.0f : highest;
        const Floats total = scores_to_weights<Units>(score_row(row), scale, base, scales);
        store(lanes, round_to(load(lanes) * memory.factors[row], lanes) + total);
    }
}

// A sink is one more score of a row: the sum of weights with it, all of them relative to the highest score without.
BATON_INLINE float total_with_sink(float total, float highest, float sink) {
    const float above = sink * kLog2OfE - highest;
    // a sink far above all scores leaves nothing of them
    return total + (above > 0.0f ? 1.0f / power_of_two(all_lanes(-above))[0] : power_of_two(all_lanes(above))[0]);
}

template <class T>
void write_results(const Tile& tile, const Partial& partial) {
    const BatonAttention& a = tile.attention;
    const T* sinks = static_cast<const T*>(a.sinks);
    const int64_t size = a.kv.head_dim;
    const float *sums = partial.sums, *total = partial.totals, *highest = partial.highest;
    for (int64_t head = 0; head < tile.num_heads; ++head)
        for (int64_t row = 0; row < tile.num_rows; ++row, sums += partial.stride, ++total, ++highest) {
            T* out = static_cast<T*>(a.out) + tile.first_value(head, row, a.num_heads * size);
            const Floats totals = all_lanes(
                sinks == nullptr ? *total : total_with_sink(*total, *highest, widen(sinks[tile.query_head(head, row)])));
            int64_t i = 0;
            for (; i + kLanes <= size; i += kLanes) store(out + i, load(sums + i) / totals);
            if (i < size) store_first(out + i, load(sums + i) / totals, size - i);
        }
}
