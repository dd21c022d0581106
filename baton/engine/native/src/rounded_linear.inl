// Products of rounded rows (`rounded.inl`) with quantized weights (`rounded_pack.inl`): the tiles of `linear.inl`, with
// sums of whole numbers.
//
// The sum of a unit is exact. It is multiplied by the weights' scale, and the offset times the sum of the unit's inputs
// is added. The units of one scale of x are added up, multiplied by that, and added to the row's sum. Each of these
// operations is rounded by itself and has its place in one order. So a row has the same result whatever is computed
// with it, by any number of threads, on any processor.

// Codes of some inputs of a panel, which stay in the first cache while all rows of a block use them.
constexpr int64_t kStretchCodeBytes = 16384;

// What is fetched from memory while other units are multiplied: as many bytes as these have, halved so often.
struct Fetching {
    const uint8_t* next;
    int32_t num_halvings;

    BATON_MEMBER void fetch(int64_t num_bytes) {
        const int64_t some = num_bytes >> num_halvings;
        if (num_halvings == 0) {  // without a loop: a single row is a third faster so
#pragma GCC unroll 8
            for (int64_t line = 0; line < num_bytes; line += 64)
                __builtin_prefetch(next + line, 0, kFetchToSecondCache);
        } else {
            for (int64_t line = 0; line < some; line += 64) __builtin_prefetch(next + line, 0, kFetchToSecondCache);
        }
        next += some;
    }
};
constexpr int32_t kFetchesNothing = 62;

// Some rounded rows, `stride` bytes apart.
struct RoundedRows {
    const char* rows;
    int64_t stride;
    RoundedRow parts;

    BATON_MEMBER uint32_t four(int row, int64_t k) const { return read_value<uint32_t>(rows + row * stride + k); }
    BATON_MEMBER float scale(int row, int64_t unit, int64_t unit_inputs) const {
        return read_value<float>(rows + row * stride + parts.scales + unit * unit_inputs / kScaledInputs * 4);
    }
    template <int kUnit>
    BATON_MEMBER int32_t sum(int row, int64_t unit) const {
        constexpr int64_t kSums = kUnit / kSummedInputs;
        const char* from = rows + row * stride + parts.sums + unit * kSums * 4;
        int32_t sum = 0;
        for (int64_t k = 0; k < kSums; ++k) sum += read_value<int32_t>(from + k * 4);
        return sum;
    }
};

template <class Weights, int kFour, int kRows>
BATON_INLINE void add_four(Ints (*found)[kPanelVectors], const uint8_t* codes, const RoundedRows& x, int64_t k) {
    Four weights[kPanelVectors];
    for (int part = 0; part < kPanelVectors; ++part)
        weights[part] = four_of_weights(Weights::template read<kFour>(codes + part * 4 * kLanes));
    for (int row = 0; row < kRows; ++row) {
        const Four numbers = four_of_x(x.four(row, k + 4 * kFour));
        for (int part = 0; part < kPanelVectors; ++part)
            found[row][part] = add_dots(found[row][part], weights[part], numbers);
    }
}

// Where the sums of some rows stand: [row][output of the panel]. `of_scale`: of the units of one scale of x, where
// there are several.
template <int kRows, int kUnits>
struct UnitSums {
    float* sums;
    bool is_first, is_last;  // of the units of one scale
    alignas(64) float of_scale[kUnits == 1 ? kLanes : kRows * kPanelOutputs];

    BATON_MEMBER void add(int row, int part, Floats of_unit, float scale) {
        const int64_t place = row * kPanelOutputs + part * kLanes;
        if constexpr (kUnits > 1) {
            if (!is_first) of_unit += load(of_scale + place);
            if (!is_last) return store(of_scale + place, of_unit);
        }
        store(sums + place, load(sums + place) + product(of_unit, all_lanes(scale)));
    }
};

