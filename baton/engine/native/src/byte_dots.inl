// Dot products of four bytes: the one thing that differs between processors in products of whole numbers. All give the
// same sums, exactly.
//
// Each word has four bytes: unsigned ones of the weights, signed ones of x. Where the instruction takes signed bytes
// alone (Arm), weights are stored signed.

#if BATON_BYTE_DOT && defined(__aarch64__)
constexpr bool kWeightsAreSigned = true;
#else
constexpr bool kWeightsAreSigned = false;
#endif

// Four bytes of x in all words, as `add_dots` takes them. Where there is no dot product of bytes, they are two pairs of
// 16 bits: bytes 0 and 2, 1 and 3.
#if BATON_BYTE_DOT
typedef Words Four;
BATON_INLINE Four four_of_x(uint32_t bytes) { return Words{} + bytes; }
BATON_INLINE Four four_of_weights(Words bytes) { return bytes; }
#else
typedef int16_t Shorts __attribute__((vector_size(BATON_VECTOR_BYTES)));
struct Four {
    Shorts even, odd;
};
BATON_INLINE Four four_of_x(uint32_t bytes) {
    const Shorts both = reinterpret_cast<Shorts>(Words{} + bytes);
    return {reinterpret_cast<Shorts>(reinterpret_cast<Words>(both) << 8 & 0xff00ff00) >> 8, both >> 8};
}
BATON_INLINE Four four_of_weights(Words bytes) {
    return {reinterpret_cast<Shorts>(bytes & 0x00ff00ff), reinterpret_cast<Shorts>(bytes >> 8 & 0x00ff00ff)};
}
#endif

// Of codes of E2M1, a byte each, twice what they stand for; 12 larger where weights are unsigned.
alignas(16) constexpr int8_t kDoubledE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
BATON_INLINE Words doubled_e2m1(Words codes) {
#if BATON_VECTOR_BYTES == 64
    const __m512i table = _mm512_maskz_broadcast_i32x4(0xffff, read_vector<__m128i>(kDoubledE2m1));
    const __m512i bytes = _mm512_maskz_shuffle_epi8(~uint64_t{0}, table, reinterpret_cast<__m512i>(codes));
    return reinterpret_cast<Words>(_mm512_add_epi8(bytes, _mm512_set1_epi8(12)));
#elif BATON_VECTOR_BYTES == 32
    const __m256i table = _mm256_broadcastsi128_si256(read_vector<__m128i>(kDoubledE2m1));
    const __m256i bytes = _mm256_shuffle_epi8(table, reinterpret_cast<__m256i>(codes));
    return reinterpret_cast<Words>(_mm256_add_epi8(bytes, _mm256_set1_epi8(12)));
#else
    typedef uint8_t Bytes __attribute__((vector_size(BATON_VECTOR_BYTES)));
    const Bytes of_bytes = reinterpret_cast<Bytes>(codes), size = of_bytes & 7;
    // a comparison that holds is minus one
    const Bytes twice = size - reinterpret_cast<Bytes>(size > 4) - reinterpret_cast<Bytes>(size > 5) +
                        (reinterpret_cast<Bytes>(size > 6) & 3);
    const Bytes negative = reinterpret_cast<Bytes>(of_bytes > 7), found = (twice ^ negative) - negative;
    return reinterpret_cast<Words>(kWeightsAreSigned ? found : found + 12);
#endif
}

#if BATON_BYTE_DOT && BATON_VECTOR_BYTES == 64
BATON_INLINE Ints add_dots(Ints sums, Four weights, Four x) {
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums),
                                                      reinterpret_cast<__m512i>(weights),
                                                      reinterpret_cast<__m512i>(x)));
}
#elif BATON_BYTE_DOT && BATON_VECTOR_BYTES == 32
BATON_INLINE Ints add_dots(Ints sums, Four weights, Four x) {
    return reinterpret_cast<Ints>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sums),
                                                          reinterpret_cast<__m256i>(weights),
                                                          reinterpret_cast<__m256i>(x)));
}
#elif BATON_BYTE_DOT
BATON_INLINE Ints add_dots(Ints sums, Four weights, Four x) {
    return reinterpret_cast<Ints>(vdotq_s32(reinterpret_cast<int32x4_t>(sums), reinterpret_cast<int8x16_t>(weights),
                                            reinterpret_cast<int8x16_t>(x)));
}
#else
BATON_INLINE Ints dots_of_pairs(Shorts a, Shorts b) {
#if BATON_VECTOR_BYTES == 64
    return reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif BATON_VECTOR_BYTES == 32
    return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
    return reinterpret_cast<Ints>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
    const Ints products = reinterpret_cast<Ints>(a * b);  // of a byte and 7 bits with a sign: each fits 16 bits
    return (reinterpret_cast<Ints>(reinterpret_cast<Words>(products) << 16) >> 16) + (products >> 16);
#endif
}
BATON_INLINE Ints add_dots(Ints sums, Four weights, Four x) {
    return sums + dots_of_pairs(weights.even, x.even) + dots_of_pairs(weights.odd, x.odd);
}
#endif
