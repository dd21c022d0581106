// A tile of few rows of one or several KV heads, as of a sequence that decodes: every key and value passes once, from
// its block through registers into the products of all rows.
//
// Tokens come in pieces of kLanes, and some pieces of a head are a stretch (`attention_stretch.inl`). All heads of a few
// pieces are computed, then those of the next ones, since heads are neighbours in a block: first the keys of
// kKeysAtOnce tokens, then their values.
//
// Invariant: the products take their units in the order of `attention_product.inl`, so that a row has the same result
// in either kind of tile.

constexpr int64_t kFewRows = 8;

BATON_INLINE bool suits_few(const BatonPagedKv& kv, int64_t num_rows) {
    return num_rows > 0 && num_rows <= kFewRows && kv.head_dim % (2 * kLanes) == 0 && kv.block_size % kLanes == 0;
}

// Rows that a kernel computes more than there are do what the last one does.
struct FewRows {
    int64_t num_rows;

    int64_t operator[](int64_t row) const { return row < num_rows ? row : num_rows - 1; }
};

// The units of the columns from `part` on, as many as are transposed at once.
template <class Units, int kRows, int kPieces, class T>
BATON_INLINE void add_part(Units, Floats (&sums)[kRows][kPieces], const uint32_t* const (&query)[kRows],
                           const T* const* pieces, int64_t head_dim, int64_t part) {
    Words columns[kPieces][Units::kColumns];
#pragma GCC unroll 2
    for (int piece = 0; piece < kPieces; ++piece)
        read_columns(Units{}, columns[piece], [&](int row) { return pieces[piece] + row * head_dim + part; });
#pragma GCC unroll 16
    for (int unit = 0; unit < Units::kColumns; ++unit)
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const uint32_t number = query[row][part / Units::kValues + unit];
#pragma GCC unroll 2
            for (int piece = 0; piece < kPieces; ++piece)
                sums[row][piece] = Units::add_product(sums[row][piece], columns[piece][unit], number);
        }
}

#if BATON_BF16_DOT
// Each column is decoded when it is due: there are no registers for all.
template <int kRows, int kPieces>
BATON_INLINE void add_part(CodedPairUnits, Floats (&sums)[kRows][kPieces], const uint32_t* const (&query)[kRows],
                           const E4m3* const* pieces, int64_t head_dim, int64_t part) {
    CodedSquare squares[kPieces];
    const uint32_t* numbers[kRows];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) numbers[row] = in_register(query[row] + part / 2);
#pragma GCC unroll 2
    for (int piece = 0; piece < kPieces; ++piece)
        squares[piece] = CodedSquare::read([&](int row) { return pieces[piece] + row * head_dim + part; });
#pragma GCC unroll 16
    for (int unit = 0; unit < CodedPairUnits::kColumns; unit += 2) {
        Words columns[kPieces][2];
#pragma GCC unroll 2
        for (int piece = 0; piece < kPieces; ++piece) CodedSquare::decode(squares[piece], columns[piece], unit / 2);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i)
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
                for (int piece = 0; piece < kPieces; ++piece)
                    sums[row][piece] =
                        CodedPairUnits::add_product(sums[row][piece], columns[piece][i], numbers[row][unit + i]);
            }
    }
}
#endif

// The scores of the keys of kPieces pieces, from piece `first` on.
template <class Units, int kRows, int kPieces, class T>
BATON_INLINE void score_pieces(Stretch<T>& keys, const TileMemory& memory, const FewRows& rows, int first) {
    constexpr int64_t kPart = Units::kColumns * Units::kValues;
    const int64_t head_dim = keys.head_dim, num_units = head_dim / Units::kValues;
    const T* const* pieces = keys.pieces + first;
    const uint32_t* query[kRows];
    for (int row = 0; row < kRows; ++row) query[row] = memory.queries + rows[row] * num_units;
    Floats sums[kRows][kPieces] = {};
    for (int64_t value = 0; value < head_dim; value += 2 * kLanes) {
#pragma GCC unroll 2
        for (int64_t part = value; part < value + 2 * kLanes; part += kPart) {
            read_ahead<Units>(keys, kPieces, keys.num_pieces * (head_dim / kPart));
            add_part(Units{}, sums, query, pieces, head_dim, part);
        }
    }
#pragma GCC unroll 2
    for (int piece = 0; piece < kPieces; ++piece) {
        float* to = memory.scores + keys.first_key + (first + piece) * kLanes;
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            if constexpr (kIsCode<T>) sums[row][piece] *= powers(keys.scales[first + piece]);
            store(to + rows[row] * kKeysAtOnce, sums[row][piece]);
        }
    }
}