// One unit of all rows. `scales`: of the weights, followed by their offsets.
template <class Weights, int kRows, int kUnit, bool kHasOffsets>
BATON_INLINE void add_unit(UnitSums<kRows, kScaledInputs / kUnit>& to, const uint8_t* codes, const uint8_t* scales,
                           const RoundedRows& x, int64_t unit, int32_t scale_dtype, Fetching& ahead) {
    Ints found[kRows][kPanelVectors];
    int32_t sums[kRows];
    for (int row = 0; row < kRows; ++row) {
        sums[row] = x.sum<kUnit>(row, unit);
        for (int part = 0; part < kPanelVectors; ++part) found[row][part] = Ints{} - sums[row] * Weights::kBias;
    }
    for (int64_t k = 0; k < kUnit; k += Weights::kInputs, codes += kWordBytes) {
        ahead.fetch(kWordBytes);
        add_four<Weights, 0, kRows>(found, codes, x, unit * kUnit + k);
        if constexpr (Weights::kInputs == 8) add_four<Weights, 1, kRows>(found, codes, x, unit * kUnit + k);
    }
    const uint8_t* offsets = scales + kPanelOutputs * bytes_of_scale(scale_dtype);
    // the sums stay in registers only if each has its own instructions
#pragma GCC unroll 4
    for (int part = 0; part < kPanelVectors; ++part) {
        Floats scale = load_scales(scales, part, scale_dtype);
        if constexpr (Weights::kUnit != 1.0f) scale *= Weights::kUnit;
        const Floats offset = kHasOffsets ? load_scales(offsets, part, scale_dtype) : Floats{};
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
            Floats of_unit = product(__builtin_convertvector(found[row][part], Floats), scale);
            if (kHasOffsets) of_unit += product(offset, all_lanes(static_cast<float>(sums[row])));
            to.add(row, part, of_unit, x.scale(row, unit, kUnit));
        }
    }
}

// The units `first` to `end` of a panel.
struct UnitRange {
    int64_t first, end;
    Fetching ahead;
};

template <class Weights, int kRows, int kUnit, bool kHasOffsets>
__attribute__((noinline)) void add_units(float* sums, const uint8_t* panel, const Units& u, const RoundedRows& rows,
                                         const UnitRange range, int32_t scale_dtype) {
    constexpr int64_t kUnits = kScaledInputs / kUnit, kCodeBytes = kUnit * kPanelOutputs * Weights::kBits / 8;
    const RoundedRows x = rows;
    UnitSums<kRows, kUnits> to;
    Fetching ahead = range.ahead;
    to.sums = sums;
    const uint8_t* group = panel + range.first / u.per_group * u.group_bytes;
    int64_t in_group = range.first % u.per_group;
    for (int64_t unit = range.first; unit < range.end; ++unit) {
        const uint8_t *codes = group + in_group * kCodeBytes, *scales = group + u.per_group * kCodeBytes;
        to.is_first = unit % kUnits == 0;
        to.is_last = unit % kUnits == kUnits - 1 || unit + 1 == u.num;
        add_unit<Weights, kRows, kUnit, kHasOffsets>(to, codes, scales, x, unit, scale_dtype, ahead);
        if (++in_group < u.per_group) continue;
        ahead.fetch(group + u.group_bytes - scales);
        in_group = 0;
        group += u.group_bytes;
    }
}

template <class Weights, int kUnit, bool kHasOffsets, int kRows = kMaxRows>
BATON_INLINE void add_units_of(int64_t num_rows, float* sums, const uint8_t* panel, const Units& u,
                               const RoundedRows& rows, const UnitRange& range, int32_t scale_dtype) {
    if (num_rows == kRows) {
        add_units<Weights, kRows, kUnit, kHasOffsets>(sums, panel, u, rows, range, scale_dtype);
    } else if constexpr (kRows > 1) {
        add_units_of<Weights, kUnit, kHasOffsets, kRows - 1>(num_rows, sums, panel, u, rows, range, scale_dtype);
    }
}

// Alone, some rows fetch the stream that they read. Of several that read the same units, the first two fetch half of
// what comes behind those.
BATON_INLINE Fetching fetching(const uint8_t* packed, const Units& u, int64_t first, int64_t end, int64_t number,
                               int64_t num_groups) {
    const uint8_t *begin = u.codes(packed, first), *behind = u.codes(packed, end);
    if (num_groups == 1) return {begin + kStreamAhead, 0};
    return {behind + (behind - begin) / 128 * 64 * number, number < 2 ? 1 : kFetchesNothing};
}

