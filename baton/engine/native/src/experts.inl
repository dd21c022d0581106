// The experts of a sparse MLP: gated MLPs, of which each token has its own. One call computes those of all tokens.
//
// The rows of x are gathered by expert, so that each expert has its rows one behind the other. Panels of all experts that
// have rows are one list, which the threads share in tiles: a tile goes from one expert's panels to the next one's, and
// what it reads is one stream. The sums of a row are those of `linear.inl` and `quantized.inl`, and a token's results are
// added in the order of its experts, so a token has the same result whatever is computed with it.
//
// Rows of gate and up take turns in gate_up: both of an output lie in the same panel, and what they become is written at
// once.

constexpr int64_t kMaxExperts = 1024;

// --- the sums of a panel, by a product's arguments. A further kind of weight has a case in `sum_any_panel`.

BATON_INLINE BatonLinear as_plain(const BatonQuantizedLinear& a) {
    return {a.out,    a.x,          a.packed,   a.bias,  a.num_tokens,    a.num_out,
            a.num_in, a.out_stride, a.x_stride, a.dtype, a.out_is_float32};
}

// Memory of a thread while it computes a tile.
struct PanelRoom {
    alignas(64) float sums[kMaxBlockRows * kPanelOutputs], of_codes[kMaxBlockRows * kPanelOutputs];
    InputSums input_sums;
};

template <class T>
__attribute__((noinline)) void sum_plain_panel(PanelRoom& room, const Block<T>& block, const BatonQuantizedLinear& a) {
    const int64_t steps = num_steps<T>(a.num_in);
    for (int64_t step = 0; step == 0 || step < steps; step += kStretchSteps)
        add_to_block<T>(room.sums, block, step);
}

template <class T, class Codes>
__attribute__((noinline)) void sum_coded_panel(PanelRoom& room, const Block<T>& block, const BatonQuantizedLinear& a) {
    const Grouping g = grouping<T, Codes>(a.num_in, a.group_size, a.scale_dtype, a.has_offsets);
    sum_panel<T, Codes>(room.sums, room.of_codes, block, g, a, room.input_sums);
}

template <class Weights>
__attribute__((noinline)) void sum_panel_of_rounded(float* sums, const BatonRoundedLinear& a, int64_t panel,
                                                    int64_t first_row, int64_t num_rows) {
    const Units u = units_of<Weights>(a.num_in, a.group_size, a.scale_dtype, a.has_offsets);
    sum_by_unit<Weights>(sums, a, u, panel, first_row, num_rows);
}

template <class T>
BATON_INLINE void sum_rounded_piece(PanelRoom& room, const Block<T>& block, const BatonQuantizedLinear& a) {
    const BatonRoundedLinear rounded = {a.out,        a.x,     a.packed,         nullptr,      a.num_tokens,  a.num_out,
                                        a.num_in,     0,       a.x_stride,       a.group_size, a.dtype,       0,
                                        a.codes_kind, a.scale_dtype, a.has_offsets};
    BATON_BY_WEIGHTS(a.codes_kind, sum_panel_of_rounded, room.sums, rounded, block.panel, block.first_row,
                     block.num_rows);
}

// The sums of a block's rows and its panel, whatever kind the weight is.
template <class T>
BATON_INLINE void sum_any_panel(PanelRoom& room, const Block<T>& block, const BatonQuantizedLinear& a,
                                bool is_rounded) {
    if (is_rounded) return sum_rounded_piece(room, block, a);
    switch (a.codes_kind) {
        case BATON_INT8: return sum_coded_panel<T, Int8Codes>(room, block, a);
        case BATON_INT4: return sum_coded_panel<T, Int4Codes>(room, block, a);
        case BATON_E4M3: return sum_coded_panel<T, E4m3Codes>(room, block, a);
        case BATON_E2M1: return sum_coded_panel<T, E2m1Codes>(room, block, a);
        case BATON_PLAIN: return sum_plain_panel<T>(room, block, a);
    }
}