template <class Units, int kRows, class T>
void few_scores(Stretch<T>& keys, const TileMemory& memory, const FewRows& rows) {
    int piece = 0;
    // two pieces side by side: for one or two rows, a sum would wait for itself
    if constexpr (kRows <= 2 && Units::kValues == 2)
        for (; piece + 2 <= keys.num_pieces; piece += 2) score_pieces<Units, kRows, 2>(keys, memory, rows, piece);
    for (; piece < keys.num_pieces; ++piece) score_pieces<Units, kRows, 1>(keys, memory, rows, piece);
}

// The values of one unit of weights, `from` their first row.
template <class Units, int kRows, int kVectors, class T>
BATON_INLINE void add_unit(Floats (&sums)[kRows][kVectors], const uint32_t* const (&weights)[kRows], int64_t unit,
                           const T* from, int64_t head_dim) {
    const T* const rows[2] = {from, from + head_dim};
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; vector += 2) {
        Words joined[2];
        Units::join_rows(joined, rows, vector * kLanes);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const uint32_t weight = weights[row][unit];
            sums[row][vector] = Units::add_product(sums[row][vector], joined[0], weight);
            sums[row][vector + 1] = Units::add_product(sums[row][vector + 1], joined[1], weight);
        }
    }
}

// Some columns of the values, with weights of type Units in `memory.scores`; `to`: these columns of the first row.
template <class Units, int kRows, int kVectors, class T>
void few_columns(Stretch<T>& values, const TileMemory& memory, float* to, int64_t stride, int64_t column,
                 const FewRows& rows) {
    constexpr int64_t kUnits = kLanes / Units::kValues;  // of a piece
    const int64_t head_dim = values.head_dim;
    const uint32_t* weights[kRows];
    Floats sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
        weights[row] = reinterpret_cast<const uint32_t*>(memory.scores + rows[row] * kKeysAtOnce);
        const float* from = to + rows[row] * stride;
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector)
            sums[row][vector] = round_to(load(from + vector * kLanes) * memory.factors[rows[row]], from);
    }
    int64_t unit = values.begin / Units::kValues;
    const int64_t num_vectors = values.num_pieces * kUnits * (head_dim / kLanes);
    const int64_t end = units_of<Units>(values.end);
    while (unit < end) {
        const int64_t piece = unit / kUnits - values.first_key / kLanes, end_of_piece = (unit / kUnits + 1) * kUnits;
        const int64_t offset = unit % kUnits * Units::kValues * head_dim + column;
        const T* from = values.pieces[piece] + offset;
        for (const int64_t last = end < end_of_piece ? end : end_of_piece; unit < last; ++unit) {
            read_ahead<Units>(values, kVectors, num_vectors);
            add_unit<Units, kRows, kVectors>(sums, weights, unit, from, head_dim);
            from += Units::kValues * head_dim;
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector)
            store(to + rows[row] * stride + vector * kLanes, sums[row][vector]);
}

template <class Units, int kRows, class T>
void few_values(Stretch<T>& values, const TileMemory& memory, const Partial& partial, const FewRows& rows) {
    constexpr int kVectors = kRows <= 4 ? kPanelVectors : 2;
    int64_t column = 0;
    for (; column + kVectors * kLanes <= values.head_dim; column += kVectors * kLanes)
        few_columns<Units, kRows, kVectors>(values, memory, partial.sums + column, partial.stride, column, rows);
    if (column < values.head_dim)
        few_columns<Units, kRows, 2>(values, memory, partial.sums + column, partial.stride, column, rows);
}

template <class Units>
BATON_INLINE TileMemory rows_of_head(TileMemory memory, const Tile& tile, int64_t head) {
    const int64_t row = head * tile.num_rows;
    memory.queries += row * units_of<Units>(tile.attention.kv.head_dim);
    memory.scores += row * kKeysAtOnce;
    memory.lanes += row * kLanes;
    memory.factors += row;
    return memory;
}

BATON_INLINE Partial rows_of_head(const Partial& all, const Tile& tile, int64_t head) {
    const int64_t row = head * tile.num_rows;
    return {all.sums + row * all.stride, all.highest + row, all.totals + row, all.stride};
}

