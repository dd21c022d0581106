// One tile of attention: some query rows of one sequence that share a KV head, over all of their keys or one span.
//
// A row is one token and one of the query heads of the group: row r is head r % group of token r / group. Keys and
// values are packed once for all rows of a tile.

constexpr int64_t kTileRows = 96;

// A thread's memory, in floats; sizes are those of `tile_memory`.
struct TileMemory {
    uint32_t* queries;  // [rows][units]
    uint32_t* packed;   // a panel of keys or of values
    float* scores;  // [rows][kKeysAtOnce], then weights
    float* lanes;   // [rows][kLanes], sums of weights
    float* factors;
    int64_t* begin;  // the position of the first key that a row sees
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
    memory->scores = take(kTileRows * kKeysAtOnce);
    memory->lanes = take(kTileRows * kLanes);
    memory->factors = take(kTileRows);
    memory->begin = reinterpret_cast<int64_t*>(take(kTileRows * 2));
    memory->end = reinterpret_cast<int64_t*>(take(kTileRows * 2));
    for (Partial* partial : {&memory->all, &memory->span})
        *partial = {take(kTileRows * padded), take(kTileRows), take(kTileRows), padded};
    return used;
}

// What a tile computes. `table`: the sequence's blocks.
struct Tile {
    const BatonAttention& attention;
    const int64_t* table;
    int64_t first_token, start, kv_head, group, first_row, num_rows;

    int64_t token(int64_t row) const { return (first_row + row) / group; }
    int64_t first_value(int64_t row, int64_t token_stride) const {
        const int64_t head = kv_head * group + (first_row + row) % group;
        return (first_token + token(row)) * token_stride + head * attention.kv.head_dim;
    }
};

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
    const int64_t size = a.kv.head_dim, values = UnitsFor<T>::Units::kValues, num_units = (size + values - 1) / values;
    for (int64_t row = 0; row < tile.num_rows; ++row) {
        const int64_t end = tile.start + tile.token(row) + 1;
        memory.end[row] = end;
        memory.begin[row] = a.window > 0 && end > a.window ? end - a.window : 0;
        copy_row(memory.queries + row * num_units, static_cast<const T*>(a.q) + tile.first_value(row, a.q_stride), size);
    }
}

// The keys from `begin` to `end` that some rows of a tile see, counted from position `first_key`.
struct SeenKeys {
    int64_t begin, end;
};

BATON_INLINE SeenKeys seen_keys(const TileMemory& memory, int64_t first_row, int64_t num_rows, int64_t first_key) {
    // later rows see later keys
    const int64_t begin = memory.begin[first_row] - first_key, end = memory.end[first_row + num_rows - 1] - first_key;
    return {begin > 0 ? begin : 0, end < kKeysAtOnce ? end : kKeysAtOnce};
}

template <class Units, class T>
void compute_scores(const Tile& tile, const TileMemory& memory, const TokenRows<T>& rows, int64_t first_key) {
    const int64_t head_dim = tile.attention.kv.head_dim, num_units = (head_dim + Units::kValues - 1) / Units::kValues;
    for (int64_t key = rows.begin / kPanel * kPanel; key < rows.end; key += kPanel) {
        pack_keys<Units>(memory.packed, rows, key, head_dim);
        for (int64_t row = 0, count; row < tile.num_rows; row += count) {
            count = rows_of_next_block(tile.num_rows - row);
            const SeenKeys seen = seen_keys(memory, row, count, first_key);
            if (key >= seen.end || key + kPanel <= seen.begin) continue;
            multiply<Units>({memory.queries + row * num_units, memory.packed, memory.scores + row * kKeysAtOnce + key,
                             nullptr, num_units, kKeysAtOnce, 0, num_units},
                            count, kPanelVectors);
        }
    }
}

template <class Units>
void compute_weights(const Tile& tile, const TileMemory& memory, const Partial& partial, int64_t first_key) {
    const float scale = tile.attention.scale * 1.44269504f;  // powers of two are taken
    const auto score_row = [&](int64_t row) {
        const SeenKeys seen = seen_keys(memory, row, 1, first_key);
        return ScoreRow{memory.scores + row * kKeysAtOnce, seen.begin, seen.end};
    };
    for (int64_t row = 0; row < tile.num_rows; ++row) {
        const float before = partial.highest[row], here = highest_score(score_row(row)) * scale;
        const float highest = here > before ? here : before;
        partial.highest[row] = highest;
        memory.factors[row] = before - (highest == kNothing ? 0.0f : highest);
    }
    for (int64_t row = 0; row < tile.num_rows; row += kLanes)
        store(memory.factors + row, power_of_two(load(memory.factors + row)));
    for (int64_t row = 0; row < tile.num_rows; ++row) {
        const float highest = partial.highest[row], base = highest == kNothing ? 0.0f : highest;
        float* lanes = memory.lanes + row * kLanes;
        const Floats total = scores_to_weights<Units>(score_row(row), scale, base);
        store(lanes, round_to(load(lanes) * memory.factors[row], lanes) + total);
    }
}