// --- rows by expert

// The rows of expert e are rows[e] .. rows[e + 1] - 1 of those that are gathered, and its pieces of work first[e] ...
struct ExpertRows {
    int64_t rows[kMaxExperts + 1], first[kMaxExperts + 1];

    int64_t count(int64_t expert) const { return rows[expert + 1] - rows[expert]; }
    // The expert of a piece of work.
    int64_t of_piece(int64_t piece, int64_t num_experts) const {
        int64_t low = 0, high = num_experts - 1;
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (first[middle] <= piece) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        return low;
    }
};

// What is between the products: of each choice, in the order of `chosen`, its place among the rows that are gathered;
// those rows, and later their results; and the inputs of the second product. Rows lie `row_stride` and `inner_stride`
// apart. Where a product takes rounded rows, those are made of its inputs, `rounded_stride` bytes apart.
template <class T>
struct ExpertScratch {
    int64_t* places;
    T* rows;
    T* inner;
    int64_t row_stride, inner_stride;
    char* rounded;
    int64_t rounded_stride;
};

template <class T>
BATON_INLINE ExpertScratch<T> expert_scratch(const BatonExperts& a) {
    const int64_t count = a.num_tokens * a.num_chosen;
    ExpertScratch<T> s;
    s.row_stride = expert_row_stride(a.size);
    s.inner_stride = expert_row_stride(a.inner);
    s.places = static_cast<int64_t*>(a.scratch);
    s.rows = reinterpret_cast<T*>(s.places + count);
    s.inner = s.rows + count * s.row_stride;
    s.rounded = reinterpret_cast<char*>(s.inner + count * s.inner_stride);
    s.rounded_stride = rounded_row_bytes(a.size > a.inner ? a.size : a.inner);
    return s;
}

// Gives each choice a place, those of an expert one behind the other in the order of their tokens.
BATON_INLINE void place_rows(ExpertRows& r, int64_t* places, const BatonExperts& a) {
    const int64_t count = a.num_tokens * a.num_chosen;
    int64_t next[kMaxExperts];
    for (int64_t expert = 0; expert <= a.num_experts; ++expert) r.rows[expert] = 0;
    for (int64_t i = 0; i < count; ++i) ++r.rows[a.chosen[i] + 1];
    for (int64_t expert = 0; expert < a.num_experts; ++expert) {
        next[expert] = r.rows[expert];
        r.rows[expert + 1] += r.rows[expert];
    }
    for (int64_t i = 0; i < count; ++i) places[i] = next[a.chosen[i]]++;
}

// Of a tile: the sums of their inputs are computed once for all of them.
constexpr int64_t kFewestPieces = 4;

// A product of all experts, cut into pieces: a panel of an expert and some of its rows.
struct ExpertPieces {
    int64_t num_panels, most_rows, num_pieces, per_tile;
    int64_t num_blocks(int64_t num_rows) const { return divided_up(num_rows, most_rows); }
};

template <class T>
BATON_INLINE ExpertPieces cut_in_pieces(const Pool& threads, ExpertRows& r, const BatonExperts& a, int64_t num_out,
                                        int64_t num_in) {
    const int64_t per_row = num_steps<T>(num_in) * kPanelVectors + 1;
    const int64_t most_rows = smaller(kMaxCodedRows, kMultipliesPerTile / per_row);
    ExpertPieces p;
    p.num_panels = divided_up(num_out, kPanelOutputs);
    p.most_rows = most_rows > kMinBlockRows ? most_rows : kMinBlockRows;
    p.num_pieces = 0;
    for (int64_t expert = 0; expert < a.num_experts; ++expert) {
        r.first[expert] = p.num_pieces;
        p.num_pieces += p.num_blocks(r.count(expert)) * p.num_panels;
    }
    r.first[a.num_experts] = p.num_pieces;
    const int64_t rows = a.num_tokens * a.num_chosen * p.num_panels / (p.num_pieces > 0 ? p.num_pieces : 1) + 1;
    const int64_t in_time = kMultipliesPerTile / (per_row * (rows > kRowsPerRead ? rows : kRowsPerRead));
    const int64_t most = smaller(in_time > kFewestPieces ? in_time : kFewestPieces,
                                 p.num_pieces / (kTilesPerThread * threads.num_threads()));
    p.per_tile = most > 1 ? most : 1;
    return p;
}

