// A token for each of some rows of logits, by the probabilities that these give at a temperature.
//
// A row is read once, in blocks: each logit becomes a weight, 1 for the largest, and the sums of blocks are added up. The
// token lies where that sum passes the share `noise` of the whole; only the blocks around this place are computed again.
// A block that a mask rules out as a whole is not read. The order of all sums depends on nothing but the size of a row.

constexpr int64_t kBlockSize = 64, kMaxSegments = 256;
constexpr int kDoubles = kLanes / 2;
typedef double Doubles __attribute__((vector_size(BATON_VECTOR_BYTES)));
typedef uint64_t LongWords __attribute__((vector_size(BATON_VECTOR_BYTES)));
typedef float HalfFloats __attribute__((vector_size(BATON_VECTOR_BYTES / 2)));

// exp of what is not above 0, within 2 units of the last place; 0 below -708. Above 0: anything.
BATON_INLINE Doubles exponential(Doubles x) {
    const Doubles bounded = x < -708.0 ? Doubles{} - 708.0 : x;
    // x = n ln 2 + r, ln 2 in two parts; r within +-0.35; n is in the lowest bits of `shifted`
    const Doubles shifted = bounded * 1.44269504088896340736 + 6755399441055744.0;
    const Doubles n = shifted - 6755399441055744.0;
    const Doubles r = (bounded - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    static const double kInverseFactorials[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800,
                                                1.0 / 362880,     1.0 / 40320,     1.0 / 5040,     1.0 / 720,
                                                1.0 / 120,        1.0 / 24,        1.0 / 6,        0.5};
    Doubles y = Doubles{} + kInverseFactorials[0];
    for (int power = 1; power < 12; ++power) y = y * r + kInverseFactorials[power];
    y = y * r * r + r + 1.0;
    y = reinterpret_cast<Doubles>(reinterpret_cast<LongWords>(y) + (reinterpret_cast<LongWords>(shifted) << 52));
    return x < -708.0 ? Doubles{} : y;
}

// What turns the logits of a row into weights. Infinity counts as the largest number.
constexpr double kLargestFloat = 3.40282346638528859812e38;
struct Weighing {
    double largest, inverse_temperature, min_weight;
};

// A row as sampling reads it. `bits` NULL: nothing is ruled out.
template <class T>
struct WeighedRow {
    const T* logits;
    const uint8_t* bits;
    int64_t size;
    Weighing by;
};

// A bit for each token of a block: whether it has a weight.
template <class T>
BATON_INLINE uint64_t allowed_in_block(const WeighedRow<T>& row, int64_t block) {
    const int64_t rest = row.size - block * kBlockSize;
    uint64_t word = ~uint64_t{0};
    if (row.bits != nullptr) {
        const int64_t num_bytes = (rest + 7) / 8;
        word = 0;
        __builtin_memcpy(&word, row.bits + block * (kBlockSize / 8), static_cast<size_t>(num_bytes < 8 ? num_bytes : 8));
    }
    return rest < kBlockSize ? word & ((uint64_t{1} << rest) - 1) : word;
}

BATON_INLINE Doubles weights_of(const float* logits, const Weighing& by) {
    Doubles values = __builtin_convertvector(read_vector<HalfFloats>(logits), Doubles);
    values = values > kLargestFloat ? Doubles{} + kLargestFloat : values;
    const Doubles weights = exponential((values - by.largest) * by.inverse_temperature);
    return weights < by.min_weight ? Doubles{} : weights;
}

// Writes the weights of a block, 0 for what is not in `allowed`. Their sum.
template <class T>
BATON_INLINE double weigh_block(const WeighedRow<T>& row, int64_t block, uint64_t allowed, double* weights) {
    float logits[kBlockSize];
    const T* from = row.logits + block * kBlockSize;
    const int64_t rest = row.size - block * kBlockSize;
    for (int64_t i = 0; i < kBlockSize; i += kLanes)
        store(logits + i, rest - i >= kLanes ? load(from + i) : load_first(from + i, rest > i ? rest - i : 0));
    LongWords lane_bits;
    for (int lane = 0; lane < kDoubles; ++lane) lane_bits[lane] = uint64_t{1} << lane;
    Doubles sums = {};
    for (int64_t i = 0; i < kBlockSize; i += kDoubles) {
        const LongWords is_allowed = (LongWords{} + (allowed >> i)) & lane_bits;
        const Doubles some = is_allowed != LongWords{} ? weights_of(logits + i, row.by) : Doubles{};
        write_vector(weights + i, some);
        sums += some;
    }
    double sum = 0;
    for (int lane = 0; lane < kDoubles; ++lane) sum += sums[lane];
    return sum;
}

template <class T>
BATON_INLINE int64_t sampled_place(const WeighedRow<T>& row, double noise) {
    double weights[kBlockSize], passed[kMaxSegments], sum = 0;
    const int64_t num_blocks = (row.size + kBlockSize - 1) / kBlockSize;
    const int64_t per_segment = (num_blocks + kMaxSegments - 1) / kMaxSegments;
    const auto with_block = [&](int64_t block) __attribute__((always_inline)) {
        const uint64_t allowed = allowed_in_block(row, block);
        return allowed == 0 ? sum : sum + weigh_block(row, block, allowed, weights);
    };
    for (int64_t block = 0; block < num_blocks; ++block) passed[block / per_segment] = sum = with_block(block);
    // rounded, a share below 1 may be the whole: then it is the last token with a weight
    const double whole = sum, wanted = noise * whole;
    const auto is_before = [&](double end) { return end <= wanted && end < whole; };
    int64_t segment = 0;
    while (is_before(passed[segment])) ++segment;
    int64_t block = segment * per_segment;
    sum = segment > 0 ? passed[segment - 1] : 0.0;
    for (double end = with_block(block); is_before(end); end = with_block(++block)) sum = end;
    int64_t last = 0;
    for (int64_t i = 0; i < kBlockSize && sum <= wanted; ++i) {
        if (weights[i] == 0.0) continue;
        sum += weights[i];
        last = i;
    }
    return block * kBlockSize + last;
}

template <class T>
BATON_INLINE int64_t sampled_in_row(const BatonSample& a, int64_t number, int64_t row, const T* logits) {
    const BatonArgmax& found = a.found;
    const int64_t mask = found.masks == nullptr ? -1 : found.masks[row];
    const uint8_t* bits = mask < 0 ? nullptr : static_cast<const uint8_t*>(found.bits) + mask * found.mask_bytes;
    const double temperature = a.parameters[number], noise = a.parameters[a.parameter_stride + number];
    const double largest = found.largest[row], inverse = 1.0 / temperature;
    const Weighing by = {largest > kLargestFloat ? kLargestFloat : largest,
                         inverse > __DBL_MAX__ ? __DBL_MAX__ : inverse, a.parameters[3 * a.parameter_stride + number]};
    return sampled_place<T>({logits, bits, found.size, by}, noise);
}

template <class T>
void sample_of(Pool& threads, const BatonSample& a) {
    constexpr int64_t kCost = 4;  // of a weight, compared to what other kernels do to an element
    const BatonArgmax& found = a.found;
    each_row(threads, a.num_sampled, kCost * found.size, [&](int64_t number) {
        const int64_t row = a.rows[number];
        if (static_cast<const uint8_t*>(found.is_valid)[row] == 0) return;
        if (found.is_wide != nullptr && static_cast<const uint8_t*>(found.is_wide)[row] != 0) {
            found.token_ids[row] = sampled_in_row<float>(a, number, row, found.wide + row * found.size);
        } else {
            const T* logits = static_cast<const T*>(found.logits) + row * found.stride;
            found.token_ids[row] = sampled_in_row<T>(a, number, row, logits);
        }
    });
}

void sample(Pool& threads, const BatonSample& arguments) { BATON_BY_DTYPE(arguments.found.dtype, sample_of); }
