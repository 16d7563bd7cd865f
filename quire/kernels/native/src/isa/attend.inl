// Attention of a few tokens of one row to one key-value head, over pages, with a running softmax. The query heads that
// share the head are treated as further queries, so one token and many tokens run the same code.

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
    int32_t first, stop;  // keys of the current block that this query sees
};

// Turns scores into weights, in place; invisible keys get exactly 0. Returns the factor for earlier sums.
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
    if (!(now > -INFINITY)) now = 0;  // only -inf so far; or NaN, which appears in the sum
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

// The sum of a query's weights, including its head's sink, all relative to exp(most).
inline float all_weights(float most, float sum, const Keys& keys, int head) {
    return keys.sinks ? sum + expf(keys.sinks[head] - most) : sum;
}

// Adds one piece's partial result of a query to those of earlier pieces, in `into`. There is one copy of this code, so
// that pieces computed by several threads give the same bits as pieces computed by one.
__attribute__((noinline)) void absorb(float* into, float most, float sum, const float* values, int head_dim) {
    if (most == -INFINITY) return;  // the query sees no key of the piece
    const float now = most > into[0] ? most : into[0];
    const float keep = into[0] == -INFINITY ? 0.0f : expf(into[0] - now), weight = expf(most - now);
    into[0] = now;
    into[1] = into[1] * keep + sum * weight;
    const Floats k = splat(keep), w = splat(weight);
    int d = 0;
    for (; d + W <= head_dim; d += W) store(into + 2 + d, fma(load(values + d), w, mul(load(into + 2 + d), k)));
    if (d < head_dim) {
        const int rest = head_dim - d;
        store_some(into + 2 + d, fma(load_some(values + d, rest), w, mul(load_some(into + 2 + d, rest), k)), rest);
    }
}

// A query's output: its weighted values over the sum of its weights.
inline void conclude(const Queries& queries, const Keys& keys, int i, float most, float sum, const float* values) {
    float* out = place(queries, i, keys.head_dim);
    const float inverse = 1.0f / all_weights(most, sum, keys, i % queries.num_heads);
    for (int d = 0; d < keys.head_dim; ++d) out[d] = values[d] * inverse;
    if (keys.form != CacheForm::kFloats) rotate(out, keys.head_dim);
}

struct Desk {  // working memory for the queries of one call
    float *turned, *weights, *sums, *parts;  // [kKeyBlock / W][head_dim][W], [queries][kKeyBlock], [queries][stride]
    Block* blocks;     // [queries, head_dim / 32]: queries of packed caches, rounded
    Factors* factors;  // the same
    int64_t stride;
    int num_queries;
    Softmax state[kQueryTokens * 64];
    const float* q[kQueryTokens * 64];
};

inline int64_t slot_of(const Keys& keys, int64_t key) {
    return int64_t(keys.pages[key / keys.page_tokens]) * keys.page_tokens + key % keys.page_tokens;
}

}  // namespace

#include "attend_packed.inl"

namespace {

// How attention reads keys and values that are floats.
class FloatEntries {
  public:
    FloatEntries(const Queries&, const Keys& keys, Desk& desk) : keys_(keys), desk_(desk) {}

    void seek(int64_t base, int n, int padded) {
        padded_ = padded;
        for (int j = 0; j < padded; ++j) {
            const int64_t slot = slot_of(keys_, base + (j < n ? j : n - 1));
            k_[j] = keys_.k + slot * keys_.token_stride;
            v_[j] = keys_.v + slot * keys_.token_stride;
        }
    }

    void score_all() {
        const int head_dim = keys_.head_dim, num_queries = desk_.num_queries;
        for (int j = 0; j < padded_; j += W) {
            float *block = desk_.turned + int64_t(j) * head_dim, *scores = desk_.weights + j;
            transpose(k_ + j, head_dim, block);
            int i = 0;
            for (; i + kScoreQueries <= num_queries; i += kScoreQueries)
                score<kScoreQueries>(desk_.q + i, block, head_dim, scores + i * kKeyBlock);
            for (; i + 3 <= num_queries; i += 3) score<3>(desk_.q + i, block, head_dim, scores + i * kKeyBlock);
            for (; i < num_queries; ++i) score<1>(desk_.q + i, block, head_dim, scores + i * kKeyBlock);
        }
    }

    void settle(int) {}

    template <int M>
    void weigh(int i, int first, int stop) {
        weigh_all<M>(desk_.weights + i * kKeyBlock, v_, keys_.head_dim, first, stop, desk_.sums + i * desk_.stride,
                     desk_.stride);
    }

