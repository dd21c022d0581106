// The most likely token of each row of logits, while a row is read once.
//
// What is compared is larger when it is greater, or not a number: as in torch, a row that holds something that is not a
// number has the first of it as its largest. Of equal ones the first is taken. A bit of a mask that is 0 adds minus
// infinity to its logit, so what is not a number stays so.

struct Best {
    float value;
    int64_t place;
};

// Rows are divided only when there are few of them.
constexpr int64_t kFewRows = 16, kMostParts = 16;
// Parts begin at whole bytes of a mask, and at whole vectors.
constexpr int64_t kPartStep = 64;

BATON_INLINE Best later_if_larger(Best first, Best second) {
    if (first.value != first.value) return first;
    return second.value > first.value || second.value != second.value ? second : first;
}

BATON_INLINE Floats ruled_out(Floats values, const uint8_t* bits, int64_t place) {
    static const uint32_t kLaneBits[16] = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                           1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    uint32_t word = bits[place >> 3];
    if (kLanes == 16) word |= static_cast<uint32_t>(bits[(place >> 3) + (kLanes > 8)]) << 8;
    if (kLanes == 4) word >>= place & 7;
    const Words is_allowed = (Words{} + word) & read_vector<Words>(kLaneBits);
    return is_allowed != Words{} ? values : values - __builtin_inff();
}

BATON_INLINE float ruled_out(float value, const uint8_t* bits, int64_t place) {
    return bits[place >> 3] >> (place & 7) & 1 ? value : value - __builtin_inff();
}

// Of the places `begin` to `end` - 1 of a row; `changed`, unless it is NULL, gets what is compared.
template <bool kIsMasked, class T>
BATON_INLINE Best best_of(const T* row, const uint8_t* bits, float* changed, int64_t begin, int64_t end) {
    constexpr int kChains = 4;  // a comparison takes longer than reading what the next one compares
    Floats largest[kChains];
    Ints places[kChains], here, not_numbers = {};
    for (int lane = 0; lane < kLanes; ++lane) here[lane] = static_cast<int32_t>(begin) + lane;
    for (int chain = 0; chain < kChains; ++chain) {
        largest[chain] = all_lanes(-__builtin_inff());
        places[chain] = Ints{} + static_cast<int32_t>(begin);
    }
    const auto look_at = [&](int chain, int64_t place) __attribute__((always_inline)) {
        Floats values = load(row + place);
        if (kIsMasked) values = ruled_out(values, bits, place);
        if (changed != nullptr) store(changed + place, values);
        const Ints is_larger = values > largest[chain];
        largest[chain] = is_larger ? values : largest[chain];
        places[chain] = is_larger ? here : places[chain];
        not_numbers |= values != values;
        here += kLanes;
    };
    int64_t i = begin;
    for (; i + kChains * kLanes <= end; i += kChains * kLanes)
        for (int chain = 0; chain < kChains; ++chain) look_at(chain, i + chain * kLanes);
    for (; i + kLanes <= end; i += kLanes) look_at(0, i);
    Best best = {-__builtin_inff(), begin};
    bool are_numbers = true;
    for (int lane = 0; lane < kLanes; ++lane) {
        are_numbers = are_numbers && not_numbers[lane] == 0;
        for (int chain = 0; chain < kChains; ++chain) {
            const Best other = {largest[chain][lane], places[chain][lane]};
            if (other.value > best.value || (other.value == best.value && other.place < best.place)) best = other;
        }
    }
    for (; i < end; ++i) {
        const float value = kIsMasked ? ruled_out(widen(row[i]), bits, i) : widen(row[i]);
        if (changed != nullptr) changed[i] = value;
        best = later_if_larger(best, {value, i});
    }
    for (i = begin; !are_numbers; ++i) {
        const float value = kIsMasked ? ruled_out(widen(row[i]), bits, i) : widen(row[i]);
        if (value != value) return {value, i};
    }
    return best;
}

template <class T>
BATON_INLINE Best best_of_part(const T* row, const uint8_t* bits, float* changed, int64_t begin, int64_t end) {
    return bits != nullptr ? best_of<true>(row, bits, changed, begin, end)
                           : best_of<false>(row, bits, static_cast<float*>(nullptr), begin, end);
}

template <class T>
BATON_INLINE Best best_in_row(const BatonArgmax& a, int64_t row, int64_t begin, int64_t end) {
    const int64_t mask = a.masks == nullptr ? -1 : a.masks[row];
    const uint8_t* bits = mask < 0 ? nullptr : static_cast<const uint8_t*>(a.bits) + mask * a.mask_bytes;
    if (a.is_wide != nullptr && static_cast<const uint8_t*>(a.is_wide)[row] != 0) {
        float* wide = a.wide + row * a.size;
        return best_of_part(wide, bits, wide, begin, end);
    }
    return best_of_part(static_cast<const T*>(a.logits) + row * a.stride, bits, nullptr, begin, end);
}

template <class T>
void argmax_of(Pool& threads, const BatonArgmax& a) {
    const auto write = [&](int64_t row, Best best) {
        a.token_ids[row] = best.place;
        a.largest[row] = best.value;
        static_cast<uint8_t*>(a.is_valid)[row] = best.value > -__builtin_inff();
    };
    const int64_t num_parts = a.num_rows >= kFewRows ? 1 : (a.size + kElementsPerTile - 1) / kElementsPerTile;
    if (num_parts <= 1) {
        each_row(threads, a.num_rows, a.size, [&](int64_t row) { write(row, best_in_row<T>(a, row, 0, a.size)); });
        return;
    }
    Best found[kFewRows * kMostParts];
    const int64_t wanted = num_parts < kMostParts ? num_parts : kMostParts;
    const int64_t size = ((a.size + wanted - 1) / wanted + kPartStep - 1) / kPartStep * kPartStep;
    const int64_t parts = (a.size + size - 1) / size;
    threads.each(a.num_rows * parts, [&](int64_t tile, int) {
        const int64_t begin = tile % parts * size, end = begin + size < a.size ? begin + size : a.size;
        found[tile] = best_in_row<T>(a, tile / parts, begin, end);
    });
    for (int64_t row = 0; row < a.num_rows; ++row) {
        Best best = found[row * parts];
        for (int64_t part = 1; part < parts; ++part) best = later_if_larger(best, found[row * parts + part]);
        write(row, best);
    }
}

void argmax(Pool& threads, const BatonArgmax& arguments) { BATON_BY_DTYPE(arguments.dtype, argmax_of); }
