// The product of attention: c = c * factor + a * b, for a few dozen rows of `a` against packed columns of `b`.
//
// Both products of attention are this one: queries with packed keys, weights with packed values. Operands consist of
// units of 4 bytes: a float, or, where the processor has dot products of them, a pair of bfloat16. Columns are packed
// in panels, [panel][unit][kPanel], so that a panel stays in the nearest cache while all rows pass by.
//
// The result of a row does not depend on which rows are computed beside it: each sum takes its units one by one, in
// their order.

constexpr int kRowBlock = 6;
constexpr int kPanelVectors = BATON_VECTOR_BYTES == 64 ? 4 : 2;
constexpr int kPanel = kPanelVectors * kLanes;

// A zero subtracted leaves every value as it is, so this is the broadcast alone.
BATON_INLINE Floats same_in_all_lanes(float value) { return value - Floats{}; }

// Values as they are: what is not float is widened when it is packed.
struct FloatUnits {
    static constexpr int kValues = 1;
    static constexpr int kColumns = kLanes;  // how many are transposed at once

    BATON_INLINE Floats add_product(Floats sum, Words packed, uint32_t unit) {
        return sum + reinterpret_cast<Floats>(packed) * same_in_all_lanes(from_bits(unit));
    }
    template <class T>
    BATON_INLINE Words load_units(const T* from) {
        return reinterpret_cast<Words>(load(from));
    }
    BATON_INLINE Words load_units(const E4m3* from) { return reinterpret_cast<Words>(unscaled(from)); }
    template <class T>
    BATON_INLINE Words load_first_units(const T* from, int64_t num_values) {
        return reinterpret_cast<Words>(load_first(from, num_values));
    }
    // Columns of kValues rows, of which each unit takes one value, so that a vector holds kLanes columns.
    template <class T>
    BATON_INLINE void join_rows(Words (&joined)[2], const T* const* rows, int64_t column) {
        joined[0] = load_units(rows[0] + column);
        joined[1] = load_units(rows[0] + column + kLanes);
    }
    template <class T>
    BATON_INLINE Words join_rows_first(const T* const* rows, int64_t column, int64_t count) {
        return load_first_units(rows[0] + column, count);
    }
    // Write kLanes values as a row of `a` holds them; may overwrite what `values` was read from.
    BATON_INLINE void write_row(uint32_t* row, int64_t index, Floats values) {
        write_vector(row + index, reinterpret_cast<Words>(values));
    }
};

#if BATON_BF16_DOT
// Pairs of bfloat16, as they lie in memory.
struct PairUnits {
    static constexpr int kValues = 2;
    static constexpr int kColumns = 8;

    BATON_INLINE Floats add_product(Floats sum, Words packed, uint32_t unit) {
        return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                         reinterpret_cast<__m512bh>(packed),
                                                         reinterpret_cast<__m512bh>(Words{} + unit)));
    }
    BATON_INLINE Words load_units(const Bfloat16* from) { return read_vector<Words>(from); }
    BATON_INLINE Words load_first_units(const Bfloat16* from, int64_t num_values) {
        Bfloat16 values[2 * kLanes] = {};
        for (int64_t i = 0; i < num_values; ++i) values[i] = from[i];
        return read_vector<Words>(values);
    }
    BATON_INLINE void join_rows(Words (&joined)[2], const Bfloat16* const* rows, int64_t column) {
        typedef uint16_t Bits __attribute__((vector_size(BATON_VECTOR_BYTES)));
        const Bits low = read_vector<Bits>(rows[0] + column), high = read_vector<Bits>(rows[1] + column);
        joined[0] = reinterpret_cast<Words>(__builtin_shufflevector(
            low, high, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13,
            45, 14, 46, 15, 47));
        joined[1] = reinterpret_cast<Words>(__builtin_shufflevector(
            low, high, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59,
            28, 60, 29, 61, 30, 62, 31, 63));
    }
    BATON_INLINE Words join_rows_first(const Bfloat16* const* rows, int64_t column, int64_t count) {
        Bfloat16 values[2 * kLanes] = {};
        for (int64_t i = 0; i < count; ++i) {
            values[2 * i] = rows[0][column + i];
            values[2 * i + 1] = rows[1][column + i];
        }
        return read_vector<Words>(values);
    }
    BATON_INLINE void write_row(uint32_t* row, int64_t index, Floats values) {
        const __m256bh rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(values));
        __builtin_memcpy(reinterpret_cast<Bfloat16*>(row) + index, &rounded, sizeof rounded);
    }
};
#endif

template <class T>
struct UnitsFor {
    using Units = FloatUnits;
};
#if BATON_BF16_DOT
template <>
struct UnitsFor<Bfloat16> {
    using Units = PairUnits;
};
#endif

// Rows of `a` and `c`, one panel of `b`. The units from `begin` to `end` count; `factors` has one number per row.
struct Product {
    const uint32_t* a;
    const uint32_t* b;
    float* c;
    const float* factors;  // NULL: c is overwritten
    int64_t a_stride, c_stride, begin, end;
};

// The loops over rows and vectors are unrolled before the sums are given registers.
template <class Units, int kRows, int kVectors>
void multiply_block(const Product& p) {
    Floats sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector) {
            const float* from = p.c + row * p.c_stride + vector * kLanes;
            sums[row][vector] = p.factors == nullptr ? Floats{} : round_to(load(from) * p.factors[row], from);
        }
    const uint32_t* b = p.b + p.begin * kPanel;
    for (int64_t unit = p.begin; unit < p.end; ++unit, b += kPanel) {
        Words columns[kVectors];
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector) columns[vector] = read_vector<Words>(b + vector * kLanes);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const uint32_t value = p.a[row * p.a_stride + unit];
#pragma GCC unroll 8
            for (int vector = 0; vector < kVectors; ++vector)
                sums[row][vector] = Units::add_product(sums[row][vector], columns[vector], value);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector)
            store(p.c + row * p.c_stride + vector * kLanes, sums[row][vector]);
}

template <class Units, int kRows>
void multiply_rows(const Product& product, int num_vectors) {
    switch (num_vectors) {
        case 1:
            return multiply_block<Units, kRows, 1>(product);
        case 2:
            return multiply_block<Units, kRows, 2>(product);
#if BATON_VECTOR_BYTES == 64
        case 3:
            return multiply_block<Units, kRows, 3>(product);
        case 4:
            return multiply_block<Units, kRows, 4>(product);
#endif
    }
}

// The rows that `multiply` takes at once when so many are left.
BATON_INLINE int64_t rows_of_next_block(int64_t num_rows) {
    return num_rows >= kRowBlock ? kRowBlock : num_rows >= 4 ? 4 : num_rows >= 2 ? 2 : 1;
}

template <class Units>
BATON_INLINE void multiply(const Product& product, int64_t num_rows, int num_vectors) {
    switch (num_rows) {
        case 1:
            return multiply_rows<Units, 1>(product, num_vectors);
        case 2:
            return multiply_rows<Units, 2>(product, num_vectors);
        case 4:
            return multiply_rows<Units, 4>(product, num_vectors);
        case kRowBlock:
            return multiply_rows<Units, kRowBlock>(product, num_vectors);
    }
}
