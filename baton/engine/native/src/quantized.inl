// Products of rows of x with quantized weights: the tiles and sums of `linear.inl`. For few rows codes are decoded to
// registers while they stream by. For more of them a stretch of codes is decoded to plain weights in the first cache,
// which the inner loops of `linear_rows.inl` multiply.
//
// The sums of a group are those of its codes, and count with the group's scale when they are complete; the offset counts
// with the sum of the group's inputs. So scales and offsets are never rounded to a dtype, and as in `linear_rows.inl` a
// row has the same result whatever is computed with it.

#include "quantized_pack.inl"

// Decoded at once: what fits the first cache beside x.
constexpr int64_t kDecodedSteps = 64;
// Rows of a block: their sums, to which each group adds, stay in the first cache.
constexpr int64_t kMaxCodedRows = 64;

// sums[row] += x[row] * codes, for one step; in the order of `add_step`
template <class T, class Codes, int kRows>
BATON_INLINE void add_step_of_codes(Floats (*sums)[kPanelVectors], const uint8_t* codes, const char* x,
                                    int64_t x_stride) {
#if BATON_BF16_DOT
    if constexpr (kIsDot<T>) {
        __m512i loaded[kPanelVectors];
        Codes::pairs(loaded, codes);
        for (int row = 0; row < kRows; ++row) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(read_value<int>(x + row * x_stride));
            for (int part = 0; part < kPanelVectors; ++part)
                sums[row][part] =
                    reinterpret_cast<Floats>(_mm512_dpbf16_ps((__m512)sums[row][part], (__m512bh)loaded[part], pair));
        }
        return;
    }
#endif
    constexpr int kInputs = Packing<T>::kInputs;
    for (int input = 0; input < kInputs; ++input) {
        Floats loaded[kPanelVectors];
        for (int part = 0; part < kPanelVectors; ++part)
            loaded[part] = Codes::template floats<kInputs>(codes, part, input);
        for (int row = 0; row < kRows; ++row)
            for (int part = 0; part < kPanelVectors; ++part)
                sums[row][part] += loaded[part] * read_value<float>(x + row * x_stride + 4 * input);
    }
}

// What is multiplied: the rows of x at `x`, x_stride bytes apart, in `steps` steps.
struct Inputs {
    const char* x;
    int64_t x_stride, steps;
};

template <class T, class Codes, int kRows>
__attribute__((noinline)) void add_codes_of(float* stored, const uint8_t* codes, const Inputs in, bool is_first) {
    constexpr int64_t kCodeBytes = kStepElements<T> * Codes::kBits / 8;
    Floats sums[kRows][kPanelVectors] = {};
    if (!is_first)
        for (int row = 0; row < kRows; ++row)
            for (int part = 0; part < kPanelVectors; ++part)
                sums[row][part] = load(stored + row * kPanelOutputs + part * kLanes);
    for (int64_t step = 0; step < in.steps; ++step, codes += kCodeBytes) {
        for (int64_t line = 0; line < kCodeBytes; line += 64)
            __builtin_prefetch(codes + kStreamAhead + line, 0, kFetchToSecondCache);
        add_step_of_codes<T, Codes, kRows>(sums, codes, in.x + step * kInputBytes<T>, in.x_stride);
    }
    for (int row = 0; row < kRows; ++row)
        for (int part = 0; part < kPanelVectors; ++part)
            store(stored + row * kPanelOutputs + part * kLanes, sums[row][part]);
}

template <class T, class Codes, int kRows = kMaxRows>
BATON_INLINE void add_codes(int64_t num_rows, float* stored, const uint8_t* codes, const Inputs& in, bool is_first) {
    if (num_rows == kRows) {
        add_codes_of<T, Codes, kRows>(stored, codes, in, is_first);
    } else if constexpr (kRows > 1) {
        add_codes<T, Codes, kRows - 1>(num_rows, stored, codes, in, is_first);
    }
}

