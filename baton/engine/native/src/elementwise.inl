// What lies between products: norms, rotation, gate. Rows are independent; each is read once or twice while it is in the
// cache.

// Less is not worth waking a thread for.
constexpr int64_t kElementsPerTile = 1 << 14;

BATON_INLINE int64_t rows_per_tile(int64_t row_size) {
    return row_size >= kElementsPerTile ? 1 : (kElementsPerTile + row_size - 1) / row_size;
}

template <class Compute>
BATON_INLINE void each_row(Pool& threads, int64_t num_rows, int64_t row_size, const Compute& compute) {
    const int64_t per_tile = rows_per_tile(row_size);
    threads.each((num_rows + per_tile - 1) / per_tile, [&](int64_t tile, int) {
        const int64_t first = tile * per_tile, end = first + per_tile < num_rows ? first + per_tile : num_rows;
        for (int64_t row = first; row < end; ++row) compute(row);
    });
}

// 1 / sqrt(mean of the squares + eps)
template <class T>
BATON_INLINE float inverse_rms(const T* x, int64_t size, float eps) {
    Floats squares[2] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= size; i += 2 * kLanes)
        for (int part = 0; part < 2; ++part) {
            const Floats values = load(x + i + part * kLanes);
            squares[part] += values * values;
        }
    float sum = sum_of_lanes(squares[0] + squares[1]);
    for (; i < size; ++i) sum += widen(x[i]) * widen(x[i]);
    return 1.0f / __builtin_sqrtf(sum / static_cast<float>(size) + eps);
}

// out = x * factor, rounded, times weight, rounded
template <class T>
BATON_INLINE void scale_row(T* out, const T* x, const T* weight, int64_t size, float factor) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(out + i, round_to(load(x + i) * factor, x) * load(weight + i));
    if (i < size) {
        const int64_t rest = size - i;
        store_first(out + i, round_to(load_first(x + i, rest) * factor, x) * load_first(weight + i, rest), rest);
    }
}

template <class T>
BATON_INLINE void add_row(T* sum, const T* delta, int64_t size) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(sum + i, load(sum + i) + load(delta + i));
    for (; i < size; ++i) narrow(widen(sum[i]) + widen(delta[i]), sum + i);
}

template <class T>
void add_norm_of(Pool& threads, const BatonAddNorm& a) {
    const T* delta = static_cast<const T*>(a.delta);
    each_row(threads, a.num_rows, a.size, [&](int64_t row) {
        T* residual = static_cast<T*>(a.residual) + row * a.residual_stride;
        if (delta != nullptr) add_row(residual, delta + row * a.delta_stride, a.size);
        scale_row(static_cast<T*>(a.out) + row * a.out_stride, residual, static_cast<const T*>(a.weight), a.size,
                  inverse_rms(residual, a.size, a.eps));
    });
}

// One part of a head, whose partner lies half a head away: x * cos, rounded, plus partner * signed sine, rounded.
template <class T>
BATON_INLINE void rotate_part(T* out, const T* x, const T* partner, const T* cos, const T* sine, int64_t size) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes)
        store(out + i, round_to(load(x + i) * load(cos + i), x) + round_to(load(partner + i) * load(sine + i), x));
    if (i < size) {
        const int64_t rest = size - i;
        const Floats own = round_to(load_first(x + i, rest) * load_first(cos + i, rest), x);
        store_first(out + i, own + round_to(load_first(partner + i, rest) * load_first(sine + i, rest), x), rest);
    }
}

constexpr int64_t kMaxHeadDim = 512;

template <class T>
void norm_rotate_of(Pool& threads, const BatonNormRotate& a) {
    const int64_t size = a.head_dim, half = size / 2, row_size = a.num_heads * size;
    each_row(threads, a.num_tokens, row_size, [&](int64_t token) {
        const T* cos = static_cast<const T*>(a.cos) + token * size;
        const T* sine = static_cast<const T*>(a.signed_sin) + token * size;
        for (int64_t head = 0; head < a.num_heads; ++head) {
            const T* x = static_cast<const T*>(a.x) + token * a.x_stride + head * size;
            T normed[kMaxHeadDim];
            if (a.weight != nullptr) {
                scale_row(normed, x, static_cast<const T*>(a.weight) + head * size, size, inverse_rms(x, size, a.eps));
                x = normed;
            }
            T* out = static_cast<T*>(a.out) + token * row_size + head * size;
            rotate_part(out, x, x + half, cos, sine, half);
            rotate_part(out + half, x + half, x, cos + half, sine + half, half);
        }
    });
}

template <class T>
BATON_INLINE Floats gated(Floats gate, Floats up, const T* dtype) {
    return round_to(gate / (exponential(-gate) + 1.0f), dtype) * up;
}

template <class T>
void gate_of(Pool& threads, const BatonGate& a) {
    each_row(threads, a.num_rows, 2 * a.size, [&](int64_t row) {
        const T* gate = static_cast<const T*>(a.x) + row * a.x_stride;
        const T* up = gate + a.size;
        T* out = static_cast<T*>(a.out) + row * a.size;
        int64_t i = 0;
        for (; i + kLanes <= a.size; i += kLanes) store(out + i, gated(load(gate + i), load(up + i), gate));
        if (i < a.size) {
            const int64_t rest = a.size - i;
            store_first(out + i, gated(load_first(gate + i, rest), load_first(up + i, rest), gate), rest);
        }
    });
}

#define BATON_BY_DTYPE(dtype, call)                   \
    switch (dtype) {                                  \
        case BATON_FLOAT32:                           \
            return call<float>(threads, arguments);   \
        case BATON_BFLOAT16:                          \
            return call<Bfloat16>(threads, arguments); \
        case BATON_FLOAT16:                           \
            return call<Float16>(threads, arguments); \
    }

void add_norm(Pool& threads, const BatonAddNorm& arguments) { BATON_BY_DTYPE(arguments.dtype, add_norm_of); }
void norm_rotate(Pool& threads, const BatonNormRotate& arguments) { BATON_BY_DTYPE(arguments.dtype, norm_rotate_of); }
void gate(Pool& threads, const BatonGate& arguments) { BATON_BY_DTYPE(arguments.dtype, gate_of); }
