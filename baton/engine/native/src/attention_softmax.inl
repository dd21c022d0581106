// The softmax of attention, taken over spans of kSpan keys that are joined one after another.
//
// Spans begin at multiples of kSpan, and a span is computed without regard to those before it. Then it does not matter
// for the result of a token whether one thread goes through all spans or several share them, nor which tokens are
// computed beside it: a token has the same result in a prompt of any chunks and as the next token of its sequence.

constexpr int64_t kSpan = 512;
constexpr float kNothing = -__builtin_inff();
constexpr float kLog2OfE = 1.44269504f;

// 2^x for x <= 0, within 2e-7 of it; exactly 1 for 0, and 0 below kLowestPower. What is no number stays so.
BATON_INLINE Floats power_of_two(Floats x) {
    const Floats shifted = x + 12582912.0f;  // its lowest bits are the nearest whole number
    const Floats r = x - (shifted - 12582912.0f);
    Floats y = r * 1.3264726390e-3f + 9.6715126973e-3f;
    y = y * r + 5.5507337459e-2f;
    y = y * r + 2.4022242084e-1f;
    y = y * r + 6.9314697760e-1f;
    y = y * r + 1.0f;
    y = y * reinterpret_cast<Floats>((reinterpret_cast<Ints>(shifted) + 127) << 23);
    return x < kLowestPower ? Floats{} : y;
}

BATON_INLINE float highest_lane(Floats x) {
    typedef float Four __attribute__((vector_size(16)));
#if BATON_VECTOR_BYTES == 64
    typedef float Eight __attribute__((vector_size(32)));
    const Eight low = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
    const Eight high = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    const Eight eight = low > high ? low : high;
#elif BATON_VECTOR_BYTES == 32
    const Floats eight = x;
#endif
#if BATON_VECTOR_BYTES > 16
    const Four below = __builtin_shufflevector(eight, eight, 0, 1, 2, 3);
    const Four above = __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    Four four = below > above ? below : above;
#else
    Four four = x;
#endif
    Four other = __builtin_shufflevector(four, four, 2, 3, 0, 1);
    four = four > other ? four : other;
    other = __builtin_shufflevector(four, four, 1, 0, 3, 2);
    four = four > other ? four : other;
    return four[0];
}

// The sums of some rows over some keys. A weight is 2^(scaled score - highest of its row).
struct Partial {
    float* sums;     // [rows][stride], of weights times values
    float* highest;  // [rows]
    float* totals;   // [rows], of weights
    int64_t stride;
};

// One more span of keys is added to what there is.
void join_span(const Partial& all, const Partial& span, int64_t num_rows) {
    for (int64_t row = 0; row < num_rows; ++row) {
        const float before = all.highest[row], here = span.highest[row], highest = before > here ? before : here;
        const float base = highest == kNothing ? 0.0f : highest;
        const Floats keep = power_of_two(all_lanes(before - base)), take = power_of_two(all_lanes(here - base));
        all.highest[row] = highest;
        all.totals[row] = all.totals[row] * keep[0] + span.totals[row] * take[0];
        for (int64_t i = row * all.stride; i < (row + 1) * all.stride; i += kLanes)
            store(all.sums + i, load(all.sums + i) * keep + load(span.sums + i) * take);
    }
}

// Which of kKeysAtOnce keys a row sees, and its scores, which become weights in the form of the product's units.
struct ScoreRow {
    float* scores;
    int64_t begin, end;
};

// All bits of a lane are set where the row sees the key.
BATON_INLINE Ints seen_lanes(const ScoreRow& row, int64_t first) {
    Ints lanes;
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
    const Ints keys = lanes + static_cast<int32_t>(first);
    return (keys >= static_cast<int32_t>(row.begin)) & (keys < static_cast<int32_t>(row.end));
}

BATON_INLINE bool is_seen_whole(const ScoreRow& row, int64_t first) {
    return first >= row.begin && first + kLanes <= row.end;
}

// The scaled scores x become cap * tanh(x / cap), within 2e-7 times the cap.
BATON_INLINE void cap_scores(const ScoreRow& row, float scale, float cap) {
    const float doubled = 2.0f * scale / cap;
    for (int64_t i = row.begin / kLanes * kLanes; i < row.end; i += kLanes) {
        const Floats powers = exponential(load(row.scores + i) * doubled);
        store(row.scores + i, cap - 2.0f * cap / (powers + 1.0f));
    }
}

BATON_INLINE float highest_score(const ScoreRow& row) {
    Floats highest = Floats{} + kNothing;
    for (int64_t i = row.begin / kLanes * kLanes; i < row.end; i += kLanes) {
        const Floats scores = load(row.scores + i);
        highest = larger(is_seen_whole(row, i) ? scores : seen_lanes(row, i) ? scores : Floats{} + kNothing, highest);
    }
    return highest_lane(highest);
}

// Returns the lanes' sums of the weights. These are multiplied by `scales` then, unless it is NULL.
template <class Units>
BATON_INLINE Floats scores_to_weights(const ScoreRow& row, float scale, float base, const Scales* scales) {
    Floats total = {};
    uint32_t* weights = reinterpret_cast<uint32_t*>(row.scores);
    for (int64_t i = 0; i < kKeysAtOnce; i += kLanes) {
        Floats values = {};
        if (i + kLanes > row.begin && i < row.end) {
            values = power_of_two(load(row.scores + i) * scale - base);
            if (!is_seen_whole(row, i)) values = seen_lanes(row, i) ? values : Floats{};
            total += values;
            if (scales != nullptr) values *= powers(scales->of_piece[i / kLanes]);
        }
        Units::write_row(weights, i, values);
    }
    return total;
}
