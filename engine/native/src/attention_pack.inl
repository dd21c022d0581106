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
#pragma GCC unroll 4
    for (int width = 1; width < kLanes; width *= 2) {
        Words merged[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes / 2; ++i) {
            merged[2 * i] = __builtin_shufflevector(rows[i], rows[i + kLanes / 2], BATON_ZIP_LOW);
            merged[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + kLanes / 2], BATON_ZIP_HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) rows[i] = merged[i];
    }
}
#undef BATON_ZIP_LOW
#undef BATON_ZIP_HIGH

// What is read next is asked for while something else is packed: blocks lie far apart, so that the processor itself
// foresees nothing beyond a block.
template <int kCount, class T>
BATON_INLINE void ask_for(const T* const* rows, int64_t column) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) __builtin_prefetch(rows[i] + column);
}

#if BATON_BF16_DOT
// The same for kLanes units in memory. Each vector is put together from four quarters of rows that stand 4 apart: half
// of the shuffles that whole rows need.
BATON_INLINE void transpose_in_memory(uint32_t* to, const Bfloat16* const* rows, int64_t value) {
    const auto quarter = [&](int row, int number) { return read_vector<__m128i>(rows[row] + value + 8 * number); };
#pragma GCC unroll 4
    for (int number = 0; number < 4; ++number) {
        Words parts[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            __m512i part = _mm512_maskz_broadcast_i32x4(0x000f, quarter(i, number));
            part = _mm512_mask_broadcast_i32x4(part, 0x00f0, quarter(i + 4, number));
            part = _mm512_mask_broadcast_i32x4(part, 0x0f00, quarter(i + 8, number));
            part = _mm512_mask_broadcast_i32x4(part, 0xf000, quarter(i + 12, number));
            parts[i] = reinterpret_cast<Words>(part);
        }
        Words pairs[4];
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            pairs[i] = __builtin_shufflevector(parts[2 * i], parts[2 * i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25,
                                               12, 28, 13, 29);
            pairs[i + 2] = __builtin_shufflevector(parts[2 * i], parts[2 * i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26,
                                                   11, 27, 14, 30, 15, 31);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            uint32_t* column = to + (4 * number + 2 * i) * kPanel;
            write_vector(column, __builtin_shufflevector(pairs[2 * i], pairs[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8,
                                                         9, 24, 25, 12, 13, 28, 29));
            write_vector(column + kPanel, __builtin_shufflevector(pairs[2 * i], pairs[2 * i + 1], 2, 3, 18, 19, 6, 7, 22,
                                                                  23, 10, 11, 26, 27, 14, 15, 30, 31));
        }
    }
}
#endif

// kLanes units of kLanes keys become columns of a panel, from unit `unit` on.
template <class Units, class T>
BATON_INLINE void pack_square(uint32_t* to, const T* const* keys, int64_t unit, int64_t head_dim) {
    const int64_t value = unit * Units::kValues, left = head_dim - value;
    const int64_t num_units = (left + Units::kValues - 1) / Units::kValues;
    Words vectors[kLanes];
    if (left >= kLanes * Units::kValues) {
#if BATON_BF16_DOT
        if constexpr (Units::kValues == 2) return transpose_in_memory(to + unit * kPanel, keys, value);
#endif
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) vectors[i] = Units::load_units(keys[i] + value);
        transpose(vectors);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) write_vector(to + (unit + i) * kPanel, vectors[i]);
    } else {
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

// The columns of one panel for few rows of weights: values are joined on their way into the product, which takes them in
// the order of `multiply_block`. `p.b` is not used.
template <class Units, int kRows, class T>
void multiply_in_place(const Product& p, const TokenRows<T>& rows, const TokenRows<T>& next, int64_t column) {
    Floats sums[kRows][kPanelVectors];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
        for (int vector = 0; vector < kPanelVectors; ++vector) {
            const float* from = p.c + row * p.c_stride + vector * kLanes;
            sums[row][vector] = round_to(load(from) * p.factors[row], from);
        }
    for (int64_t unit = p.begin; unit < p.end; ++unit) {
        const int64_t key = unit * Units::kValues;
#pragma GCC unroll 8
        for (int vector = 0; vector < kPanelVectors; vector += 2) {
            Words joined[2];
            Units::join_rows(joined, rows.values + key, column + vector * kLanes);
            ask_for<Units::kValues>(next.keys + key, column + vector * kLanes);
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) {
                const uint32_t value = p.a[row * p.a_stride + unit];
                sums[row][vector] = Units::add_product(sums[row][vector], joined[0], value);
                sums[row][vector + 1] = Units::add_product(sums[row][vector + 1], joined[1], value);
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
        for (int vector = 0; vector < kPanelVectors; ++vector)
            store(p.c + row * p.c_stride + vector * kLanes, sums[row][vector]);
}
