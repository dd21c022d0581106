// A tile of few rows of one or several KV heads, as of a sequence that decodes: every key and value passes once, from
// its block through registers into the products of all rows.
//
// Tokens come in pieces of kLanes, which lie within a block. Some pieces of a head are a stretch. All heads of a few
// pieces are computed, then those of the next ones, since heads are neighbours in a block: first the keys of
// kKeysAtOnce tokens, then their values.
//
// Memory is the limit, and no part of it is long enough for the processor to foresee: it reads far ahead only where
// several pages are read at once, each from its beginning to its end. So while a stretch is computed, a line of each
// piece of the next one is read in turn, and the same line of the stretch after that is asked for.
//
// Invariant: the products take their units in the order of `attention_product.inl`, so that a row has the same result
// in either kind of tile.

constexpr int64_t kFewRows = 8;
constexpr int kPiecesAtOnce = kKeysAtOnce / kLanes;
// Of a stretch: two of them and what else is computed with fit into the nearest cache.
constexpr int64_t kStretchBytes = 1 << 14;

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

// A stretch of the keys or of the values: `count` pieces of one head from number `first` on. `pieces` NULL: there is
// none.
struct Place {
    const Pieces* pieces;
    bool is_values;
    int first, count;
    int64_t head;
};

// The stretches of a group of keys and of the one behind it, `next`, in their order. `longest`: pieces of a stretch.
struct Order {
    const Pieces* next;
    int64_t num_heads;
    int longest;

    Place begin(const Pieces* pieces, bool is_values, int first) const {
        const int left = pieces == nullptr ? 0 : pieces->behind() - first;
        return {pieces, is_values, first, left < longest ? left : longest, 0};
    }
    Place behind(Place place) const {
        if (place.pieces == nullptr) return place;
        if (++place.head < num_heads) return place;
        const int first = place.first + place.count;
        if (first < place.pieces->behind()) return begin(place.pieces, place.is_values, first);
        if (!place.is_values) return begin(place.pieces, true, place.pieces->first());
        return begin(next, false, next == nullptr ? 0 : next->first());
    }
};

// A stretch and what is read of the two behind it meanwhile, each piece in `lines` lines. The piece 0 begins at the key
// `first_key`; those from `begin` to `end` are seen.
template <class T>
struct Stretch {
    const T* pieces[kPiecesAtOnce];
    const char* coming[kPiecesAtOnce];
    const char* asked[kPiecesAtOnce];
    int num_pieces, num_coming, num_asked;
    int64_t first_key, begin, end, head_dim;
    int64_t lines;              // of a piece
    int64_t line = 0, due = 0;  // the next one to read, and parts that were computed since the last one, times `lines`
};

// Where the piece `number` of a place begins, its block's head and its place in that, of elements of type Stored.
template <class Stored>
BATON_INLINE const Stored* head_of(const Tile& tile, const Place& place, int number) {
    const BatonPagedKv& kv = tile.attention.kv;
    const void* plane = place.is_values ? kv.values : kv.keys;
    return static_cast<const Stored*>(plane) + place.pieces->blocks[place.first + number] +
           (tile.first_head + place.head) * head_stride(kv);
}

BATON_INLINE bool is_seen_whole(const Pieces& all, int64_t key) { return key >= all.begin && key + kLanes <= all.end; }

// Where the pieces of a place begin, of those only that are seen as a whole; returns how many.
template <class Stored>
BATON_INLINE int find_lines(const char* (&lines)[kPiecesAtOnce], const Tile& tile, const Place& place) {
    int count = 0;
    for (int i = 0; i < place.count; ++i)
        if (is_seen_whole(*place.pieces, (place.first + i) * kLanes))
            lines[count++] = reinterpret_cast<const char*>(
                head_of<Stored>(tile, place, i) + place.pieces->places[place.first + i] * tile.attention.kv.head_dim);
    return count;
}

// Which token of the piece that begins at `key` stands for the one at `place`: itself, or one that is seen.
BATON_INLINE int64_t seen_place(const Pieces& all, int64_t key, int64_t place) {
    return key + place < all.begin ? all.begin - key : key + place < all.end ? place : all.end - 1 - key;
}

// Codes are decoded to `copies`. A piece that is seen in part only is copied there, with a token that is seen in the
// place of each that is not.
template <class T>
Stretch<T> find_stretch(const Tile& tile, const Order& order, const Place& place, T* copies) {
    const BatonPagedKv& kv = tile.attention.kv;
    const int64_t size = kv.head_dim, first_key = place.first * kLanes, behind = first_key + place.count * kLanes;
    const Pieces& all = *place.pieces;
    Stretch<T> stretch;
    const Place coming = order.behind(place), asked = order.behind(coming);
    const auto find = kv.has_codes ? find_lines<uint8_t> : find_lines<T>;
    stretch.num_pieces = place.count;
    stretch.num_coming = find(stretch.coming, tile, coming);
    stretch.num_asked = find(stretch.asked, tile, asked);
    stretch.lines = kLanes * size * static_cast<int64_t>(kv.has_codes ? 1 : sizeof(T)) / 64;
    stretch.first_key = first_key;
    stretch.begin = all.begin > first_key ? all.begin : first_key;
    stretch.end = all.end < behind ? all.end : behind;
    stretch.head_dim = size;
    for (int i = 0; i < place.count; ++i) {
        const int64_t key = first_key + i * kLanes, first_place = all.places[place.first + i];
        if (!kv.has_codes) stretch.pieces[i] = head_of<T>(tile, place, i) + first_place * size;
        if (!kv.has_codes && is_seen_whole(all, key)) continue;
        const T* from = stretch.pieces[i];
        stretch.pieces[i] = copies;
        for (int64_t token = 0; token < kLanes; ++token, copies += size) {
            const int64_t seen = seen_place(all, key, token);
            if (kv.has_codes)
                decode_token(copies, kv, head_of<uint8_t>(tile, place, i), first_place + seen);
            else
                __builtin_memcpy(copies, from + seen * size, size * sizeof(T));
        }
    }
    return stretch;
}

