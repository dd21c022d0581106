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

// Of each row so much is asked for ahead of its use: there are more rows than the processor itself follows.
constexpr int64_t kAheadBytes = 512;

// kLanes rows become columns of words, from `offset` bytes of each row on. A row that is padding (NULL) has `padding`.
BATON_INLINE void read_square(Words (&columns)[kLanes], const uint8_t* const* rows, int64_t offset, Words padding) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
        columns[i] = padding;
        if (rows[i] == nullptr) continue;
        columns[i] = read_vector<Words>(rows[i] + offset);
        __builtin_prefetch(rows[i] + offset + kAheadBytes);
    }
    transpose(columns);
}

// kLanes outputs, from `step` on as many steps as kLanes words of a row have. A word has one step or two.
template <class T>
BATON_INLINE void pack_square(T* panel, const uint8_t* const* rows, int64_t step) {
    Words columns[kLanes];
    read_square(columns, rows, step * Packing<T>::kInputs * int64_t{sizeof(T)}, Words{});
    constexpr int kStepsOfWord = 4 / (Packing<T>::kInputs * sizeof(T));
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
        T* to = panel + (step + i * kStepsOfWord) * kStepElements<T>;
        if constexpr (kStepsOfWord == 1) {
            write_vector(to, columns[i]);
        } else {
            write_vector(to, __builtin_convertvector(columns[i] & 0xffff, Halves));
            write_vector(to + kStepElements<T>, __builtin_convertvector(columns[i] >> 16, Halves));
        }
    }
}

// The rows of a panel of [num_out] rows, NULL for those that are padding.
BATON_INLINE void rows_of_panel(const uint8_t* (&rows)[kPanelOutputs], const void* weight, int64_t panel, int64_t num_out,
                                int64_t row_bytes) {
    for (int64_t i = 0; i < kPanelOutputs; ++i) {
        const int64_t row = panel * kPanelOutputs + i;
        rows[i] = row < num_out ? static_cast<const uint8_t*>(weight) + row * row_bytes : nullptr;
    }
}

template <class T>
void pack_of(Pool& threads, const BatonPack& a) {
    constexpr int64_t kInputs = Packing<T>::kInputs, kStepsAtOnce = kLanes * 4 / (kInputs * sizeof(T));
    const int64_t steps = num_steps<T>(a.num_in), whole = a.num_in / (kStepsAtOnce * kInputs) * kStepsAtOnce;
    threads.each(divided_up(a.num_out, kPanelOutputs), [&](int64_t tile, int) {
        T* panel = static_cast<T*>(a.packed) + tile * steps * kStepElements<T>;
        const uint8_t* rows[kPanelOutputs];
        rows_of_panel(rows, a.weight, tile, a.num_out, a.weight_stride * int64_t{sizeof(T)});
        for (int64_t step = 0; step < whole; step += kStepsAtOnce)
            for (int64_t output = 0; output < kPanelOutputs; output += kLanes)
                pack_square(panel + output * kInputs, rows + output, step);
        for (int64_t output = 0; output < kPanelOutputs; ++output)
            pack_output(panel + output * kInputs, reinterpret_cast<const T*>(rows[output]), a.num_in, whole, steps);
    });
}

void pack(Pool& threads, const BatonPack& arguments) { BATON_BY_DTYPE(arguments.dtype, pack_of); }
