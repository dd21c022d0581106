// How quantized weights of products lie in memory, their way there, and back to numbers that are multiplied.
//
// weight = scale * code + offset, where all inputs of a group share scale and offset. Panels and steps are those of
// plain weights (`linear_pack.inl`). A panel has its groups one after another, each with all it needs, so that a product
// reads one stream: the codes of the group's steps, the scales of the panel's outputs, and their offsets where there are
// some.
//
// Codes are decoded to the dtype T of x, which holds each of them exactly: a product with them is exact in float32, and
// only sums are rounded. For dot products of bfloat16 they are decoded to code + kBias, which takes fewer instructions
// and is exact as well; kBias times the sum of the group's inputs is subtracted from the group's sum.
//
// Codes of 8 bits lie as plain weights do. Those of 4 bits lie in words of 16: word w of a step has in its p-th 4 bits
// the w-th weight of part p of the panel. For dot products both lie as their decoding says.

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

#if BATON_BF16_DOT
template <class T>
constexpr bool kIsDot = Packing<T>::kInputs == 2;

// The bfloat16 of 128 magnitudes, as its lower and its upper byte.
struct ByteTable {
    alignas(64) uint8_t low[128], high[128];
};
constexpr ByteTable byte_table(float (*value_of)(int)) {
    ByteTable table = {};
    for (int magnitude = 0; magnitude < 128; ++magnitude) {
        const uint32_t bits = __builtin_bit_cast(uint32_t, value_of(magnitude));
        table.low[magnitude] = static_cast<uint8_t>(bits >> 16);
        table.high[magnitude] = static_cast<uint8_t>(bits >> 24);
    }
    return table;
}

BATON_INLINE __m512i looked_up(__m512i codes, const uint8_t* table) {
    return _mm512_permutex2var_epi8(read_vector<__m512i>(table), codes, read_vector<__m512i>(table + 64));
}

// Codes of a sign and 7 bits of magnitude, for two parts in 64 bytes.
BATON_INLINE void pairs_by_table(__m512i* pairs, const uint8_t* from, const ByteTable& table) {
    for (int part = 0; part < kPanelVectors; part += 2, from += 64) {
        const __m512i codes = read_vector<__m512i>(from);
        const __m512i low = looked_up(codes, table.low), sign = _mm512_set1_epi8(static_cast<char>(0x80));
        const __m512i high = _mm512_or_si512(looked_up(codes, table.high), _mm512_and_si512(codes, sign));
        pairs[part] = _mm512_unpacklo_epi8(low, high);
        pairs[part + 1] = _mm512_unpackhi_epi8(low, high);
    }
}

// Where such a code lies: an interleaving of bytes takes 8 of each 16.
constexpr int64_t place_by_table(int64_t element) {
    const int64_t part = element / (2 * kLanes), within = element % (2 * kLanes);
    return part / 2 * 64 + within / 8 * 16 + part % 2 * 8 + within % 8;
}
#else
template <class T>
constexpr bool kIsDot = false;
#endif

// Each kind of codes decodes those of one step. `floats` gives those of kLanes outputs of a part and one of the step's
// kInputs inputs; `pairs`, for dot products, of each part both inputs side by side and kBias larger.
//
// `place`: where the code of an element of a step lies, as plain weights count them. `stored`: how.
struct Int8Codes {
    static constexpr int64_t kBits = 8;
    static constexpr uint8_t kZero = 0;
    static constexpr float kBias = 0.5f;  // makes a sign and a magnitude of all of -128 .. 127

    template <int kInputs>
    BATON_INLINE Floats floats(const uint8_t* from, int part, int input) {
        return signed_byte(widen_bytes(from + (part * kInputs + input) * kLanes));
    }
#if BATON_BF16_DOT
    static constexpr float magnitude(int bits) { return static_cast<float>(bits) + kBias; }
    BATON_INLINE void pairs(__m512i* pairs, const uint8_t* from) {
        static constexpr ByteTable table = byte_table(magnitude);
        pairs_by_table(pairs, from, table);
    }
#endif
    template <class T>
    static constexpr int64_t place(int64_t element) {
#if BATON_BF16_DOT
        if constexpr (kIsDot<T>) return place_by_table(element);
#endif
        // of each part first inputs, then second ones
        constexpr int64_t kInputs = Packing<T>::kInputs;
        const int64_t part = element / (kLanes * kInputs), within = element % (kLanes * kInputs);
        return part * kLanes * kInputs + within % kInputs * kLanes + within / kInputs;
    }
    template <class T>
    static constexpr uint8_t stored(uint8_t code) {
        return kIsDot<T> && code >= 0x80 ? code ^ 0x7f : code;
    }
};

