// A mixture of experts over packed matrices, in one call: tokens sorted by expert, two products for each expert that got
// any, and every token's shares added up. The struct is filled in by `quire/kernels/native/library.py`.
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

// Within a call: x [tokens, width]; chosen [tokens, sent] and weights alike. out [tokens, width]: `residual` (or nothing, where that is
// null) and all shares, added in the order of their experts, so that a token's sum is the same in any company. `residual` may be `out`.
void mix_experts(Context& context, const ExpertsDesc& experts, const float* x, int64_t num_tokens,
                 const int64_t* chosen, const float* weights, int64_t num_sent, const float* residual, float* out,
                 const Hooks& hooks);

// That as a call of its own.
void run_experts(Context& context, const ExpertsDesc& experts, const float* x, int64_t num_tokens,
                 const int64_t* chosen, const float* weights, int64_t num_sent, const float* residual, float* out);

}  // namespace quire
