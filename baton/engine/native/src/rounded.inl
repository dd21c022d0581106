// Rows of x rounded to 8 bits, once for all products that they go into.
//
// Each kScaledInputs of a row share a scale, 1/127 of the one furthest from zero; what is left of a row is padded with
// zeros. A rounded row has the whole numbers -127 .. 127, then the scales, then the sum of each kSummedInputs numbers.
// A scale that is no number makes all products with the row none.

constexpr int64_t kScaledInputs = 32, kSummedInputs = 16;
constexpr float kSmallestScaled = 1e-30f;  // less than this is zero: its inverse would not be a number

// Where the parts of a rounded row lie, in bytes.
struct RoundedRow {
    int64_t scales, sums, bytes;
};
BATON_INLINE RoundedRow rounded_row(int64_t num_in) {
    const int64_t padded = divided_up(num_in, kScaledInputs) * kScaledInputs;
    RoundedRow r;
    r.scales = padded;
    r.sums = r.scales + padded / kScaledInputs * 4;
    r.bytes = rounded_row_bytes(num_in);
    return r;
}

int64_t rounded_bytes(int64_t num_in) { return rounded_row(num_in).bytes; }

// The largest magnitude of some inputs, as bits: as these, what is not a number is larger than all numbers.
BATON_INLINE float furthest_of(const Floats* values) {
    Ints most = {};
    for (int64_t k = 0; k < kScaledInputs / kLanes; ++k) {
        const Ints bits = reinterpret_cast<Ints>(values[k]) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    int32_t lanes[kLanes], found = 0;
    write_vector(lanes, most);
    for (int lane = 0; lane < kLanes; ++lane) found = lanes[lane] > found ? lanes[lane] : found;
    return from_bits(static_cast<uint32_t>(found));
}

// The nearest whole numbers, ties to even, of what lies within +-127.5 or is brought there.
BATON_INLINE Ints whole_numbers(Floats values) {
    const Floats above = values > -127.0f ? values : all_lanes(-127.0f);
    const Floats bounded = above < 127.0f ? above : all_lanes(127.0f);
    return reinterpret_cast<Ints>(bounded + 12582912.0f) - 0x4b400000;
}

// `values`: kScaledInputs of them. Returns their scale.
BATON_INLINE float round_scaled(int8_t* numbers, int32_t* sums, const Floats* values) {
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    const float furthest = furthest_of(values), inverse = furthest > kSmallestScaled ? 127.0f / furthest : 0.0f;
    for (int64_t k = 0; k < kScaledInputs / kLanes; ++k)
        write_vector(numbers + k * kLanes, __builtin_convertvector(whole_numbers(values[k] * inverse), Bytes));
    for (int64_t place = 0; place < kScaledInputs / kSummedInputs; ++place) {
        int32_t sum = 0;
        for (int64_t k = 0; k < kSummedInputs; ++k) sum += numbers[place * kSummedInputs + k];
        sums[place] = sum;
    }
    return furthest <= kSmallestScaled ? 0.0f : furthest / 127.0f;
}

template <class T>
BATON_INLINE void round_row(char* to, const T* x, int64_t num_in) {
    constexpr int64_t kVectors = kScaledInputs / kLanes;
    const RoundedRow r = rounded_row(num_in);
    int8_t* numbers = reinterpret_cast<int8_t*>(to);
    float* scales = reinterpret_cast<float*>(to + r.scales);
    int32_t* sums = reinterpret_cast<int32_t*>(to + r.sums);
    Floats values[kVectors];
    int64_t first = 0;
    for (; first + kScaledInputs <= num_in; first += kScaledInputs) {
        for (int64_t k = 0; k < kVectors; ++k) values[k] = load(x + first + k * kLanes);
        *scales++ = round_scaled(numbers + first, sums + first / kSummedInputs, values);
    }
    if (first == num_in) return;
    for (int64_t k = 0; k < kVectors; ++k) {
        const int64_t left = num_in - first - k * kLanes;
        values[k] = left > 0 ? load_first(x + first + k * kLanes, smaller(left, kLanes)) : Floats{};
    }
    *scales = round_scaled(numbers + first, sums + first / kSummedInputs, values);
}

template <class T>
void round_rows_of(Pool& threads, const BatonRoundRows& a) {
    each_row(threads, a.num_rows, a.size, [&](int64_t row) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
        round_row(static_cast<char*>(a.out) + row * a.out_stride, x, a.size);
    });
}

void round_rows(Pool& threads, const BatonRoundRows& arguments) { BATON_BY_DTYPE(arguments.dtype, round_rows_of); }
