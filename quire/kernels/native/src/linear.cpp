#include "linear.h"

#include <algorithm>

namespace quire {

int64_t grain(int64_t count, int threads) { return std::max<int64_t>(1, count / (threads * 6)); }

void reserve_inputs(Context& c, int64_t num_tokens, int64_t columns) {
    c.floats.take_as<float>(num_tokens * columns);
    c.blocks.take_as<Block>(num_tokens * (columns / kBlock));
    c.factors.take_as<Factors>(num_tokens * (columns / kBlock));
}

void run_norm(const Kernels& kernels, const NormDesc& norm, float eps, bool takes_mean, const float* x, int64_t n,
              float* out) {
    if (takes_mean) kernels.layer_norm(x, norm.weight, norm.bias, eps, n, out);
    else kernels.norm(x, norm.weight, eps, n, out);
}

namespace {

struct Needs {
    bool floats = false, blocks = false, bytes = false;
};

Needs needs(const LinearDesc& linear) {
    Needs found;
    for (int64_t i = 0; i < linear.num_parts; ++i)
        (is_float(linear.parts[i].form)      ? found.floats
         : takes_bytes(linear.parts[i].form) ? found.bytes
                                             : found.blocks) = true;
    return found;
}

// Runs the operation before a product, then rounds its result for the forms that the matrix needs.
Inputs prepare(Context& c, const LinearDesc& linear, const float* x, int64_t num_tokens, int64_t columns,
               const Before& before) {
    const Needs need = needs(linear);
    float* floats = static_cast<float*>(c.floats.take(0));
    Block* blocks = static_cast<Block*>(c.blocks.take(0));
    Factors* factors = static_cast<Factors*>(c.factors.take(0));
    Block* bytes = need.bytes ? c.bytes.take_as<Block>(num_tokens * (columns / kBlock)) : nullptr;
    ByteFactors* byte_factors =
        need.bytes ? c.byte_factors.take_as<ByteFactors>(num_tokens * (columns / kBlock)) : nullptr;
    c.pool.share(num_tokens, grain(num_tokens, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t t = first; t < stop; ++t) {
            const float* row = x + t * columns * (before.activates && before.has_gate ? 2 : 1);
            const float* up = before.has_gate ? row + columns : nullptr;
            float* ready = floats + t * columns;
            if (before.norm.weight)
                run_norm(*c.kernels, before.norm, before.eps, before.takes_mean, row, columns, ready);
            else if (before.activates) c.kernels->activate(before.activation, row, up, columns, ready);
            else ready = const_cast<float*>(row);
            if (need.blocks)
                c.kernels->quantize(ready, columns, blocks + t * (columns / kBlock), factors + t, num_tokens);
            if (need.bytes)
                c.kernels->quantize_bytes(ready, columns, bytes + t * (columns / kBlock), byte_factors + t, num_tokens);
        }
    });
    return {before.norm.weight || before.activates ? floats : x, blocks, factors, bytes, byte_factors,
            num_tokens};
}

void multiply(Context& c, const LinearDesc& linear, const Inputs& in, int64_t num_tokens,
              const float* residual, float* out) {
    int64_t rows = 0, tiles = 0;
    for (int64_t i = 0; i < linear.num_parts; ++i) {
        rows += linear.parts[i].rows;
        tiles += num_tiles(linear.parts[i]);
    }
    c.pool.share(tiles, grain(tiles, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        int64_t row = 0, before = 0;
        for (int64_t i = 0; i < linear.num_parts; ++i) {
            const Matrix& part = linear.parts[i];
            const int64_t count = num_tiles(part), from = std::max(first - before, int64_t(0));
            const int64_t to = std::min(stop - before, count);
            if (from < to) {
                const Target target = {out + row, rows, linear.bias ? linear.bias + row : nullptr,
                                       residual ? residual + row : nullptr};
                c.kernels->product(part, from, to, in, num_tokens, target);
            }
            row += part.rows;
            before += count;
        }
    });
}

}  // namespace

const float* apply(Context& c, const LinearDesc& linear, const float* x, int64_t num_tokens, const Before& before,
                   const float* residual, float* out) {
    const Inputs in = prepare(c, linear, x, num_tokens, linear.parts[0].columns, before);
    multiply(c, linear, in, num_tokens, residual, out);
    return in.x;
}

void run_linear(Context& c, const LinearDesc& linear, const float* x, int64_t num_tokens, const float* norm, float eps,
                bool silu, const float* residual, float* out, const AdaptersDesc* adapters) {
    std::lock_guard<std::mutex> lock(c.busy);
    const int64_t columns = linear.parts[0].columns;
    reserve_inputs(c, num_tokens, columns);
    Before before;
    before.norm.weight = norm;
    before.eps = eps;
    before.activates = silu;
    Run run(c.pool);
    const float* in = apply(c, linear, x, num_tokens, before, residual, out);
    if (!adapters || !num_tokens) return;
    int64_t rows = 0;
    for (int64_t i = 0; i < linear.num_parts; ++i) rows += linear.parts[i].rows;
    Hooks{nullptr, adapters}.adapt(Product::kHead, in, num_tokens, columns, out, rows);
}

}  // namespace quire
