// Products of rows of x with quantized weights: the tiles, sums and inner loops of `linear.inl`, with codes decoded to
// the first cache before they are multiplied.
//
// The sums of a group are those of its codes, and count with the group's scale when they are complete; the offset counts
// with the sum of the group's inputs. So scales and offsets are never rounded to a dtype, and as in `linear_rows.inl` a
// row has the same result whatever is computed with it.

#include "quantized_pack.inl"

// Decoded at once: what fits the first cache beside x.
constexpr int64_t kDecodedSteps = 64;

// x of one block: its groups of kMaxRows rows, over the steps from first_step on. Adds to, or begins, sums of codes.
template <class T, int kRows = kMaxRows>
BATON_INLINE void add_rows(int64_t num_rows, float* stored, const Stretch<T>& stretch, bool is_first) {
    if (num_rows == kRows) {
        add_stretch<T, kRows, 0>(stored, stretch, is_first);
    } else if constexpr (kRows > 1) {
        add_rows<T, kRows - 1>(num_rows, stored, stretch, is_first);
    }
}

template <class T>
BATON_INLINE void add_decoded(float* sums, const T* decoded, const Block<T>& block, int64_t first_input, int64_t steps,
                              bool is_first) {
    constexpr int kInputs = Packing<T>::kInputs;
    typedef typename Input<T>::Value Value;
    const BatonLinear& a = block.a;
    const int64_t num_inputs = smaller(steps * kInputs, a.num_in - first_input);
    const bool in_place = Input<T>::kInPlace && num_inputs == steps * kInputs;
    alignas(64) Value staged[kMaxRows * kStretchSteps * Input<T>::kValues];
    Stretch<T> stretch = {};
    stretch.weights = decoded;
    stretch.steps = steps;
    for (int64_t first = 0; first < block.num_rows; first += kMaxRows) {
        const int64_t num_rows = smaller(kMaxRows, block.num_rows - first);
        const T* x = static_cast<const T*>(a.x) + (block.first_row + first) * a.x_stride + first_input;
        if (in_place) {
            stretch.x = reinterpret_cast<const char*>(x);
            stretch.x_stride = a.x_stride * int64_t{sizeof(T)};
        } else {
            stage<T>(staged, x, a.x_stride, num_rows, num_inputs);
            stretch.x = reinterpret_cast<const char*>(staged);
            stretch.x_stride = kStretchSteps * kInputBytes<T>;
        }
        add_rows<T>(num_rows, sums + first * kPanelOutputs, stretch, is_first);
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
    alignas(64) T decoded[kDecodedSteps * kStepElements<T>];
    for (int64_t first = 0; first == 0 || first < g.steps; first += kDecodedSteps) {
        const int64_t steps = smaller(kDecodedSteps, g.steps - first);
        for (int64_t step = 0; step < steps; ++step) {
            const uint8_t* from = group + (first + step) * g.code_bytes;
            for (int64_t line = 0; line < kStepElements<T> * Codes::kBits / 8; line += 64)
                __builtin_prefetch(from + kStreamAhead + line, 0, kFetchToSecondCache);
            Codes::decode(decoded + step * kStepElements<T>, from);
        }
        add_decoded<T>(of_codes, decoded, block, first_input + first * Packing<T>::kInputs, steps, first == 0);
    }
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
