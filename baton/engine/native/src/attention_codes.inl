// Keys and values in codes of 8 bits, with a scale for each token and head: how they are made of numbers, and back.
//
// A head of a block is block_size rows of codes, and behind them their scales, a byte each: s stands for 2^(s - 127). The
// scale is the least power of two for which every code of the row is a number. What a code stands for is exact in float
// and bfloat16, so attention over codes is, bit for bit, attention over plain keys and values of those numbers.
//
// For many rows codes are decoded to plain rows, kKeysAtOnce of them at most. For few rows they are decoded in registers,
// and the scales are applied to scores and weights: that is exact for scales that are moderate (`attention_coded.inl`).
// `baton/engine/attention/kv_planes.py` makes and reads the same codes.

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// Elements of one head in a block.
BATON_INLINE int64_t head_stride(const BatonPagedKv& kv) {
    return static_cast<int64_t>(kv.block_size) * (kv.head_dim + (kv.has_codes ? 1 : 0));
}

// A code among keys or values that are multiplied without their scales.
struct E4m3 {
    uint8_t bits;
};
template <class T>
constexpr bool kIsCode = false;
template <>
constexpr bool kIsCode<E4m3> = true;

// Decoded rows have the type of the queries, or float where that is what their products take anyway.
template <class T>
struct DecodedAs {
    using Row = T;
};
#if !BATON_BF16_DOT
template <>
struct DecodedAs<Bfloat16> {
    using Row = float;
};
#endif

// As floats of which the exponent is 120 too small; numbers below the normal ones are right as well.
BATON_INLINE Floats small_floats(const uint8_t* codes) {
    const Words bits = products::widen_bytes(codes);
    return reinterpret_cast<Floats>(((bits & 0x80) << 24) | ((bits & 0x7f) << 20));
}

// What kLanes codes stand for, but for their scale.
BATON_INLINE Floats unscaled(const E4m3* codes) { return small_floats(&codes->bits) * from_bits(0x7b800000); }

// `scale` 255, which no row of numbers has, makes none of each code 0: zero times infinity.
template <class T>
BATON_INLINE void decode_row(T* to, const uint8_t* codes, uint32_t scale, int64_t size) {
    const bool fits = scale + 120 < 255;  // as a rule
    const float first = fits ? from_bits((scale + 120) << 23) : from_bits(0x7b800000);
    const float second = fits ? 1.0f : from_bits(scale << 23);
    int64_t i = 0;
    for (; fits && i + kLanes <= size; i += kLanes) store(to + i, small_floats(codes + i) * first);
    for (; i < size; i += kLanes) {
        const int64_t count = size - i < kLanes ? size - i : kLanes;
        uint8_t last[kLanes] = {};
        __builtin_memcpy(last, codes + i, count);
        store_first(to + i, small_floats(last) * first * second, count);
    }
}

#if BATON_BF16_DOT
// By a table of their bits; the scale is added to the exponents.
BATON_INLINE void decode_row(Bfloat16* to, const uint8_t* codes, uint32_t scale, int64_t size) {
    static constexpr products::ByteTable table = products::byte_table(products::E4m3Codes::magnitude);
    // halves of 32 bytes go to the halves of 16 bytes from which two vectors are made
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    const __m512i exponent = _mm512_set1_epi16(static_cast<int16_t>((static_cast<int32_t>(scale) - 127) * 128));
    const __m512i magnitudes = _mm512_set1_epi8(0x7f), signs = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i none = _mm512_set1_epi16(0x7fc0);
    for (int64_t i = 0; i < size; i += 64) {
        const int64_t left = size - i;
        const __mmask64 there = left < 64 ? (uint64_t{1} << left) - 1 : ~uint64_t{0};
        const __m512i in_order = _mm512_maskz_loadu_epi8(there, codes + i);
        const __mmask64 is_number = _mm512_test_epi8_mask(in_order, magnitudes);  // other than zero
        const __m512i found = _mm512_permutexvar_epi64(order, in_order);
        const __m512i low = products::looked_up(found, table.low);
        const __m512i high = _mm512_or_si512(products::looked_up(found, table.high), _mm512_and_si512(found, signs));
        __m512i first = _mm512_unpacklo_epi8(low, high), second = _mm512_unpackhi_epi8(low, high);
        first = _mm512_mask_add_epi16(first, static_cast<__mmask32>(is_number), first, exponent);
        second = _mm512_mask_add_epi16(second, static_cast<__mmask32>(is_number >> 32), second, exponent);
        if (scale == 255) first = second = none;
        _mm512_mask_storeu_epi16(to + i, static_cast<__mmask32>(there), first);
        if (left > 32) _mm512_mask_storeu_epi16(to + i + 32, static_cast<__mmask32>(there >> 32), second);
    }
}
#endif

