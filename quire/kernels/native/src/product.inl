// Matrix times activations, a tile of W rows by up to kMaxTokens tokens in registers: every block of weights is unpacked
// once for all tokens of the register tile.

namespace {

template <int M>
inline void begin(Floats* acc) {
    for (int m = 0; m < M; ++m) acc[m] = splat(0);
}

constexpr int64_t kNearBytes = 20000;  // of activations, beside a tile of weights, in the first cache

template <Form F, int M>
inline void add_blocks(const uint8_t* p, int64_t blocks, const Inputs& in, int64_t token, Floats* acc) {
    constexpr int kScales = (F == Form::kQ4_1 ? 4 : 2) * W;
    constexpr int kBytes = kScales + (F == Form::kQ8_0 ? 32 : 16) * W;
    const Block* at[M];
    for (int m = 0; m < M; ++m) at[m] = in.blocks + (token + m) * blocks;
    const Factors* factors = in.factors + token;
    for (int64_t b = 0; b < blocks; ++b, p += kBytes, factors += in.num_tokens) {
        const uint8_t* w = p + kScales;
        Sum high[M], low[M];
        for (int m = 0; m < M; ++m) high[m] = low[m] = begin_sum();
        if constexpr (F == Form::kQ8_0) {
#pragma GCC unroll 8
            for (int g = 0; g < 32; g += 4) {
                Signed x = load_signed(w + g * W);
                for (int m = 0; m < M; ++m) {
                    const Block& a = *at[m];
                    high[m] = dot_signed(high[m], x, a.high + g);
                    low[m] = dot_signed(low[m], x, a.low + g);
                }
            }
        } else {
#pragma GCC unroll 4
            for (int g = 0; g < 16; g += 4) {
                Bytes x = load_bytes(w + g * W), first = low_nibbles(x), second = high_nibbles(x);
                for (int m = 0; m < M; ++m) {
                    const Block& a = *at[m];
                    high[m] = dot_unsigned(dot_unsigned(high[m], first, a.high + g), second, a.high + 16 + g);
                    low[m] = dot_unsigned(dot_unsigned(low[m], first, a.low + g), second, a.low + 16 + g);
                }
            }
        }
        const Floats scale = load_half((const uint16_t*)p);
        Floats least = scale;  // what a nibble of 0 stands for
        if constexpr (F == Form::kQ4_0) least = mul(scale, splat(-8.0f));
        if constexpr (F == Form::kQ4_1) least = load_half((const uint16_t*)p + W);
        for (int m = 0; m < M; ++m) {
            Floats whole;
            if constexpr (F == Form::kQ8_0) whole = end_signed(high[m], low[m], factors[m].offset);
            else whole = end_unsigned(high[m], low[m]);
            acc[m] = fma(mul(whole, scale), splat(factors[m].scale), acc[m]);
            if constexpr (F != Form::kQ8_0) acc[m] = fma(least, splat(factors[m].sum), acc[m]);
            ++at[m];
        }
    }
}

template <Form F, int M>
inline void add_columns(const uint8_t* p, const float* x, int64_t columns, Floats* acc) {
    for (int64_t c = 0; c < columns; ++c) {
        Floats w = F == Form::kF32 ? load((const float*)p + c * W) : load_half((const uint16_t*)p + c * W);
        for (int m = 0; m < M; ++m) acc[m] = fma(w, splat(x[m * columns + c]), acc[m]);
    }
}

template <int M>
inline void finish(const Floats* acc, const Matrix& m, int64_t first_row, int64_t token, const Target& to) {
    int rows = m.rows - first_row < W ? int(m.rows - first_row) : W;
    for (int i = 0; i < M; ++i) {
        int64_t place = (token + i) * to.stride + first_row;
        Floats value = acc[i];
        if (rows == W) {
            if (to.bias) value = add(value, load(to.bias + first_row));
            if (to.residual) value = add(value, load(to.residual + place));
            store(to.out + place, value);
        } else {
            if (to.bias) value = add(value, load_some(to.bias + first_row, rows));
            if (to.residual) value = add(value, load_some(to.residual + place, rows));
            store_some(to.out + place, value, rows);
        }
    }
}

template <Form F, int M>
void few_tokens(const Matrix& m, int64_t tile, const Inputs& in, int64_t token, const Target& to) {
    const uint8_t* p = m.data + tile * tile_bytes(m);
    if constexpr (F == Form::kF32 || F == Form::kF16) {
        Floats acc[M];
        begin<M>(acc);
        add_columns<F, M>(p, in.x + token * m.columns, m.columns, acc);
        finish<M>(acc, m, tile * W, token, to);
    } else {
        Floats acc[M];
        begin<M>(acc);
        add_blocks<F, M>(p, m.columns / kBlock, in, token, acc);
        finish<M>(acc, m, tile * W, token, to);
    }
}

template <Form F, int M>
inline void last_tokens(int64_t count, const Matrix& m, int64_t tile, const Inputs& in, int64_t token,
                        const Target& to) {
    if constexpr (M > 0) {
        if (count == M) few_tokens<F, M>(m, tile, in, token, to);
        else last_tokens<F, M - 1>(count, m, tile, in, token, to);
    }
}

template <Form F>
void some_tokens(const Matrix& m, int64_t tile, const Inputs& in, int64_t token, int64_t stop, const Target& to) {
    for (; token + kMaxTokens <= stop; token += kMaxTokens) few_tokens<F, kMaxTokens>(m, tile, in, token, to);
    last_tokens<F, kMaxTokens - 1>(stop - token, m, tile, in, token, to);
}

template <Form F>
void product_of(const Matrix& m, int64_t first_tile, int64_t stop_tile, const Inputs& in, int64_t num_tokens,
                const Target& to) {
    // As many tokens at a time as stay in the first cache while all tiles pass by.
    const int64_t token_bytes = m.columns * (is_float(F) ? 4 : 2);
    const int64_t most = (kNearBytes / token_bytes / kMaxTokens + 1) * kMaxTokens;
    for (int64_t first = 0; first < num_tokens; first += most) {
        const int64_t stop = first + most < num_tokens ? first + most : num_tokens;
        for (int64_t tile = first_tile; tile < stop_tile; ++tile) some_tokens<F>(m, tile, in, first, stop, to);
    }
}

void product(const Matrix& m, int64_t first_tile, int64_t stop_tile, const Inputs& in, int64_t num_tokens,
             const Target& to) {
    switch (m.form) {
        case Form::kF32: return product_of<Form::kF32>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kF16: return product_of<Form::kF16>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kQ8_0: return product_of<Form::kQ8_0>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kQ4_0: return product_of<Form::kQ4_0>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kQ4_1: return product_of<Form::kQ4_1>(m, first_tile, stop_tile, in, num_tokens, to);
    }
}

}  // namespace
