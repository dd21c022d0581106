// How quantized weights of products lie in memory, their way there, and back to numbers that are multiplied.
//
// weight = scale * code + offset, where all inputs of a group share scale and offset. Panels and steps are those of
// plain weights (`linear_pack.inl`). A panel has its groups one after another, each with all it needs, so that a product
// reads one stream: the codes of the group's steps, the scales of the panel's outputs, and their offsets where there are
// some.
//
// Codes are decoded to the dtype T of x, which holds each of them exactly: a product with them is exact in float32, and
// only sums are rounded. Codes of 4 bits lie in words of 16: word w of a step has in its p-th 4 bits the w-th of the
// kLanes * inputs of part p of the panel. Then a vector of words is a vector of codes after a shift, for each part.

typedef int8_t Bytes __attribute__((vector_size(kLanes)));
typedef uint8_t PlainBytes __attribute__((vector_size(kLanes)));

// What T holds exactly.
BATON_INLINE void store_exact(float* to, Floats values) { store(to, values); }
BATON_INLINE void store_exact(Float16* to, Floats values) { store(to, values); }
BATON_INLINE void store_exact(Bfloat16* to, Floats values) {
    write_vector(to, __builtin_convertvector(reinterpret_cast<Words>(values) >> 16, Halves));
}

struct Int8Codes {
    static constexpr int64_t kBits = 8;
    static constexpr uint8_t kZero = 0;

    template <class T>
    BATON_INLINE void decode(T* to, const uint8_t* from) {
        for (int64_t first = 0; first < kStepElements<T>; first += kLanes)
            store_exact(to + first, __builtin_convertvector(read_vector<Bytes>(from + first), Floats));
    }
#if BATON_BF16_DOT
    BATON_INLINE void decode(Bfloat16* to, const uint8_t* from) {
        for (int64_t first = 0; first < kStepElements<Bfloat16>; first += 2 * kLanes) {
            const Floats low = __builtin_convertvector(read_vector<Bytes>(from + first), Floats);
            const Floats high = __builtin_convertvector(read_vector<Bytes>(from + first + kLanes), Floats);
            write_vector(to + first,
                         _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low)));
        }
    }
#endif
};

// 0 .. 15 stand for -8 .. 7.
struct Int4Codes {
    static constexpr int64_t kBits = 4;
    static constexpr uint8_t kZero = 8;

    template <class T>
    BATON_INLINE void decode(T* to, const uint8_t* from) {
        constexpr int64_t kPartElements = kLanes * Packing<T>::kInputs;
        for (int64_t first = 0; first < kPartElements; first += kLanes) {
            const Ints words = __builtin_convertvector(read_vector<Halves>(from + first * 2), Ints);
            for (int part = 0; part < kPanelVectors; ++part)
                store_exact(to + part * kPartElements + first,
                            __builtin_convertvector(((words >> (4 * part)) & 15) - kZero, Floats));
        }
    }
#if BATON_BF16_DOT
    BATON_INLINE void decode(Bfloat16* to, const uint8_t* from) {
        // the upper half of the floats -8.0 .. 7.0, twice: of an index only five bits count
        alignas(64) static const uint16_t values[32] = {
            0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000,
            0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
            0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
        const __m512i table = read_vector<__m512i>(values), words = read_vector<__m512i>(from);
        for (int part = 0; part < kPanelVectors; ++part)
            write_vector(to + part * 2 * kLanes, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * part), table));
    }
#endif
};

// Floats of 8 bits: a sign, 4 bits of exponent, 3 of the fraction. Codes that are no number are refused before.
struct E4m3Codes {
    static constexpr int64_t kBits = 8;
    static constexpr uint8_t kZero = 0;

    template <class T>
    BATON_INLINE void decode(T* to, const uint8_t* from) {
        for (int64_t first = 0; first < kStepElements<T>; first += kLanes) {
            const Words bits = __builtin_convertvector(read_vector<PlainBytes>(from + first), Words);
            // the exponent moves by 120; numbers below the normal ones come out right as well
            const Floats moved = reinterpret_cast<Floats>(((bits & 0x80) << 24) | ((bits & 0x7f) << 20));
            store_exact(to + first, moved * from_bits(0x7b800000));
        }
    }
};

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
                to[element] = code;
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
