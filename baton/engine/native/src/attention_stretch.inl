// Stretches of keys and values, as `attention_few.inl` goes through them: where they lie, and what is read ahead.
//
// Tokens come in pieces of kLanes, which lie within a block. Some pieces of a head are a stretch.
//
// Memory is the limit, and no part of it is long enough for the processor to foresee: it reads far ahead only where
// several pages are read at once, each from its beginning to its end. So while a stretch is computed, a line of each
// piece of the next one is read in turn, and the same line of the stretch after that is asked for.

constexpr int kPiecesAtOnce = kKeysAtOnce / kLanes;
// Of a stretch: two of them and what else is computed with fit into the nearest cache.
constexpr int64_t kStretchBytes = 1 << 14;

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
// `first_key`; those from `begin` to `end` are seen. `scales`: of codes, those of each piece.
template <class T>
struct Stretch {
    const T* pieces[kPiecesAtOnce];
    const uint8_t* const* scales = nullptr;
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

// The scales of one head's keys or values in these pieces. Where a token is not seen, there is one of a token that is.
void find_scales(Scales& scales, const Tile& tile, const Pieces& pieces, bool is_values, int64_t head) {
    const int64_t num_codes = static_cast<int64_t>(tile.attention.kv.block_size) * tile.attention.kv.head_dim;
    const Place all = {&pieces, is_values, 0, 0, head};
    scales.are_moderate = true;
    for (int piece = pieces.first(); piece < pieces.behind(); ++piece) {
        const int64_t key = piece * kLanes;
        const uint8_t* from = head_of<uint8_t>(tile, all, piece) + num_codes + pieces.places[piece];
        scales.of_piece[piece] = from;
        if (!is_seen_whole(pieces, key)) {
            uint8_t* copied = scales.copies + key;
            for (int64_t token = 0; token < kLanes; ++token) copied[token] = from[seen_place(pieces, key, token)];
            scales.of_piece[piece] = copied;
        }
        scales.are_moderate &= are_moderate(scales.of_piece[piece]);
    }
}

template <class T>
Stretch<T> begin_stretch(const Tile& tile, const Order& order, const Place& place) {
    const BatonPagedKv& kv = tile.attention.kv;
    const int64_t first_key = place.first * kLanes, behind = first_key + place.count * kLanes;
    const Pieces& all = *place.pieces;
    Stretch<T> stretch;
    const Place coming = order.behind(place), asked = order.behind(coming);
    const auto find = kv.has_codes ? find_lines<uint8_t> : find_lines<T>;
    stretch.num_pieces = place.count;
    stretch.num_coming = find(stretch.coming, tile, coming);
    stretch.num_asked = find(stretch.asked, tile, asked);
    // codes begin anywhere in a line, and there is something behind them
    stretch.lines = kv.has_codes ? kLanes * kv.head_dim / 64 + 1 : kLanes * kv.head_dim * int64_t{sizeof(T)} / 64;
    stretch.first_key = first_key;
    stretch.begin = all.begin > first_key ? all.begin : first_key;
    stretch.end = all.end < behind ? all.end : behind;
    stretch.head_dim = kv.head_dim;
    return stretch;
}

// A piece that is seen in part only is copied to `copies`, with a token that is seen in the place of each that is not.
template <class T>
Stretch<T> find_stretch(const Tile& tile, const Order& order, const Place& place, T* copies) {
    Stretch<T> stretch = begin_stretch<T>(tile, order, place);
    const int64_t size = stretch.head_dim;
    const Pieces& all = *place.pieces;
    for (int i = 0; i < place.count; ++i) {
        const int64_t key = stretch.first_key + i * kLanes;
        const T* from = stretch.pieces[i] = head_of<T>(tile, place, i) + all.places[place.first + i] * size;
        if (is_seen_whole(all, key)) continue;
        stretch.pieces[i] = copies;
        for (int64_t token = 0; token < kLanes; ++token, copies += size)
            __builtin_memcpy(copies, from + seen_place(all, key, token) * size, size * sizeof(T));
    }
    return stretch;
}

// Codes are decoded to `copies`.
template <class T>
Stretch<T> decode_stretch(const Tile& tile, const Order& order, const Place& place, T* copies) {
    Stretch<T> stretch = begin_stretch<T>(tile, order, place);
    const Pieces& all = *place.pieces;
    for (int i = 0; i < place.count; ++i) {
        const int64_t key = stretch.first_key + i * kLanes, first_place = all.places[place.first + i];
        stretch.pieces[i] = copies;
        for (int64_t token = 0; token < kLanes; ++token, copies += stretch.head_dim)
            decode_token(copies, tile.attention.kv, head_of<uint8_t>(tile, place, i),
                         first_place + seen_place(all, key, token));
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
