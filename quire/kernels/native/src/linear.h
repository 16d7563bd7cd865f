// Products of some tokens with packed matrices, and what is done to a token's vector before them.
#pragma once

#include "stack.h"

namespace quire {

// What is done before a product: nothing, a norm, or an activation.
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

// Room for the inputs of so many tokens, which `apply` then finds.
void reserve_inputs(Context& context, int64_t num_tokens, int64_t columns);

// out [tokens, rows]: the product, and `residual` unless that is null; these two may be one. Returns the product's input
// [tokens, columns], which stays until the next product.
const float* apply(Context& context, const LinearDesc& linear, const float* x, int64_t num_tokens, const Before& before,
           const float* residual, float* out);

}  // namespace quire