// The sums of a block of rows and a panel: stretch by stretch, some rows after the others.
template <class Weights, int kUnit, bool kHasOffsets>
BATON_INLINE void sum_rounded_panel(float* sums, const BatonRoundedLinear& a, const Units& u, int64_t panel,
                                    int64_t first_row, int64_t num_rows) {
    const uint8_t* packed = static_cast<const uint8_t*>(a.packed) + panel * u.panel_bytes();
    const int64_t num_groups = divided_up(num_rows, kMaxRows);
    const int64_t at_once = num_groups == 1 ? u.num : kStretchCodeBytes / u.code_bytes;
    __builtin_memset(sums, 0, static_cast<uint64_t>(num_rows * kPanelOutputs) * sizeof(float));
    for (int64_t unit = 0; unit < u.num; unit += at_once)
        for (int64_t group = 0; group < num_groups; ++group) {
            // groups of equal size, give or take one
            const int64_t first = num_rows * group / num_groups, end = num_rows * (group + 1) / num_groups;
            const char* rows = static_cast<const char*>(a.x) + (first_row + first) * a.x_stride;
            const int64_t end_unit = smaller(unit + at_once, u.num);
            const RoundedRows x = {rows, a.x_stride, rounded_row(a.num_in)};
            const UnitRange range = {unit, end_unit, fetching(packed, u, unit, end_unit, group, num_groups)};
            add_units_of<Weights, kUnit, kHasOffsets>(end - first, sums + first * kPanelOutputs, packed, u, x, range,
                                                      a.scale_dtype);
        }
}

template <class Weights>
BATON_INLINE void sum_by_unit(float* sums, const BatonRoundedLinear& a, const Units& u, int64_t panel,
                              int64_t first_row, int64_t num_rows) {
#define BATON_SUM(unit, has_offsets) \
    sum_rounded_panel<Weights, unit, has_offsets>(sums, a, u, panel, first_row, num_rows)
    switch (u.inputs) {
        case 16: return a.has_offsets ? BATON_SUM(16, true) : BATON_SUM(16, false);
        case 32: return a.has_offsets ? BATON_SUM(32, true) : BATON_SUM(32, false);
    }
#undef BATON_SUM
}

template <class T>
BATON_INLINE void finish_rounded(const float* sums, const BatonLinear& plain, int64_t panel, int64_t first_row,
                                 int64_t num_rows) {
    const Block<T> block = {plain, panel, first_row, num_rows};
    if (plain.out_is_float32) {
        finish<T, float>(sums, block);
    } else {
        finish<T, T>(sums, block);
    }
}

template <class Weights>
void rounded_linear_of(Pool& threads, const BatonRoundedLinear& a) {
    const BatonLinear plain = {a.out,    nullptr,      a.packed, a.bias,  a.num_tokens,    a.num_out,
                               a.num_in, a.out_stride, 0,        a.dtype, a.out_is_float32};
    const Units u = units_of<Weights>(a.num_in, a.group_size, a.scale_dtype, a.has_offsets);
    const Tiling t = tiling_of(threads, plain, divided_up(a.num_in, 4) * kPanelVectors + 1);
    threads.each(t.num_tiles(), [&](int64_t tile, int) {
        alignas(64) float sums[kMaxBlockRows * kPanelOutputs];
        const int64_t number = tile % t.num_blocks, first_row = a.num_tokens * number / t.num_blocks;
        const int64_t num_rows = a.num_tokens * (number + 1) / t.num_blocks - first_row;
        const int64_t first_panel = tile / t.num_blocks * t.panels_per_tile;
        for (int64_t panel = first_panel; panel < smaller(first_panel + t.panels_per_tile, t.num_panels); ++panel) {
            sum_by_unit<Weights>(sums, a, u, panel, first_row, num_rows);
            switch (a.dtype) {
                case BATON_FLOAT32: finish_rounded<float>(sums, plain, panel, first_row, num_rows); break;
                case BATON_BFLOAT16: finish_rounded<Bfloat16>(sums, plain, panel, first_row, num_rows); break;
                case BATON_FLOAT16: finish_rounded<Float16>(sums, plain, panel, first_row, num_rows); break;
            }
        }
    });
}

void rounded_linear(Pool& threads, const BatonRoundedLinear& arguments) {
    BATON_BY_WEIGHTS(arguments.codes_kind, rounded_linear_of, threads, arguments);
}
