// A tile of few rows of one or several KV heads, as of a sequence that decodes: every key and value passes once, from
// its block through registers into the products of all rows.
//
// Tokens come in pieces of kLanes, which lie within a block. A few pieces of all heads are computed, then the next ones,
// since heads are neighbours in a block: first the keys of kKeysAtOnce tokens, then their values. What comes next is
// asked for meanwhile, in the order in which it lies in memory.
//
// Invariant: the products take their units in the order of `attention_product.inl`, so that a row has the same result
// in either kind of tile.

constexpr int64_t kFewRows = 8;
constexpr int kPiecesAtOnce = kKeysAtOnce / kLanes;
constexpr int kPiecesOfChunk = 2;

BATON_INLINE bool suits_few(const BatonPagedKv& kv, int64_t num_rows) {
    return num_rows > 0 && num_rows <= kFewRows && kv.head_dim % (2 * kLanes) == 0 && kv.block_size % kLanes == 0;
}

// Where kKeysAtOnce tokens lie: the offsets of their blocks, and their places in these. Those from `begin` to `end` are
// seen.
struct Pieces {
    int64_t blocks[kPiecesAtOnce], places[kPiecesAtOnce];
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
        pieces.blocks[piece] = tile.table[position / kv.block_size] * kv.block_stride;
        pieces.places[piece] = position % kv.block_size;
    }
}

// A few pieces of the keys or of the values of all heads. `plane`: those of the tile's first head in block 0, of type T or
// codes.
template <class T>
struct Chunk {
    const Pieces* pieces;
    const void* plane;
    int first;

    int count() const { return pieces->behind() - first < kPiecesOfChunk ? pieces->behind() - first : kPiecesOfChunk; }
};

// The part of a chunk that belongs to one head: what is read, and what is asked for meanwhile. The piece 0 begins at the
// key `first_key`; those from `begin` to `end` are seen.
template <class T>
struct Stretch {
    const T* pieces[kPiecesOfChunk];
    const T* asked[kPiecesOfChunk];
    int64_t first_key, begin, end, head_dim;
};

template <class T>
BATON_INLINE Stretch<T> begin_stretch(const Chunk<T>& chunk, int64_t head_dim) {
    const Pieces& all = *chunk.pieces;
    const int64_t first_key = chunk.first * kLanes, behind = first_key + chunk.count() * kLanes;
    return {{}, {}, first_key, all.begin > first_key ? all.begin : first_key, all.end < behind ? all.end : behind,
            head_dim};
}

// Where a head of a chunk's block begins, of elements of type Stored.
template <class Stored, class T>
BATON_INLINE const Stored* head_of(const Tile& tile, const Chunk<T>& chunk, int64_t piece, int64_t head) {
    return static_cast<const Stored*>(chunk.plane) + chunk.pieces->blocks[chunk.first + piece] +
           head * head_stride(tile.attention.kv);
}

// Which token of the piece that begins at `key` stands for the one at `place`: itself, or one that is seen.
BATON_INLINE int64_t seen_place(const Pieces& all, int64_t key, int64_t place) {
    return key + place < all.begin ? all.begin - key : key + place < all.end ? place : all.end - 1 - key;
}

// `find_stretch` of codes: all pieces are decoded to `copies`, and the codes of the next chunk are asked for here.
template <class T>
Stretch<T> decode_stretch(const Tile& tile, const Chunk<T>& chunk, const Chunk<T>& next, int64_t head, T* copies) {
    const BatonPagedKv& kv = tile.attention.kv;
    Stretch<T> stretch = begin_stretch(chunk, kv.head_dim);
    for (int i = 0; i < chunk.count(); ++i) {
        const int64_t number = head * chunk.count() + i, piece = number / tile.num_heads;
        if (piece < next.count()) {
            const uint8_t* asked = head_of<uint8_t>(tile, next, piece, number % tile.num_heads) +
                                   next.pieces->places[next.first + piece] * kv.head_dim;
            for (int64_t line = 0; line < kLanes * kv.head_dim; line += 64) ask_for_line(asked + line);
        }
        const uint8_t* from = head_of<uint8_t>(tile, chunk, i, head);
        stretch.pieces[i] = stretch.asked[i] = copies;
        const int64_t key = stretch.first_key + i * kLanes, first_place = chunk.pieces->places[chunk.first + i];
        for (int64_t place = 0; place < kLanes; ++place, copies += kv.head_dim)
            decode_token(copies, kv, from, first_place + seen_place(*chunk.pieces, key, place));
    }
    return stretch;
}

