// How quantized weights of products lie in memory, their way there, and back to numbers that are multiplied.
//
// weight = scale * code + offset, where all inputs of a group share scale and offset. Panels and steps are those of
// plain weights (`linear_pack.inl`). A panel has its groups one after another, each with all it needs, so that a product
// reads one stream: the codes of the group's steps, the scales of the panel's outputs, and their offsets where there are
// some.
//
// Codes are decoded to the dtype T of x, which holds each of them exactly: a product with them is exact in float32, and
// only sums are rounded. Codes of 8 bits lie as plain weights do. Those of 4 bits lie in words of 16: word w of a step
// has in its p-th 4 bits the w-th weight of part p of the panel.

// kLanes bytes as words.
BATON_INLINE Words widen_bytes(const uint8_t* from) {
#if BATON_VECTOR_BYTES == 64
    return reinterpret_cast<Words>(_mm512_maskz_cvtepu8_epi32(0xffff, read_vector<__m128i>(from)));
#elif BATON_VECTOR_BYTES == 32
    return reinterpret_cast<Words>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(read_vector<int64_t>(from))));
#else
    return Words{from[0], from[1], from[2], from[3]};
#endif
}

// The signed number in the lowest byte of each word.
BATON_INLINE Floats signed_byte(Words words) {
    return __builtin_convertvector(reinterpret_cast<Ints>(words << 24) >> 24, Floats);
}

// Each kind of codes decodes those of one step, a vector at a time: `floats` gives those of kLanes outputs of a part and
// one of the step's kInputs inputs, `pairs` both inputs of them side by side as the dot product of bfloat16 takes them.
//
// `place`: where the code of an element of a step lies, as plain weights count them.
struct Int8Codes {
    static constexpr int64_t kBits = 8;
    static constexpr uint8_t kZero = 0;

    template <int kInputs>
    BATON_INLINE Floats floats(const uint8_t* from, int part, int input) {
        return signed_byte(widen_bytes(from + (part * kInputs + input) * kLanes));
    }
    // of each part first inputs, then second ones
    template <int64_t kInputs>
    static constexpr int64_t place(int64_t element) {
        const int64_t part = element / (kLanes * kInputs), within = element % (kLanes * kInputs);
        return part * kLanes * kInputs + within % kInputs * kLanes + within / kInputs;
    }
#if BATON_BF16_DOT
    BATON_INLINE Floats signed_bytes(const uint8_t* from) {
        return __builtin_convertvector(
            reinterpret_cast<Ints>(_mm512_maskz_cvtepi8_epi32(0xffff, read_vector<__m128i>(from))), Floats);
    }
    BATON_INLINE __m512i pairs(const uint8_t* from, int part) {
        const Words low = reinterpret_cast<Words>(signed_bytes(from + part * 2 * kLanes));
        const Words high = reinterpret_cast<Words>(signed_bytes(from + part * 2 * kLanes + kLanes));
        return (__m512i)(high | (low >> 16));
    }
#endif
};

// 0 .. 15 stand for -8 .. 7.
struct Int4Codes {
    static constexpr int64_t kBits = 4;
    static constexpr uint8_t kZero = 8;

    template <int kInputs>
    BATON_INLINE Floats floats(const uint8_t* from, int part, int input) {
        Words words;
        if constexpr (kInputs == 1) {
            words = __builtin_convertvector(read_vector<Halves>(from), Words);
        } else {
            words = read_vector<Words>(from);
        }
        const Words codes = (words >> (16 * input + 4 * part)) & 15;
        return __builtin_convertvector(reinterpret_cast<Ints>(codes) - kZero, Floats);
    }
#if BATON_BF16_DOT
    BATON_INLINE __m512i pairs(const uint8_t* from, int part) {
        // the upper half of the floats -8.0 .. 7.0, twice: of an index five bits count
        alignas(64) static const uint16_t values[32] = {
            0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000,
            0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
            0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
        const __m512i words = _mm512_srli_epi16(read_vector<__m512i>(from), 4 * part);
        return _mm512_permutexvar_epi16(words, read_vector<__m512i>(values));
    }
#endif
};

// Floats of 8 bits: a sign, 4 bits of exponent, 3 of the fraction. Codes that are no number are refused before.
struct E4m3Codes {
    static constexpr int64_t kBits = 8;
    static constexpr uint8_t kZero = 0;

