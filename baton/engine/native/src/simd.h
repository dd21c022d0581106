// Vectors of floats, and how the dtypes of a model are read into them and written from them.
//
// Included by the kernels of each dispatch level, within the level's own namespace: compiled for different processors,
// equal names must not meet in the linker. A level defines BATON_VECTOR_BYTES (64, 32 or 16) before it includes this.
// Everything is written with the vector extension of GCC and Clang; intrinsics only where it has no word for something.
// No function of the standard library may be called here: its code could be compiled for a processor that is not there.

constexpr int kLanes = BATON_VECTOR_BYTES / 4;
typedef float Floats __attribute__((vector_size(BATON_VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(BATON_VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(BATON_VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(BATON_VECTOR_BYTES / 2)));

#define BATON_INLINE static inline __attribute__((always_inline))
#define BATON_MEMBER inline __attribute__((always_inline))

struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

template <class Vector, class Pointer>
BATON_INLINE Vector read_vector(const Pointer* from) {
    Vector vector;
    __builtin_memcpy(&vector, from, sizeof vector);
    return vector;
}

template <class Vector, class Pointer>
BATON_INLINE void write_vector(Pointer* to, Vector vector) {
    __builtin_memcpy(to, &vector, sizeof vector);
}

BATON_INLINE Floats all_lanes(float value) { return value - Floats{}; }  // 0 + value takes an addition: it may be -0

BATON_INLINE float sum_of_lanes(Floats vector) {
#if BATON_VECTOR_BYTES == 64
    const __m512 all = reinterpret_cast<__m512>(vector);
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_maskz_extractf32x8_ps(0xff, all, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float lanes[kLanes];
    write_vector(lanes, vector);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    return lanes[0];
#endif
}

BATON_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// --- single values

BATON_INLINE float from_bits(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

BATON_INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}

BATON_INLINE float widen(float value) { return value; }
BATON_INLINE float widen(Bfloat16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }
BATON_INLINE float widen(Float16 value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16, magnitude = value.bits & 0x7fff;
    if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude << 13));  // infinity, or not a number
    // the exponent moves by 112; numbers below the normal ones come out right as well
    return from_bits(to_bits(from_bits(magnitude << 13) * from_bits(0x77800000)) | sign);
}

BATON_INLINE void narrow(float value, float* to) { *to = value; }
BATON_INLINE void narrow(float value, Bfloat16* to) {
    const uint32_t bits = to_bits(value);
    to->bits = value != value ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
BATON_INLINE void narrow(float value, Float16* to) {
    const uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        to->bits = static_cast<uint16_t>(sign | 0x7e00);
    } else if (magnitude >= 0x477ff000) {  // rounds to 65536 or more
        to->bits = static_cast<uint16_t>(sign | 0x7c00);
    } else if (magnitude < 0x38800000) {
        // adding 0.5 lets the processor round to the last place of the numbers below the normal ones
        to->bits = static_cast<uint16_t>(sign | (to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000));
    } else {
        to->bits = static_cast<uint16_t>(sign | ((magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13));
    }
}

// --- kLanes values

// The compiler makes five instructions of the word for it where there is one.
BATON_INLINE Words widened(Halves values) {
#if BATON_VECTOR_BYTES == 64
    return reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(values)));
#elif BATON_VECTOR_BYTES == 32
    return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(values)));
#else
    return __builtin_convertvector(values, Words);
#endif
}

BATON_INLINE Floats load(const float* from) { return read_vector<Floats>(from); }
BATON_INLINE Floats load(const Bfloat16* from) {
    return reinterpret_cast<Floats>(widened(read_vector<Halves>(from)) << 16);
}
BATON_INLINE Floats load(const Float16* from) {
#if BATON_VECTOR_BYTES == 64
    return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(0xffff, read_vector<__m256i>(from)));
#elif BATON_VECTOR_BYTES == 32
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(read_vector<__m128i>(from)));
#else
    Floats values;
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = widen(from[lane]);
    return values;
#endif
}

BATON_INLINE void store(float* to, Floats values) { write_vector(to, values); }
BATON_INLINE void store(Bfloat16* to, Floats values) {
#if BATON_BF16_DOT
    // one instruction for what takes eight; values below the normal numbers become zero
    write_vector(to, _mm512_cvtneps_pbh(reinterpret_cast<__m512>(values)));
#else
    const Words bits = reinterpret_cast<Words>(values);
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = values != values ? Words{} + 0x7fc0 : rounded;
    write_vector(to, __builtin_convertvector(rounded, Halves));
#endif
}
BATON_INLINE void store(Float16* to, Floats values) {
#if BATON_VECTOR_BYTES == 64
    write_vector(to, _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(values), _MM_FROUND_TO_NEAREST_INT));
#elif BATON_VECTOR_BYTES == 32
    write_vector(to, _mm256_cvtps_ph(reinterpret_cast<__m256>(values), _MM_FROUND_TO_NEAREST_INT));
#else
    for (int lane = 0; lane < kLanes; ++lane) narrow(values[lane], to + lane);
#endif
}

// The first `count` of kLanes values, which alone are read or written; the others are zero.
template <class T>
BATON_INLINE Floats load_first(const T* from, int64_t count) {
    T values[kLanes] = {};
    for (int64_t lane = 0; lane < count; ++lane) values[lane] = from[lane];
    return load(values);
}
template <class T>
BATON_INLINE void store_first(T* to, Floats values, int64_t count) {
    T rounded[kLanes];
    store(rounded, values);
    for (int64_t lane = 0; lane < count; ++lane) to[lane] = rounded[lane];
}

// As a T would hold it. Also a float is rounded here: the compiler may not make one operation of a product and the sum
// that it goes into.
BATON_INLINE Floats round_to(Floats values, const float*) {
#if defined(__x86_64__)
    asm("" : "+v"(values));
#elif defined(__aarch64__)
    asm("" : "+w"(values));
#endif
    return values;
}
template <class T>
BATON_INLINE Floats round_to(Floats values, const T*) {
    T rounded[kLanes];
    store(rounded, values);
    return load(rounded);
}

// y * 2^n for whole numbers n of at most 128, and of at least -126
BATON_INLINE Floats times_power_of_2(Floats y, Floats n) {
#if BATON_VECTOR_BYTES == 64
    return reinterpret_cast<Floats>(
        _mm512_maskz_scalef_ps(0xffff, reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(n)));
#else
    // two steps of the exponent, since 2^n may lie outside of the normal numbers
    const Ints whole = __builtin_convertvector(n, Ints), half = whole >> 1;
    return y * reinterpret_cast<Floats>((half + 127) << 23) * reinterpret_cast<Floats>((whole - half + 127) << 23);
#endif
}

// exp within 2 units of the last place; 0 below -87.3, infinity above 88.7.
BATON_INLINE Floats exponential(Floats x) {
    const Floats bounded = larger(x > 88.8f ? all_lanes(88.8f) : x, all_lanes(-87.4f));
    // x = n ln 2 + r, ln 2 in two parts; r within +-0.35
    const Floats shifted = bounded * 1.44269504f + 12582912.0f;
    const Floats n = shifted - 12582912.0f;
    const Floats r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
    Floats y = all_lanes(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    y = times_power_of_2(y, n);
    y = x < -87.3f ? Floats{} : y;
    return x != x ? x : y;
}
