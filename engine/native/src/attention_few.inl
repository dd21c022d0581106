// A tile of few rows of one or several KV heads, as of a sequence that decodes: every key and value passes once, from
// its block through registers into the products of all rows.
//
// Tokens come in pieces of kLanes, which lie within a block. Of kKeysAtOnce tokens each head has its turn before the
// next ones: heads are neighbours in a block. While keys are computed the values are asked for, and then the next keys.
//
// Invariant: the products take their units in the order of `attention_product.inl`, so that a row has the same result
// in either kind of tile.

constexpr int64_t kFewRows = 8;
constexpr int kPiecesAtOnce = kKeysAtOnce / kLanes;

BATON_INLINE bool suits_few(const BatonPagedKv& kv, int64_t num_rows) {
    return num_rows > 0 && num_rows <= kFewRows && kv.head_dim % (2 * kLanes) == 0 && kv.block_size % kLanes == 0;
}

// Where kKeysAtOnce tokens lie, from the keys or the values of KV head 0 on. Those from `begin` to `end` are seen.
struct Pieces {
    int64_t offsets[kPiecesAtOnce];
    int64_t begin, end;

    int first() const { return static_cast<int>(begin / kLanes); }
    int behind() const { return static_cast<int>((end + kLanes - 1) / kLanes); }
};

void find_pieces(Pieces& pieces, const Tile& tile, int64_t first_key, int64_t begin, int64_t end) {
    const BatonPagedKv& kv = tile.attention.kv;
    pieces.begin = begin > first_key ? begin - first_key : 0;
    pieces.end = end - first_key < kKeysAtOnce ? end - first_key : kKeysAtOnce;
    for (int piece = pieces.first(); piece < pieces.behind(); ++piece) {
        const int64_t position = first_key + piece * kLanes;
        pieces.offsets[piece] =
            tile.table[position / kv.block_size] * kv.block_stride + position % kv.block_size * kv.head_dim;
    }
}

// The keys or the values of one head: what is read, and what is asked for meanwhile.
template <class T>
struct Stretch {
    const T* pieces[kPiecesAtOnce];
    const T* asked[kPiecesAtOnce];
    int64_t begin, end, head_dim;
};

// `plane`: the keys or the values of the head in block 0. A piece that is seen in part only is copied to `copies`, with
// a token that is seen in the place of each that is not.
template <class T>
void find_stretch(Stretch<T>& stretch, const Pieces& pieces, const T* plane, int64_t head_dim, T* copies) {
    stretch.begin = pieces.begin;
    stretch.end = pieces.end;
    stretch.head_dim = head_dim;
    for (int piece = pieces.first(); piece < pieces.behind(); ++piece) {
        const int64_t first = piece * kLanes;
        const T* from = plane + pieces.offsets[piece];
        stretch.pieces[piece] = stretch.asked[piece] = from;
        if (first >= pieces.begin && first + kLanes <= pieces.end) continue;
        stretch.pieces[piece] = copies;
        for (int64_t key = first; key < first + kLanes; ++key, copies += head_dim) {
            const int64_t seen = key < pieces.begin ? pieces.begin : key < pieces.end ? key : pieces.end - 1;
            __builtin_memcpy(copies, from + (seen - first) * head_dim, head_dim * sizeof(T));
        }
    }
}

template <class T>
BATON_INLINE void ask_meanwhile(Stretch<T>& stretch, const Pieces& pieces, const T* plane) {
    const int first = stretch.begin / kLanes, behind = (stretch.end + kLanes - 1) / kLanes;
    for (int piece = first; piece < behind; ++piece)
        if (piece >= pieces.first() && piece < pieces.behind()) stretch.asked[piece] = plane + pieces.offsets[piece];
}

// Rows that a kernel computes more than there are do what the last one does.
struct FewRows {
    int64_t num_rows;

    int64_t operator[](int64_t row) const { return row < num_rows ? row : num_rows - 1; }
};

// 2 * kLanes values of a row.
template <class T>
BATON_INLINE void ask_for_values(const T* values) {
    constexpr int64_t kLine = 64 / sizeof(T);
#pragma GCC unroll 2
    for (int64_t value = 0; value < 2 * kLanes; value += kLine) ask_for_line(values + value);
}

// The scores of the keys of kPieces pieces, from `key` on.
template <class Units, int kRows, int kPieces, class T>
BATON_INLINE void score_pieces(const Stretch<T>& keys, const TileMemory& memory, const uint32_t* queries,
                               const FewRows& rows, int64_t key) {
    static_assert(Units::kColumns * Units::kValues == kLanes);
    constexpr int kAsked = kPieces * kLanes / 2;
    const int64_t head_dim = keys.head_dim, num_units = head_dim / Units::kValues;
    const T* const* pieces = keys.pieces + key / kLanes;
    const T* const* asked = keys.asked + key / kLanes;
    const uint32_t* query[kRows];
    for (int row = 0; row < kRows; ++row) query[row] = queries + rows[row] * num_units;
    Floats sums[kRows][kPieces] = {};
    for (int64_t value = 0; value < head_dim; value += 2 * kLanes) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const int64_t part = value + half * kLanes;
#pragma GCC unroll 16
            for (int row = half * kAsked; row < (half + 1) * kAsked; ++row)
                ask_for_values(asked[row / kLanes] + row % kLanes * head_dim + value);
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
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
        for (int piece = 0; piece < kPieces; ++piece)
            store(memory.scores + rows[row] * kKeysAtOnce + key + piece * kLanes, sums[row][piece]);
}

