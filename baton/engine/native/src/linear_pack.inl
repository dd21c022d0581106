// How weights of products lie in memory, and their way there.
//
// Outputs are packed in panels of kPanelOutputs, padded with zeros: [panel][step][output of the panel][inputs of a
// step]. A step is what one multiplication takes: two inputs in bfloat16, which lie together for the dot product of
// pairs (and are two shifts away from floats where there is none), else one. So a product reads one panel after another
// in a single stream, each load holding the weights of kLanes outputs, and needs no sum across lanes.

constexpr int kPanelVectors = 4;
constexpr int64_t kPanelOutputs = kPanelVectors * kLanes;

template <class T>
struct Packing {
    static constexpr int kInputs = 1;
};
template <>
struct Packing<Bfloat16> {
    static constexpr int kInputs = 2;
};

template <class T>
constexpr int64_t kStepElements = kPanelOutputs* Packing<T>::kInputs;

BATON_INLINE int64_t divided_up(int64_t count, int64_t by) { return (count + by - 1) / by; }
BATON_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
BATON_INLINE int64_t num_steps(int64_t num_in) {
    return divided_up(num_in, Packing<T>::kInputs);
}

template <class T>
BATON_INLINE int64_t bytes_packed(int64_t num_out, int64_t num_in) {
    return divided_up(num_out, kPanelOutputs) * num_steps<T>(num_in) * kStepElements<T> * int64_t{sizeof(T)};
}

int64_t packed_bytes(int32_t dtype, int64_t num_out, int64_t num_in) {
    switch (dtype) {
        case BATON_FLOAT32:
            return bytes_packed<float>(num_out, num_in);
        case BATON_BFLOAT16:
            return bytes_packed<Bfloat16>(num_out, num_in);
        case BATON_FLOAT16:
            return bytes_packed<Float16>(num_out, num_in);
    }
    return 0;
}

// The steps `first` to `end` of one output, or zeros in place of an output that is padding (`weight` NULL).
template <class T>
BATON_INLINE void pack_output(T* panel, const T* weight, int64_t num_in, int64_t first, int64_t end) {
    constexpr int kInputs = Packing<T>::kInputs;
    for (int64_t step = first; step < end; ++step)
        for (int input = 0; input < kInputs; ++input) {
            const int64_t k = step * kInputs + input;
            panel[step * kStepElements<T> + input] = weight != nullptr && k < num_in ? weight[k] : T{};
        }
}

template <class T>
void pack_of(Pool& threads, const BatonPack& a) {
    // Few enough steps that what they write stays in the first cache while output after output is filled in.
    constexpr int64_t kStepsAtOnce = 32;
    const int64_t steps = num_steps<T>(a.num_in);
    threads.each(divided_up(a.num_out, kPanelOutputs), [&](int64_t tile, int) {
        T* panel = static_cast<T*>(a.packed) + tile * steps * kStepElements<T>;
        for (int64_t first = 0; first < steps; first += kStepsAtOnce)
            for (int64_t output = 0; output < kPanelOutputs; ++output) {
                const int64_t row = tile * kPanelOutputs + output;
                const T* weight = row < a.num_out ? static_cast<const T*>(a.weight) + row * a.weight_stride : nullptr;
                pack_output(panel + output * Packing<T>::kInputs, weight, a.num_in, first,
                            smaller(first + kStepsAtOnce, steps));
            }
    });
}

void pack(Pool& threads, const BatonPack& arguments) { BATON_BY_DTYPE(arguments.dtype, pack_of); }
