// Quantizing plain weights while they are loaded. What the numbers become is defined by `while_loading.py`, which
// computes it in torch where there are no kernels. Every operation here is one there, in its order: what torch rounds once
// is rounded once, what it rounds twice is rounded twice. So the codes are the same on every processor.

constexpr int64_t kSmallGroup = 32;  // of codes of 4 bits
constexpr int64_t kGroupsPerTile = 64 * kLanes;
constexpr float kSmallestHalf = 6.103515625e-5f;  // below, float16 has fewer bits: such scales stay float32

BATON_INLINE Floats rounded(Floats values) { return round_to(values, static_cast<const float*>(nullptr)); }
BATON_INLINE Floats product(Floats a, Floats b) { return rounded(a * b); }
// Rounded once.
BATON_INLINE Floats sum_with_product(Floats sum, Floats a, Floats b) {
#if BATON_VECTOR_BYTES == 64
    return reinterpret_cast<Floats>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b),
                                                    reinterpret_cast<__m512>(sum)));
#elif BATON_VECTOR_BYTES == 32
    return reinterpret_cast<Floats>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b),
                                                    reinterpret_cast<__m256>(sum)));
#else
    for (int lane = 0; lane < kLanes; ++lane)
        sum[lane] = static_cast<float>(static_cast<double>(a[lane]) * b[lane] + sum[lane]);
    return sum;
#endif
}
BATON_INLINE Floats inverse_of(Floats values) { return values != 0.0f ? 1.0f / values : Floats{}; }
BATON_INLINE Floats as_half(Floats values) { return round_to(values, static_cast<const Float16*>(nullptr)); }
BATON_INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

// The nearest whole number within bounds, ties to even.
BATON_INLINE Floats whole_within(Floats values, float low, float high) {
    const Floats bounded = larger(smaller(values, all_lanes(high)), all_lanes(low));
    return rounded(bounded + 12582912.0f) - 12582912.0f;
}

// kLanes groups side by side: row k has the k-th number of each.
struct SmallGroups {
    Floats numbers[kSmallGroup];
};

// 16 at a time, as torch adds them.
template <class Value>
BATON_INLINE Floats mean_of(const Value& value) {
    Floats halves[2] = {};
    for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 16; ++k) halves[half] = rounded(halves[half] + value(16 * half + k));
    return (halves[0] + halves[1]) * 0.03125f;
}

template <class T>
BATON_INLINE void read_groups(SmallGroups& groups, const T* from, int64_t count) {
    for (int first = 0; first < kSmallGroup; first += kLanes) {
        Words rows[kLanes];
        for (int lane = 0; lane < kLanes; ++lane)
            rows[lane] = reinterpret_cast<Words>(load(from + (lane < count ? lane : count - 1) * kSmallGroup + first));
        transpose(rows);
        for (int i = 0; i < kLanes; ++i) groups.numbers[first + i] = reinterpret_cast<Floats>(rows[i]);
    }
}

// Scale and offset of each group: of four ranges that the codes are spread over those that leave the smallest error.
BATON_INLINE void fit_groups(const SmallGroups& groups, Floats* scales, Floats* offsets) {
    const Floats* numbers = groups.numbers;
    Floats low = numbers[0], high = numbers[0];
    for (int k = 1; k < kSmallGroup; ++k) {
        low = smaller(low, numbers[k]);
        high = larger(high, numbers[k]);
    }
    const Floats mean = mean_of([&](int k) { return numbers[k]; }), spread = inverse_of(high - low);
    Floats fit = {};
    *scales = Floats{};
    *offsets = mean;
    for (const double range : {15.0, 14.2, 15.8, 16.6}) {
        const Floats inverse = static_cast<float>(range) * spread;
        const Floats begin = static_cast<float>((15.0 - range) / 2) - product(low, inverse);
        Floats codes[kSmallGroup];
        Floats sum = {}, squares = {};
        for (int k = 0; k < kSmallGroup; ++k) {
            codes[k] = whole_within(sum_with_product(begin, numbers[k], inverse), 0.0f, 15.0f);
            sum += codes[k];
            squares += codes[k] * codes[k];  // exact
        }
        const Floats middle = sum * 0.03125f;
        const Floats together = mean_of([&](int k) { return product(codes[k], numbers[k]); });
        const Floats covariance = together - product(middle, mean);
        const Floats variance = squares * 0.03125f - product(middle, middle);
        const Floats slope = product(covariance, inverse_of(variance));
        const Floats explained = product(slope, covariance), offset = mean - product(slope, middle);
        *scales = explained > fit ? slope : *scales;
        *offsets = explained > fit ? offset : *offsets;
        fit = explained > fit ? explained : fit;
    }
    *scales = *scales < kSmallestHalf ? *scales : as_half(*scales);
    *offsets = *offsets + product(*scales, all_lanes(8.0f));
    *offsets = *scales < kSmallestHalf ? *offsets : as_half(*offsets);
}