template <class T, int kRows = kMaxRows>
BATON_INLINE void add_decoded(int64_t num_rows, float* stored, const T* weights, const Inputs& in, bool is_first) {
    if (num_rows == kRows) {
        const Stretch<T> stretch = {weights, in.x, in.x_stride, in.steps, nullptr, 0};
        add_stretch<T, kRows, 0>(stored, stretch, is_first);
    } else if constexpr (kRows > 1) {
        add_decoded<T, kRows - 1>(num_rows, stored, weights, in, is_first);
    }
}

// Calls `add(first row, number of rows, inputs)` for some rows of a block after the others, kMaxRows at most.
template <class T, class Add>
BATON_INLINE void for_rows(const Block<T>& block, int64_t first_input, int64_t steps, const Add& add) {
    constexpr int kInputs = Packing<T>::kInputs;
    typedef typename Input<T>::Value Value;
    const BatonLinear& a = block.a;
    const int64_t num_inputs = smaller(steps * kInputs, a.num_in - first_input);
    alignas(64) Value staged[kMaxRows * kStretchSteps * Input<T>::kValues];
    for (int64_t first = 0; first < block.num_rows; first += kMaxRows) {
        const int64_t num_rows = smaller(kMaxRows, block.num_rows - first);
        const T* x = static_cast<const T*>(a.x) + (block.first_row + first) * a.x_stride + first_input;
        if (Input<T>::kInPlace && num_inputs == steps * kInputs) {
            add(first, num_rows, Inputs{reinterpret_cast<const char*>(x), a.x_stride * int64_t{sizeof(T)}, steps});
        } else {
            stage<T>(staged, x, a.x_stride, num_rows, num_inputs);
            add(first, num_rows,
                Inputs{reinterpret_cast<const char*>(staged), kStretchSteps * kInputBytes<T>, steps});
        }
    }
}

// The sums of a group's codes, for all rows of a block.
template <class T, class Codes>
BATON_INLINE void sum_codes(float* sums, const Block<T>& block, const uint8_t* codes, int64_t num_steps,
                            int64_t first_input) {
    constexpr int64_t kInputs = Packing<T>::kInputs, kCodeBytes = kStepElements<T> * Codes::kBits / 8;
    const bool is_few = block.num_rows <= kMaxRows;
    const int64_t most_steps = is_few ? kStretchSteps : kDecodedSteps;
    for (int64_t first = 0; first == 0 || first < num_steps; first += most_steps) {
        const int64_t steps = smaller(most_steps, num_steps - first);
        const uint8_t* from = codes + first * kCodeBytes;
        if (is_few) {
            for_rows(block, first_input + first * kInputs, steps, [&](int64_t, int64_t num_rows, const Inputs& in) {
                add_codes<T, Codes>(num_rows, sums, from, in, first == 0);
            });
            continue;
        }
        alignas(64) T decoded[kDecodedSteps * kStepElements<T>];
        for (int64_t step = 0; step < steps; ++step)
            decode<Codes>(decoded + step * kStepElements<T>, from + step * kCodeBytes);
        for_rows(block, first_input + first * kInputs, steps, [&](int64_t row, int64_t num_rows, const Inputs& in) {
            add_decoded<T>(num_rows, sums + row * kPanelOutputs, decoded, in, first == 0);
        });
    }
}

template <class T>
BATON_INLINE float sum_of(const T* x, int64_t count) {
    Floats sums = {};
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) sums += load(x + k);
    if (k < count) sums += load_first(x + k, count - k);
    return sum_of_lanes(sums);
}

// The sums of the inputs of each group, for the rows of a block. They are the same for all panels, and computed once
// where there is room for those of all groups.
struct InputSums {
    static constexpr int64_t kRoom = 12288;
    float values[kRoom];
    int64_t first = 0, count = 0;

    static bool has_room(int64_t num_groups, int64_t num_rows) { return num_groups * num_rows <= kRoom; }

