// How quantized weights lie in memory that multiply rounded rows.
//
// Panels as in `linear_pack.inl`, their groups one after another as in `quantized_pack.inl`: codes, scales, offsets. A
// step is a word of each output of the panel: four inputs in 8 bits, or eight in 4 bits, where the lower halves of the
// bytes are the first four. Codes are stored as what they are above the least one, which their bias takes off again.

constexpr int64_t kWordBytes = kPanelOutputs * 4;  // of the panel's words

struct ByteWeights {
    static constexpr int64_t kBits = 8, kInputs = 4;
    static constexpr uint8_t kZero = kWeightsAreSigned ? 0 : 0x80;
    static constexpr int32_t kBias = kWeightsAreSigned ? 0 : 128;
    static constexpr float kUnit = 1.0f;  // of what a whole number stands for
    static constexpr uint8_t stored(uint8_t code) { return kWeightsAreSigned ? code : code ^ 0x80; }
    // The four inputs number `four` of a step.
    template <int kFour>
    BATON_INLINE Words read(const uint8_t* from) {
        return read_vector<Words>(from);
    }
};

struct HalfByteWeights {
    static constexpr int64_t kBits = 4, kInputs = 8;
    static constexpr uint8_t kZero = 8;
    static constexpr int32_t kBias = 8;
    static constexpr float kUnit = 1.0f;
    static constexpr uint8_t stored(uint8_t code) { return code; }
    template <int kFour>
    BATON_INLINE Words read(const uint8_t* from) {
        return read_vector<Words>(from) >> (4 * kFour) & 0x0f0f0f0f;
    }
};

// Twice the numbers of E2M1, which are whole ones then.
struct E2m1Weights {
    static constexpr int64_t kBits = 4, kInputs = 8;
    static constexpr uint8_t kZero = 0;
    static constexpr int32_t kBias = kWeightsAreSigned ? 0 : 12;
    static constexpr float kUnit = 0.5f;
    static constexpr uint8_t stored(uint8_t code) { return code; }
    template <int kFour>
    BATON_INLINE Words read(const uint8_t* from) {
        return doubled_e2m1(read_vector<Words>(from) >> (4 * kFour) & 0x0f0f0f0f);
    }
};

// A unit is what has one scale and one offset of weights and one scale of x: its sums are whole numbers.
BATON_INLINE int64_t unit_inputs(const int64_t num_in, int64_t group_size) {
    if (group_size == num_in) return kScaledInputs;
    for (int64_t inputs = kScaledInputs; inputs >= kSummedInputs; inputs /= 2)
        if (group_size % inputs == 0) return inputs;
    return 0;
}

// Where units and groups of a panel lie. Sizes in bytes.
struct Units {
    int64_t inputs, num, per_group, code_bytes, scale_bytes, group_bytes, num_groups;
    int64_t panel_bytes() const { return num_groups * group_bytes; }
    const uint8_t* codes(const uint8_t* panel, int64_t unit) const {
        return panel + unit / per_group * group_bytes + unit % per_group * code_bytes;
    }
};

template <class Weights>
BATON_INLINE Units units_of(int64_t num_in, int64_t group_size, int32_t scale_dtype, bool has_offsets) {
    Units u;
    u.inputs = unit_inputs(num_in, group_size);
    u.num = divided_up(num_in, u.inputs);
    u.per_group = divided_up(group_size, u.inputs);
    u.code_bytes = u.inputs * kPanelOutputs * Weights::kBits / 8;
    u.scale_bytes = kPanelOutputs * bytes_of_scale(scale_dtype);
    u.group_bytes = u.per_group * u.code_bytes + u.scale_bytes * (has_offsets ? 2 : 1);
    u.num_groups = divided_up(u.num, u.per_group);
    return u;
}

#define BATON_BY_WEIGHTS(codes, function, ...)                                  \
    switch (codes) {                                                            \
        case BATON_INT8: function<ByteWeights>(__VA_ARGS__); break;             \
        case BATON_INT4: function<HalfByteWeights>(__VA_ARGS__); break;         \
        case BATON_E2M1: function<E2m1Weights>(__VA_ARGS__); break;             \
    }

template <class Weights>
void rounded_pack_bytes_of(int64_t* bytes, const BatonQuantizedPack& a) {
    const Units u = units_of<Weights>(a.num_in, a.group_size, a.scale_dtype, a.offsets != nullptr);
    *bytes = divided_up(a.num_out, kPanelOutputs) * u.panel_bytes();
}

int64_t rounded_pack_bytes(const BatonQuantizedPack& arguments) {
    int64_t bytes = 0;
    if (unit_inputs(arguments.num_in, arguments.group_size) == 0) return 0;
    BATON_BY_WEIGHTS(arguments.codes_kind, rounded_pack_bytes_of, &bytes, arguments);
    return bytes;
}

// The code of an output and an input, or of zero in place of one that is padding.
template <class Weights>
BATON_INLINE uint8_t stored_at(const BatonQuantizedPack& a, int64_t output, int64_t k) {
    if (output >= a.num_out || k >= a.num_in) return Weights::kZero;
    const uint8_t* row = static_cast<const uint8_t*>(a.codes) + output * a.codes_stride;
    if constexpr (Weights::kBits == 8) return Weights::stored(row[k]);
    return Weights::stored((row[k / 2] >> (4 * (k % 2))) & 15);
}

template <class Weights>
BATON_INLINE void pack_step(uint8_t* to, const BatonQuantizedPack& a, int64_t panel, int64_t first_input) {
    for (int64_t place = 0; place < kPanelOutputs; ++place)
        for (int64_t k = 0; k < 4; ++k, ++to) {
            const int64_t output = panel * kPanelOutputs + place;
            *to = stored_at<Weights>(a, output, first_input + k);
            if constexpr (Weights::kBits == 4)
                *to |= static_cast<uint8_t>(stored_at<Weights>(a, output, first_input + 4 + k) << 4);
        }
}

template <class Weights>
void rounded_pack_of(Pool& threads, const BatonQuantizedPack& a) {
    const Units u = units_of<Weights>(a.num_in, a.group_size, a.scale_dtype, a.offsets != nullptr);
    threads.each(divided_up(a.num_out, kPanelOutputs), [&](int64_t panel, int) {
        uint8_t* to = static_cast<uint8_t*>(a.packed) + panel * u.panel_bytes();
        const int64_t group_inputs = u.per_group * u.inputs;
        for (int64_t group = 0; group < u.num_groups; ++group) {
            for (int64_t k = 0; k < group_inputs; k += Weights::kInputs, to += kWordBytes)
                pack_step<Weights>(to, a, panel, group * group_inputs + k);
            pack_scales(to, static_cast<const float*>(a.scales), a, panel, group, u.num_groups);
            to += u.scale_bytes;
            if (a.offsets == nullptr) continue;
            pack_scales(to, static_cast<const float*>(a.offsets), a, panel, group, u.num_groups);
            to += u.scale_bytes;
        }
    });
}

void rounded_pack(Pool& threads, const BatonQuantizedPack& arguments) {
    BATON_BY_WEIGHTS(arguments.codes_kind, rounded_pack_of, threads, arguments);
}
