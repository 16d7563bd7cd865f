// How attention reads entries of 8 and 4 bits. Keys meet queries as whole numbers: a query is rounded to 16 bits like the
// activations of a product, and four columns of W keys are one vector. Values are read as floats, and their scales are
// multiplied into the weights.

namespace {

constexpr int kPackedQueries = 4;  // queries that share a read of the keys

template <CacheForm F>
class PackedEntries {
  public:
    static constexpr int kKeyBits = key_bits(F), kValueBits = value_bits(F);

    PackedEntries(const Queries& queries, const Keys& keys, Desk& desk)
        : keys_(keys), desk_(desk), head_dim_(keys.head_dim), num_blocks_(keys.head_dim / kBlock) {
        for (int i = 0; i < desk.num_queries; ++i) {
            const float* q = desk.q[i];
            memcpy(desk.turned, q, sizeof(float) * head_dim_);
            rotate(desk.turned, head_dim_);
            quantize(desk.turned, head_dim_, desk.blocks + i * num_blocks_, desk.factors + i * num_blocks_, 1);
        }
        (void)queries;
    }

    // The keys from `base`, of which n lie in the piece; the last is repeated up to `padded`.
    void seek(int64_t base, int n, int padded) {
        const int64_t value_at = side_bytes(kKeyBits, head_dim_), value_end = number_bytes(kValueBits, head_dim_);
        padded_ = padded;
        for (int j = 0; j < padded; ++j) {
            key_[j] = keys_.entries + slot_of(keys_, base + (j < n ? j : n - 1)) * keys_.token_stride;
            value_[j] = key_[j] + value_at;
            scale_[j] = from_upper_half(value_[j] + value_end);
            if constexpr (kValueBits == 4) least_[j] = from_upper_half(value_[j] + value_end + 2);
        }
    }

    void score_all() {
        for (int j = 0; j < padded_; j += W) {
            turn_keys(j);
            int i = 0;
            for (; i + kPackedQueries <= desk_.num_queries; i += kPackedQueries) score_some<kPackedQueries>(i, j);
            for (; i + 3 <= desk_.num_queries; i += 3) score_some<3>(i, j);
            for (; i < desk_.num_queries; ++i) score_some<1>(i, j);
        }
    }

    // Multiplies the values' scales into the weights of a query.
    void settle(int i) {
        float* w = desk_.weights + i * kKeyBlock;
        Floats sum = splat(0);
        for (int j = 0; j < padded_; j += W) {
            const Floats x = load(w + j);
            if constexpr (kValueBits == 4) sum = fma(x, load(least_ + j), sum);
            store(w + j, mul(x, load(scale_ + j)));
        }
        extra_[i] = kValueBits == 4 ? total(sum) : 0.0f;
    }

    template <int M>
    void weigh(int i, int first, int stop) {
        constexpr int V = W == 16 ? 4 : 2;
        int at = 0;
        for (; at + V * W <= head_dim_; at += V * W) weigh_columns<M, V>(i, at, first, stop);
        for (; at < head_dim_; at += W) weigh_columns<M, 1>(i, at, first, stop);
    }

  private:
    // Four columns of W keys as one vector; two times, where a number has 4 bits.
    void turn_keys(int j) {
        const int words = head_dim_ * kKeyBits / 32, most = int(entry_bytes(F, head_dim_) / 4);
        const int even = (words + W - 1) / W * W;  // what lies behind a key in its entry may be turned along
        transpose(reinterpret_cast<const float* const*>(key_ + j), even <= most ? even : words, desk_.turned);
        const int64_t key_end = number_bytes(kKeyBits, head_dim_);
        for (int i = 0; i < W; ++i) {
            key_scale_[i] = from_upper_half(key_[j + i] + key_end);
            if constexpr (kKeyBits == 4) key_least_[i] = from_upper_half(key_[j + i] + key_end + 2);
        }
    }

    static Bytes columns(const uint8_t* turned, int block, int group) {
        if constexpr (kKeyBits == 8) return load_bytes(turned + (block * 8 + group) * 4 * W);
        return pick(load_bytes(turned + (block * 4 + group % 4) * 4 * W), group < 4 ? 0 : 4, 15);
    }

    template <int M>
    void score_some(int i, int j) {
        const uint8_t* turned = reinterpret_cast<const uint8_t*>(desk_.turned);
        Floats acc[M];
        float sums[M];
        begin<M>(acc);
        for (float& sum : sums) sum = 0;
        for (int b = 0; b < num_blocks_; ++b) {
            Sum sum[M];
            for (Sum& each : sum) each = begin_sum();
            const Block* blocks = desk_.blocks + i * num_blocks_ + b;
            const Factors* factors = desk_.factors + i * num_blocks_ + b;
            for (int g = 0; g < kBlock / 4; ++g) {
                const Weights w = to_weights<kKeyBits == 8>(columns(turned, b, g));
                for (int m = 0; m < M; ++m) add_products(sum[m], w, blocks[m * num_blocks_].bytes, g);
            }
            for (int m = 0; m < M; ++m) {
                const Factors& f = factors[m * num_blocks_];
                acc[m] = fma(end_sum<kKeyBits == 8>(sum[m], f.offset), splat(f.scale), acc[m]);
                sums[m] += f.sum;
            }
        }
        for (int m = 0; m < M; ++m) {
            Floats score = mul(acc[m], load(key_scale_));
            if constexpr (kKeyBits == 4) score = fma(load(key_least_), splat(sums[m]), score);
            store(desk_.weights + (i + m) * kKeyBlock + j, score);
        }
    }

    // W columns of a value from `column` on, before its scale.
    static Floats numbers(const uint8_t* value, int column) {
        if constexpr (kValueBits == 8) return load_signed_bytes(value + column);
        return load_bits(value + column / 32 * 16 + column % 16, column % 32 < 16 ? 0 : 4, 15);
    }

    template <int M, int V>
    void weigh_columns(int i, int at, int first, int stop) {
        const float* weights = desk_.weights + i * kKeyBlock;
        float* sums = desk_.sums + i * desk_.stride + at;
        Floats acc[M][V];
        for (int m = 0; m < M; ++m)
            for (int v = 0; v < V; ++v) {
                acc[m][v] = load(sums + m * desk_.stride + v * W);
                if constexpr (kValueBits == 4) acc[m][v] = add(acc[m][v], splat(extra_[i + m]));
            }
        for (int j = first; j < stop; ++j) {
            Floats x[V];
            for (int v = 0; v < V; ++v) x[v] = numbers(value_[j], at + v * W);
            for (int m = 0; m < M; ++m) {
                const Floats w = splat(weights[m * kKeyBlock + j]);
                for (int v = 0; v < V; ++v) acc[m][v] = fma(w, x[v], acc[m][v]);
            }
        }
        for (int m = 0; m < M; ++m)
            for (int v = 0; v < V; ++v) store(sums + m * desk_.stride + v * W, acc[m][v]);
    }

    const Keys& keys_;
    Desk& desk_;
    const int head_dim_, num_blocks_;
    int padded_ = 0;
    const uint8_t *key_[kKeyBlock], *value_[kKeyBlock];
    float scale_[kKeyBlock], least_[kKeyBlock];  // of values
    float key_scale_[W], key_least_[W];          // of the keys being scored
    float extra_[kQueryTokens * 64];             // weights times least values, which all columns of a query's sum get
};

}  // namespace