// Where the stream of an expert's panels ends, that of the next one with rows begins.
BATON_INLINE void fetch_next(const ExpertRows& r, const BatonExperts& a, const BatonExpertWeight* weights,
                             int64_t expert) {
    do {
        if (++expert == a.num_experts) return;
    } while (r.count(expert) == 0);
    const char* next = static_cast<const char*>(weights[expert].packed);
    for (int64_t line = 0; line < kStreamAhead; line += 64) __builtin_prefetch(next + line, 0, kFetchToSecondCache);
}

// Calls `finish(sums, block)` for each piece of a product; `product(expert)` has the expert's arguments.
template <class T, class Product, class Finish>
BATON_INLINE void each_piece(Pool& threads, ExpertRows& r, const BatonExperts& a, const BatonExpertWeight* weights,
                             int64_t num_out, int64_t num_in, const Product& product, const Finish& finish) {
    const ExpertPieces p = cut_in_pieces<T>(threads, r, a, num_out, num_in);
    threads.each(divided_up(p.num_pieces, p.per_tile), [&](int64_t tile, int) {
        PanelRoom room;
        int64_t piece = tile * p.per_tile;
        const int64_t end = smaller(p.num_pieces, piece + p.per_tile);
        for (int64_t expert = r.of_piece(piece, a.num_experts); piece < end; ++expert) {
            const BatonQuantizedLinear of_expert = product(expert);
            const BatonLinear plain = as_plain(of_expert);
            const int64_t num_rows = r.count(expert), num_blocks = p.num_blocks(num_rows);
            int64_t last_block = -1;
            for (; piece < smaller(end, r.first[expert + 1]); ++piece) {
                const int64_t number = (piece - r.first[expert]) % num_blocks, first_row = num_rows * number / num_blocks;
                const Block<T> block = {plain, (piece - r.first[expert]) / num_blocks, first_row,
                                        num_rows * (number + 1) / num_blocks - first_row};
                if (number != last_block) room.input_sums.count = 0;
                if (piece + 1 == r.first[expert + 1]) fetch_next(r, a, weights, expert);
                last_block = number;
                sum_any_panel<T>(room, block, of_expert, weights[expert].is_rounded != 0);
                finish(room.sums, block);
            }
        }
    });
}

// Rows that a product reads, or writes: how far they are apart, and how many numbers of each it takes or makes.
template <class T>
struct Rows {
    T* first;
    int64_t stride, size;
};

// The arguments of an expert's product from its rows of `x`, or what they are rounded to, to those of `out`.
template <class T>
BATON_INLINE BatonQuantizedLinear product_of(const BatonExpertWeight& w, const BatonExperts& a,
                                             const ExpertScratch<T>& s, int64_t first_row, const Rows<T>& x,
                                             const Rows<T>& out) {
    BatonQuantizedLinear found = {};
    found.x = w.is_rounded ? static_cast<const void*>(s.rounded + first_row * s.rounded_stride)
                           : static_cast<const void*>(x.first + first_row * x.stride);
    found.out = out.first + first_row * out.stride;
    found.packed = w.packed;
    found.bias = w.bias;
    found.num_out = out.size;
    found.num_in = x.size;
    found.out_stride = out.stride;
    found.x_stride = w.is_rounded ? s.rounded_stride : x.stride;
    found.group_size = w.group_size;
    found.dtype = a.dtype;
    found.codes_kind = w.codes_kind;
    found.scale_dtype = w.scale_dtype;
    found.has_offsets = w.has_offsets;
    return found;
}

