// Operations on one token's vector: norms, activations, rope, sums, and rounding to blocks.

namespace {

void norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
    Floats a = splat(0), b = splat(0);
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) {
        Floats u = load(x + i), v = load(x + i + W);
        a = fma(u, u, a);
        b = fma(v, v, b);
    }
    for (; i < n; i += W) {
        Floats u = load_some(x + i, n - i < W ? int(n - i) : W);
        a = fma(u, u, a);
    }
    float scale = 1.0f / sqrtf(total(add(a, b)) / float(n) + eps);
    Floats s = splat(scale);
    for (i = 0; i + W <= n; i += W) store(out + i, mul(mul(load(x + i), s), load(weight + i)));
    if (i < n) {
        int rest = int(n - i);
        store_some(out + i, mul(mul(load_some(x + i, rest), s), load_some(weight + i, rest)), rest);
    }
}

// Layer norm, which subtracts the mean; `bias` may be null.
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out) {
    Floats a = splat(0);
    int64_t i = 0;
    for (; i + W <= n; i += W) a = add(a, load(x + i));
    if (i < n) a = add(a, load_some(x + i, int(n - i)));
    const float mean = total(a) / float(n);
    const Floats m = splat(mean);
    a = splat(0);
    for (i = 0; i + W <= n; i += W) {
        const Floats d = sub(load(x + i), m);
        a = fma(d, d, a);
    }
    float square = total(a);
    for (; i < n; ++i) square += (x[i] - mean) * (x[i] - mean);
    const float scale = 1.0f / sqrtf(square / float(n) + eps);
    const Floats s = splat(scale);
    for (i = 0; i + W <= n; i += W) {
        const Floats y = mul(mul(sub(load(x + i), m), s), load(weight + i));
        store(out + i, bias ? add(y, load(bias + i)) : y);
    }
    for (; i < n; ++i) out[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f);
}

void add_scaled(const float* x, float scale, int64_t n, float* out) {
    const Floats s = splat(scale);
    int64_t i = 0;
    for (; i + W <= n; i += W) store(out + i, fma(load(x + i), s, load(out + i)));
    for (; i < n; ++i) out[i] += x[i] * scale;
}

inline Floats silu(Floats g) { return div(g, add(splat(1.0f), exponential(sub(splat(0), g)))); }

template <Activation A>
inline Floats activated(Floats g) {
    if constexpr (A == Activation::kSilu) return silu(g);
    if constexpr (A == Activation::kSigmoid) return div(splat(1.0f), add(splat(1.0f), exponential(sub(splat(0), g))));
    if constexpr (A == Activation::kRelu) return larger(splat(0), g);  // in this order a NaN stays one
    if constexpr (A == Activation::kRelu2) {
        const Floats r = larger(splat(0), g);
        return mul(r, r);
    }
    if constexpr (A == Activation::kGeluTanh) {  // half of 1 + tanh(u) is a sigmoid of 2 u
        const Floats cube = mul(mul(g, g), g), u = fma(cube, splat(0.044715f), g);
        return div(g, add(splat(1.0f), exponential(mul(u, splat(-1.5957691216f)))));
    }
    if constexpr (A == Activation::kGelu) {
        float lanes[W];
        store(lanes, g);
        for (float& x : lanes) x = 0.5f * x * (1.0f + erff(x * 0.70710678f));
        return load(lanes);
    }
}

template <Activation A>
void activate_as(const float* gate, const float* up, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const Floats a = activated<A>(load(gate + i));
        store(out + i, up ? mul(a, load(up + i)) : a);
    }
    if (i < n) {
        const int rest = int(n - i);
        const Floats a = activated<A>(load_some(gate + i, rest));
        store_some(out + i, up ? mul(a, load_some(up + i, rest)) : a, rest);
    }
}

void activate(Activation how, const float* gate, const float* up, int64_t n, float* out) {
    switch (how) {
        case Activation::kSilu: return activate_as<Activation::kSilu>(gate, up, n, out);
        case Activation::kGeluTanh: return activate_as<Activation::kGeluTanh>(gate, up, n, out);
        case Activation::kGelu: return activate_as<Activation::kGelu>(gate, up, n, out);
        case Activation::kRelu: return activate_as<Activation::kRelu>(gate, up, n, out);
        case Activation::kRelu2: return activate_as<Activation::kRelu2>(gate, up, n, out);
        case Activation::kSigmoid: return activate_as<Activation::kSigmoid>(gate, up, n, out);
    }
}

void turn(float* head, const float* cos, const float* sin, int64_t half) {
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        Floats a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(head + i, sub(mul(a, c), mul(b, s)));
        store(head + half + i, fma(a, s, mul(b, c)));
    }
    for (; i < half; ++i) {
        float a = head[i], b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = a * sin[i] + b * cos[i];
    }
}

// Finds the scale of a block whose largest magnitude becomes `top`: NaN if it has NaN or infinity, and then its values
// become 0. Returns what values are to be multiplied by.
inline Floats block_scale(Floats* part, float top, float& scale) {
    Floats bits = splat(0);
    for (int i = 0; i < kBlock / W; ++i) bits = larger_magnitude(bits, part[i]);
    float lanes[W], most = 0;
    store(lanes, bits);
    bool finite = true;
    for (float lane : lanes) {
        finite &= lane <= 3.4028234e38f;
        most = lane > most ? lane : most;
    }
    if (!finite) {
        most = 0;
        for (int i = 0; i < kBlock / W; ++i) part[i] = splat(0);
    }
    scale = finite ? most / top : NAN;
    // Below this the inverse overflows; such a block is rounded to zero.
    return splat(most > 1e-30f ? top / most : 0.0f);
}

// Rounds blocks of 32 to 8 bits. n is a multiple of 32.
void quantize_bytes(const float* x, int64_t n, Block* bytes, ByteFactors* factors, int64_t stride) {
    for (int64_t b = 0; b < n / kBlock; ++b) {
        Floats part[kBlock / W];
        for (int i = 0; i < kBlock / W; ++i) part[i] = load(x + b * kBlock + i * W);
        ByteFactors& f = factors[b * stride];
        const Floats inverse = block_scale(part, 127, f.scale);
        int32_t sum = 0;
        for (int i = 0; i < kBlock / W; ++i) sum += store_whole(bytes[b].bytes, i * W, nearest(mul(part[i], inverse)));
        f.offset = -128 * sum;
    }
}

// Rounds blocks of 32 to 16 bits. n is a multiple of 32. A block with NaN or infinity gets the scale NaN,
// so that it propagates to every product.
void quantize(const float* x, int64_t n, Block* blocks, Factors* factors, int64_t stride) {
    constexpr float kMost = 127 * 256;  // the integer of a block's largest magnitude
    for (int64_t b = 0; b < n / kBlock; ++b) {
        Floats part[kBlock / W];
        for (int i = 0; i < kBlock / W; ++i) part[i] = load(x + b * kBlock + i * W);
        float scale;
        const Floats inverse = block_scale(part, kMost, scale);
        int32_t sums[2] = {0, 0};  // of either half
        for (int i = 0; i < kBlock / W; ++i) {
            sums[i * W / (kBlock / 2)] += store_whole(blocks[b].bytes, i * W, nearest(mul(part[i], inverse)));
        }
        const int32_t sum = sums[0] + sums[1];
        factors[b * stride] = {scale, scale * float(sum), -128 * sum, {scale * float(sums[0]), scale * float(sums[1])}};
    }
}

}  // namespace