// A piece that is seen in part only is copied to `copies`, with a token that is seen in the place of each that is not.
template <class T>
Stretch<T> find_stretch(const Tile& tile, const Chunk<T>& chunk, const Chunk<T>& next, int64_t head, T* copies) {
    if (tile.attention.kv.has_codes) return decode_stretch(tile, chunk, next, head, copies);
    const int64_t size = tile.attention.kv.head_dim;
    const Pieces& all = *chunk.pieces;
    Stretch<T> stretch = begin_stretch(chunk, size);
    for (int i = 0; i < chunk.count(); ++i) {
        const T* from = head_of<T>(tile, chunk, i, head) + all.places[chunk.first + i] * size;
        // for each block, one head after the other
        const int64_t number = head * chunk.count() + i, piece = number / tile.num_heads;
        stretch.asked[i] = from;
        if (piece < next.count())
            stretch.asked[i] = head_of<T>(tile, next, piece, number % tile.num_heads) +
                               next.pieces->places[next.first + piece] * size;
        stretch.pieces[i] = from;
        const int64_t key = stretch.first_key + i * kLanes;
        if (key >= all.begin && key + kLanes <= all.end) continue;
        stretch.pieces[i] = copies;
        for (int64_t place = 0; place < kLanes; ++place, copies += size)
            __builtin_memcpy(copies, from + seen_place(all, key, place) * size, size * sizeof(T));
    }
    return stretch;
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

// The scores of the keys of kPieces pieces, from piece `first` on.
template <class Units, int kRows, int kPieces, class T>
BATON_INLINE void score_pieces(const Stretch<T>& keys, const TileMemory& memory, const FewRows& rows, int first) {
    static_assert(Units::kColumns * Units::kValues == kLanes);
    constexpr int kAsked = kPieces * kLanes / 2;
    const int64_t head_dim = keys.head_dim, num_units = head_dim / Units::kValues;
    const T* const* pieces = keys.pieces + first;
    const T* const* asked = keys.asked + first;
    const uint32_t* query[kRows];
    for (int row = 0; row < kRows; ++row) query[row] = memory.queries + rows[row] * num_units;
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
            store(memory.scores + rows[row] * kKeysAtOnce + keys.first_key + (first + piece) * kLanes, sums[row][piece]);
}

template <class Units, int kRows, class T>
void few_scores(const Stretch<T>& keys, const TileMemory& memory, const FewRows& rows) {
    const int count = static_cast<int>((keys.end - keys.first_key + kLanes - 1) / kLanes);
    // two pieces side by side: for one or two rows, a sum would wait for itself
    if constexpr (kRows <= 2 && Units::kColumns < kLanes)
        if (count == kPiecesOfChunk) return score_pieces<Units, kRows, kPiecesOfChunk>(keys, memory, rows, 0);
    for (int piece = 0; piece < count; ++piece) score_pieces<Units, kRows, 1>(keys, memory, rows, piece);
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
        const int64_t piece = unit / kUnits - values.first_key / kLanes, end_of_piece = (unit / kUnits + 1) * kUnits;
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

// The keys and values of `pieces` are added to the sums of all heads; the first keys of `next` are asked for.
template <int kRows, class T>
void add_pieces(const Tile& tile, const TileMemory& memory, const Partial& partial, const Pieces& pieces,
                const Pieces& next, int64_t first_key) {
    using Units = typename UnitsFor<T>::Units;
    const BatonPagedKv& kv = tile.attention.kv;
    const int64_t offset = tile.first_head * head_stride(kv) * static_cast<int64_t>(kv.has_codes ? 1 : sizeof(T));
    const char *keys = static_cast<const char*>(kv.keys) + offset, *values = static_cast<const char*>(kv.values) + offset;
    T* copies = reinterpret_cast<T*>(memory.packed);
    const auto each_head = [&](const char* plane, const Chunk<T>& behind, const auto& compute) {
        for (int first = pieces.first(); first < pieces.behind(); first += kPiecesOfChunk) {
            const bool is_last = first + kPiecesOfChunk >= pieces.behind();
            const Chunk<T> chunk = {&pieces, plane, first}, following = {&pieces, plane, first + kPiecesOfChunk};
            for (int64_t head = 0; head < tile.num_heads; ++head)
                compute(find_stretch(tile, chunk, is_last ? behind : following, head, copies),
                        rows_of_head<Units>(memory, tile, head), rows_of_head(partial, tile, head));
        }
    };
    each_head(keys, {&pieces, values, pieces.first()},
              [&](const Stretch<T>& stretch, const TileMemory& rows, const Partial&) {
                  few_scores<Units, kRows>(stretch, rows, {tile.num_rows});
              });
    for (int64_t head = 0; head < tile.num_heads; ++head)
        compute_weights<Units>(tile, rows_of_head<Units>(memory, tile, head), rows_of_head(partial, tile, head),
                               first_key);
    each_head(values, {&next, keys, next.first()},
              [&](const Stretch<T>& stretch, const TileMemory& rows, const Partial& sums) {
                  few_values<Units, kRows>(stretch, rows, sums, {tile.num_rows});
                  for (int64_t row = 0; row < tile.num_rows; ++row) rows.factors[row] = 1.0f;  // they count once
              });
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
        add_pieces<kRows, T>(tile, memory, partial, pieces[number], pieces[is_last ? number : number ^ 1], key);
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