// --- gates

// (up + 1) * (gate * sigmoid(slope * gate)) of clamped inputs, rounded after each operation
template <class T>
BATON_INLINE Floats clamped_gated(Floats gate, Floats up, const BatonExperts& a, const T* dtype) {
    const Floats limit = all_lanes(a.gate_limit);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    const Floats sloped = round_to(gate * a.gate_slope, dtype);
    const Floats share = round_to(1.0f / (exponential(-sloped) + 1.0f), dtype);
    return round_to(up + 1.0f, dtype) * round_to(gate * share, dtype);
}

template <class T>
BATON_INLINE Floats gated_as(const BatonExperts& a, Floats gate, Floats up, const T* dtype) {
    return a.gate == BATON_CLAMPED ? clamped_gated(gate, up, a, dtype) : gated(gate, up, dtype);
}

// The inputs of the second product that a panel of gate and up become, both with their biases and rounded.
template <class T>
BATON_INLINE void finish_gate(const float* sums, const Block<T>& block, const BatonExperts& a) {
    const int64_t first = block.panel * kPanelOutputs, count = smaller(kPanelOutputs, block.a.num_out - first);
    const T* bias = static_cast<const T*>(block.a.bias);
    const T* dtype = nullptr;
    float biases[kPanelOutputs] = {};
    for (int64_t place = 0; bias != nullptr && place < count; ++place) biases[place] = widen(bias[first + place]);
    for (int64_t row = 0; row < block.num_rows; ++row) {
        alignas(64) float gates[kPanelOutputs / 2], ups[kPanelOutputs / 2];
        for (int64_t part = 0; part < kPanelVectors; ++part) {
            alignas(64) float values[kLanes];
            const int64_t place = part * kLanes;
            store(values, round_to(load(sums + row * kPanelOutputs + place) + load(biases + place), dtype));
            for (int64_t lane = 0; lane < kLanes / 2; ++lane) {
                gates[place / 2 + lane] = values[2 * lane];
                ups[place / 2 + lane] = values[2 * lane + 1];
            }
        }
        T* out = static_cast<T*>(block.a.out) + (block.first_row + row) * block.a.out_stride + first / 2;
        for (int64_t place = 0; place < count / 2; place += kLanes) {
            const Floats values = gated_as(a, load(gates + place), load(ups + place), dtype);
            const int64_t rest = count / 2 - place;
            if (rest >= kLanes) {
                store(out + place, values);
            } else {
                store_first(out + place, values, rest);
            }
        }
    }
}

// --- the sum of a token's experts

// Of a token, its choices in the order of their experts, which is that of their places.
BATON_INLINE void order_choices(int64_t* order, const int64_t* places, int64_t count) {
    for (int64_t choice = 0; choice < count; ++choice) {
        int64_t i = choice;
        for (; i > 0 && places[order[i - 1]] > places[choice]; --i) order[i] = order[i - 1];
        order[i] = choice;
    }
}

// out = the results of a token's experts, each times its weight and rounded, added one after another and rounded.
template <class T>
BATON_INLINE void add_results(const BatonExperts& a, const ExpertScratch<T>& s, int64_t token) {
    const int64_t* places = s.places + token * a.num_chosen;
    const T* weights = static_cast<const T*>(a.weights) + token * a.num_chosen;
    T* out = static_cast<T*>(a.out) + token * a.size;
    int64_t order[kMaxExperts];
    order_choices(order, places, a.num_chosen);
    for (int64_t first = 0; first < a.size; first += kLanes) {
        const int64_t count = smaller(kLanes, a.size - first);
        Floats sum = {};
        for (int64_t i = 0; i < a.num_chosen; ++i) {
            const T* result = s.rows + places[order[i]] * s.row_stride + first;
            const Floats values = count == kLanes ? load(result) : load_first(result, count);
            sum = round_to(sum + round_to(values * widen(weights[order[i]]), out), out);
        }
        if (count == kLanes) {
            store(out + first, sum);
        } else {
            store_first(out + first, sum, count);
        }
    }
}

