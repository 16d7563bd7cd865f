#include "adapters/lora.h"

#include <algorithm>

#include "layout.h"
#include "linear.h"
#include "pack.h"

namespace quire {

namespace {

int32_t slot_of(const LoraDesc& lora, const ProductDesc& p, int64_t row) {
    return lora.token_slots[p.tokens ? p.tokens[row] : row];
}

Inputs floats_alone(const float* x, int64_t count) {  // all that products with matrices of floats read
    Inputs in = {};
    in.x = x;
    in.num_tokens = count;
    return in;
}

}  // namespace

void run_lora(const LoraDesc& lora, const ProductDesc& p) {
    if (p.layer < 0 || p.expert >= 0) return;
    Context& c = *lora.context;
    const int64_t at = p.layer * kNumProducts + int64_t(p.product);
    std::vector<LoraJob>& jobs = c.lora_jobs;
    jobs.clear();
    for (int64_t row = 0; row < p.num_rows;) {
        const int32_t slot = slot_of(lora, p, row);
        int64_t stop = row + 1;
        while (stop < p.num_rows && slot_of(lora, p, stop) == slot) ++stop;
        const LoraSlot* held = slot < 0 ? nullptr : lora.slots + slot;
        if (held && held->starts)
            for (int32_t i = held->starts[at]; i < held->starts[at + 1]; ++i)
                jobs.push_back({held->entries + i, row, stop - row, 0, nullptr});
        row = stop;
    }
    if (jobs.empty()) return;
    // Jobs of one matrix follow each other, so that it is read from memory once.
    std::stable_sort(jobs.begin(), jobs.end(), [](const LoraJob& l, const LoraJob& r) { return l.entry < r.entry; });
    int64_t floats = 0, tiles = 0;
    for (const LoraJob& job : jobs) floats += job.count * job.entry->a.rows;
    float* inner = c.lora_inner.take_as<float>(floats);
    for (LoraJob& job : jobs) {
        job.inner = inner;
        job.first_tile = tiles;
        inner += job.count * job.entry->a.rows;
        tiles += num_tiles(job.entry->b);
    }
    c.pool.share(int64_t(jobs.size()), 1, [&](int64_t first, int64_t stop, int) {
        for (int64_t i = first; i < stop; ++i) {
            const LoraJob& job = jobs[size_t(i)];
            const Matrix& a = job.entry->a;
            const Inputs in = floats_alone(p.x + job.row * p.columns, job.count);
            c.kernels->product(a, 0, num_tiles(a), in, job.count, {job.inner, a.rows, nullptr, nullptr});
        }
    });
    c.pool.share(tiles, grain(tiles, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (const LoraJob& job : jobs) {
            const Matrix& b = job.entry->b;
            const int64_t from = std::max(first - job.first_tile, int64_t(0));
            const int64_t to = std::min(stop - job.first_tile, num_tiles(b));
            if (from >= to) continue;
            float* out = p.out + job.row * p.stride + job.entry->first;
            const Inputs in = floats_alone(job.inner, job.count);
            c.kernels->product(b, from, to, in, job.count, {out, p.stride, nullptr, out});
        }
    });
}

}  // namespace quire
