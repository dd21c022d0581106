// The recurrence of gated delta nets, token by token: each head of a sequence carries on a matrix, which every token fades,
// corrects by its key and value, and reads by its query.
//
// Columns of a matrix do not depend on each other. Some of them at once lie in the nearest cache while all tokens of a
// piece pass by. So the result of a token is the same however its sequence is cut, and whatever is computed beside it.

constexpr int kDeltaVectors = 2;
constexpr int64_t kDeltaColumns = kDeltaVectors * kLanes;
constexpr int64_t kMaxKeyDim = 256;

// Columns of a row, from number `column` on; behind the end of the row there are zeros.
BATON_INLINE Floats load_columns(const float* row, int64_t column, int64_t size) {
    if (column + kLanes <= size) return load(row + column);
    return column < size ? load_first(row + column, size - column) : Floats{};
}
BATON_INLINE void store_columns(float* row, int64_t column, int64_t size, Floats values) {
    if (column + kLanes <= size) return store(row + column, values);
    if (column < size) store_first(row + column, values, size - column);
}

// One token of a head: `row` counts tokens and heads.
BATON_INLINE void delta_token(const BatonDeltaRule& a, float* matrix, int64_t row, int64_t column) {
    const float *key = a.k + row * a.key_dim, *query = a.q + row * a.key_dim;
    Floats read[2][kDeltaVectors] = {};  // of even and of odd rows, or a sum would wait for itself
    for (int64_t i = 0; i < a.key_dim; i += 2)
        for (int odd = 0; odd < 2 && i + odd < a.key_dim; ++odd)
            for (int vector = 0; vector < kDeltaVectors; ++vector)
                read[odd][vector] += load(matrix + (i + odd) * kDeltaColumns + vector * kLanes) * key[i + odd];
    const float keep = a.keep[row], beta = a.beta[row];
    Floats added[kDeltaVectors], found[kDeltaVectors] = {};
    for (int vector = 0; vector < kDeltaVectors; ++vector) {
        const Floats value = load_columns(a.v + row * a.value_dim, column + vector * kLanes, a.value_dim);
        added[vector] = (value - (read[0][vector] + read[1][vector]) * keep) * beta;
    }
    for (int64_t i = 0; i < a.key_dim; ++i)
        for (int vector = 0; vector < kDeltaVectors; ++vector) {
            float* at = matrix + i * kDeltaColumns + vector * kLanes;
            const Floats corrected = load(at) * keep + added[vector] * key[i];
            store(at, corrected);
            found[vector] += corrected * query[i];
        }
    for (int vector = 0; vector < kDeltaVectors; ++vector)
        store_columns(a.out + row * a.value_dim, column + vector * kLanes, a.value_dim, found[vector]);
}

// Some columns of a head, through the pieces of a sequence.
void delta_columns(const BatonDeltaRule& a, int64_t sequence, int64_t head, int64_t column) {
    alignas(64) float matrix[kMaxKeyDim * kDeltaColumns];
    const int64_t head_size = int64_t{a.key_dim} * a.value_dim;
    for (int64_t number = a.sequence_begin[sequence]; number < a.sequence_begin[sequence + 1]; ++number) {
        const BatonDeltaPiece& piece = a.pieces[number];
        const float* before = piece.before < 0 ? nullptr : a.matrices + piece.before * a.stride + head * head_size;
        float* after = a.matrices + piece.block * a.stride + head * head_size;
        for (int64_t i = 0; i < a.key_dim; ++i)
            for (int vector = 0; vector < kDeltaVectors; ++vector)
                store(matrix + i * kDeltaColumns + vector * kLanes,
                      before == nullptr
                          ? Floats{}
                          : load_columns(before + i * a.value_dim, column + vector * kLanes, a.value_dim));
        for (int64_t token = piece.first; token < piece.last; ++token)
            delta_token(a, matrix, token * a.num_heads + head, column);
        for (int64_t i = 0; i < a.key_dim; ++i)
            for (int vector = 0; vector < kDeltaVectors; ++vector)
                store_columns(after + i * a.value_dim, column + vector * kLanes, a.value_dim,
                              load(matrix + i * kDeltaColumns + vector * kLanes));
    }
}

void delta_rule(Pool& threads, const BatonDeltaRule& a) {
    threads.each(a.num_sequences * a.num_heads, [&](int64_t tile, int) {
        for (int64_t column = 0; column < a.value_dim; column += kDeltaColumns)
            delta_columns(a, tile / a.num_heads, tile % a.num_heads, column);
    });
}