template <class Units, int kRows, class T>
void few_scores(const Stretch<T>& keys, const TileMemory& memory, const uint32_t* queries, const FewRows& rows) {
    int64_t key = keys.begin / kLanes * kLanes;
    // two pieces side by side: for one or two rows, a sum would wait for itself
    if constexpr (kRows <= 2 && Units::kColumns < kLanes)
        for (; key + kLanes < keys.end; key += 2 * kLanes)
            score_pieces<Units, kRows, 2>(keys, memory, queries, rows, key);
    for (; key < keys.end; key += kLanes) score_pieces<Units, kRows, 1>(keys, memory, queries, rows, key);
}

// The values of one unit of weights, `from` their first row.
template <class Units, int kRows, int kVectors, class T>
BATON_INLINE void add_unit(Floats (&sums)[kRows][kVectors], const uint32_t* const (&weights)[kRows], int64_t unit,
                           const T* from, const T* asked, int64_t head_dim) {
    const T* const rows[2] = {from, from + head_dim};
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; vector += 2) {
        Words joined[2];
        Units::join_rows(joined, rows, vector * kLanes);
#pragma GCC unroll 2
        for (int row = 0; row < Units::kValues; ++row) ask_for_values(asked + row * head_dim + vector * kLanes);
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
void few_columns(const Stretch<T>& values, const TileMemory& memory, float* to, int64_t stride, int64_t column,
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
    const int64_t end = units_of<Units>(values.end);
    while (unit < end) {
        const int64_t piece = unit / kUnits, end_of_piece = (piece + 1) * kUnits;
        const int64_t offset = unit % kUnits * Units::kValues * head_dim + column;
        const T *from = values.pieces[piece] + offset, *asked = values.asked[piece] + offset;
        for (const int64_t last = end < end_of_piece ? end : end_of_piece; unit < last; ++unit) {
            add_unit<Units, kRows, kVectors>(sums, weights, unit, from, asked, head_dim);
            from += Units::kValues * head_dim;
            asked += Units::kValues * head_dim;
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector)
            store(to + rows[row] * stride + vector * kLanes, sums[row][vector]);
}

template <class Units, int kRows, class T>
void few_values(const Stretch<T>& values, const TileMemory& memory, const Partial& partial, const FewRows& rows) {
    constexpr int kVectors = kRows <= 4 ? kPanelVectors : 2;
    int64_t column = 0;
    for (; column + kVectors * kLanes <= values.head_dim; column += kVectors * kLanes)
        few_columns<Units, kRows, kVectors>(values, memory, partial.sums + column, partial.stride, column, rows);
    if (column < values.head_dim)
        few_columns<Units, kRows, 2>(values, memory, partial.sums + column, partial.stride, column, rows);
}

// One head's turn: kKeysAtOnce keys are added to its rows' sums. `next`, `next_head`: whose keys come after this.
template <int kRows, class T>
void add_pieces(const Tile& tile, const TileMemory& memory, const Partial& partial, const Pieces& pieces, int64_t head,
                const Pieces& next, int64_t next_head, int64_t first_key) {
    using Units = typename UnitsFor<T>::Units;
    const BatonPagedKv& kv = tile.attention.kv;
    const int64_t head_size = kv.block_size * kv.head_dim, first_row = head * tile.num_rows;
    const T* keys = static_cast<const T*>(kv.keys) + tile.first_head * head_size;
    const T* values = static_cast<const T*>(kv.values) + (tile.first_head + head) * head_size;
    T* copies = reinterpret_cast<T*>(memory.packed);
    const Partial rows = {partial.sums + first_row * partial.stride, partial.highest + first_row,
                          partial.totals + first_row, partial.stride};
    Stretch<T> stretch;
    find_stretch(stretch, pieces, keys + head * head_size, kv.head_dim, copies);
    ask_meanwhile(stretch, pieces, values);
    few_scores<Units, kRows>(stretch, memory, memory.queries + first_row * units_of<Units>(kv.head_dim),
                             {tile.num_rows});
    compute_weights<Units>(tile, memory, rows, memory.lanes + first_row * kLanes, first_key);
    find_stretch(stretch, pieces, values, kv.head_dim, copies);
    ask_meanwhile(stretch, next, keys + next_head * head_size);
    few_values<Units, kRows>(stretch, memory, rows, {tile.num_rows});
}

template <int kRows, class T>
void compute_rows(const Tile& tile, const TileMemory& memory, const Partial& partial, const KeyRange& range,
                  int64_t last) {
    Pieces pieces[2];
    int64_t key = range.begin / kKeysAtOnce * kKeysAtOnce;
    find_pieces(pieces[0], tile, key, range.begin, range.end);
    for (int number = 0; key < range.end; key += kKeysAtOnce, number ^= 1) {
        const bool is_last = key + kKeysAtOnce >= last;
        if (!is_last) find_pieces(pieces[number ^ 1], tile, key + kKeysAtOnce, range.begin, last);
        for (int64_t head = 0; head < tile.num_heads; ++head) {
            const bool is_last_head = head + 1 == tile.num_heads;
            add_pieces<kRows, T>(tile, memory, partial, pieces[number], head,
                                 pieces[is_last_head && !is_last ? number ^ 1 : number], is_last_head ? 0 : head + 1,
                                 key);
        }
    }
}

// See `compute_many`.
template <class T>
void compute_few(const Tile& tile, const TileMemory& memory, const Partial& partial, const KeyRange& range,
                 int64_t last) {
    switch (tile.num_rows) {
        case 1:
            return compute_rows<1, T>(tile, memory, partial, range, last);
        case 2:
            return compute_rows<2, T>(tile, memory, partial, range, last);
        case 3:
        case 4:
            return compute_rows<4, T>(tile, memory, partial, range, last);
        default:
            return compute_rows<kFewRows, T>(tile, memory, partial, range, last);
    }
}
