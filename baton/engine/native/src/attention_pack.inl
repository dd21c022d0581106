// Packs keys and values of a few dozen tokens for `attention_product.inl`, wherever their blocks lie.
//
// Reads the rows of visible tokens only. What belongs to a hidden token is a copy of a visible one, or is left as it
// was: nothing of it may reach a result, but for values times zero.

constexpr int kKeysAtOnce = 128;

// Where the keys and values of one head and of kKeysAtOnce tokens lie. Those before `begin` and from `end` on
// are as the first or the last one.
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
    // keys are packed kLanes at once, values in pairs, and both are asked for without a look at the ends
    for (int64_t i = 0; i < begin; ++i) {
        rows.keys[i] = rows.keys[begin];
        rows.values[i] = rows.values[begin];
    }
    for (int64_t i = end; i < kKeysAtOnce; ++i) {
        rows.keys[i] = rows.keys[end - 1];
        rows.values[i] = rows.values[end - 1];
    }
    rows.begin = begin;
    rows.end = end;
}

// What is read next is asked for while something else is computed: blocks lie far apart, so that the processor itself
// foresees nothing beyond a block. It is brought into the second-level cache: the first can wait for a few lines only.
BATON_INLINE void ask_for_line(const void* place) { __builtin_prefetch(place, 0, 2); }

template <int kCount, class T>
BATON_INLINE void ask_for(const T* const* rows, int64_t column) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) ask_for_line(rows[i] + column);
}

// Units of kLanes rows become columns, kColumns of them. `row(i)` is where those of row i begin.
template <class Row>
BATON_INLINE void read_columns(FloatUnits, Words (&columns)[FloatUnits::kColumns], const Row& row) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) columns[i] = FloatUnits::load_units(row(i));
    transpose(columns);
}

#if BATON_BF16_DOT
// The lower half of a vector is a row's, the upper half that of the row 4 further: a quarter of the shuffles is saved.
template <class Row>
BATON_INLINE void read_columns(PairUnits, Words (&columns)[PairUnits::kColumns], const Row& row) {
    Words halves[8], twos[8], fours[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const int lower = i < 4 ? i : i + 4;
        const __m512i half = _mm512_maskz_broadcast_i64x4(0x0f, read_vector<__m256i>(row(lower)));
        halves[i] = reinterpret_cast<Words>(
            _mm512_mask_broadcast_i64x4(half, 0xf0, read_vector<__m256i>(row(lower + 4))));
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
        twos[i] = __builtin_shufflevector(halves[i], halves[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28,
                                          13, 29);
        twos[i + 1] = __builtin_shufflevector(halves[i], halves[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14,
                                              30, 15, 31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
        const int from = i / 4 * 4 + i % 4 / 2;
        fours[i] = __builtin_shufflevector(twos[from], twos[from + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13,
                                           28, 29);
        fours[i + 1] = __builtin_shufflevector(twos[from], twos[from + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27,
                                               14, 15, 30, 31);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        columns[i] = __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25,
                                             26, 27);
        columns[i + 4] = __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28,
                                                 29, 30, 31);
    }
}
#endif

// kLanes units of kLanes keys become columns of a panel, from unit `unit` on.
template <class Units, class T>
BATON_INLINE void pack_square(uint32_t* to, const T* const* keys, int64_t unit, int64_t head_dim) {
    const int64_t value = unit * Units::kValues, left = head_dim - value;
    const int64_t num_units = (left + Units::kValues - 1) / Units::kValues;
    if (left >= kLanes * Units::kValues) {
#pragma GCC unroll 2
        for (int first = 0; first < kLanes; first += Units::kColumns) {
            Words columns[Units::kColumns];
            read_columns(Units{}, columns, [&](int row) { return keys[row] + value + first * Units::kValues; });
#pragma GCC unroll 16
            for (int i = 0; i < Units::kColumns; ++i) write_vector(to + (unit + first + i) * kPanel, columns[i]);
        }
    } else {
        Words vectors[kLanes];
        for (int i = 0; i < kLanes; ++i) vectors[i] = Units::load_first_units(keys[i] + value, left);
        transpose(vectors);
        for (int64_t i = 0; i < num_units; ++i) write_vector(to + (unit + i) * kPanel, vectors[i]);
    }
}

// The keys of the panel that begins at `first` become columns: [units of a row][kPanel].
template <class Units, class T>
void pack_keys(uint32_t* packed, const TokenRows<T>& rows, int64_t first, int64_t head_dim) {
    const int64_t begin = first > rows.begin ? first : rows.begin / kLanes * kLanes;
    const int64_t end = first + kPanel < rows.end ? first + kPanel : rows.end;
    for (int64_t key = begin; key < end; key += kLanes)
        for (int64_t value = 0; value < head_dim; value += kLanes * Units::kValues) {
            pack_square<Units>(packed + key % kPanel, rows.keys + key, value / Units::kValues, head_dim);
            ask_for<kLanes>(rows.values + key, value);
        }
}

// The columns of the panel that begins at `first` stay columns, units run over keys: [keys][kPanel].
template <class Units, class T>
void pack_values(uint32_t* packed, const TokenRows<T>& rows, const TokenRows<T>& next, int64_t first, int64_t head_dim) {
    const int64_t end = first + kPanel < head_dim ? first + kPanel : head_dim;
    for (int64_t key = rows.begin / Units::kValues * Units::kValues; key < rows.end; key += Units::kValues) {
        const T* const* joined = rows.values + key;
        uint32_t* to = packed + key / Units::kValues * kPanel - first;
        int64_t column = first;
        for (; column + 2 * kLanes <= end; column += 2 * kLanes) {
            Words vectors[2];
            Units::join_rows(vectors, joined, column);
            write_vector(to + column, vectors[0]);
            write_vector(to + column + kLanes, vectors[1]);
            ask_for<Units::kValues>(next.keys + key, column);
        }
        for (; column < end; column += kLanes)
            write_vector(to + column,
                         Units::join_rows_first(joined, column, end - column < kLanes ? end - column : kLanes));
    }
}
