// Products of rows of x with packed weights: cut into tiles of some panels and some rows each, which the threads share.
//
// Small batches read the weights once, and the memory's speed is the limit. Large ones are computed in blocks of rows: a
// stretch of a panel stays in the cache while all groups of rows of the block use it. No choice here changes a result,
// see `linear_rows.inl`.

#include "linear_pack.inl"
#include "linear_rows.inl"

constexpr int64_t kStretchSteps = 512;
constexpr int64_t kMaxBlockRows = 192, kMinBlockRows = 24;
// Multiplications of vectors in a tile: some 80 microseconds at one in each cycle.
constexpr int64_t kMultipliesPerTile = 1 << 18;
constexpr int64_t kTilesPerThread = 8;
// The rows of so many blocks, a quarter of a megabyte each, stay in the second cache while all panels pass by. With more
// of them at once each panel would read the rows from further away.
constexpr int64_t kBlocksAtOnce = 3;
// So many rows take the time in which their weights are read from memory: fewer do not make a tile any shorter.
constexpr int64_t kRowsPerRead = 8;

struct Tiling {
    int64_t num_panels, panels_per_tile, num_blocks;
    int64_t tiles_of_block() const { return divided_up(num_panels, panels_per_tile); }
    int64_t num_tiles() const { return tiles_of_block() * num_blocks; }
};

// Where a tile lies: blocks that are computed at once, of these panel after panel, of a panel block after block.
struct TilePlace {
    int64_t block, first_panel;
};

BATON_INLINE TilePlace place_of(const Tiling& t, int64_t tile) {
    const int64_t first_block = tile / (t.tiles_of_block() * kBlocksAtOnce) * kBlocksAtOnce;
    const int64_t at_once = smaller(kBlocksAtOnce, t.num_blocks - first_block);
    const int64_t within = tile - first_block * t.tiles_of_block();
    return {first_block + within % at_once, within / at_once * t.panels_per_tile};
}

// `per_row`: multiplications of vectors for a row and a panel.
BATON_INLINE Tiling tiling_of(const Pool& threads, const BatonLinear& a, int64_t per_row,
                              int64_t max_rows = kMaxBlockRows) {
    const int64_t most_rows = smaller(max_rows, kMultipliesPerTile / per_row);
    Tiling t;
    t.num_panels = divided_up(a.num_out, kPanelOutputs);
    t.num_blocks = divided_up(a.num_tokens, most_rows > kMinBlockRows ? most_rows : kMinBlockRows);
    const int64_t block_rows = divided_up(a.num_tokens, t.num_blocks > 0 ? t.num_blocks : 1);
    const int64_t rows = block_rows > kRowsPerRead ? block_rows : kRowsPerRead;
    const int64_t most_panels = smaller(kMultipliesPerTile / (per_row * rows),
                                        t.num_panels * t.num_blocks / (kTilesPerThread * threads.num_threads()));
    t.panels_per_tile = most_panels > 1 ? most_panels : 1;
    return t;
}

template <class T>
BATON_INLINE Tiling tiling(const Pool& threads, const BatonLinear& a, int64_t max_rows = kMaxBlockRows) {
    return tiling_of(threads, a, num_steps<T>(a.num_in) * kPanelVectors + 1, max_rows);
}

// One panel and one block of rows.
template <class T>
struct Block {
    const BatonLinear& a;
    int64_t panel, first_row, num_rows;
};

// x of some rows in the inputs of a stretch, widened, or with a zero behind the last of an odd number of inputs.
template <class T>
BATON_INLINE void stage(typename Input<T>::Value* staged, const T* x, int64_t x_stride, int64_t num_rows,
                        int64_t num_inputs) {
    constexpr int64_t kRowValues = kStretchSteps * Input<T>::kValues;
    for (int64_t row = 0; row < num_rows; ++row) {
        const T* from = x + row * x_stride;
        if constexpr (Input<T>::kInPlace) {
            __builtin_memset(staged + row * kRowValues + num_inputs / Packing<T>::kInputs, 0, kInputBytes<T>);
            __builtin_memcpy(staged + row * kRowValues, from, static_cast<uint64_t>(num_inputs) * sizeof(T));
        } else {
            float* to = staged + row * kRowValues;
            int64_t k = 0;
            for (; k + kLanes <= num_inputs; k += kLanes) store(to + k, load(from + k));
            for (; k < num_inputs; ++k) to[k] = widen(from[k]);
            if (num_inputs % Packing<T>::kInputs != 0) to[num_inputs] = 0.0f;
        }
    }
}

