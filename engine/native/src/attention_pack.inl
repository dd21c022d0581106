// Packs keys and values of a few dozen tokens for `attention_product.inl`, wherever their blocks lie.
//
// Reads the rows of visible tokens only. What belongs to a hidden token is a copy of a visible one, or is left as it
// was: nothing of it may reach a result, but for values times zero.

constexpr int kKeysAtOnce = 128;

// Where the keys and values of one head and of kKeysAtOnce tokens lie; set from `begin` to `end`.
template <class T>
struct TokenRows {
    const T* keys[kKeysAtOnce];
    const T* values[kKeysAtOnce];
    int64_t begin, end;
};

// `first_key`: the position that index 0 stands for.
template <class T>
BATON_INLINE void find_rows(TokenRows<T>& rows, const BatonPagedKv& kv, const int64_t* table, int64_t kv_head,
                            int64_t first_key, int64_t begin, int64_t end) {
    const int64_t row_size = kv.head_dim;
    int64_t block = (first_key + begin) / kv.block_size, place = (first_key + begin) % kv.block_size;
    for (int64_t i = begin; i < end; ++block, place = 0) {
        int64_t offset = table[block] * kv.block_stride + (kv_head * kv.block_size + place) * row_size;
        for (; place < kv.block_size && i < end; ++place, ++i, offset += row_size) {
            rows.keys[i] = static_cast<const T*>(kv.keys) + offset;
            rows.values[i] = static_cast<const T*>(kv.values) + offset;
        }
    }
    // fill up whole groups: keys are packed kLanes at once, values in pairs
    for (int64_t i = begin; i % kLanes != 0; --i) {
        rows.keys[i - 1] = rows.keys[begin];
        rows.values[i - 1] = rows.values[begin];
    }
    for (int64_t i = end; i % kLanes != 0; ++i) {
        rows.keys[i] = rows.keys[end - 1];
        rows.values[i] = rows.values[end - 1];
    }
    rows.begin = begin;
    rows.end = end;
}

#if BATON_VECTOR_BYTES == 64
#define BATON_ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define BATON_ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif BATON_VECTOR_BYTES == 32
#define BATON_ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define BATON_ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define BATON_ZIP_LOW 0, 4, 1, 5
#define BATON_ZIP_HIGH 2, 6, 3, 7
#endif

// Rows become columns: each pass merges row i with row i + kLanes / 2.
BATON_INLINE void transpose(Words (&rows)[kLanes]) {
    for (int width = 1; width < kLanes; width *= 2) {
        Words merged[kLanes];
        for (int i = 0; i < kLanes / 2; ++i) {
            merged[2 * i] = __builtin_shufflevector(rows[i], rows[i + kLanes / 2], BATON_ZIP_LOW);
            merged[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + kLanes / 2], BATON_ZIP_HIGH);
        }
        for (int i = 0; i < kLanes; ++i) rows[i] = merged[i];
    }
}
#undef BATON_ZIP_LOW
#undef BATON_ZIP_HIGH

// Keys become columns: [keys / kPanel][units of a row][kPanel].
template <class Units, class T>
void pack_keys(uint32_t* packed, const TokenRows<T>& rows, int64_t head_dim) {
    const int64_t num_units = (head_dim + Units::kValues - 1) / Units::kValues;
    for (int64_t key = rows.begin / kLanes * kLanes; key < rows.end; key += kLanes) {
        uint32_t* to = packed + key / kPanel * num_units * kPanel + key % kPanel;
        for (int64_t unit = 0; unit < num_units; unit += kLanes) {
            const int64_t value = unit * Units::kValues, left = head_dim - value;
            Words vectors[kLanes];
            if (left >= kLanes * Units::kValues) {
                for (int i = 0; i < kLanes; ++i) vectors[i] = Units::load_units(rows.keys[key + i] + value);
            } else {
                for (int i = 0; i < kLanes; ++i) vectors[i] = Units::load_first_units(rows.keys[key + i] + value, left);
            }
            transpose(vectors);
            const int64_t count = num_units - unit < kLanes ? num_units - unit : kLanes;
            if (count == kLanes) {
                for (int i = 0; i < kLanes; ++i) write_vector(to + (unit + i) * kPanel, vectors[i]);
            } else {
                for (int64_t i = 0; i < count; ++i) write_vector(to + (unit + i) * kPanel, vectors[i]);
            }
        }
    }
}

// Columns stay columns, units run over keys: [columns / kPanel][kKeysAtOnce / Units::kValues][kPanel].
template <class Units, class T>
void pack_values(uint32_t* packed, const TokenRows<T>& rows, int64_t head_dim) {
    constexpr int64_t kPanelUnits = kKeysAtOnce / Units::kValues * kPanel;
    for (int64_t unit = rows.begin / Units::kValues; unit * Units::kValues < rows.end; ++unit) {
        const T* const* joined = rows.values + unit * Units::kValues;
        uint32_t* to = packed + unit * kPanel;
        int64_t column = 0;
        for (; column + kLanes <= head_dim; column += kLanes)
            write_vector(to + column / kPanel * kPanelUnits + column % kPanel, Units::join_rows(joined, column));
        if (column < head_dim)
            write_vector(to + column / kPanel * kPanelUnits + column % kPanel,
                         Units::join_rows_first(joined, column, head_dim - column));
    }
}
