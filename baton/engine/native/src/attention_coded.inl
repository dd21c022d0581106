// Products with keys and values that are codes: decoded in registers, between their block and the product.
//
// Scales are powers of two. Those of keys are applied to scores, and those of values to the weights that multiply them.
// That changes no bit of a result as long as no weight leaves the normal numbers: weights are 0 below 2^kLowestPower, and
// only moderate scales are applied like this. Rows with others, of zeros or of what is no number, are decoded first.

constexpr float kLowestPower = -94.0f;
constexpr int kMostScaling = 32;  // a weight of 2^kLowestPower, scaled down by as much, is 2^-126

// Of kLanes tokens: whether none scales by more than 2^kMostScaling, or by less than its inverse.
BATON_INLINE bool are_moderate(const uint8_t* scales) {
    const Words above_least = products::widen_bytes(scales) - (127 - kMostScaling);
#if BATON_VECTOR_BYTES == 64
    const __m512i most = _mm512_set1_epi32(2 * kMostScaling);
    return _mm512_cmpgt_epu32_mask(reinterpret_cast<__m512i>(above_least), most) == 0;
#else
    bool all = true;
    for (int lane = 0; lane < kLanes; ++lane) all &= above_least[lane] <= 2 * kMostScaling;
    return all;
#endif
}

BATON_INLINE Floats powers(const uint8_t* scales) {
    return reinterpret_cast<Floats>(products::widen_bytes(scales) << 23);
}

// Of kKeysAtOnce tokens and a head, those of each piece of kLanes tokens.
struct Scales {
    const uint8_t* of_piece[kKeysAtOnce / kLanes];
    uint8_t copies[kKeysAtOnce];
    bool are_moderate;
};

#if BATON_BF16_DOT
// The compiler would rather compute the address of each element apart, and keep all of them in memory.
template <class T>
BATON_INLINE const T* in_register(const T* pointer) {
    asm("" : "+r"(pointer));
    return pointer;
}

// 64 codes become two vectors: each takes 8 of 16 neighbours.
BATON_INLINE void unscaled_pairs(Words* pairs, __m512i codes) {
    static constexpr products::ByteTable table = products::byte_table(products::E4m3Codes::magnitude);
    const __m512i low = products::looked_up(codes, table.low), sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i high = _mm512_or_si512(products::looked_up(codes, table.high), _mm512_and_si512(codes, sign));
    pairs[0] = reinterpret_cast<Words>(_mm512_unpacklo_epi8(low, high));
    pairs[1] = reinterpret_cast<Words>(_mm512_unpackhi_epi8(low, high));
}

// Where the bytes of 64 are taken from, so that `unscaled_pairs` makes pairs of the codes of two rows of 32, in order.
struct ByteOrder {
    alignas(64) uint8_t from[64] = {};
    constexpr ByteOrder() {
        for (int to = 0; to < 64; ++to) {
            const int column = to % 16 / 8 * 16 + to / 16 * 4 + to % 8 / 2;
            from[to] = static_cast<uint8_t>(to % 2 * 32 + column);
        }
    }
};

struct CodedPairUnits : PairUnits {
    static constexpr int kColumns = 16;

    BATON_INLINE void join_rows(Words (&joined)[2], const E4m3* const* rows, int64_t column) {
        static constexpr ByteOrder order;
        const __m512i first = _mm512_zextsi256_si512(read_vector<__m256i>(rows[0] + column));
        const __m512i both = _mm512_maskz_inserti64x4(0xff, first, read_vector<__m256i>(rows[1] + column), 1);
        unscaled_pairs(joined, _mm512_maskz_permutexvar_epi8(~uint64_t{0}, read_vector<__m512i>(order.from), both));
    }
};

// Codes of 32 columns of 16 rows, of which each vector holds 4 columns: of all 16 units in their order, those in the lower
// and then in the upper half of each lane pair.
struct CodedSquare {
    __m512i halves[8];

    template <class Row>
    BATON_INLINE CodedSquare read(const Row& row) {
        __m512i halves[8], twos[8];
        CodedSquare square;
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const int lower = i < 4 ? i : i + 4;  // the upper half of a vector is the row 4 further
            halves[i] = _mm512_zextsi256_si512(read_vector<__m256i>(row(lower)));
            halves[i] = _mm512_maskz_inserti64x4(0xff, halves[i], read_vector<__m256i>(row(lower + 4)), 1);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            twos[i] = _mm512_unpacklo_epi16(halves[2 * i], halves[2 * i + 1]);
            twos[4 + i] = _mm512_unpackhi_epi16(halves[2 * i], halves[2 * i + 1]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            square.halves[i / 2 * 4 + i % 2] = _mm512_unpacklo_epi32(twos[2 * i], twos[2 * i + 1]);
            square.halves[i / 2 * 4 + i % 2 + 2] = _mm512_unpackhi_epi32(twos[2 * i], twos[2 * i + 1]);
        }
        return square;
    }
    // The units 2 * number and 2 * number + 1 of all rows.
    BATON_INLINE void decode(const CodedSquare& square, Words (&columns)[2], int number) {
        const __m512i first = square.halves[number % 4 * 2], second = square.halves[number % 4 * 2 + 1];
        unscaled_pairs(columns, number < 4 ? _mm512_maskz_shuffle_i32x4(0xffff, first, second, 0x88)
                                           : _mm512_maskz_shuffle_i32x4(0xffff, first, second, 0xdd));
    }
};
#endif

// T: what codes are decoded to otherwise.
template <class T>
struct CodedUnitsFor {
    using Units = FloatUnits;
};
#if BATON_BF16_DOT
template <>
struct CodedUnitsFor<Bfloat16> {
    using Units = CodedPairUnits;
};
#endif