    template <class T>
    const float* of(const Block<T>& block, const BatonQuantizedLinear& a, int64_t group) {
        if (group < first || group >= first + count) {
            first = group;
            count = smaller(divided_up(a.num_in, a.group_size) - group, kRoom / block.num_rows);
            float* to = values;
            for (int64_t k = group * a.group_size; k < smaller(a.num_in, (group + count) * a.group_size);
                 k += a.group_size)
                for (int64_t row = block.first_row; row < block.first_row + block.num_rows; ++row)
                    *to++ = sum_of(static_cast<const T*>(a.x) + row * a.x_stride + k,
                                   smaller(a.group_size, a.num_in - k));
        }
        return values + (group - first) * block.num_rows;
    }
};

// Scales and offsets of a group, for the outputs of a panel.
struct GroupScales {
    Floats scales[kPanelVectors], offsets[kPanelVectors];
    bool has_offsets;
};

BATON_INLINE Floats load_scales(const uint8_t* from, int part, int32_t dtype) {
    if (dtype == BATON_E8M0) return reinterpret_cast<Floats>(widen_bytes(from + part * kLanes) << 23);
    return dtype == BATON_FLOAT16 ? load(reinterpret_cast<const Float16*>(from) + part * kLanes)
                                  : load(reinterpret_cast<const float*>(from) + part * kLanes);
}

BATON_INLINE GroupScales group_scales(const uint8_t* from, const Grouping& g, const BatonQuantizedLinear& a) {
    GroupScales found;
    found.has_offsets = a.has_offsets != 0;
    for (int part = 0; part < kPanelVectors; ++part) {
        found.scales[part] = load_scales(from, part, a.scale_dtype);
        found.offsets[part] = found.has_offsets ? load_scales(from + g.scale_bytes, part, a.scale_dtype) : Floats{};
    }
    return found;
}

// Rounded: the compiler may fuse it with no addition in one of the ways to compute a row, and not in another.
BATON_INLINE Floats product(Floats a, Floats b) { return round_to(a * b, static_cast<const float*>(nullptr)); }

// The sum of a group's inputs, and what the bias of its codes adds to sums.
struct RowSum {
    Floats x, bias;
};
template <class T, class Codes>
BATON_INLINE RowSum row_sum(const float* x_sum) {
    RowSum found;
    found.x = all_lanes(x_sum == nullptr ? 0.0f : *x_sum);
    found.bias = product(found.x, all_lanes(kBiasOf<T, Codes>));
    return found;
}

// The sum of a row and some outputs with that of a group added.
template <class T, class Codes>
BATON_INLINE Floats with_group(Floats sum, Floats of_codes, const GroupScales& s, int part, const RowSum& row) {
    if constexpr (kBiasOf<T, Codes> != 0.0f) of_codes -= row.bias;
    sum += product(of_codes, s.scales[part]);
    return s.has_offsets ? sum + product(s.offsets[part], row.x) : sum;
}

template <class T, class Codes>
BATON_INLINE bool needs_input_sums(const BatonQuantizedLinear& a) {
    return kBiasOf<T, Codes> != 0.0f || a.has_offsets;
}

// A group whose codes are decoded, for kRows rows: `add_group`, without sums of codes that are stored.
template <class T, class Codes, int kRows>
__attribute__((noinline)) void add_decoded_group_of(float* sums, const T* decoded, const Inputs in,
                                                    const GroupScales& scales, const float* x_sums, bool is_first) {
    Floats of_codes[kRows][kPanelVectors] = {};
    for (int64_t step = 0; step < in.steps; ++step)
        add_step<T, kRows>(of_codes, decoded + step * kStepElements<T>, in.x + step * kInputBytes<T>, in.x_stride);
    for (int row = 0; row < kRows; ++row, sums += kPanelOutputs) {
        const RowSum of_row = row_sum<T, Codes>(x_sums != nullptr ? x_sums + row : nullptr);
        for (int part = 0; part < kPanelVectors; ++part) {
            const Floats sum = is_first ? Floats{} : load(sums + part * kLanes);
            store(sums + part * kLanes, with_group<T, Codes>(sum, of_codes[row][part], scales, part, of_row));
        }
    }
}

