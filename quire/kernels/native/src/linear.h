// Products of tokens with packed matrices, and the operation on a token's vector before them.
#pragma once

#include "stack.h"

namespace quire {

// The operation before a product: none, a norm, or an activation.
struct Before {
    NormDesc norm = {nullptr, nullptr};
    float eps = 0;
    bool takes_mean = false;
    bool activates = false;
    Activation activation = Activation::kSilu;
    bool has_gate = true;  // the vector is gate and up side by side
};

int64_t grain(int64_t count, int threads);

void run_norm(const Kernels& kernels, const NormDesc& norm, float eps, bool takes_mean, const float* x, int64_t n,
              float* out);

// Allocates the inputs of this many tokens for `apply`.
void reserve_inputs(Context& context, int64_t num_tokens, int64_t columns);

// out [tokens, rows]: the product plus `residual`, which may be null, or `out` itself. Returns the product's input
// [tokens, columns], which is valid until the next product.
const float* apply(Context& context, const LinearDesc& linear, const float* x, int64_t num_tokens, const Before& before,
           const float* residual, float* out);

}  // namespace quire
