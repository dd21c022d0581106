// The inner loops of products: some rows of x times a stretch of one packed panel.
//
// Sums of a row and kLanes outputs are one register from the first step of a stretch to its last. They are stored
// between stretches as the floats that they are, so neither the cut into stretches nor the number of rows that are
// computed together changes a result: each sum takes its steps one by one, in order.

// Rows at once: as many as leave registers for the weights of a step.
#if BATON_VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int kMaxRows = 6;
#else
constexpr int kMaxRows = 3;
#endif

// How far the weights are fetched ahead of a stream, in bytes.
constexpr int64_t kStreamAhead = 6144;

// Into the second cache only: what is fetched to the first one pushes out weights that are still needed, and takes the
// few places for outstanding reads from the loads (a third slower at 4 rows, two thirds at 8).
constexpr int kFetchToSecondCache = 2;

// How x is read: `Value` is what goes into all lanes, and a step takes kValues of them. `kInPlace`: they need not be
// widened before.
template <class T>
struct Input {
    typedef float Value;
    static constexpr int kValues = Packing<T>::kInputs;
    static constexpr bool kInPlace = false;
};
template <>
struct Input<float> {
    typedef float Value;
    static constexpr int kValues = 1;
    static constexpr bool kInPlace = true;
};
#if BATON_BF16_DOT
template <>
struct Input<Bfloat16> {
    typedef uint32_t Value;  // two inputs
    static constexpr int kValues = 1;
    static constexpr bool kInPlace = true;
};
#endif

template <class T>
constexpr int64_t kInputBytes = Input<T>::kValues * int64_t{sizeof(typename Input<T>::Value)};

// What is multiplied: `weights` of `steps` steps times x, whose rows begin x_stride bytes apart. `ahead`: what the next
// stretch will read, of which each step fetches ahead_stride bytes.
template <class T>
struct Stretch {
    const T* weights;
    const char* x;
    int64_t x_stride, steps;
    const char* ahead;
    int64_t ahead_stride;
};

template <class Value>
BATON_INLINE Value read_value(const char* from) {
    Value value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

// sums[row] += x[row] * weights, for one step
template <class T, int kRows>
BATON_INLINE void add_step(Floats (*sums)[kPanelVectors], const T* weights, const char* x, int64_t x_stride) {
    Floats loaded[kPanelVectors];
    for (int part = 0; part < kPanelVectors; ++part) loaded[part] = load(weights + part * kLanes);
    for (int row = 0; row < kRows; ++row)
        for (int part = 0; part < kPanelVectors; ++part) sums[row][part] += loaded[part] * read_value<float>(x + row * x_stride);
}

#if BATON_BF16_DOT
template <class T, int kRows>
BATON_INLINE void add_step(Floats (*sums)[kPanelVectors], const Bfloat16* weights, const char* x, int64_t x_stride) {
    __m512bh loaded[kPanelVectors];
    for (int part = 0; part < kPanelVectors; ++part) loaded[part] = read_vector<__m512bh>(weights + part * 2 * kLanes);
    for (int row = 0; row < kRows; ++row) {
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(read_value<int>(x + row * x_stride));
        for (int part = 0; part < kPanelVectors; ++part)
            sums[row][part] =
                reinterpret_cast<Floats>(_mm512_dpbf16_ps((__m512)sums[row][part], loaded[part], pair));
    }
}
#else
template <class T, int kRows>
BATON_INLINE void add_step(Floats (*sums)[kPanelVectors], const Bfloat16* weights, const char* x, int64_t x_stride) {
    Floats loaded[kPanelVectors];
    for (int part = 0; part < kPanelVectors; ++part)
        loaded[part] = reinterpret_cast<Floats>(read_vector<Words>(weights + part * 2 * kLanes) << 16);
    for (int row = 0; row < kRows; ++row)
        for (int part = 0; part < kPanelVectors; ++part) sums[row][part] += loaded[part] * read_value<float>(x + row * x_stride);
    for (int part = 0; part < kPanelVectors; ++part)
        loaded[part] = reinterpret_cast<Floats>(read_vector<Words>(weights + part * 2 * kLanes) & 0xffff0000);
    for (int row = 0; row < kRows; ++row)
        for (int part = 0; part < kPanelVectors; ++part) sums[row][part] += loaded[part] * read_value<float>(x + row * x_stride + 4);
}
#endif

// The sums of kRows rows, [row][output of the panel], which begin at zero when `is_first`. `kLines`: lines of 64 bytes
// that each step fetches ahead.
template <class T, int kRows, int kLines>
__attribute__((noinline)) void add_stretch(float* stored, const Stretch<T> s, bool is_first) {
    Floats sums[kRows][kPanelVectors] = {};
    if (!is_first)
        for (int row = 0; row < kRows; ++row)
            for (int part = 0; part < kPanelVectors; ++part)
                sums[row][part] = load(stored + row * kPanelOutputs + part * kLanes);
    for (int64_t step = 0; step < s.steps; ++step) {
        for (int line = 0; line < kLines; ++line)
            __builtin_prefetch(s.ahead + step * s.ahead_stride + line * 64, 0, kFetchToSecondCache);
        add_step<T, kRows>(sums, s.weights + step * kStepElements<T>, s.x + step * kInputBytes<T>, s.x_stride);
    }
    for (int row = 0; row < kRows; ++row)
        for (int part = 0; part < kPanelVectors; ++part)
            store(stored + row * kPanelOutputs + part * kLanes, sums[row][part]);
}

template <class T>
constexpr int64_t kStepBytes = kStepElements<T>* int64_t{sizeof(T)};

// A stretch that no other rows use: the stream that it is part of is fetched ahead.
template <class T, int kRows = kMaxRows>
BATON_INLINE void add_alone(int64_t num_rows, float* stored, Stretch<T> stretch, bool is_first) {
    if (num_rows == kRows) {
        stretch.ahead = reinterpret_cast<const char*>(stretch.weights) + kStreamAhead;
        stretch.ahead_stride = kStepBytes<T>;
        add_stretch<T, kRows, kStepBytes<T> / 64>(stored, stretch, is_first);
    } else if constexpr (kRows > 1) {
        add_alone<T, kRows - 1>(num_rows, stored, stretch, is_first);
    }
}

// A stretch that `num_groups` groups of rows use in turn, of which this is number `group`: they share the fetching of
// the next stretch.
template <class T, int kRows = kMaxRows>
BATON_INLINE void add_shared(int64_t num_rows, float* stored, Stretch<T> stretch, bool is_first, int64_t group,
                             int64_t num_groups) {
    if (num_rows == kRows) {
        const int64_t parts = num_groups < 4 ? 2 : 4, bytes = stretch.steps * kStepBytes<T>;
        stretch.ahead = reinterpret_cast<const char*>(stretch.weights) + bytes + (group % parts) * (bytes / parts);
        stretch.ahead_stride = group < parts ? kStepBytes<T> / parts : 0;
        add_stretch<T, kRows, kStepBytes<T> >= 128 ? kStepBytes<T> / 128 : 1>(stored, stretch, is_first);
    } else if constexpr (kRows > 1) {
        add_shared<T, kRows - 1>(num_rows, stored, stretch, is_first, group, num_groups);
    }
}