// The codes of 4 bits of a step: those of a part and an input are in 4 bits of each word.
template <int kInputs>
BATON_INLINE Words words_of(const uint8_t* from) {
    if constexpr (kInputs == 1) return __builtin_convertvector(read_vector<Halves>(from), Words);
    return read_vector<Words>(from);
}

// 0 .. 15 stand for -8 .. 7.
struct Int4Codes {
    static constexpr int64_t kBits = 4;
    static constexpr uint8_t kZero = 8;
    static constexpr float kBias = 24.0f;  // 16 .. 31 have the code in the upper bits of their fraction

    template <int kInputs>
    BATON_INLINE Floats floats(const uint8_t* from, int part, int input) {
        const Words codes = (words_of<kInputs>(from) >> (16 * input + 4 * part)) & 15;
        return __builtin_convertvector(reinterpret_cast<Ints>(codes) - kZero, Floats);
    }
#if BATON_BF16_DOT
    static constexpr int kRotation = 3;  // of each pair of words in memory: those of part 0 lie where they are needed
    BATON_INLINE void pairs(__m512i* pairs, const uint8_t* from) {
        const __m512i words = read_vector<__m512i>(from);
        pairs[0] = larger_by_bias(words);
        pairs[1] = larger_by_bias(_mm512_maskz_ror_epi32(0xffff, words, 4));
        pairs[2] = larger_by_bias(_mm512_maskz_ror_epi32(0xffff, words, 8));
        pairs[3] = larger_by_bias(_mm512_maskz_ror_epi32(0xffff, words, 12));
    }
    BATON_INLINE __m512i larger_by_bias(__m512i words) {
        constexpr int kAndThenOr = 0xea;
        return _mm512_ternarylogic_epi32(words, _mm512_set1_epi32(0x00780078), _mm512_set1_epi32(0x41804180),
                                         kAndThenOr);
    }
#endif
};

// Floats of 4 bits: a sign, 2 bits of exponent, one of the fraction. They lie as the codes of Int4Codes.
struct E2m1Codes {
    static constexpr int64_t kBits = 4;
    static constexpr uint8_t kZero = 0;
    static constexpr float kBias = 0.0f;