  private:
    const Keys& keys_;
    Desk& desk_;
    int padded_ = 0;
    const float *k_[kKeyBlock], *v_[kKeyBlock];
};

// One piece of the keys, from `first` to `last`, in blocks that begin at multiples of kKeyBlock. Which keys share a
// block, and so the order of sums, is the same for a token alone and in any batch.
template <class Entries>
void look(const Queries& queries, const Keys& keys, int64_t first, int64_t last, Desk& desk) {
    const int num_queries = desk.num_queries;
    const int64_t window = keys.window, stride = desk.stride;
    float *weights = desk.weights, *sums = desk.sums;
    Softmax* state = desk.state;
    Entries entries(queries, keys, desk);
    for (int i = 0; i < num_queries; ++i) state[i] = {-INFINITY, 0, 0, 0};
    memset(sums, 0, sizeof(float) * num_queries * stride);
    for (int64_t base = first; base < last; base += kKeyBlock) {
        const int n = last - base < kKeyBlock ? int(last - base) : kKeyBlock, padded = (n + W - 1) / W * W;
        entries.seek(base, n, padded);
        entries.score_all();
        for (int i = 0; i < num_queries; ++i) {
            const int64_t position = queries.first_position + i / queries.num_heads;
            const int64_t from = window && position >= window ? position - window + 1 : 0;
            state[i].first = from > base ? int(from - base < n ? from - base : n) : 0;
            state[i].stop = position + 1 - base < n ? int(position + 1 > base ? position + 1 - base : 0) : n;
            float* w = weights + i * kKeyBlock;
            if (state[i].first >= state[i].stop) {
                memset(w, 0, sizeof(float) * padded);
                entries.settle(i);
                continue;
            }
            float shrink = soften(w, state[i], keys, padded);
            if (shrink != 1.0f) {
                float* sum = sums + i * stride;
                for (int64_t d = 0; d < stride; d += W) store(sum + d, mul(load(sum + d), splat(shrink)));
            }
            entries.settle(i);
        }
        // The first queries may see no key of a block at the end of the sequence; the last query sees the most.
        int i = 0;
        for (; i + kValueQueries <= num_queries; i += kValueQueries)
            entries.template weigh<kValueQueries>(i, state[i].first, state[i + kValueQueries - 1].stop);
        for (; i + 3 <= num_queries; i += 3) entries.template weigh<3>(i, state[i].first, state[i + 2].stop);
        for (; i < num_queries; ++i) entries.template weigh<1>(i, state[i].first, state[i].stop);
    }
}

void look_at(const Queries& queries, const Keys& keys, int64_t first, int64_t last, Desk& desk) {
    switch (keys.form) {
        case CacheForm::kFloats: return look<FloatEntries>(queries, keys, first, last, desk);
        case CacheForm::kInt8: return look<PackedEntries<CacheForm::kInt8>>(queries, keys, first, last, desk);
        case CacheForm::kK8V4: return look<PackedEntries<CacheForm::kK8V4>>(queries, keys, first, last, desk);
        case CacheForm::kQ4: return look<PackedEntries<CacheForm::kQ4>>(queries, keys, first, last, desk);
    }
}

void attend(const Queries& queries, const Keys& keys, float* scratch) {
    const int head_dim = keys.head_dim;
    Desk desk;
    desk.num_queries = queries.num_tokens * queries.num_heads;
    desk.stride = (head_dim + W - 1) / W * W;
    desk.turned = scratch;
    desk.weights = desk.turned + int64_t(kKeyBlock) * head_dim;
    desk.sums = desk.weights + int64_t(desk.num_queries) * kKeyBlock;
    float* end = desk.sums + int64_t(desk.num_queries) * desk.stride;
    desk.parts = queries.part ? queries.part : end;
    if (!queries.part) end += int64_t(desk.num_queries) * part_floats(head_dim);
    const int64_t num_blocks = int64_t(desk.num_queries) * (head_dim / kBlock);
    desk.blocks = reinterpret_cast<Block*>(end);
    desk.factors = reinterpret_cast<Factors*>(desk.blocks + num_blocks);
    for (int i = 0; i < desk.num_queries; ++i)
        desk.q[i] = queries.q + (i / queries.num_heads) * queries.q_stride + (i % queries.num_heads) * int64_t(head_dim);
    const bool is_whole = !queries.part && keys.first / kSplitKeys == (keys.stop - 1) / kSplitKeys;
    for (int64_t first = keys.first; first < keys.stop;) {
        const int64_t end = (first / kSplitKeys + 1) * kSplitKeys, last = end < keys.stop ? end : keys.stop;
        look_at(queries, keys, first, last, desk);
        for (int i = 0; i < desk.num_queries && !is_whole; ++i) {
            float* part = desk.parts + i * part_floats(head_dim);
            if (first == keys.first) part[0] = -INFINITY, memset(part + 1, 0, sizeof(float) * (head_dim + 1));
            absorb(part, desk.state[i].most, desk.state[i].sum, desk.sums + i * desk.stride, head_dim);
        }
        first = last;
    }
    for (int i = 0; i < desk.num_queries && !queries.part; ++i) {
        const float* part = desk.parts + i * part_floats(head_dim);
        if (is_whole) conclude(queries, keys, i, desk.state[i].most, desk.state[i].sum, desk.sums + i * desk.stride);
        else conclude(queries, keys, i, part[0], part[1], part + 2);
    }
}

// Merges the partial results of several pieces of the keys for the same queries.
void merge(const Queries& queries, const Keys& keys, int64_t num_parts) {
    const int head_dim = keys.head_dim, num_queries = queries.num_tokens * queries.num_heads;
    const int64_t floats = part_floats(head_dim);
    for (int i = 0; i < num_queries; ++i) {
        float* whole = queries.part + i * floats;
        for (int64_t p = 1; p < num_parts; ++p) {
            const float* part = whole + p * num_queries * floats;
            absorb(whole, part[0], part[1], part + 2, head_dim);
        }
        conclude(queries, keys, i, whole[0], whole[1], whole + 2);
    }
}

}  // namespace
