// A mixture of experts over packed matrices, in one call: sorts tokens by expert, computes two products for each expert
// with tokens, and sums each token's results. The struct is filled in by `quire/kernels/native/library.py`.
#pragma once

#include "stack.h"

namespace quire {

struct ExpertsDesc {
    const LinearDesc* gate_up;  // [experts], gates above ups
    const LinearDesc* down;     // [experts]
    int64_t num_experts, width, inner_width;
    Activation activation;      // of gates
    float alpha, shift, limit;  // (up + shift) * curve(gate), where SiLU has alpha inside; limit 0: nothing is clamped
};

// Runs inside a call. x [tokens, width]; chosen and weights [tokens, sent]. out [tokens, width]: `residual` (which may be
// null or `out`) plus all experts' results, added in the order of experts, so that a token's sum is the same in any batch.
void mix_experts(Context& context, const ExpertsDesc& experts, const float* x, int64_t num_tokens,
                 const int64_t* chosen, const float* weights, int64_t num_sent, const float* residual, float* out,
                 const Hooks& hooks);

// The same, outside of another call.
void run_experts(Context& context, const ExpertsDesc& experts, const float* x, int64_t num_tokens,
                 const int64_t* chosen, const float* weights, int64_t num_sent, const float* residual, float* out);

}  // namespace quire