    template <int kInputs>
    BATON_INLINE Floats floats(const uint8_t* from, int part, int input) {
        const Words codes = words_of<kInputs>(from) >> (16 * input + 4 * part);
        // the exponent moves by 126; 0.5, which is below the normal numbers there, comes out right as well
        return reinterpret_cast<Floats>(((codes & 8) << 28) | ((codes & 7) << 22)) * from_bits(0x7e800000);
    }
#if BATON_BF16_DOT
    static constexpr int kRotation = 0;
    // Twice the bfloat16 of all codes: the lowest bit of the code behind does not count.
    alignas(64) static constexpr uint16_t kTable[32] = {
        0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
        0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
        0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    BATON_INLINE void pairs(__m512i* pairs, const uint8_t* from) {
        const __m512i words = read_vector<__m512i>(from), table = read_vector<__m512i>(kTable);
        pairs[0] = _mm512_permutexvar_epi16(words, table);
        pairs[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
        pairs[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
        pairs[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
    }
#endif
};

// Floats of 8 bits: a sign, 4 bits of exponent, 3 of the fraction. Codes that are no number are refused before.
struct E4m3Codes {
    static constexpr int64_t kBits = 8;
    static constexpr uint8_t kZero = 0;
    static constexpr float kBias = 0.0f;

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
#if BATON_BF16_DOT
    static constexpr float magnitude(int bits) {
        float value = static_cast<float>(bits < 8 ? bits : 8 + bits % 8) / 512.0f;
        for (int exponent = 1; exponent < bits / 8; ++exponent) value *= 2.0f;
        return value;
    }
    BATON_INLINE void pairs(__m512i* pairs, const uint8_t* from) {
        static constexpr ByteTable table = byte_table(magnitude);
        pairs_by_table(pairs, from, table);
    }
#endif
    template <class T>
    static constexpr int64_t place(int64_t element) {
#if BATON_BF16_DOT
        if constexpr (kIsDot<T>) return place_by_table(element);
#endif
        return element;
    }
    template <class T>
    static constexpr uint8_t stored(uint8_t code) {
        return code;
    }
};

// What is multiplied is larger by this than the code.
template <class T, class Codes>
constexpr float kBiasOf = kIsDot<T> ? Codes::kBias : 0.0f;

// The codes of a step as plain weights. T holds each of them exactly.
template <class Codes, class T>
BATON_INLINE void decode(T* to, const uint8_t* from) {
    for (int part = 0; part < kPanelVectors; ++part)
        store(to + part * kLanes, Codes::template floats<1>(from, part, 0));
}
template <class Codes>
BATON_INLINE void decode(Bfloat16* to, const uint8_t* from) {
#if BATON_BF16_DOT
    __m512i pairs[kPanelVectors];
    Codes::pairs(pairs, from);
    for (int part = 0; part < kPanelVectors; ++part) write_vector(to + part * 2 * kLanes, pairs[part]);
#else
    for (int part = 0; part < kPanelVectors; ++part) {
        const Words low = reinterpret_cast<Words>(Codes::template floats<2>(from, part, 0));
        const Words high = reinterpret_cast<Words>(Codes::template floats<2>(from, part, 1));
        write_vector(to + part * 2 * kLanes, high | (low >> 16));
    }
#endif
}

// Where the groups of a panel lie. Sizes in bytes.
struct Grouping {
    int64_t steps, num_groups, code_bytes, scale_bytes, group_bytes;
    int64_t panel_bytes() const { return num_groups * group_bytes; }
};

BATON_INLINE int64_t bytes_of_scale(int32_t dtype) { return dtype == BATON_FLOAT32 ? 4 : dtype == BATON_FLOAT16 ? 2 : 1; }

template <class T, class Codes>
BATON_INLINE Grouping grouping(int64_t num_in, int64_t group_size, int32_t scale_dtype, bool has_offsets) {
    Grouping g;
    g.steps = num_steps<T>(group_size);
    g.num_groups = divided_up(num_in, group_size);
    g.code_bytes = kStepElements<T> * Codes::kBits / 8;
    g.scale_bytes = kPanelOutputs * bytes_of_scale(scale_dtype);
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
            case BATON_E2M1: BATON_BY_DTYPE_OF(dtype, E2m1Codes, function, __VA_ARGS__); break; \
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

// Codes of 4 bits lie in words as the processor reads them.
template <class T, class Codes>
BATON_INLINE void rotate_step(uint8_t* to) {
#if BATON_BF16_DOT
    if constexpr (Codes::kBits == 4 && kIsDot<T>)
        write_vector(to, _mm512_maskz_rol_epi32(0xffff, read_vector<__m512i>(to), Codes::kRotation));
#endif
}

// One step, code by code.
template <class T, class Codes>
BATON_INLINE void pack_step(uint8_t* to, const BatonQuantizedPack& a, int64_t panel, int64_t first_input) {
    constexpr int64_t kInputs = Packing<T>::kInputs, kPartElements = kLanes * kInputs;
    if constexpr (Codes::kBits == 4) __builtin_memset(to, 0, kStepElements<T> / 2);
    for (int64_t element = 0; element < kStepElements<T>; ++element) {
        const int64_t output = panel * kPanelOutputs + element / kInputs;
        const uint8_t code = code_at<Codes>(a, output, first_input + element % kInputs);
        if constexpr (Codes::kBits == 8) {
            to[Codes::template place<T>(element)] = Codes::template stored<T>(code);
        } else {
            const int64_t part = element / kPartElements, word = element % kPartElements;
            to[word * 2 + part / 2] |= static_cast<uint8_t>(code << (4 * (part % 2)));
        }
    }
    rotate_step<T, Codes>(to);
}

// One step of columns whose words have its codes in their lowest bits, a vector for each part of the panel.
template <class T, class Codes>
BATON_INLINE void pack_step(uint8_t* to, const Words (&codes)[kPanelVectors]) {
    constexpr int64_t kInputs = Packing<T>::kInputs;
    if constexpr (Codes::kBits == 8) {
        typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
        uint8_t plain[kStepElements<T>];
        for (int part = 0; part < kPanelVectors; ++part) {
            if constexpr (kInputs == 2) {
                write_vector(plain + part * 2 * kLanes, __builtin_convertvector(codes[part] & 0xffff, Halves));
            } else {
                write_vector(plain + part * kLanes, __builtin_convertvector(codes[part] & 0xff, Bytes));
            }
        }
        for (int64_t element = 0; element < kStepElements<T>; ++element)
            plain[element] = Codes::template stored<T>(plain[element]);
        constexpr int64_t kTogether = kIsDot<T> ? 8 : 1;  // neighbours that stay neighbours
        for (int64_t element = 0; element < kStepElements<T>; element += kTogether)
            __builtin_memcpy(to + Codes::template place<T>(element), plain + element, kTogether);
    } else {
        Words words = {};
        for (int part = 0; part < kPanelVectors; ++part)
            words |= ((codes[part] & 15) | ((codes[part] << 12) & 0xf0000)) << (4 * part);
        if constexpr (kInputs == 2) {
            write_vector(to, words);
        } else {
            write_vector(to, __builtin_convertvector(words & 0xffff, Halves));
        }
        rotate_step<T, Codes>(to);
    }
}

template <class T, class Codes>
BATON_INLINE void pack_codes(uint8_t* panel_begin, const BatonQuantizedPack& a, const Grouping& g, int64_t panel) {
    constexpr int64_t kInputs = Packing<T>::kInputs, kStepBits = kInputs * Codes::kBits, kStepsOfWord = 32 / kStepBits;
    constexpr int64_t kStepsAtOnce = kLanes * kStepsOfWord;
    const auto place = [&](int64_t step) {
        return panel_begin + step / g.steps * g.group_bytes + step % g.steps * g.code_bytes;
    };
    const bool are_in_order = a.group_size % kInputs == 0;  // else a group ends within a step
    const int64_t whole = are_in_order ? a.num_in / (kStepsAtOnce * kInputs) * kStepsAtOnce : 0;
    const uint8_t* rows[kPanelOutputs];
    rows_of_panel(rows, a.codes, panel, a.num_out, a.codes_stride);
    const Words padding = Words{} + (Codes::kBits == 8 ? 0x01010101u : 0x11111111u) * Codes::kZero;
    for (int64_t first = 0; first < whole; first += kStepsAtOnce) {
        Words columns[kPanelVectors][kLanes];
        for (int part = 0; part < kPanelVectors; ++part)
            read_square(columns[part], rows + part * kLanes, first * kStepBits / 8, padding);
        for (int64_t i = 0; i < kStepsAtOnce; ++i) {
            Words codes[kPanelVectors];
            for (int part = 0; part < kPanelVectors; ++part)
                codes[part] = columns[part][i / kStepsOfWord] >> (i % kStepsOfWord * kStepBits);
            pack_step<T, Codes>(place(first + i), codes);
        }
    }
    for (int64_t step = whole; step < g.num_groups * g.steps; ++step)
        pack_step<T, Codes>(place(step), a, panel, step / g.steps * a.group_size + step % g.steps * kInputs);
}

BATON_INLINE void pack_scales(uint8_t* to, const float* values, const BatonQuantizedPack& a, int64_t panel,
                              int64_t group, int64_t num_groups) {
    for (int64_t place = 0; place < kPanelOutputs; ++place) {
        const int64_t output = panel * kPanelOutputs + place;
        const float value = output < a.num_out ? values[output * num_groups + group] : 0.0f;
        if (a.scale_dtype == BATON_FLOAT16) {
            narrow(value, reinterpret_cast<Float16*>(to) + place);
        } else if (a.scale_dtype == BATON_E8M0) {
            to[place] = static_cast<uint8_t>(to_bits(value) >> 23);
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
        pack_codes<T, Codes>(to, a, g, panel);
        for (int64_t group = 0; group < g.num_groups; ++group, to += g.group_bytes) {
            uint8_t* scales = to + g.steps * g.code_bytes;
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
