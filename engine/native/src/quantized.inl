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

// sums[row] += x[row] * codes, for one step; in the order of `add_step`
template <class T, class Codes, int kRows>
BATON_INLINE void add_step_of_codes(Floats (*sums)[kPanelVectors], const uint8_t* codes, const char* x,
                                    int64_t x_stride) {
#if BATON_BF16_DOT
    if constexpr (Packing<T>::kInputs == 2) {
        __m512bh loaded[kPanelVectors];
        for (int part = 0; part < kPanelVectors; ++part) loaded[part] = (__m512bh)Codes::pairs(codes, part);
        for (int row = 0; row < kRows; ++row) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(read_value<int>(x + row * x_stride));
            for (int part = 0; part < kPanelVectors; ++part)
                sums[row][part] =
                    reinterpret_cast<Floats>(_mm512_dpbf16_ps((__m512)sums[row][part], loaded[part], pair));
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

// sums of all rows += scale * sums of codes + offset * sum of x
template <class T, class Scale>
BATON_INLINE void add_scaled(float* sums, const float* of_codes, const Block<T>& block, const Scale* scales,
                             const Scale* offsets, int64_t first_input, int64_t num_inputs) {
    Floats scale[kPanelVectors], offset[kPanelVectors] = {};
    for (int part = 0; part < kPanelVectors; ++part) {
        scale[part] = load(scales + part * kLanes);
        if (offsets != nullptr) offset[part] = load(offsets + part * kLanes);
    }
    for (int64_t row = 0; row < block.num_rows; ++row) {
        float x_sum = 0.0f;
        if (offsets != nullptr)
            x_sum = sum_of(static_cast<const T*>(block.a.x) + (block.first_row + row) * block.a.x_stride + first_input,
                           num_inputs);
        for (int part = 0; part < kPanelVectors; ++part) {
            const int64_t place = row * kPanelOutputs + part * kLanes;
            Floats sum = first_input == 0 ? Floats{} : load(sums + place);
            sum += load(of_codes + place) * scale[part];
            if (offsets != nullptr) sum += offset[part] * x_sum;
            store(sums + place, sum);
        }
    }
}

template <class T, class Codes>
BATON_INLINE void add_group(float* sums, float* of_codes, const Block<T>& block, const uint8_t* group,
                            const Grouping& g, const BatonQuantizedLinear& a, int64_t first_input) {
    sum_codes<T, Codes>(of_codes, block, group, g.steps, first_input);
    const uint8_t* scales = group + g.steps * g.code_bytes;
    const int64_t num_inputs = smaller(a.group_size, a.num_in - first_input);
    if (a.scale_dtype == BATON_FLOAT16) {
        add_scaled(sums, of_codes, block, reinterpret_cast<const Float16*>(scales),
                   a.has_offsets ? reinterpret_cast<const Float16*>(scales + g.scale_bytes) : nullptr, first_input,
                   num_inputs);
    } else {
        add_scaled(sums, of_codes, block, reinterpret_cast<const float*>(scales),
                   a.has_offsets ? reinterpret_cast<const float*>(scales + g.scale_bytes) : nullptr, first_input,
                   num_inputs);
    }
}

template <class T, class Codes>
void quantized_linear_of(Pool& threads, const BatonQuantizedLinear& a) {
    const BatonLinear plain = {a.out,    a.x,          a.packed,   a.bias,  a.num_tokens,    a.num_out,
                               a.num_in, a.out_stride, a.x_stride, a.dtype, a.out_is_float32};
    const Grouping g = grouping<T, Codes>(a.num_in, a.group_size, a.scale_dtype, a.has_offsets);
    const Tiling t = tiling<T>(threads, plain);
    threads.each(t.num_tiles(), [&](int64_t tile, int) {
        alignas(64) float sums[kMaxBlockRows * kPanelOutputs], of_codes[kMaxBlockRows * kPanelOutputs];
        const int64_t number = tile % t.num_blocks, first_row = a.num_tokens * number / t.num_blocks;
        const int64_t first_panel = tile / t.num_blocks * t.panels_per_tile;
        Block<T> block = {plain, first_panel, first_row, a.num_tokens * (number + 1) / t.num_blocks - first_row};
        for (; block.panel < smaller(first_panel + t.panels_per_tile, t.num_panels); ++block.panel) {
            const uint8_t* panel = static_cast<const uint8_t*>(a.packed) + block.panel * g.panel_bytes();
            for (int64_t group = 0; group < g.num_groups; ++group)
                add_group<T, Codes>(sums, of_codes, block, panel + group * g.group_bytes, g, a, group * a.group_size);
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