// Calls `compute` with a stretch of keys or values, and with the units of its products. S: E4m3 for codes, else T.
template <class T, class S, class Compute>
BATON_INLINE void with_stretch(const Tile& tile, const TileMemory& memory, const Order& order, const Place& place,
                               const Compute& compute) {
    using Units = typename UnitsFor<T>::Units;
    if constexpr (kIsCode<S>) {
        Scales scales;
        find_scales(scales, tile, *place.pieces, place.is_values, place.head);
        if (!scales.are_moderate)
            return compute(Units{}, decode_stretch(tile, order, place, static_cast<T*>(memory.decoded)));
        Stretch<S> stretch = find_stretch(tile, order, place, static_cast<S*>(memory.decoded));
        stretch.scales = scales.of_piece + place.first;
        compute(typename CodedUnitsFor<T>::Units{}, stretch);
    } else {
        compute(Units{}, find_stretch(tile, order, place, static_cast<T*>(memory.decoded)));
    }
}

// The scores of all heads become weights.
template <class T, class S>
void weigh_pieces(const Tile& tile, const TileMemory& memory, const Partial& partial, const Pieces& pieces,
                  int64_t first_key) {
    using Units = typename UnitsFor<T>::Units;
    for (int64_t head = 0; head < tile.num_heads; ++head) {
        Scales scales;
        if constexpr (kIsCode<S>) find_scales(scales, tile, pieces, true, head);
        compute_weights<Units>(tile, rows_of_head<Units>(memory, tile, head), rows_of_head(partial, tile, head),
                               first_key, kIsCode<S> && scales.are_moderate ? &scales : nullptr);
    }
}

// The keys and values of `pieces` are added to the sums of all heads; `next` follow, NULL for none.
template <int kRows, class T, class S>
void add_pieces(const Tile& tile, const TileMemory& memory, const Partial& partial, const Pieces& pieces,
                const Pieces* next, int64_t first_key) {
    using Units = typename UnitsFor<T>::Units;
    const BatonPagedKv& kv = tile.attention.kv;
    int64_t longest = kStretchBytes / (kLanes * kv.head_dim * static_cast<int64_t>(sizeof(S)));
    longest = longest < 2 ? 2 : longest < kPiecesAtOnce ? longest : kPiecesAtOnce;
    const Order order = {next, tile.num_heads, static_cast<int>(longest)};
    Place place = order.begin(&pieces, false, pieces.first());
    for (; !place.is_values; place = order.behind(place)) {
        const TileMemory rows = rows_of_head<Units>(memory, tile, place.head);
        with_stretch<T, S>(tile, memory, order, place, [&](auto units, auto keys) {
            few_scores<decltype(units), kRows>(keys, rows, {tile.num_rows});
        });
    }
    weigh_pieces<T, S>(tile, memory, partial, pieces, first_key);
    for (; place.pieces == &pieces; place = order.behind(place)) {
        const TileMemory rows = rows_of_head<Units>(memory, tile, place.head);
        with_stretch<T, S>(tile, memory, order, place, [&](auto units, auto values) {
            few_values<decltype(units), kRows>(values, rows, rows_of_head(partial, tile, place.head), {tile.num_rows});
        });
        for (int64_t row = 0; row < tile.num_rows; ++row) rows.factors[row] = 1.0f;  // they count once
    }
}

template <int kRows, class T, class S>
void compute_rows(const Tile& tile, const TileMemory& memory, const Partial& partial, const KeyRange& range,
                  int64_t last) {
    Pieces pieces[2];
    int64_t key = range.begin / kKeysAtOnce * kKeysAtOnce;
    find_pieces(pieces[0], tile, key, range.begin, range.end);
    for (int number = 0; key < range.end; key += kKeysAtOnce, number ^= 1) {
        const bool is_last = key + kKeysAtOnce >= last;
        if (!is_last) find_pieces(pieces[number ^ 1], tile, key + kKeysAtOnce, range.begin, last);
        add_pieces<kRows, T, S>(tile, memory, partial, pieces[number], is_last ? nullptr : &pieces[number ^ 1], key);
    }
}

// See `compute_many`. S: what is stored, T: what plain keys and values are, or codes where they are decoded.
template <class T, class S>
void compute_few(const Tile& tile, const TileMemory& memory, const Partial& partial, const KeyRange& range,
                 int64_t last) {
    switch (tile.num_rows) {
        case 1:
            return compute_rows<1, T, S>(tile, memory, partial, range, last);
        case 2:
            return compute_rows<2, T, S>(tile, memory, partial, range, last);
        case 3:
        case 4:
            return compute_rows<4, T, S>(tile, memory, partial, range, last);
        default:
            return compute_rows<kFewRows, T, S>(tile, memory, partial, range, last);
    }
}