template <class T, class Codes, int kRows = kMaxRows>
BATON_INLINE void add_decoded_group(int64_t num_rows, float* sums, const T* decoded, const Inputs& in,
                                    const GroupScales& scales, const float* x_sums, bool is_first) {
    if (num_rows == kRows) {
        add_decoded_group_of<T, Codes, kRows>(sums, decoded, in, scales, x_sums, is_first);
    } else if constexpr (kRows > 1) {
        add_decoded_group<T, Codes, kRows - 1>(num_rows, sums, decoded, in, scales, x_sums, is_first);
    }
}

template <class T, class Codes>
BATON_INLINE void add_group_of_many(float* sums, const Block<T>& block, const uint8_t* codes, const Grouping& g,
                                    const BatonQuantizedLinear& a, int64_t group, const float* x_sums) {
    alignas(64) T decoded[kDecodedSteps * kStepElements<T>];
    const GroupScales scales = group_scales(codes + g.steps * g.code_bytes, g, a);
    for (int64_t step = 0; step < g.steps; ++step)
        decode<Codes>(decoded + step * kStepElements<T>, codes + step * g.code_bytes);
    for_rows(block, group * a.group_size, g.steps, [&](int64_t row, int64_t num_rows, const Inputs& in) {
        add_decoded_group<T, Codes>(num_rows, sums + row * kPanelOutputs, decoded, in, scales,
                                    x_sums != nullptr ? x_sums + row : nullptr, group == 0);
    });
}

template <class T, class Codes>
BATON_INLINE void add_group(float* sums, float* of_codes, const Block<T>& block, const uint8_t* panel,
                            const Grouping& g, const BatonQuantizedLinear& a, int64_t group, InputSums& input_sums) {
    const uint8_t* codes = panel + group * g.group_bytes;
    const float* x_sums = needs_input_sums<T, Codes>(a) ? input_sums.of(block, a, group) : nullptr;
    if (block.num_rows > kMaxRows && g.steps <= kDecodedSteps)
        return add_group_of_many<T, Codes>(sums, block, codes, g, a, group, x_sums);
    sum_codes<T, Codes>(of_codes, block, codes, g.steps, group * a.group_size);
    const GroupScales scales = group_scales(codes + g.steps * g.code_bytes, g, a);
    for (int64_t row = 0; row < block.num_rows; ++row) {
        const RowSum of_row = row_sum<T, Codes>(x_sums != nullptr ? x_sums + row : nullptr);
        for (int part = 0; part < kPanelVectors; ++part) {
            const int64_t place = row * kPanelOutputs + part * kLanes;
            const Floats sum = group == 0 ? Floats{} : load(sums + place);
            store(sums + place, with_group<T, Codes>(sum, load(of_codes + place), scales, part, of_row));
        }
    }
}

// All groups of a panel for few rows, whose inputs need not be staged: `add_group` of each, from register to register.
template <class T, class Codes, int kRows>
__attribute__((noinline)) void sum_groups_of(float* stored, const uint8_t* codes, const Inputs in, const Grouping& g,
                                             const BatonQuantizedLinear& a, const float* x_sums) {
    constexpr int64_t kCodeBytes = kStepElements<T> * Codes::kBits / 8;
    const int64_t scale_bytes = g.group_bytes - g.steps * kCodeBytes;
    const char* x = in.x;
    Floats sums[kRows][kPanelVectors] = {};
    for (int64_t group = 0; group < g.num_groups; ++group) {
        Floats of_codes[kRows][kPanelVectors] = {};
        for (int64_t step = 0; step < g.steps; ++step, codes += kCodeBytes, x += kInputBytes<T>) {
            for (int64_t line = 0; line < kCodeBytes; line += 64)
                __builtin_prefetch(codes + kStreamAhead + line, 0, kFetchToSecondCache);
            add_step_of_codes<T, Codes, kRows>(of_codes, codes, x, in.x_stride);
        }
        for (int64_t line = 0; line < scale_bytes; line += 64)
            __builtin_prefetch(codes + kStreamAhead + line, 0, kFetchToSecondCache);
        const GroupScales scales = group_scales(codes, g, a);
        codes += scale_bytes;
        for (int row = 0; row < kRows; ++row) {
            const RowSum of_row = row_sum<T, Codes>(x_sums != nullptr ? x_sums + group * kRows + row : nullptr);
            for (int part = 0; part < kPanelVectors; ++part)
                sums[row][part] = with_group<T, Codes>(sums[row][part], of_codes[row][part], scales, part, of_row);
        }
    }
    for (int row = 0; row < kRows; ++row)
        for (int part = 0; part < kPanelVectors; ++part)
            store(stored + row * kPanelOutputs + part * kLanes, sums[row][part]);
}