// Adds the stretch from `first_step` on to the sums of all rows of a block.
template <class T>
BATON_INLINE void add_to_block(float* sums, const Block<T>& block, int64_t first_step) {
    constexpr int kInputs = Packing<T>::kInputs;
    typedef typename Input<T>::Value Value;
    const BatonLinear& a = block.a;
    const int64_t panel_steps = num_steps<T>(a.num_in), steps = smaller(kStretchSteps, panel_steps - first_step);
    const int64_t num_inputs = smaller(steps * kInputs, a.num_in - first_step * kInputs);
    const int64_t num_groups = divided_up(block.num_rows, kMaxRows);
    const bool in_place = Input<T>::kInPlace && num_inputs == steps * kInputs;
    alignas(64) Value staged[kMaxRows * kStretchSteps * Input<T>::kValues];
    Stretch<T> stretch = {};
    stretch.weights = static_cast<const T*>(a.packed) + (block.panel * panel_steps + first_step) * kStepElements<T>;
    stretch.steps = steps;
    for (int64_t group = 0; group < num_groups; ++group) {
        // groups of equal size, give or take one
        const int64_t first = block.num_rows * group / num_groups;
        const int64_t num_rows = block.num_rows * (group + 1) / num_groups - first;
        const T* x = static_cast<const T*>(a.x) + (block.first_row + first) * a.x_stride + first_step * kInputs;
        if (in_place) {
            stretch.x = reinterpret_cast<const char*>(x);
            stretch.x_stride = a.x_stride * int64_t{sizeof(T)};
        } else {
            stage<T>(staged, x, a.x_stride, num_rows, num_inputs);
            stretch.x = reinterpret_cast<const char*>(staged);
            stretch.x_stride = kStretchSteps * kInputBytes<T>;
        }
        float* stored = sums + first * kPanelOutputs;
        if (num_groups == 1) {
            add_alone<T>(num_rows, stored, stretch, first_step == 0);
        } else {
            add_shared<T>(num_rows, stored, stretch, first_step == 0, group, num_groups);
        }
    }
}

// out = sums + bias, rounded to Out, for the outputs of a panel that exist
template <class T, class Out>
BATON_INLINE void finish(const float* sums, const Block<T>& block) {
    const BatonLinear& a = block.a;
    const int64_t first_output = block.panel * kPanelOutputs;
    for (int64_t part = 0; part < kPanelVectors; ++part) {
        const int64_t output = first_output + part * kLanes, count = smaller(kLanes, a.num_out - output);
        if (count <= 0) break;
        Floats bias = {};
        if (a.bias != nullptr) bias = load_first(static_cast<const T*>(a.bias) + output, count);
        for (int64_t row = 0; row < block.num_rows; ++row) {
            const Floats values = load(sums + row * kPanelOutputs + part * kLanes) + bias;
            Out* out = static_cast<Out*>(a.out) + (block.first_row + row) * a.out_stride + output;
            if (count == kLanes) {
                store(out, values);
            } else {
                store_first(out, values, count);
            }
        }
    }
}

template <class T>
void linear_of(Pool& threads, const BatonLinear& a) {
    const Tiling t = tiling<T>(threads, a);
    const int64_t steps = num_steps<T>(a.num_in);
    threads.each(t.num_tiles(), [&](int64_t tile, int) {
        alignas(64) float sums[kMaxBlockRows * kPanelOutputs];
        const TilePlace place = place_of(t, tile);
        const int64_t first_row = a.num_tokens * place.block / t.num_blocks;
        Block<T> block = {a, place.first_panel, first_row, a.num_tokens * (place.block + 1) / t.num_blocks - first_row};
        for (; block.panel < smaller(place.first_panel + t.panels_per_tile, t.num_panels); ++block.panel) {
            for (int64_t step = 0; step == 0 || step < steps; step += kStretchSteps) add_to_block<T>(sums, block, step);
            if (a.out_is_float32) {
                finish<T, float>(sums, block);
            } else {
                finish<T, T>(sums, block);
            }
        }
    });
}

void linear(Pool& threads, const BatonLinear& arguments) { BATON_BY_DTYPE(arguments.dtype, linear_of); }
