#include "mixture.h"

#include <math.h>

#include <algorithm>

#include "linear.h"

namespace quire {

namespace {

int64_t rank_floats(const MixtureDesc& m) { return m.experts.num_experts + m.num_groups; }

// Turns logits into scores, in place.
void score(const MixtureDesc& m, float* logits) {
    const int64_t n = m.experts.num_experts;
    if (m.is_sigmoid) {
        for (int64_t i = 0; i < n; ++i) logits[i] = 1.0f / (1.0f + expf(-logits[i]));
        return;
    }
    float top = logits[0], sum = 0;
    for (int64_t i = 1; i < n; ++i) top = logits[i] > top ? logits[i] : top;
    for (int64_t i = 0; i < n; ++i) sum += logits[i] = expf(logits[i] - top);
    for (int64_t i = 0; i < n; ++i) logits[i] /= sum;
}

// The index of the largest of n, the first of equals; -inf marks entries that are taken or excluded. 0 if all are -inf.
int64_t find_best(const float* values, int64_t n) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; ++i)
        if (values[i] != -INFINITY && (best < 0 || values[i] > values[best])) best = i;
    return std::max<int64_t>(best, 0);
}

// Excludes experts outside the best groups.
void keep_best_groups(const MixtureDesc& m, float* ranks, float* groups) {
    const int64_t members = m.experts.num_experts / m.num_groups;
    for (int64_t g = 0; g < m.num_groups; ++g) {
        float* group = ranks + g * members;
        int64_t taken[kMostMembers];
        float values[kMostMembers], sum = 0;
        for (int64_t i = 0; i < m.group_members; ++i) {
            taken[i] = find_best(group, members);
            values[i] = group[taken[i]];
            sum += values[i];
            group[taken[i]] = -INFINITY;
        }
        for (int64_t i = m.group_members - 1; i >= 0; --i) group[taken[i]] = values[i];
        groups[g] = sum;
    }
    for (int64_t left = m.num_groups - m.top_groups; left > 0; --left) {
        int64_t worst = -1;  // the last of equals, so that the first are kept
        for (int64_t g = 0; g < m.num_groups; ++g)
            if (groups[g] != INFINITY && (worst < 0 || !(groups[g] > groups[worst]))) worst = g;
        worst = std::max<int64_t>(worst, 0);
        groups[worst] = INFINITY;
        std::fill_n(ranks + worst * members, members, -INFINITY);
    }
}

void route(const MixtureDesc& m, float* logits, float* ranks, int64_t* chosen, float* weights) {
    const int64_t n = m.experts.num_experts;
    score(m, logits);
    for (int64_t i = 0; i < n; ++i) ranks[i] = m.choice_bias ? logits[i] + m.choice_bias[i] : logits[i];
    if (m.num_groups > 1) keep_best_groups(m, ranks, ranks + n);
    float sum = 0;
    for (int64_t k = 0; k < m.top_k; ++k) {
        chosen[k] = find_best(ranks, n);
        ranks[chosen[k]] = -INFINITY;
        weights[k] = logits[chosen[k]];
        sum += weights[k];
    }
    for (int64_t k = 0; k < m.top_k; ++k) weights[k] = (m.normalises ? weights[k] / sum : weights[k]) * m.scale;
}

// Adds the shared expert's output, weighted by the sigmoid of its gate if it has one.
void add_shared(Context& c, const MixtureDesc& m, const float* x, int64_t num_tokens, float* onto, const Hooks& hooks) {
    const int64_t width = m.experts.width, inner = m.shared_down.parts[0].columns;
    reserve_inputs(c, num_tokens, std::max(width, inner));
    float* gate_up = c.expert_inner.take_as<float>(num_tokens * 2 * inner);
    Before activated;
    activated.activates = true;
    apply(c, m.shared_up, x, num_tokens, Before(), nullptr, gate_up);
    hooks.adapt_pair(Product::kSharedGate, Product::kSharedUp, x, num_tokens, width, gate_up, inner);
    const bool has_weight = m.shared_gate.num_parts != 0;
    if (!has_weight && !hooks.adapters) {
        apply(c, m.shared_down, gate_up, num_tokens, activated, onto, onto);
        return;
    }
    float* share = c.shares.take_as<float>(num_tokens * width);
    float* gates = c.weights.take_as<float>(num_tokens);
    if (has_weight) {
        apply(c, m.shared_gate, x, num_tokens, Before(), nullptr, gates);
        hooks.adapt(Product::kSharedWeight, x, num_tokens, width, gates, 1);
    }
    const float* active = apply(c, m.shared_down, gate_up, num_tokens, activated, nullptr, share);
    hooks.adapt(Product::kSharedDown, active, num_tokens, inner, share, width);
    c.pool.share(num_tokens, grain(num_tokens, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t t = first; t < stop; ++t)
            c.kernels->add_scaled(share + t * width, has_weight ? 1.0f / (1.0f + expf(-gates[t])) : 1.0f, width,
                                  onto + t * width);
    });
}

}  // namespace

void run_mixture(Context& c, const MixtureDesc& m, const float* x, int64_t num_tokens, float* onto,
                 const Hooks& hooks) {
    const int64_t num_experts = m.experts.num_experts;
    if (m.shared_up.num_parts) add_shared(c, m, x, num_tokens, onto, hooks);
    reserve_inputs(c, num_tokens, m.experts.width);
    float* logits = c.logits.take_as<float>(num_tokens * num_experts);
    float* ranks = c.ranks.take_as<float>(c.pool.size() * rank_floats(m));
    int64_t* chosen = c.chosen.take_as<int64_t>(num_tokens * m.top_k);
    float* weights = c.weights.take_as<float>(num_tokens * m.top_k);
    apply(c, m.router, x, num_tokens, Before(), nullptr, logits);
    hooks.adapt(Product::kRouter, x, num_tokens, m.experts.width, logits, num_experts);
    c.pool.share(num_tokens, grain(num_tokens, c.pool.size()), [&](int64_t first, int64_t stop, int thread) {
        for (int64_t t = first; t < stop; ++t)
            route(m, logits + t * num_experts, ranks + thread * rank_floats(m), chosen + t * m.top_k,
                  weights + t * m.top_k);
    });
    mix_experts(c, m.experts, x, num_tokens, chosen, weights, m.top_k, onto, onto, hooks);
}

}  // namespace quire