template <class T, class Codes, int kRows = kMaxRows>
BATON_INLINE void sum_groups(int64_t num_rows, float* stored, const uint8_t* codes, const Inputs& in,
                             const Grouping& g, const BatonQuantizedLinear& a, const float* x_sums) {
    if (num_rows == kRows) {
        sum_groups_of<T, Codes, kRows>(stored, codes, in, g, a, x_sums);
    } else if constexpr (kRows > 1) {
        sum_groups<T, Codes, kRows - 1>(num_rows, stored, codes, in, g, a, x_sums);
    }
}

// The sums of all rows of a block and one panel.
template <class T, class Codes>
BATON_INLINE void sum_panel(float* sums, float* of_codes, const Block<T>& block, const Grouping& g,
                            const BatonQuantizedLinear& a, InputSums& input_sums) {
    const uint8_t* panel = static_cast<const uint8_t*>(a.packed) + block.panel * g.panel_bytes();
    if constexpr (Input<T>::kInPlace)
        if (block.num_rows <= kMaxRows && a.num_in % Packing<T>::kInputs == 0 &&
            input_sums.has_room(g.num_groups, block.num_rows)) {
            const T* x = static_cast<const T*>(a.x) + block.first_row * a.x_stride;
            const Inputs in = {reinterpret_cast<const char*>(x), a.x_stride * int64_t{sizeof(T)}, g.steps};
            const float* x_sums = needs_input_sums<T, Codes>(a) ? input_sums.of(block, a, 0) : nullptr;
            return sum_groups<T, Codes>(block.num_rows, sums, panel, in, g, a, x_sums);
        }
    for (int64_t group = 0; group < g.num_groups; ++group)
        add_group<T, Codes>(sums, of_codes, block, panel, g, a, group, input_sums);
}

template <class T, class Codes>
void quantized_linear_of(Pool& threads, const BatonQuantizedLinear& a) {
    const BatonLinear plain = {a.out,    a.x,          a.packed,   a.bias,  a.num_tokens,    a.num_out,
                               a.num_in, a.out_stride, a.x_stride, a.dtype, a.out_is_float32};
    const Grouping g = grouping<T, Codes>(a.num_in, a.group_size, a.scale_dtype, a.has_offsets);
    const Tiling t = tiling<T>(threads, plain, kMaxCodedRows);
    threads.each(t.num_tiles(), [&](int64_t tile, int) {
        alignas(64) float sums[kMaxBlockRows * kPanelOutputs], of_codes[kMaxBlockRows * kPanelOutputs];
        InputSums input_sums;
        const int64_t number = tile % t.num_blocks, first_row = a.num_tokens * number / t.num_blocks;
        const int64_t first_panel = tile / t.num_blocks * t.panels_per_tile;
        Block<T> block = {plain, first_panel, first_row, a.num_tokens * (number + 1) / t.num_blocks - first_row};
        for (; block.panel < smaller(first_panel + t.panels_per_tile, t.num_panels); ++block.panel) {
            sum_panel<T, Codes>(sums, of_codes, block, g, a, input_sums);
            if (a.out_is_float32) {
                finish<T, float>(sums, block);
            } else {
                finish<T, T>(sums, block);
            }
        }
    });
}

void quantized_linear(Pool& threads, const BatonQuantizedLinear& arguments) {
    BATON_BY_CODES(arguments.dtype, arguments.codes_kind, quantized_linear_of, threads, arguments);
}
