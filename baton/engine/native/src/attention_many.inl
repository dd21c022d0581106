// A tile of any number of rows of one KV head: keys and values are packed once for all of them.

template <class Units, class T>
void compute_scores(const Tile& tile, const TileMemory& memory, const TokenRows<T>& rows, int64_t first_key) {
    const int64_t head_dim = tile.attention.kv.head_dim, num_units = units_of<Units>(head_dim);
    for (int64_t key = rows.begin / kPanel * kPanel; key < rows.end; key += kPanel) {
        pack_keys<Units>(memory.packed, rows, key, head_dim);
        for (int64_t row = 0, count; row < tile.num_rows; row += count) {
            count = rows_of_next_block(tile.num_rows - row);
            const KeyRange seen = seen_keys(memory, row, count, first_key);
            if (key >= seen.end || key + kPanel <= seen.begin) continue;
            multiply<Units>({memory.queries + row * num_units, memory.packed, memory.scores + row * kKeysAtOnce + key,
                             nullptr, num_units, kKeysAtOnce, 0, num_units},
                            count, kPanelVectors);
        }
    }
}

template <class Units, class T>
void add_values(const Tile& tile, const TileMemory& memory, const Partial& partial, const TokenRows<T>& rows,
                const TokenRows<T>& next, int64_t first_key) {
    const int64_t head_dim = tile.attention.kv.head_dim;
    for (int64_t column = 0; column < head_dim; column += kPanel) {
        pack_values<Units>(memory.packed, rows, next, column, head_dim);
        const int64_t num_vectors = (head_dim - column + kLanes - 1) / kLanes;
        for (int64_t row = 0, count; row < tile.num_rows; row += count) {
            count = rows_of_next_block(tile.num_rows - row);
            const KeyRange seen = seen_keys(memory, row, count, first_key);
            if (seen.begin >= seen.end) continue;  // then the factors are 1
            multiply<Units>({reinterpret_cast<const uint32_t*>(memory.scores + row * kKeysAtOnce), memory.packed,
                             partial.sums + row * partial.stride + column, memory.factors + row, kKeysAtOnce,
                             partial.stride, seen.begin / Units::kValues,
                             units_of<Units>(seen.end)},
                            count, static_cast<int>(num_vectors < kPanelVectors ? num_vectors : kPanelVectors));
        }
    }
}

// The same rows for keys and for values: what has been decoded of either.
template <class T>
void find_decoded(TokenRows<T>& rows, const T* decoded, int64_t head_dim, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < kKeysAtOnce; ++i)
        rows.keys[i] = rows.values[i] = decoded + (i < begin ? begin : i < end ? i : end - 1) * head_dim;
    rows.begin = begin;
    rows.end = end;
}

// `compute_many` of codes.
template <class T>
void compute_many_codes(const Tile& tile, const TileMemory& memory, const Partial& partial, const KeyRange& range) {
    using Units = typename UnitsFor<T>::Units;
    const BatonPagedKv& kv = tile.attention.kv;
    T* decoded = static_cast<T*>(memory.decoded);
    TokenRows<T> rows;
    for (int64_t key = range.begin / kKeysAtOnce * kKeysAtOnce; key < range.end; key += kKeysAtOnce) {
        const int64_t begin = range.begin > key ? range.begin - key : 0;
        const int64_t end = range.end - key < kKeysAtOnce ? range.end - key : kKeysAtOnce;
        find_decoded(rows, decoded, kv.head_dim, begin, end);
        decode_tokens(decoded, kv, kv.keys, tile.table, tile.first_head, key, begin, end);
        compute_scores<Units>(tile, memory, rows, key);
        compute_weights<Units>(tile, memory, partial, key);
        decode_tokens(decoded, kv, kv.values, tile.table, tile.first_head, key, begin, end);
        add_values<Units>(tile, memory, partial, rows, rows, key);
    }
}

// The keys of `range` are added to `partial`; those up to `last` are asked for, maybe for the next span.
template <class T>
void compute_many(const Tile& tile, const TileMemory& memory, const Partial& partial, const KeyRange& range,
                  int64_t last) {
    using Units = typename UnitsFor<T>::Units;
    if (tile.attention.kv.has_codes) return compute_many_codes<T>(tile, memory, partial, range);
    TokenRows<T> rows[2];
    const auto find = [&](TokenRows<T>& found, int64_t key, int64_t end) {
        find_rows(found, tile.attention.kv, tile.table, tile.first_head, key, range.begin > key ? range.begin - key : 0,
                  end - key < kKeysAtOnce ? end - key : kKeysAtOnce);
    };
    int64_t key = range.begin / kKeysAtOnce * kKeysAtOnce;
    find(rows[0], key, range.end);
    for (int number = 0; key < range.end; key += kKeysAtOnce, number ^= 1) {
        const bool is_last = key + kKeysAtOnce >= last;
        if (!is_last) find(rows[number ^ 1], key + kKeysAtOnce, last);
        compute_scores<Units>(tile, memory, rows[number], key);
        compute_weights<Units>(tile, memory, partial, key);
        add_values<Units>(tile, memory, partial, rows[number], rows[is_last ? number : number ^ 1], key);
    }
}