    template <int kInputs>
    BATON_INLINE Floats floats(const uint8_t* from, int part, int input) {
        Words bits;
        if constexpr (kInputs == 1) {
            bits = widen_bytes(from + part * kLanes);
        } else {
            bits = __builtin_convertvector(read_vector<Halves>(from + part * 2 * kLanes), Words) >> (8 * input);
        }
        // the exponent moves by 120; numbers below the normal ones come out right as well
        return reinterpret_cast<Floats>(((bits & 0x80) << 24) | ((bits & 0x7f) << 20)) * from_bits(0x7b800000);
    }
    template <int64_t kInputs>
    static constexpr int64_t place(int64_t element) {
        return element;
    }
#if BATON_BF16_DOT
    BATON_INLINE __m512i pairs(const uint8_t* from, int part) {
        const __m512i codes = _mm512_maskz_cvtepu8_epi16(0xffffffff, read_vector<__m256i>(from + part * 32));
        const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
        const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
        // the eight below the normal ones, as often as five bits of an index count
        alignas(64) static const uint16_t small[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
        const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
        const __m512i value =
            _mm512_mask_permutexvar_epi16(normal, is_small, magnitude, read_vector<__m512i>(small));
        return _mm512_or_si512(value, _mm512_slli_epi16(_mm512_sub_epi16(codes, magnitude), 8));
    }
#endif
};

// The codes of a step as plain weights. T holds each of them exactly.
template <class Codes, class T>
BATON_INLINE void decode(T* to, const uint8_t* from) {
    for (int part = 0; part < kPanelVectors; ++part)
        store(to + part * kLanes, Codes::template floats<1>(from, part, 0));
}
template <class Codes>
BATON_INLINE void decode(Bfloat16* to, const uint8_t* from) {
    for (int part = 0; part < kPanelVectors; ++part) {
#if BATON_BF16_DOT
        write_vector(to + part * 2 * kLanes, Codes::pairs(from, part));
#else
        const Words low = reinterpret_cast<Words>(Codes::template floats<2>(from, part, 0));
        const Words high = reinterpret_cast<Words>(Codes::template floats<2>(from, part, 1));
        write_vector(to + part * 2 * kLanes, high | (low >> 16));
#endif
    }
}

// Where the groups of a panel lie. Sizes in bytes.
struct Grouping {
    int64_t steps, num_groups, code_bytes, scale_bytes, group_bytes;
    int64_t panel_bytes() const { return num_groups * group_bytes; }
};

template <class T, class Codes>
BATON_INLINE Grouping grouping(int64_t num_in, int64_t group_size, int32_t scale_dtype, bool has_offsets) {
    Grouping g;
    g.steps = num_steps<T>(group_size);
    g.num_groups = divided_up(num_in, group_size);
    g.code_bytes = kStepElements<T> * Codes::kBits / 8;
    g.scale_bytes = kPanelOutputs * (scale_dtype == BATON_FLOAT16 ? 2 : 4);
    g.group_bytes = g.steps * g.code_bytes + g.scale_bytes * (has_offsets ? 2 : 1);
    return g;
}

// Calls `function<T, Codes>` of the dtype and the kind of codes.
#define BATON_BY_CODES(dtype, codes, function, ...)                               \
    do {                                                                          \
        switch (codes) {                                                          \
            case BATON_INT8: BATON_BY_DTYPE_OF(dtype, Int8Codes, function, __VA_ARGS__); break; \
            case BATON_INT4: BATON_BY_DTYPE_OF(dtype, Int4Codes, function, __VA_ARGS__); break; \
            case BATON_E4M3: BATON_BY_DTYPE_OF(dtype, E4m3Codes, function, __VA_ARGS__); break; \
        }                                                                         \
    } while (0)
#define BATON_BY_DTYPE_OF(dtype, kind, function, ...)                        \
    switch (dtype) {                                                         \
        case BATON_FLOAT32: function<float, kind>(__VA_ARGS__); break;       \
        case BATON_BFLOAT16: function<Bfloat16, kind>(__VA_ARGS__); break;   \
        case BATON_FLOAT16: function<Float16, kind>(__VA_ARGS__); break;     \
    }

template <class T, class Codes>
void quantized_bytes_of(int64_t* bytes, const BatonQuantizedPack& a) {
    const Grouping g = grouping<T, Codes>(a.num_in, a.group_size, a.scale_dtype, a.offsets != nullptr);
    *bytes = divided_up(a.num_out, kPanelOutputs) * g.panel_bytes();
}

int64_t quantized_bytes(const BatonQuantizedPack& arguments) {
    int64_t bytes = 0;
    BATON_BY_CODES(arguments.dtype, arguments.codes_kind, quantized_bytes_of, &bytes, arguments);
    return bytes;
}

// The code of an output and an input, or of zero in place of one that is padding.
template <class Codes>
BATON_INLINE uint8_t code_at(const BatonQuantizedPack& a, int64_t output, int64_t k) {
    if (output >= a.num_out || k >= a.num_in) return Codes::kZero;
    const uint8_t* row = static_cast<const uint8_t*>(a.codes) + output * a.codes_stride;
    if constexpr (Codes::kBits == 8) return row[k];
    return (row[k / 2] >> (4 * (k % 2))) & 15;
}

template <class T, class Codes>
BATON_INLINE void pack_group_codes(uint8_t* to, const BatonQuantizedPack& a, int64_t panel, int64_t first_input,
                                   int64_t steps) {
    constexpr int64_t kInputs = Packing<T>::kInputs, kPartElements = kLanes * kInputs;
    for (int64_t step = 0; step < steps; ++step, to += kStepElements<T> * Codes::kBits / 8) {
        if constexpr (Codes::kBits == 4) __builtin_memset(to, 0, kStepElements<T> / 2);
        for (int64_t element = 0; element < kStepElements<T>; ++element) {
            const int64_t output = panel * kPanelOutputs + element / kInputs;
            const uint8_t code = code_at<Codes>(a, output, first_input + step * kInputs + element % kInputs);
            if constexpr (Codes::kBits == 8) {
                to[Codes::template place<kInputs>(element)] = code;
            } else {
                const int64_t part = element / kPartElements, word = element % kPartElements;
                to[word * 2 + part / 2] |= static_cast<uint8_t>(code << (4 * (part % 2)));
            }
        }
    }
}

BATON_INLINE void pack_scales(uint8_t* to, const float* values, const BatonQuantizedPack& a, int64_t panel,
                              int64_t group, int64_t num_groups) {
    for (int64_t place = 0; place < kPanelOutputs; ++place) {
        const int64_t output = panel * kPanelOutputs + place;
        const float value = output < a.num_out ? values[output * num_groups + group] : 0.0f;
        if (a.scale_dtype == BATON_FLOAT16) {
            narrow(value, reinterpret_cast<Float16*>(to) + place);
        } else {
            __builtin_memcpy(to + place * 4, &value, 4);
        }
    }
}

template <class T, class Codes>
void quantized_pack_of(Pool& threads, const BatonQuantizedPack& a) {
    const Grouping g = grouping<T, Codes>(a.num_in, a.group_size, a.scale_dtype, a.offsets != nullptr);
    threads.each(divided_up(a.num_out, kPanelOutputs), [&](int64_t panel, int) {
        uint8_t* to = static_cast<uint8_t*>(a.packed) + panel * g.panel_bytes();
        for (int64_t group = 0; group < g.num_groups; ++group, to += g.group_bytes) {
            uint8_t* scales = to + g.steps * g.code_bytes;
            pack_group_codes<T, Codes>(to, a, panel, group * a.group_size, g.steps);
            pack_scales(scales, static_cast<const float*>(a.scales), a, panel, group, g.num_groups);
            if (a.offsets != nullptr)
                pack_scales(scales + g.scale_bytes, static_cast<const float*>(a.offsets), a, panel, group,
                            g.num_groups);
        }
    });
}

void quantized_pack(Pool& threads, const BatonQuantizedPack& arguments) {
    BATON_BY_CODES(arguments.dtype, arguments.codes_kind, quantized_pack_of, threads, arguments);
}