// How the weights of a product take their inputs.
struct InputForms {
    bool plain, rounded;
};

BATON_INLINE InputForms forms_of(const BatonExpertWeight* weights, int64_t num_experts) {
    InputForms found = {};
    for (int64_t expert = 0; expert < num_experts; ++expert) {
        found.plain |= !weights[expert].is_rounded;
        found.rounded |= weights[expert].is_rounded != 0;
    }
    return found;
}

// Each token's row of x to the places of its choices, in the forms that the first product takes.
template <class T>
BATON_INLINE void gather_rows(Pool& threads, const BatonExperts& a, const ExpertScratch<T>& s) {
    const InputForms forms = forms_of(a.gate_up, a.num_experts);
    const uint64_t bytes = static_cast<uint64_t>(a.size) * sizeof(T);
    each_row(threads, a.num_tokens, a.num_chosen * a.size, [&](int64_t token) {
        const T* x = static_cast<const T*>(a.x) + token * a.x_stride;
        const int64_t* places = s.places + token * a.num_chosen;
        char* rounded = s.rounded + places[0] * s.rounded_stride;
        if (forms.rounded) round_row(rounded, x, a.size);
        for (int64_t choice = 0; choice < a.num_chosen; ++choice) {
            if (forms.plain) __builtin_memcpy(s.rows + places[choice] * s.row_stride, x, bytes);
            if (forms.rounded && choice > 0)
                __builtin_memcpy(s.rounded + places[choice] * s.rounded_stride, rounded,
                                 static_cast<uint64_t>(rounded_row_bytes(a.size)));
        }
    });
}

template <class T>
BATON_INLINE void round_inner(Pool& threads, const BatonExperts& a, const ExpertScratch<T>& s) {
    each_row(threads, a.num_tokens * a.num_chosen, a.inner, [&](int64_t row) {
        round_row(s.rounded + row * s.rounded_stride, s.inner + row * s.inner_stride, a.inner);
    });
}

template <class T>
void experts_of(Pool& threads, const BatonExperts& a) {
    const ExpertScratch<T> s = expert_scratch<T>(a);
    const Rows<T> rows = {s.rows, s.row_stride, a.size}, inner = {s.inner, s.inner_stride, a.inner};
    const Rows<T> gates_and_ups = {s.inner, s.inner_stride, 2 * a.inner};
    ExpertRows r;
    place_rows(r, s.places, a);
    gather_rows(threads, a, s);
    const auto gate_up = [&](int64_t expert) {
        return product_of<T>(a.gate_up[expert], a, s, r.rows[expert], rows, gates_and_ups);
    };
    each_piece<T>(threads, r, a, a.gate_up, 2 * a.inner, a.size, gate_up,
                  [&](const float* sums, const Block<T>& block) { finish_gate(sums, block, a); });
    if (forms_of(a.down, a.num_experts).rounded) round_inner(threads, a, s);
    // the rows of x are not needed any more: results take their place
    const auto down = [&](int64_t expert) {
        return product_of<T>(a.down[expert], a, s, r.rows[expert], inner, rows);
    };
    each_piece<T>(threads, r, a, a.down, a.size, a.inner, down,
                  [](const float* sums, const Block<T>& block) { finish<T, T>(sums, block); });
    each_row(threads, a.num_tokens, a.num_chosen * a.size, [&](int64_t token) { add_results(a, s, token); });
}

void experts(Pool& threads, const BatonExperts& arguments) { BATON_BY_DTYPE(arguments.dtype, experts_of); }