// `to`: the codes of kLanes groups or of `count`, two in a byte.
BATON_INLINE void write_small_codes(uint8_t* to, const SmallGroups& groups, Floats scales, Floats offsets, int64_t count) {
    const Floats inverse = inverse_of(scales), begin = 8.0f - product(offsets, inverse);
    uint32_t lanes[kLanes];
    for (int pair = 0; pair < kSmallGroup / 2; ++pair) {
        Words codes[2];
        for (int i = 0; i < 2; ++i) {
            const Floats whole = whole_within(sum_with_product(begin, groups.numbers[2 * pair + i], inverse), 0.0f, 15.0f);
            codes[i] = reinterpret_cast<Words>(__builtin_convertvector(whole, Ints));
        }
        write_vector(lanes, codes[0] | (codes[1] << 4));
        for (int64_t lane = 0; lane < count; ++lane) to[lane * (kSmallGroup / 2) + pair] = static_cast<uint8_t>(lanes[lane]);
    }
}

template <class T>
void quantize_small(const BatonQuantize& a, int64_t first, int64_t end) {
    for (; first < end; first += kLanes) {
        const int64_t count = end - first < kLanes ? end - first : kLanes;
        SmallGroups groups;
        Floats scales, offsets;
        read_groups(groups, static_cast<const T*>(a.weight) + first * kSmallGroup, count);
        fit_groups(groups, &scales, &offsets);
        write_small_codes(static_cast<uint8_t*>(a.codes) + first * (kSmallGroup / 2), groups, scales, offsets, count);
        store_first(a.scales + first, scales, count);
        store_first(a.offsets + first, offsets, count);
    }
}

template <class T>
BATON_INLINE Floats load_some(const T* from, int64_t left) {
    return left >= kLanes ? load(from) : load_first(from, left);
}

template <class T>
void quantize_bytes(const BatonQuantize& a, int64_t group) {
    const T* from = static_cast<const T*>(a.weight) + group * a.group_size;
    int8_t* to = static_cast<int8_t*>(a.codes) + group * a.group_size;
    Floats furthest = {};
    for (int64_t k = 0; k < a.group_size; k += kLanes) {
        const Floats numbers = load_some(from + k, a.group_size - k);
        furthest = larger(furthest, larger(numbers, -numbers));
    }
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane)
            furthest[lane] = furthest[lane] > furthest[lane + width] ? furthest[lane] : furthest[lane + width];
    Floats scale = all_lanes(furthest[0]) / 127.0f;
    scale = scale < kSmallestHalf ? scale : as_half(scale);
    const Floats inverse = inverse_of(scale);
    for (int64_t k = 0; k < a.group_size; k += kLanes) {
        const int64_t left = a.group_size - k;
        const Floats whole = whole_within(product(load_some(from + k, left), inverse), -127.0f, 127.0f);
        typedef int8_t Codes __attribute__((vector_size(kLanes)));
        const Codes codes = __builtin_convertvector(__builtin_convertvector(whole, Ints), Codes);
        __builtin_memcpy(to + k, &codes, left < kLanes ? left : kLanes);
    }
    a.scales[group] = scale[0];
}

template <class T>
void quantize_of(Pool& threads, const BatonQuantize& a) {
    threads.each((a.num_groups + kGroupsPerTile - 1) / kGroupsPerTile, [&](int64_t tile, int) {
        const int64_t first = tile * kGroupsPerTile, behind = first + kGroupsPerTile;
        const int64_t end = behind < a.num_groups ? behind : a.num_groups;
        if (a.codes_kind == BATON_INT4) return quantize_small<T>(a, first, end);
        for (int64_t group = first; group < end; ++group) quantize_bytes<T>(a, group);
    });
}

void quantize(Pool& threads, const BatonQuantize& arguments) { BATON_BY_DTYPE(arguments.dtype, quantize_of); }