template <class Units, class T>
void add_values(const Tile& tile, const TileMemory& memory, const Partial& partial, const TokenRows<T>& rows,
                const TokenRows<T>& next, int64_t first_key) {
    const int64_t head_dim = tile.attention.kv.head_dim;
    for (int64_t column = 0; column < head_dim; column += kPanel) {
        const auto product = [&](int64_t row, const SeenKeys& seen) {
            return Product{reinterpret_cast<const uint32_t*>(memory.scores + row * kKeysAtOnce), memory.packed,
                           partial.sums + row * partial.stride + column, memory.factors + row, kKeysAtOnce,
                           partial.stride, seen.begin / Units::kValues,
                           (seen.end + Units::kValues - 1) / Units::kValues};
        };
        if (tile.num_rows <= 2 && column + kPanel <= head_dim) {
            (tile.num_rows == 1 ? multiply_in_place<Units, 1, T> : multiply_in_place<Units, 2, T>)(
                product(0, {rows.begin, rows.end}), rows, next, column);
            continue;
        }
        pack_values<Units>(memory.packed, rows, next, column, head_dim);
        const int64_t num_vectors = (head_dim - column + kLanes - 1) / kLanes;
        for (int64_t row = 0, count; row < tile.num_rows; row += count) {
            count = rows_of_next_block(tile.num_rows - row);
            const SeenKeys seen = seen_keys(memory, row, count, first_key);
            if (seen.begin >= seen.end) continue;  // then the factors are 1
            multiply<Units>(product(row, seen), count,
                            static_cast<int>(num_vectors < kPanelVectors ? num_vectors : kPanelVectors));
        }
    }
}

// The sums of a tile over the keys of one span.
template <class T>
void compute_span(const Tile& tile, const TileMemory& memory, const Partial& partial, int64_t span) {
    using Units = typename UnitsFor<T>::Units;
    const int64_t last = memory.end[tile.num_rows - 1], end = (span + 1) * kSpan < last ? (span + 1) * kSpan : last;
    const int64_t begin = span * kSpan > memory.begin[0] ? span * kSpan : memory.begin[0];
    __builtin_memset(partial.sums, 0, tile.num_rows * partial.stride * 4);
    __builtin_memset(memory.lanes, 0, tile.num_rows * kLanes * 4);
    for (int64_t row = 0; row < tile.num_rows; ++row) partial.highest[row] = kNothing;
    TokenRows<T> rows[2];
    const auto find = [&](TokenRows<T>& found, int64_t key, int64_t behind) {
        find_rows(found, tile.attention.kv, tile.table, tile.kv_head, key, begin > key ? begin - key : 0,
                  behind - key < kKeysAtOnce ? behind - key : kKeysAtOnce);
    };
    int64_t key = begin / kKeysAtOnce * kKeysAtOnce;
    find(rows[0], key, end);
    for (int number = 0; key < end; key += kKeysAtOnce, number ^= 1) {
        const bool is_last = key + kKeysAtOnce >= last;
        if (!is_last) find(rows[number ^ 1], key + kKeysAtOnce, last);  // maybe of the next span
        compute_scores<Units>(tile, memory, rows[number], key);
        compute_weights<Units>(tile, memory, partial, key);
        add_values<Units>(tile, memory, partial, rows[number], rows[is_last ? number : number ^ 1], key);
    }
    for (int64_t row = 0; row < tile.num_rows; ++row)
        partial.totals[row] = sum_of_lanes(load(memory.lanes + row * kLanes));
}

template <class T>
void write_results(const Tile& tile, const Partial& partial) {
    const BatonAttention& a = tile.attention;
    const int64_t size = a.kv.head_dim;
    for (int64_t row = 0; row < tile.num_rows; ++row) {
        T* out = static_cast<T*>(a.out) + tile.first_value(row, a.num_heads * size);
        const float* sums = partial.sums + row * partial.stride;
        const Floats totals = all_lanes(partial.totals[row]);
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) store(out + i, load(sums + i) / totals);
        if (i < size) store_first(out + i, load(sums + i) / totals, size - i);
    }
}

// All spans of a tile, and its result.
template <class T>
void compute_tile(const Tile& tile, const TileMemory& memory) {
    begin_tile<T>(tile, memory);
    const int64_t first_span = memory.begin[0] / kSpan, end = memory.end[tile.num_rows - 1];
    compute_span<T>(tile, memory, memory.all, first_span);
    for (int64_t span = first_span + 1; span * kSpan < end; ++span) {
        compute_span<T>(tile, memory, memory.span, span);
        join_span(memory.all, memory.span, tile.num_rows);
    }
    write_results<T>(tile, memory.all);
}
