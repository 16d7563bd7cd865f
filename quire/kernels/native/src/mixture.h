// A mixture of experts with its router and its shared expert, as a stack runs it. The struct is filled in by
// `quire/kernels/native/library.py`.
#pragma once

#include "experts.h"

namespace quire {

constexpr int kMostMembers = 16;  // maximum experts whose scores rank a group

struct MixtureDesc {
    ExpertsDesc experts;
    LinearDesc router;                  // of floats, with the router's bias
    const float* choice_bias;           // [experts], added to scores for the choice only; or null
    LinearDesc shared_up, shared_down;  // no parts: there is no shared expert
    LinearDesc shared_gate;             // one row of floats; no parts: the output is not gated
    int64_t top_k, num_groups, top_groups, group_members;  // see `Routing` in quire/kernels/expert_types.py
    int32_t is_sigmoid, normalises;
    float scale;
};

// x [tokens, width], normed; adds all experts' outputs to `onto`, which must not be x. Runs inside a call. Of the hooks only the
// adapters are called: a reduction follows the whole block.
void run_mixture(Context& context, const MixtureDesc& mixture, const float* x, int64_t num_tokens, float* onto,
                 const Hooks& hooks);

}  // namespace quire