// What is due when `count` of `all` parts of a stretch are about to be computed. Lines are read, since what is only
// asked for teaches the processor nothing. Where products take longer than memory, asking is enough.
template <class Units, class T>
BATON_INLINE void read_ahead(Stretch<T>& stretch, int64_t count, int64_t all) {
    for (stretch.due += stretch.lines * count; stretch.due >= all; stretch.due -= all, ++stretch.line) {
        if constexpr (Units::kValues == 1) {
            for (int i = 0; i < stretch.num_coming; ++i) ask_for_line(stretch.coming[i] + 64 * stretch.line);
            continue;
        }
        // each piece has an instruction of its own, by which the processor tells the pages apart
#pragma GCC unroll 16
        for (int i = 0; i < kPiecesAtOnce; ++i)
            if (i < stretch.num_coming) (void)*static_cast<const volatile char*>(stretch.coming[i] + 64 * stretch.line);
#pragma GCC unroll 16
        for (int i = 0; i < kPiecesAtOnce; ++i)
            if (i < stretch.num_asked) ask_for_line(stretch.asked[i] + 64 * stretch.line);
    }
}

// Rows that a kernel computes more than there are do what the last one does.
struct FewRows {
    int64_t num_rows;

    int64_t operator[](int64_t row) const { return row < num_rows ? row : num_rows - 1; }
};

// The scores of the keys of kPieces pieces, from piece `first` on.
template <class Units, int kRows, int kPieces, class T>
BATON_INLINE void score_pieces(Stretch<T>& keys, const TileMemory& memory, const FewRows& rows, int first) {
    static_assert(Units::kColumns * Units::kValues == kLanes);
    const int64_t head_dim = keys.head_dim, num_units = head_dim / Units::kValues;
    const T* const* pieces = keys.pieces + first;
    const uint32_t* query[kRows];
    for (int row = 0; row < kRows; ++row) query[row] = memory.queries + rows[row] * num_units;
    Floats sums[kRows][kPieces] = {};
    for (int64_t value = 0; value < head_dim; value += 2 * kLanes) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const int64_t part = value + half * kLanes;
            read_ahead<Units>(keys, kPieces, keys.num_pieces * (head_dim / kLanes));
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
void few_scores(Stretch<T>& keys, const TileMemory& memory, const FewRows& rows) {
    int piece = 0;
    // two pieces side by side: for one or two rows, a sum would wait for itself
    if constexpr (kRows <= 2 && Units::kColumns < kLanes)
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

// The keys and values of `pieces` are added to the sums of all heads; `next` follow, NULL for none.
template <int kRows, class T>
void add_pieces(const Tile& tile, const TileMemory& memory, const Partial& partial, const Pieces& pieces,
                const Pieces* next, int64_t first_key) {
    using Units = typename UnitsFor<T>::Units;
    const BatonPagedKv& kv = tile.attention.kv;
    T* copies = reinterpret_cast<T*>(memory.decoded);
    int64_t longest = kStretchBytes / (kLanes * kv.head_dim * static_cast<int64_t>(sizeof(T)));
    longest = longest < 2 ? 2 : longest < kPiecesAtOnce ? longest : kPiecesAtOnce;
    const Order order = {next, tile.num_heads, static_cast<int>(longest)};
    Place place = order.begin(&pieces, false, pieces.first());
    for (; !place.is_values; place = order.behind(place)) {
        Stretch<T> keys = find_stretch(tile, order, place, copies);
        few_scores<Units, kRows>(keys, rows_of_head<Units>(memory, tile, place.head), {tile.num_rows});
    }
    for (int64_t head = 0; head < tile.num_heads; ++head)
        compute_weights<Units>(tile, rows_of_head<Units>(memory, tile, head), rows_of_head(partial, tile, head),
                               first_key);
    for (; place.pieces == &pieces; place = order.behind(place)) {
        Stretch<T> values = find_stretch(tile, order, place, copies);
        const TileMemory rows = rows_of_head<Units>(memory, tile, place.head);
        few_values<Units, kRows>(values, rows, rows_of_head(partial, tile, place.head), {tile.num_rows});
        for (int64_t row = 0; row < tile.num_rows; ++row) rows.factors[row] = 1.0f;  // they count once
    }
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
        add_pieces<kRows, T>(tile, memory, partial, pieces[number], is_last ? nullptr : &pieces[number ^ 1], key);
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
