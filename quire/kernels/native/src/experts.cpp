#include "experts.h"

#include "linear.h"

#include <string.h>

#include <algorithm>

namespace quire {

namespace {

struct Job {  // one expert and the tokens routed to it
    int64_t expert, first, count;  // first: index of its first entry among all (token, expert) pairs
    int64_t tiles_before;          // tiles of the jobs before it, in the current products
};

// The (token, expert) pairs, sorted by expert, then by token.
struct Sorted {
    int64_t num_sent;     // number of pairs
    int64_t* token_of;    // [num_sent]
    int64_t* job_of;      // [num_sent]
    int64_t* place_of;    // [tokens * sent]: index of each of a token's pairs
    Job* jobs;
    int64_t num_jobs;
};

Sorted sort_by_expert(Context& c, const ExpertsDesc& experts, const int64_t* chosen, int64_t num_tokens, int64_t sent) {
    const int64_t total = num_tokens * sent, num_experts = experts.num_experts;
    int64_t* memory = c.places.take_as<int64_t>(3 * total + num_experts + 1);
    Sorted sorted = {total, memory, memory + total, memory + 2 * total, nullptr, 0};
    int64_t* starts = memory + 3 * total;
    memset(starts, 0, sizeof(int64_t) * size_t(num_experts + 1));
    for (int64_t i = 0; i < total; ++i) ++starts[chosen[i] + 1];
    sorted.jobs = c.jobs.take_as<Job>(std::min(total, num_experts));
    for (int64_t e = 0; e < num_experts; ++e) {
        if (starts[e + 1]) sorted.jobs[sorted.num_jobs++] = {e, starts[e], starts[e + 1], 0};
        starts[e + 1] += starts[e];
    }
    for (int64_t i = 0; i < total; ++i) {
        const int64_t place = starts[chosen[i]]++;
        sorted.token_of[place] = i / sent;
        sorted.place_of[i] = place;
    }
    for (int64_t j = 0; j < sorted.num_jobs; ++j)
        std::fill_n(sorted.job_of + sorted.jobs[j].first, sorted.jobs[j].count, j);
    return sorted;
}

enum class Need { kFloats, kBlocks, kBytes };  // what a matrix reads its input as

Need need_of(Form form) {
    return is_float(form) ? Need::kFloats : takes_bytes(form) ? Need::kBytes : Need::kBlocks;
}

// Whether any of these experts' matrices reads its input so.
bool any_of(const LinearDesc* linears, const Sorted& sorted, Need need) {
    for (int64_t j = 0; j < sorted.num_jobs; ++j) {
        const LinearDesc& linear = linears[sorted.jobs[j].expert];
        for (int64_t i = 0; i < linear.num_parts; ++i)
            if (need_of(linear.parts[i].form) == need) return true;
    }
    return false;
}

// Input vectors of all pairs, as products read them: blocks and factors of one job are contiguous.
struct Ready {
    float* floats;
    Block* blocks;
    Factors* factors;
    Block* bytes;
    ByteFactors* byte_factors;
    int64_t columns;
};

struct Rounding {
    bool blocks, bytes;
};

void round(const Kernels& kernels, const Ready& ready, const Job& job, int64_t place, const float* x, Rounding to) {
    const int64_t num_blocks = ready.columns / kBlock;
    if (to.blocks)
        kernels.quantize(x, ready.columns, ready.blocks + place * num_blocks,
                         ready.factors + job.first * num_blocks + place - job.first, job.count);
    if (to.bytes)
        kernels.quantize_bytes(x, ready.columns, ready.bytes + place * num_blocks,
                               ready.byte_factors + job.first * num_blocks + place - job.first, job.count);
}

// Every job's product: out [sent, rows].
void multiply(Context& c, const LinearDesc* linears, Sorted& sorted, const Ready& ready, int64_t rows, float* out) {
    int64_t tiles = 0;
    for (int64_t j = 0; j < sorted.num_jobs; ++j) {
        Job& job = sorted.jobs[j];
        job.tiles_before = tiles;
        for (int64_t i = 0; i < linears[job.expert].num_parts; ++i) tiles += num_tiles(linears[job.expert].parts[i]);
    }
    c.pool.share(tiles, grain(tiles, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        const Job* after = std::upper_bound(sorted.jobs, sorted.jobs + sorted.num_jobs, first,
                                            [](int64_t tile, const Job& job) { return tile < job.tiles_before; });
        for (const Job* job = after - 1; job < sorted.jobs + sorted.num_jobs && job->tiles_before < stop; ++job) {
            const LinearDesc& linear = linears[job->expert];
            const int64_t at = job->first * (ready.columns / kBlock);
            const Inputs in = {ready.floats + job->first * ready.columns, ready.blocks + at, ready.factors + at,
                               ready.bytes ? ready.bytes + at : nullptr,
                               ready.bytes ? ready.byte_factors + at : nullptr, job->count};
            int64_t row = 0, before = job->tiles_before;
            for (int64_t i = 0; i < linear.num_parts; ++i) {
                const Matrix& part = linear.parts[i];
                const int64_t count = num_tiles(part), from = std::max(first - before, int64_t(0));
                const int64_t to = std::min(stop - before, count);
                if (from < to) {
                    const Target target = {out + job->first * rows + row, rows,
                                           linear.bias ? linear.bias + row : nullptr, nullptr};
                    c.kernels->product(part, from, to, in, job->count, target);
                }
                row += part.rows;
                before += count;
            }
        }
    });
}

// Calls adapters beside the jobs' products: beside gate and up where there are two, or beside down.
void adapt(const Hooks& hooks, const Sorted& sorted, const int64_t* tokens, const Ready& ready, int64_t rows,
           float* out, bool is_down) {
    for (const Job* job = sorted.jobs; job < sorted.jobs + sorted.num_jobs; ++job) {
        const float* x = ready.floats + job->first * ready.columns;
        float* to = out + job->first * rows;
        const auto call = [&](Product product, int64_t first, int64_t width) {
            hooks.adapt({hooks.layer, job->expert, x, job->count, ready.columns, to + first, width, rows,
                         tokens + job->first, product});
        };
        if (is_down) call(Product::kDown, 0, rows);
        else {
            call(Product::kGate, 0, rows / 2);
            call(Product::kUp, rows / 2, rows / 2);
        }
    }
}

// The token of each pair.
const int64_t* find_tokens(Context& c, const Hooks& hooks, const Sorted& sorted) {
    if (!hooks.tokens) return sorted.token_of;
    int64_t* tokens = c.routed.take_as<int64_t>(sorted.num_sent);
    for (int64_t s = 0; s < sorted.num_sent; ++s) tokens[s] = hooks.tokens[sorted.token_of[s]];
    return tokens;
}

// gate_up [2 * inner] is clamped and scaled in place; NaN is preserved.
void activate(const Kernels& kernels, const ExpertsDesc& experts, float* gate_up, float* out) {
    const int64_t n = experts.inner_width;
    float *gate = gate_up, *up = gate_up + n;
    const float limit = experts.limit, alpha = experts.alpha;
    if (limit > 0)
        for (int64_t i = 0; i < n; ++i) {
            gate[i] = gate[i] > limit ? limit : gate[i];
            up[i] = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
        }
    if (alpha != 1.0f || experts.shift != 0.0f)  // alpha * gate * sigmoid(alpha * gate) is too large by a factor of alpha
        for (int64_t i = 0; i < n; ++i) {
            gate[i] *= alpha;
            up[i] = (up[i] + experts.shift) / alpha;
        }
    kernels.activate(experts.activation, gate, up, n, out);
}

}  // namespace

void mix_experts(Context& c, const ExpertsDesc& experts, const float* x, int64_t num_tokens, const int64_t* chosen,
                 const float* weights, int64_t num_sent, const float* residual, float* out, const Hooks& hooks) {
    const int64_t width = experts.width, inner = experts.inner_width, widest = std::max(width, inner);
    Sorted sorted = sort_by_expert(c, experts, chosen, num_tokens, num_sent);
    const int64_t total = sorted.num_sent;
    float* floats = c.floats.take_as<float>(total * widest);
    Block* blocks = c.blocks.take_as<Block>(total * (widest / kBlock));
    Factors* factors = c.factors.take_as<Factors>(total * (widest / kBlock));
    float* gate_up = c.expert_inner.take_as<float>(total * 2 * inner);
    float* shares = c.shares.take_as<float>(total * width);
    const bool floats_up = hooks.adapters || any_of(experts.gate_up, sorted, Need::kFloats);
    const auto rounding = [&](const LinearDesc* linears) {
        return Rounding{any_of(linears, sorted, Need::kBlocks), any_of(linears, sorted, Need::kBytes)};
    };
    const Rounding up = rounding(experts.gate_up), down = rounding(experts.down);
    const bool any_bytes = up.bytes || down.bytes;
    Ready ready = {floats, blocks, factors, any_bytes ? c.bytes.take_as<Block>(total * (widest / kBlock)) : nullptr,
                   any_bytes ? c.byte_factors.take_as<ByteFactors>(total * (widest / kBlock)) : nullptr, width};
    c.pool.share(total, grain(total, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t s = first; s < stop; ++s) {
            const float* row = x + sorted.token_of[s] * width;
            if (floats_up) memcpy(floats + s * width, row, sizeof(float) * size_t(width));
            round(*c.kernels, ready, sorted.jobs[sorted.job_of[s]], s, row, up);
        }
    });
    multiply(c, experts.gate_up, sorted, ready, 2 * inner, gate_up);
    const int64_t* tokens = hooks.adapters ? find_tokens(c, hooks, sorted) : nullptr;
    if (hooks.adapters) adapt(hooks, sorted, tokens, ready, 2 * inner, gate_up, false);
    ready.columns = inner;
    c.pool.share(total, grain(total, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t s = first; s < stop; ++s) {
            activate(*c.kernels, experts, gate_up + s * 2 * inner, floats + s * inner);
            round(*c.kernels, ready, sorted.jobs[sorted.job_of[s]], s, floats + s * inner, down);
        }
    });
    multiply(c, experts.down, sorted, ready, width, shares);
    if (hooks.adapters) adapt(hooks, sorted, tokens, ready, width, shares, true);
    c.pool.share(num_tokens, grain(num_tokens, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t t = first; t < stop; ++t) {
            float* row = out + t * width;
            if (residual && residual != out) memcpy(row, residual + t * width, sizeof(float) * size_t(width));
            else if (!residual) memset(row, 0, sizeof(float) * size_t(width));
            // Indices ascend with experts, so taking the lowest remaining one adds in the order of experts.
            int64_t last = -1;
            for (int64_t n = 0; n < num_sent; ++n) {
                int64_t best = -1;
                for (int64_t k = 0; k < num_sent; ++k) {
                    const int64_t place = sorted.place_of[t * num_sent + k];
                    if (place > last && (best < 0 || place < sorted.place_of[best])) best = t * num_sent + k;
                }
                last = sorted.place_of[best];
                c.kernels->add_scaled(shares + last * width, weights[best], width, row);
            }
        }
    });
}

void run_experts(Context& c, const ExpertsDesc& experts, const float* x, int64_t num_tokens, const int64_t* chosen,
                 const float* weights, int64_t num_sent, const float* residual, float* out) {
    std::lock_guard<std::mutex> lock(c.busy);
    Run run(c.pool);
    mix_experts(c, experts, x, num_tokens, chosen, weights, num_sent, residual, out, Hooks());
}

}  // namespace quire
