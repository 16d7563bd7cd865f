// Attention of a few tokens of one row to one key-value head, over pages, with a running softmax. The query heads that
// share the head stand side by side as queries, so one token and many take the same way.

namespace {

constexpr int kScoreQueries = 8;
constexpr int kValueQueries = 4;

// scores[m][0..W) of M queries against W keys laid out as [head_dim][W].
template <int M>
inline void score(const float* const* q, const float* keys, int head_dim, float* scores) {
    Floats acc[M];
    begin<M>(acc);
    for (int d = 0; d < head_dim; ++d) {
        Floats k = load(keys + d * W);
        for (int m = 0; m < M; ++m) acc[m] = fma(k, splat(q[m][d]), acc[m]);
    }
    for (int m = 0; m < M; ++m) store(scores + m * kKeyBlock, acc[m]);
}

// sums[m][0..V*W) += weights[m][j] * values[j][0..V*W) for keys first..stop.
template <int M, int V>
inline void weigh(const float* weights, const float* const* values, int at, int first, int stop, float* sums,
                  int64_t stride) {
    Floats acc[M][V];
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < V; ++v) acc[m][v] = load(sums + m * stride + at + v * W);
    for (int j = first; j < stop; ++j) {
        Floats x[V];
        for (int v = 0; v < V; ++v) x[v] = load(values[j] + at + v * W);
        for (int m = 0; m < M; ++m) {
            Floats w = splat(weights[m * kKeyBlock + j]);
            for (int v = 0; v < V; ++v) acc[m][v] = fma(w, x[v], acc[m][v]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < V; ++v) store(sums + m * stride + at + v * W, acc[m][v]);
}

template <int M>
inline void weigh_all(const float* weights, const float* const* values, int head_dim, int first, int stop, float* sums,
                      int64_t stride) {
    int at = 0;
    constexpr int V = W == 16 ? 4 : 2;
    for (; at + V * W <= head_dim; at += V * W) weigh<M, V>(weights, values, at, first, stop, sums, stride);
    for (; at + W <= head_dim; at += W) weigh<M, 1>(weights, values, at, first, stop, sums, stride);
    for (; at < head_dim; ++at)  // a head that is no multiple of the vector
        for (int m = 0; m < M; ++m)
            for (int j = first; j < stop; ++j) sums[m * stride + at] += weights[m * kKeyBlock + j] * values[j][at];
}

struct Softmax {
    float most, sum;
    int32_t first, stop;  // keys of the current block this query sees
};

// Turns scores into weights, in place; those it may not see get exactly 0. Returns what earlier sums shrink by.
inline float soften(float* s, Softmax& state, const Keys& keys, int num_padded) {
    Floats scale = splat(keys.scale), most = splat(-INFINITY);
    for (int j = 0; j < num_padded; j += W) store(s + j, mul(load(s + j), scale));
    if (keys.softcap > 0) {
        const Floats cap = splat(keys.softcap), steep = splat(2.0f / keys.softcap), one = splat(1.0f), two = splat(2.0f);
        for (int j = 0; j < num_padded; j += W) {  // tanh(x) = 1 - 2 / (exp(2 x) + 1)
            const Floats bent = sub(one, div(two, add(exponential(mul(load(s + j), steep)), one)));
            store(s + j, mul(bent, cap));
        }
    }
    for (int j = 0; j < state.first; ++j) s[j] = -INFINITY;
    for (int j = state.stop; j < num_padded; ++j) s[j] = -INFINITY;
    for (int j = 0; j < num_padded; j += W) most = larger(most, load(s + j));
    float now = largest(most);
    now = now > state.most ? now : state.most;
    if (!(now > -INFINITY)) now = 0;  // nothing but -inf so far, or NaN: then it shows in the sum
    Floats shift = splat(now), sum = splat(0), nothing = splat(-3.0e38f);
    for (int j = 0; j < num_padded; j += W) {
        Floats x = load(s + j), w = select_less(x, nothing, splat(0), exponential(sub(x, shift)));
        store(s + j, w);
        sum = add(sum, w);
    }
    float shrink = state.most > -INFINITY ? expf(state.most - now) : 0.0f;
    state.sum = state.sum * shrink + total(sum);
    state.most = now;
    return shrink;
}

inline float* place(const Queries& queries, int i, int head_dim) {
    return queries.out + (i / queries.num_heads) * queries.out_stride + (i % queries.num_heads) * int64_t(head_dim);
}

// The sum of a query's weights, and that of its head's sink, all relative to exp(most).
inline float all_weights(float most, float sum, const Keys& keys, int head) {
    return keys.sinks ? sum + expf(keys.sinks[head] - most) : sum;
}

void attend(const Queries& queries, const Keys& keys, float* scratch) {
    const int head_dim = keys.head_dim, num_queries = queries.num_tokens * queries.num_heads;
    const int64_t stride = (head_dim + W - 1) / W * W;
    float* turned = scratch;                              // [kKeyBlock / W][head_dim][W]
    float* weights = turned + int64_t(kKeyBlock) * head_dim;  // [queries][kKeyBlock]
    float* sums = weights + int64_t(num_queries) * kKeyBlock;  // [queries][stride]
    Softmax state[kQueryTokens * 64];
    const float* q[kQueryTokens * 64];
    for (int i = 0; i < num_queries; ++i) {
        state[i] = {-INFINITY, 0, 0, 0};
        q[i] = queries.q + (i / queries.num_heads) * queries.q_stride + (i % queries.num_heads) * int64_t(head_dim);
    }
    memset(sums, 0, sizeof(float) * num_queries * stride);
    const int64_t window = keys.window, end = queries.first_position + queries.num_tokens;
    const int64_t last = keys.stop < end ? keys.stop : end;
    const int64_t first_key = keys.first;
    for (int64_t base = first_key; base < last; base += kKeyBlock) {
        const int n = last - base < kKeyBlock ? int(last - base) : kKeyBlock, padded = (n + W - 1) / W * W;
        const float *k[kKeyBlock], *v[kKeyBlock];
        for (int j = 0; j < padded; ++j) {
            int64_t key = base + (j < n ? j : n - 1);
            int64_t slot = int64_t(keys.pages[key / keys.page_tokens]) * keys.page_tokens + key % keys.page_tokens;
            k[j] = keys.k + slot * keys.token_stride;
            v[j] = keys.v + slot * keys.token_stride;
        }
        for (int j = 0; j < padded; j += W) {
            float* block = turned + int64_t(j) * head_dim;
            transpose(k + j, head_dim, block);
            int i = 0;
            for (; i + kScoreQueries <= num_queries; i += kScoreQueries)
                score<kScoreQueries>(q + i, block, head_dim, weights + i * kKeyBlock + j);
            for (; i + 3 <= num_queries; i += 3) score<3>(q + i, block, head_dim, weights + i * kKeyBlock + j);
            for (; i < num_queries; ++i) score<1>(q + i, block, head_dim, weights + i * kKeyBlock + j);
        }
        for (int i = 0; i < num_queries; ++i) {
            const int64_t position = queries.first_position + i / queries.num_heads;
            const int64_t from = window && position >= window ? position - window + 1 : 0;
            state[i].first = from > base ? int(from - base < n ? from - base : n) : 0;
            state[i].stop = position + 1 - base < n ? int(position + 1 > base ? position + 1 - base : 0) : n;
            float* w = weights + i * kKeyBlock;
            if (state[i].first >= state[i].stop) {
                memset(w, 0, sizeof(float) * padded);
                continue;
            }
            float shrink = soften(w, state[i], keys, padded);
            if (shrink != 1.0f) {
                float* sum = sums + i * stride;
                for (int64_t d = 0; d < stride; d += W) store(sum + d, mul(load(sum + d), splat(shrink)));
            }
        }
        // A block of keys at the end of the sequence may be beyond the first queries' sight; the last sees the most.
        int i = 0;
        for (; i + kValueQueries <= num_queries; i += kValueQueries)
            weigh_all<kValueQueries>(weights + i * kKeyBlock, v, head_dim, state[i].first,
                                     state[i + kValueQueries - 1].stop, sums + i * stride, stride);
        for (; i + 3 <= num_queries; i += 3)
            weigh_all<3>(weights + i * kKeyBlock, v, head_dim, state[i].first, state[i + 2].stop, sums + i * stride,
                         stride);
        for (; i < num_queries; ++i)
            weigh_all<1>(weights + i * kKeyBlock, v, head_dim, state[i].first, state[i].stop, sums + i * stride,
                         stride);
    }
    for (int i = 0; i < num_queries; ++i) {
        if (queries.part) {
            float* part = queries.part + i * part_floats(head_dim);
            part[0] = state[i].most;
            part[1] = state[i].sum;
            memcpy(part + 2, sums + i * stride, sizeof(float) * head_dim);
            continue;
        }
        float* out = place(queries, i, head_dim);
        const float inverse = 1.0f / all_weights(state[i].most, state[i].sum, keys, i % queries.num_heads);
        for (int d = 0; d < head_dim; ++d) out[d] = sums[i * stride + d] * inverse;
    }
}

// Brings together what several pieces of the keys left for the same queries.
void merge(const Queries& queries, const Keys& keys, int64_t num_parts) {
    const int head_dim = keys.head_dim, num_queries = queries.num_tokens * queries.num_heads;
    const int64_t floats = part_floats(head_dim);
    for (int i = 0; i < num_queries; ++i) {
        const float* first = queries.part + i * floats;
        float most = -INFINITY, sum = 0;
        for (int64_t p = 0; p < num_parts; ++p) {
            const float here = first[p * num_queries * floats];
            most = here > most ? here : most;
        }
        float* out = place(queries, i, head_dim);
        memset(out, 0, sizeof(float) * head_dim);
        for (int64_t p = 0; p < num_parts; ++p) {
            const float* part = first + p * num_queries * floats;
            const float weight = part[0] > -INFINITY ? expf(part[0] - most) : 0.0f;
            sum += part[1] * weight;
            add_scaled(part + 2, weight, head_dim, out);
        }
        const float inverse = 1.0f / all_weights(most, sum, keys, i % queries.num_heads);
        for (int d = 0; d < head_dim; ++d) out[d] *= inverse;
    }
}

}  // namespace
