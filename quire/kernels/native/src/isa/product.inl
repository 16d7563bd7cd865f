// Matrix times activations, a tile of W rows by up to kMaxTokens tokens in registers: every block of weights is unpacked
// once for all tokens of the register tile.

namespace {

template <int M>
inline void begin(Floats* acc) {
    for (int m = 0; m < M; ++m) acc[m] = splat(0);
}

constexpr int64_t kNearBytes = 20000;  // of activations, beside a tile of weights, in the first cache

// Weights are streamed once a step, and processors fetch ahead only within a page: far enough for what memory takes to
// answer, near enough to stay in the first cache beside the activations.
constexpr int64_t kAheadBytes = 10240;

// What stands between a tile and its registers must be inlined, or sums go through memory.
#define QUIRE_INLINE inline __attribute__((always_inline))

// One cell: group after group, in an order in which groups that share a vector follow each other.
template <Form F, int kFirst, int M>
QUIRE_INLINE void add_cell(const uint8_t* w, const Scales& scales, const Block* const* at, const Factors* factors,
                           Floats* acc) {
    using C = Coding<F>;
    constexpr int kGroups = C::kCell / 4;
    Sum sums[M];
    for (int m = 0; m < M; ++m) sums[m] = begin_sum();
#pragma GCC unroll 8
    for (int i = 0; i < kGroups; ++i) {
        const int g = kFirst / 4 + i / 2 + i % 2 * (kGroups / 2);
        const Weights weights = to_weights<C::kIsSigned>(C::group(w, g));
        for (int m = 0; m < M; ++m) add_products(sums[m], weights, at[m]->bytes, g);
    }
    for (int m = 0; m < M; ++m) {
        const Factors& f = factors[m];
        acc[m] = fma(mul(end_sum<C::kIsSigned>(sums[m], f.offset), scales.scale), splat(f.scale), acc[m]);
        if constexpr (!C::kIsSigned) {
            const float sum = C::kCell == kBlock ? f.sum : f.halves[kFirst / 16];
            acc[m] = fma(scales.least, splat(sum), acc[m]);
        }
    }
}

template <Form F, int M>
QUIRE_INLINE void add_units(const uint8_t* p, int64_t units, const Inputs& in, int64_t token, Floats* acc) {
    using C = Coding<F>;
    constexpr Layout kLayout = layout_of(F);
    constexpr int kBlocks = kLayout.columns / kBlock, kCells = kBlock / C::kCell;
    const Block* at[M];
    for (int m = 0; m < M; ++m) at[m] = in.blocks + (token + m) * units * kBlocks;
    const Factors* factors = in.factors + token;
    for (int64_t u = 0; u < units; ++u, p += unit_bytes(F) * W) {
        const auto head = C::open(p);
        for (int64_t line = 0; line < unit_bytes(F) * W; line += 64) __builtin_prefetch(p + kAheadBytes + line);
        const uint8_t* w = p + head_bytes(kLayout) * W;
        for (int b = 0; b < kBlocks; ++b, w += num_words(kLayout.spread) * V, factors += in.num_tokens) {
            add_cell<F, 0, M>(w, C::scales(head, b * kCells), at, factors, acc);
            if constexpr (kCells == 2) add_cell<F, 16, M>(w, C::scales(head, b * kCells + 1), at, factors, acc);
            for (int m = 0; m < M; ++m) ++at[m];
        }
    }
}

// Bytes times bytes: a scale for each row of the matrix, and one for each block of a token's activations.
template <Form F, int M>
QUIRE_INLINE void add_bytes_of(const uint8_t* p, int64_t units, const Inputs& in, int64_t token, Floats* acc) {
    const Block* at[M];
    for (int m = 0; m < M; ++m) at[m] = in.bytes + (token + m) * units;
    const ByteFactors* factors = in.byte_factors + token;
    for (int64_t u = 0; u < units; ++u, p += unit_bytes(F) * W, factors += in.num_tokens) {
        for (int64_t line = 0; line < unit_bytes(F) * W; line += 64) __builtin_prefetch(p + kAheadBytes + line);
        ByteSum sums[M];
        for (int m = 0; m < M; ++m) sums[m] = begin_bytes();
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            const Weights weights = to_weights<true>(load_bytes(p + g * V));
            for (int m = 0; m < M; ++m) add_byte_products(sums[m], weights, at[m]->bytes, g);
        }
        for (int m = 0; m < M; ++m) {
            acc[m] = fma(end_bytes(sums[m], factors[m].offset), splat(factors[m].scale), acc[m]);
            ++at[m];
        }
    }
    const Floats scale = load((const float*)p);
    for (int m = 0; m < M; ++m) acc[m] = mul(acc[m], scale);
}

template <Form F, int M>
QUIRE_INLINE void add_columns(const uint8_t* p, const float* x, int64_t columns, Floats* acc) {
    for (int64_t c = 0; c < columns; ++c) {
        __builtin_prefetch(p + kAheadBytes + c * W * unit_bytes(F));
        Floats w;
        if constexpr (F == Form::kF32) w = load((const float*)p + c * W);
        else if constexpr (F == Form::kBF16) w = load_upper((const uint16_t*)p + c * W);
        else w = load_half((const uint16_t*)p + c * W);
        for (int m = 0; m < M; ++m) acc[m] = fma(w, splat(x[m * columns + c]), acc[m]);
    }
}

template <int M>
QUIRE_INLINE void finish(const Floats* acc, const Matrix& m, int64_t first_row, int64_t token, const Target& to) {
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
__attribute__((noinline)) void few_tokens(const Matrix& m, int64_t tile, const Inputs& in, int64_t token, const Target& to) {
    const uint8_t* p = m.data + tile * tile_bytes(m);
    Floats acc[M];
    begin<M>(acc);
    if constexpr (is_float(F)) {
        add_columns<F, M>(p, in.x + token * m.columns, m.columns, acc);
    } else if constexpr (takes_bytes(F)) {
        add_bytes_of<F, M>(p, m.columns / layout_of(F).columns, in, token, acc);
    } else {
        add_units<F, M>(p, m.columns / layout_of(F).columns, in, token, acc);
    }
    finish<M>(acc, m, tile * W, token, to);
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
        case Form::kBF16: return product_of<Form::kBF16>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kQ8_0: return product_of<Form::kQ8_0>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kQ4_0: return product_of<Form::kQ4_0>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kQ4_1: return product_of<Form::kQ4_1>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kQ5_0: return product_of<Form::kQ5_0>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kQ5_1: return product_of<Form::kQ5_1>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kIQ4_NL: return product_of<Form::kIQ4_NL>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kMXFP4: return product_of<Form::kMXFP4>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kQ4_K: return product_of<Form::kQ4_K>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kQ5_K: return product_of<Form::kQ5_K>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kQ6_K: return product_of<Form::kQ6_K>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kQ3_K: return product_of<Form::kQ3_K>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kQ2_K: return product_of<Form::kQ2_K>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kIQ4_XS: return product_of<Form::kIQ4_XS>(m, first_tile, stop_tile, in, num_tokens, to);
        case Form::kW8A8: return product_of<Form::kW8A8>(m, first_tile, stop_tile, in, num_tokens, to);
    }
}

}  // namespace