// The row of the token at `place` in a block's `head`.
template <class T>
BATON_INLINE void decode_token(T* to, const BatonPagedKv& kv, const uint8_t* head, int64_t place) {
    const uint8_t scale = head[static_cast<int64_t>(kv.block_size) * kv.head_dim + place];
    decode_row(to, head + place * kv.head_dim, scale, kv.head_dim);
}

// The codes of numbers of 448 at most, rounded to nearest, ties to even.
BATON_INLINE Words encoded(Floats values) {
    const Words bits = reinterpret_cast<Words>(values), magnitude = bits & 0x7fffffff;
    const Words normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
    // the last place of 2^14 is that of the numbers below the normal ones
    const Floats moved = reinterpret_cast<Floats>(magnitude) + 16384.0f;
    const Words codes = magnitude < 0x3c800000 ? reinterpret_cast<Words>(moved) - 0x46800000 : normal;
    return codes | ((bits >> 24) & 0x80);
}

// kLanes values of a row of `size`, from `i` on, with zeros behind its end.
template <class T>
BATON_INLINE Floats load_part(const T* from, int64_t i, int64_t size) {
    return i + kLanes <= size ? load(from + i) : load_first(from + i, size - i);
}

// The scale of a row, 255 where something in it is no number, or infinite.
template <class T>
BATON_INLINE uint32_t scale_of(const T* from, int64_t size) {
    constexpr uint32_t kBeyondLargest = (1 << 21) - 1;  // raises the exponent of what is above 1.75 times a power of two
    Words largest = {};
    for (int64_t i = 0; i < size; i += kLanes) {
        const Words magnitude = reinterpret_cast<Words>(load_part(from, i, size)) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    uint32_t magnitude = 0;
    for (int lane = 0; lane < kLanes; ++lane) magnitude = largest[lane] > magnitude ? largest[lane] : magnitude;
    if (magnitude >= 0x7f800000) return 255;
    const int32_t scale = static_cast<int32_t>((magnitude + kBeyondLargest) >> 23) - 8;
    return static_cast<uint32_t>(scale > 10 ? scale : 10);
}

template <class T>
void encode_token(const BatonPagedKv& kv, uint8_t* head, int64_t place, const T* from) {
    const int64_t size = kv.head_dim;
    const uint32_t scale = scale_of(from, size);
    const float inverse = from_bits((254 - scale) << 23);
    head[kv.block_size * size + place] = static_cast<uint8_t>(scale);
    uint8_t* to = head + place * size;
    if (scale == 255) return (void)__builtin_memset(to, 0, size);
    for (int64_t i = 0; i < size; i += kLanes) {
        const Bytes codes = __builtin_convertvector(encoded(load_part(from, i, size) * inverse), Bytes);
        if (i + kLanes <= size) {
            write_vector(to + i, codes);
        } else {
            __builtin_memcpy(to + i, &codes, size - i);
        }
    }
}

// Keys or values of `plane` of one head, of the tokens from `begin` to `end` counted from the position `first_key`, as
// rows in `to` [kKeysAtOnce][head_dim].
template <class T>
void decode_tokens(T* to, const BatonPagedKv& kv, const void* plane, const int64_t* table, int64_t kv_head,
                   int64_t first_key, int64_t begin, int64_t end) {
    const uint8_t* head = static_cast<const uint8_t*>(plane) + kv_head * head_stride(kv);
    for (int64_t i = begin; i < end; ++i) {
        const int64_t position = first_key + i;
        const uint8_t* from = head + table[position / kv.block_size] * kv.block_stride;
        decode_token(to + i * kv.head_dim, kv, from, position % kv.block_size);
    }
}
