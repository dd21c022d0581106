// How tokens choose experts: scores of logits, the best of them, and the weights of their results. Rounding and order as
// `baton/engine/models/parts/routing.py` has them; of equal scores the first expert's counts as better.

constexpr int64_t kMaxRouted = 1024;
constexpr float kLeast = -__builtin_inff();

// The sum of exponentials of `values` less the largest, which they become.
BATON_INLINE float exponentials(float* values, int64_t count) {
    float largest = values[0];
    for (int64_t i = 1; i < count; ++i) largest = values[i] > largest ? values[i] : largest;
    float sum = 0.0f;
    for (int64_t first = 0; first < count; first += kLanes) {
        const int64_t rest = count - first < kLanes ? count - first : kLanes;
        store_first(values + first, exponential(load_first(values + first, rest) - largest), rest);
    }
    for (int64_t i = 0; i < count; ++i) sum += values[i];
    return sum;
}

BATON_INLINE void softmax(float* values, int64_t count) {
    const float sum = exponentials(values, count);
    for (int64_t i = 0; i < count; ++i) values[i] /= sum;
}

BATON_INLINE void sigmoids(float* values, int64_t count) {
    for (int64_t first = 0; first < count; first += kLanes) {
        const int64_t rest = count - first < kLanes ? count - first : kLanes;
        store_first(values + first, 1.0f / (exponential(-load_first(values + first, rest)) + 1.0f), rest);
    }
}

// The place of the largest value that is not `taken`; something that is not a number is never the largest.
BATON_INLINE int64_t largest_place(const float* values, const bool* taken, int64_t count) {
    int64_t found = -1;
    for (int64_t i = 0; i < count; ++i)
        if (!taken[i] && (found < 0 || values[i] > values[found])) found = i;
    return found;
}

// Take the `num_best` largest of `values`; returns their sum.
BATON_INLINE float take_best(bool* taken, const float* values, int64_t count, int64_t num_best) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) taken[i] = false;
    for (int64_t i = 0; i < num_best; ++i) {
        const int64_t place = largest_place(values, taken, count);
        taken[place] = true;
        sum += values[place];
    }
    return sum;
}

// Rules out the experts outside of a token's best groups.
BATON_INLINE void keep_groups(float* choice, const BatonRouting& a) {
    bool taken[kMaxRouted];
    float groups[kMaxRouted];
    const int64_t size = a.num_experts / a.num_groups;
    for (int64_t group = 0; group < a.num_groups; ++group)
        groups[group] = take_best(taken, choice + group * size, size, a.num_best_of_group);
    take_best(taken, groups, a.num_groups, a.num_chosen_groups);
    for (int64_t expert = 0; expert < a.num_experts; ++expert)
        if (!taken[expert / size]) choice[expert] = kLeast;
}

template <class T, class Logit>
BATON_INLINE void route_token(const BatonRouting& a, int64_t token) {
    const Logit* logits = static_cast<const Logit*>(a.logits) + token * a.logit_stride;
    float scores[kMaxRouted], choice[kMaxRouted], weights[kMaxRouted];
    bool taken[kMaxRouted] = {};
    for (int64_t i = 0; i < a.num_experts; ++i) scores[i] = widen(logits[i]);
    if (a.scoring == BATON_SOFTMAX) softmax(scores, a.num_experts);
    if (a.scoring == BATON_SIGMOID) sigmoids(scores, a.num_experts);
    for (int64_t i = 0; i < a.num_experts; ++i)
        choice[i] = a.correction != nullptr ? scores[i] + a.correction[i] : scores[i];
    if (a.num_groups > 1) keep_groups(choice, a);
    int64_t* chosen = a.chosen + token * a.num_chosen;
    float sum = 0.0f;
    for (int64_t i = 0; i < a.num_chosen; ++i) {
        chosen[i] = largest_place(choice, taken, a.num_experts);
        taken[chosen[i]] = true;
        weights[i] = scores[chosen[i]];
        sum += weights[i];
    }
    if (a.scoring == BATON_SOFTMAX_OF_CHOSEN) softmax(weights, a.num_chosen);
    T* out = static_cast<T*>(a.weights) + token * a.num_chosen;
    for (int64_t i = 0; i < a.num_chosen; ++i) {
        // what is added keeps a division by zero away, and changes no other float32
        const float weight = a.normalizes ? weights[i] / (sum + 1e-20f) : weights[i];
        narrow(weight * a.scaling, out + i);
    }
}

template <class T>
void route_of(Pool& threads, const BatonRouting& a) {
    each_row(threads, a.num_tokens, a.num_experts * a.num_chosen, [&](int64_t token) {
        if (a.logits_are_float32) {
            route_token<T, float>(a, token);
        } else {
            route_token<T, T>(a, token);
        }
    });
}

void route(Pool& threads, const BatonRouting& arguments) { BATON_BY_DTYPE(arguments.dtype, route_of); }
