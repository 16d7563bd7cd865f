#include "stack.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "linear.h"
#include "mixture.h"
#include "pack.h"

namespace quire {

namespace {

struct Shape {
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t q_width() const { return num_heads * head_dim; }
    int64_t kv_width() const { return num_kv_heads * head_dim; }
    int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
    int64_t group() const { return num_heads / num_kv_heads; }
};

// --------------------------------------------------------------------------------------------------------------------
// Attention

struct Unit {  // tokens of one row that attend together, and the place of their outputs
    int64_t row, first, count, out;
};

int64_t list_units(Context& c, const StepDesc& step, const Shape& shape) {
    const int64_t most = std::max<int64_t>(1, std::min<int64_t>(kQueryTokens, kQueryTokens * 64 / shape.group()));
    Unit* units = c.units.take_as<Unit>(step.num_tokens);
    int64_t count = 0;
    for (int64_t row = 0; row < step.num_rows; ++row)
        for (int64_t t = step.query_starts[row]; t < step.query_starts[row + 1]; t += most)
            units[count++] = {row, t, std::min<int64_t>(most, step.query_starts[row + 1] - t), t};
    // The longest first, so that no thread starts a long one last.
    std::sort(units, units + count, [&](const Unit& a, const Unit& b) {
        return step.positions[a.first] * a.count > step.positions[b.first] * b.count;
    });
    return count;
}

// Each wanted token separately, for a last layer whose other outputs are not needed.
void list_wanted(Context& c, const StepDesc& step) {
    Unit* units = c.last_units.take_as<Unit>(step.num_wanted);
    const int32_t* ends = step.query_starts + 1;
    for (int64_t i = 0; i < step.num_wanted; ++i) {
        const int64_t row = std::upper_bound(ends, ends + step.num_rows, int32_t(step.wanted[i])) - ends;
        units[i] = {row, step.wanted[i], 1, i};
    }
}

void reserve_attention(Context& c, const Shape& shape) {
    c.scratch.take_as<float>(c.pool.size() * attend_scratch_floats(int(shape.head_dim), int(shape.group())));
}

struct Planes {  // one layer's keys and values in the cache
    CacheForm form;
    float *k, *v;      // [pages, page_tokens, kv_heads, head_dim] each
    uint8_t* entries;  // packed forms: in place of both, [pages, page_tokens, kv_heads, entry_bytes]
};

Planes planes_of(CacheForm form, void* k, void* v) {
    if (form == CacheForm::kFloats) return {form, static_cast<float*>(k), static_cast<float*>(v), nullptr};
    return {form, nullptr, nullptr, static_cast<uint8_t*>(k)};
}

Planes planes_of(const GroupDesc& group, int64_t layer) {
    if (group.form == CacheForm::kFloats) {
        float* k = static_cast<float*>(group.cache) + 2 * layer * group.plane;
        return {group.form, k, k + group.plane, nullptr};
    }
    return {group.form, nullptr, nullptr, static_cast<uint8_t*>(group.cache) + layer * group.plane};
}

struct Attended {  // inputs and outputs of one layer's attention
    const float* q;
    Planes planes;
    int64_t q_stride;
    float scale, softcap;
    const float* sinks;  // [heads], or null
    float* out;
};

struct Piece {  // a piece of the keys of one unit and key-value head
    int64_t unit, head, first, stop;
    int64_t index, count;  // index among the unit's pieces, which are merged at the end if there are several
    float* part;
};

// Keys are processed in pieces that begin at multiples of kSplitKeys, so that other rows of the batch change no bit. If
// few tokens see many keys, or threads would have nothing to do, each piece is a task; else one thread processes all
// pieces in order.
int64_t list_pieces(Context& c, const StepDesc& step, const GroupDesc& group, const Shape& shape, const Unit* units,
                    int64_t num_units) {
    int64_t num_pieces = 0, num_floats = 0;
    const auto first_key = [&](const Unit& unit) {
        const int64_t first = step.positions[unit.first], window = group.window;
        const int64_t from = window && first >= window ? first - window + 1 : 0;
        return from - from % kKeyBlock;
    };
    const auto last_key = [&](const Unit& unit) { return step.positions[unit.first] + unit.count - 1; };
    const bool are_few = num_units * shape.num_kv_heads < kFewTasks * c.pool.size();  // of a draft or a chunk of one row
    const auto count_of = [&](const Unit& unit) {
        return unit.count <= kSplitTokens || are_few ? last_key(unit) / kSplitKeys - first_key(unit) / kSplitKeys + 1 : int64_t(1);
    };
    const int64_t query_floats = shape.group() * part_floats(int(shape.head_dim));
    for (int64_t u = 0; u < num_units; ++u) {
        const int64_t count = count_of(units[u]);
        num_pieces += count * shape.num_kv_heads;
        if (count > 1) num_floats += count * shape.num_kv_heads * units[u].count * query_floats;
    }
    Piece* pieces = c.pieces.take_as<Piece>(num_pieces);
    float* part = c.parts.take_as<float>(num_floats);
    for (int64_t u = 0; u < num_units; ++u) {
        const int64_t count = count_of(units[u]), stop = last_key(units[u]) + 1;
        for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
            int64_t at = first_key(units[u]);
            for (int64_t p = 0; p < count; ++p) {
                const int64_t end = p + 1 < count ? (at / kSplitKeys + 1) * kSplitKeys : stop;
                *pieces++ = {u, head, at, end, p, count, count > 1 ? part : nullptr};
                if (count > 1) part += units[u].count * query_floats;
                at = end;
            }
        }
    }
    return num_pieces;
}

void attend_all(Context& c, const StepDesc& step, const GroupDesc& group, const Shape& shape, const Unit* units,
                int64_t num_units, const Attended& work) {
    const int64_t heads = shape.group(), dim = shape.head_dim;
    const int64_t room = attend_scratch_floats(int(dim), int(heads));
    const int64_t num_pieces = list_pieces(c, step, group, shape, units, num_units);
    const Piece* pieces = static_cast<Piece*>(c.pieces.take(0));
    const auto queries_of = [&](const Piece& piece) {
        const Unit& unit = units[piece.unit];
        return Queries{work.q + unit.first * work.q_stride + piece.head * heads * dim,
                       work.out + unit.out * shape.q_width() + piece.head * heads * dim, work.q_stride, shape.q_width(),
                       int32_t(unit.count), int32_t(heads), step.positions[unit.first], piece.part};
    };
    const Planes& planes = work.planes;
    const int64_t bytes = entry_bytes(planes.form, dim);
    const auto keys_of = [&](const Piece& piece) {
        Keys keys = {nullptr, nullptr, group.table + units[piece.unit].row * group.table_stride, shape.kv_width(),
                     int32_t(group.page_tokens), int32_t(dim), group.window, work.scale, work.softcap,
                     work.sinks ? work.sinks + piece.head * heads : nullptr, piece.first, piece.stop,
                     planes.form, nullptr};
        if (planes.form == CacheForm::kFloats) {
            keys.k = planes.k + piece.head * dim;
            keys.v = planes.v + piece.head * dim;
        } else {
            keys.entries = planes.entries + piece.head * bytes;
            keys.token_stride = shape.num_kv_heads * bytes;
        }
        return keys;
    };
    c.pool.share(num_pieces, 1, [&](int64_t first, int64_t stop, int thread) {
        float* scratch = static_cast<float*>(c.scratch.take(0)) + thread * room;
        for (int64_t i = first; i < stop; ++i) c.kernels->attend(queries_of(pieces[i]), keys_of(pieces[i]), scratch);
    });
    if (num_pieces == num_units * shape.num_kv_heads) return;
    c.pool.share(num_pieces, grain(num_pieces, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t i = first; i < stop; ++i)
            if (pieces[i].count > 1 && pieces[i].index == 0)
                c.kernels->merge(queries_of(pieces[i]), keys_of(pieces[i]), pieces[i].count);
    });
}

// Angles of token t: cos and sin of position * frequency, computed in float32 as torch does.
void angles(Context& c, const StepDesc& step, const float* frequencies, float scale, int64_t half, float* cos,
            float* sin) {
    c.pool.share(step.num_tokens, grain(step.num_tokens, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t t = first; t < stop; ++t) {
            for (int64_t i = 0; i < half; ++i) {
                const float angle = float(step.positions[t]) * frequencies[i];
                cos[t * half + i] = cosf(angle) * scale;
                sin[t * half + i] = sinf(angle) * scale;
            }
        }
    });
}

// Writes one token's keys and values, which follow its keys in `kv`, to its slot. Packed forms overwrite `kv`.
void write_token(Context& c, const Shape& shape, const Planes& planes, int64_t slot, float* kv) {
    const int64_t width = shape.kv_width(), dim = shape.head_dim;
    if (planes.form == CacheForm::kFloats) {
        memcpy(planes.k + slot * width, kv, sizeof(float) * size_t(width));
        memcpy(planes.v + slot * width, kv + width, sizeof(float) * size_t(width));
        return;
    }
    const int64_t bytes = entry_bytes(planes.form, dim);
    uint8_t* entry = planes.entries + slot * shape.num_kv_heads * bytes;
    for (int64_t h = 0; h < shape.num_kv_heads; ++h)
        c.kernels->write_entry(planes.form, kv + h * dim, kv + width + h * dim, dim, entry + h * bytes);
}

void rope_write(Context& c, const StepDesc& step, const GroupDesc& group, const Shape& shape, float* qkv,
                const float* q_norm, const float* k_norm, bool is_wide, float eps, const float* cos, const float* sin,
                const Planes& planes) {
    const int64_t dim = shape.head_dim, half = dim / 2;
    c.pool.share(step.num_tokens, grain(step.num_tokens, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t t = first; t < stop; ++t) {
            float* row = qkv + t * shape.qkv_width();
            if (is_wide) {
                c.kernels->norm(row, q_norm, eps, shape.q_width(), row);
                c.kernels->norm(row + shape.q_width(), k_norm, eps, shape.kv_width(), row + shape.q_width());
            }
            for (int64_t h = 0; h < shape.num_heads + shape.num_kv_heads; ++h) {
                float* head = row + h * dim;
                const float* norm = h < shape.num_heads ? q_norm : k_norm;
                if (norm && !is_wide) c.kernels->norm(head, norm, eps, dim, head);
                c.kernels->turn(head, cos + t * half, sin + t * half, half);
            }
            write_token(c, shape, planes, group.slots[t], row + shape.q_width());
        }
    });
}

bool joins_plainly(const StackDesc& stack, const NormDesc& after) {
    return !after.weight && stack.residual_scale == 1.0f;
}

// Adds a block's output in `branch` to the stream, normed or scaled first where the model does.
void add_branch(Context& c, const StackDesc& stack, const NormDesc& after, int64_t num_tokens, float* stream) {
    const int64_t width = stack.width;
    float* branch = static_cast<float*>(c.branch.take(0));
    c.pool.share(num_tokens, grain(num_tokens, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t t = first; t < stop; ++t) {
            float* row = branch + t * width;
            if (after.weight) run_norm(*c.kernels, after, stack.eps, stack.takes_mean, row, width, row);
            c.kernels->add_scaled(row, stack.residual_scale, width, stream + t * width);
        }
    });
}

// Adds a block's last product to the stream: inside the product, or through `branch`, which hooks need.
void join(Context& c, const StackDesc& stack, const LinearDesc& linear, const float* x, int64_t num_tokens,
          const Before& before, const NormDesc& after, const Hooks& hooks, Product product, float* stream) {
    if (joins_plainly(stack, after) && !hooks.are_set()) {
        apply(c, linear, x, num_tokens, before, stream, stream);
        return;
    }
    float* branch = static_cast<float*>(c.branch.take(0));
    const float* in = apply(c, linear, x, num_tokens, before, nullptr, branch);
    hooks.adapt(product, in, num_tokens, linear.parts[0].columns, branch, stack.width);
    hooks.reduce(branch, num_tokens, stack.width, 2 * hooks.layer + (product == Product::kDown));
    add_branch(c, stack, after, num_tokens, stream);
}

// A mixture of experts in place of a feed-forward block.
void mix(Context& c, const StackDesc& stack, const LayerDesc& layer, int64_t num_tokens, const Hooks& hooks,
         float* stream) {
    const int64_t width = stack.width;
    float* normed = c.normed.take_as<float>(num_tokens * width);
    c.pool.share(num_tokens, grain(num_tokens, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t t = first; t < stop; ++t) {
            const float* row = stream + t * width;
            if (layer.before_mlp.weight)
                run_norm(*c.kernels, layer.before_mlp, stack.eps, stack.takes_mean, row, width, normed + t * width);
            else memcpy(normed + t * width, row, sizeof(float) * size_t(width));
        }
    });
    if (joins_plainly(stack, layer.after_mlp) && !hooks.reduction) {
        run_mixture(c, *layer.mixture, normed, num_tokens, stream, hooks);
        return;
    }
    float* branch = static_cast<float*>(c.branch.take(0));
    memset(branch, 0, sizeof(float) * size_t(num_tokens * width));
    run_mixture(c, *layer.mixture, normed, num_tokens, branch, hooks);
    hooks.reduce(branch, num_tokens, width, 2 * hooks.layer + 1);
    add_branch(c, stack, layer.after_mlp, num_tokens, stream);
}

}  // namespace

// --------------------------------------------------------------------------------------------------------------------
// Calls

void run_attention(Context& c, const StepDesc& step, const float* q, int64_t num_heads, int64_t num_kv_heads,
                   int64_t head_dim, void* k, void* v, float scale, float softcap, const float* sinks, float* out) {
    std::lock_guard<std::mutex> lock(c.busy);
    const Shape shape = {num_heads, num_kv_heads, head_dim};
    const int64_t num_units = list_units(c, step, shape);
    reserve_attention(c, shape);
    Run run(c.pool);
    const Unit* units = static_cast<Unit*>(c.units.take(0));
    attend_all(c, step, step.groups[0], shape, units, num_units,
               {q, planes_of(step.groups[0].form, k, v), shape.q_width(), scale, softcap, sinks, out});
}

void run_rope_write(Context& c, const StepDesc& step, float* qkv, const float* q_norm, const float* k_norm, float eps,
                    const float* frequencies, float rope_scale, int64_t num_heads, int64_t num_kv_heads,
                    int64_t head_dim, void* k, void* v) {
    std::lock_guard<std::mutex> lock(c.busy);
    const Shape shape = {num_heads, num_kv_heads, head_dim};
    float* cos = c.cos.take_as<float>(step.num_tokens * head_dim / 2);
    float* sin = c.sin.take_as<float>(step.num_tokens * head_dim / 2);
    Run run(c.pool);
    angles(c, step, frequencies, rope_scale, head_dim / 2, cos, sin);
    rope_write(c, step, step.groups[0], shape, qkv, q_norm, k_norm, false, eps, cos, sin,
               planes_of(step.groups[0].form, k, v));
}

namespace {

void embed(Context& c, const StackDesc& stack, const StepDesc& step, float* stream) {
    const int64_t tokens = step.num_tokens, width = stack.width;
    c.pool.share(tokens, grain(tokens, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t t = first; t < stop; ++t) {
            float* row = stream + t * width;
            if (step.vectors) {
                memcpy(row, step.vectors + t * width, width * sizeof(float));
                continue;
            }
            unpack_row(stack.embedding, step.tokens[t], row);
            if (stack.embedding_scale != 1.0f)
                for (int64_t i = 0; i < width; ++i) row[i] *= stack.embedding_scale;
        }
    });
}

Before after_norm(const StackDesc& stack, const NormDesc& norm) {
    Before before;
    before.norm = norm;
    before.eps = stack.eps;
    before.takes_mean = stack.takes_mean != 0;
    return before;
}

Before after_activation(const StackDesc& stack) {
    Before before;
    before.activates = true;
    before.activation = stack.activation;
    before.has_gate = stack.has_gate != 0;
    return before;
}

// Queries, keys and values of a layer.
void project(Context& c, const StackDesc& stack, const LayerDesc& layer, const Shape& shape, const float* stream,
             int64_t num_tokens, const Hooks& hooks, float* qkv) {
    const float* x = apply(c, layer.qkv, stream, num_tokens, after_norm(stack, layer.before_attention), nullptr, qkv);
    if (!hooks.adapters) return;
    const auto adapt = [&](Product product, int64_t first, int64_t width) {
        hooks.adapt({hooks.layer, -1, x, num_tokens, stack.width, qkv + first, width, shape.qkv_width(), hooks.tokens,
                     product});
    };
    adapt(Product::kQuery, 0, shape.q_width());
    adapt(Product::kKey, shape.q_width(), shape.kv_width());
    adapt(Product::kValue, shape.q_width() + shape.kv_width(), shape.kv_width());
}

// The first products of a feed-forward block: gate and up, or up alone.
void widen(Context& c, const StackDesc& stack, const LayerDesc& layer, const float* stream, int64_t num_tokens,
           const Hooks& hooks, float* inner) {
    const float* x = apply(c, layer.up, stream, num_tokens, after_norm(stack, layer.before_mlp), nullptr, inner);
    const int64_t width = layer.down.parts[0].columns;
    if (stack.has_gate) hooks.adapt_pair(Product::kGate, Product::kUp, x, num_tokens, stack.width, inner, width);
    else hooks.adapt(Product::kUp, x, num_tokens, stack.width, inner, width);
}

}  // namespace

void run_stack(Context& c, const StackDesc& stack, const StepDesc& step, float* out) {
    std::lock_guard<std::mutex> lock(c.busy);
    const Shape shape = {stack.num_heads, stack.num_kv_heads, stack.head_dim};
    const int64_t tokens = step.num_tokens, width = stack.width, half = stack.head_dim / 2;
    reserve_inputs(c, tokens, std::max({width, stack.inner_width, shape.q_width()}));
    reserve_attention(c, shape);
    float* stream = c.stream.take_as<float>(tokens * width);
    float* qkv = c.qkv.take_as<float>(tokens * shape.qkv_width());
    float* attended = c.attended.take_as<float>(tokens * shape.q_width());
    float* inner = c.inner.take_as<float>(tokens * 2 * stack.inner_width);
    float* cos = c.cos.take_as<float>(stack.num_ropes * tokens * half);
    float* sin = c.sin.take_as<float>(stack.num_ropes * tokens * half);
    c.branch.take_as<float>(tokens * width);
    const int64_t num_units = list_units(c, step, shape);
    const bool narrows = step.num_wanted >= 0 && step.num_wanted < tokens;
    if (narrows) list_wanted(c, step);
    const Before activated = after_activation(stack);
    Run run(c.pool);
    embed(c, stack, step, stream);
    for (int64_t r = 0; r < stack.num_ropes; ++r)
        angles(c, step, stack.frequencies + r * half, stack.rope_scales[r], half, cos + r * tokens * half,
               sin + r * tokens * half);
    for (int64_t i = 0; i < stack.num_layers; ++i) {
        const LayerDesc& layer = stack.layers[i];
        const GroupDesc& group = step.groups[layer.group];
        const Planes planes = planes_of(group, layer.cache_index);
        const int64_t turn = layer.rope * tokens * half;
        Hooks hooks = {stack.reduction, step.adapters, i, nullptr};
        project(c, stack, layer, shape, stream, tokens, hooks, qkv);
        rope_write(c, step, group, shape, qkv, layer.q_norm, layer.k_norm, stack.is_wide != 0, stack.eps, cos + turn,
                   sin + turn, planes);
        int64_t count = tokens, units_here = num_units;
        const Unit* units = static_cast<Unit*>(c.units.take(0));
        if (narrows && i == stack.num_layers - 1) {  // the last layer computes the wanted tokens only
            count = units_here = step.num_wanted;
            if (count == 0) return;
            units = static_cast<Unit*>(c.last_units.take(0));
            hooks.tokens = step.wanted;
            // Indices ascend, so no row is overwritten before it is moved.
            for (int64_t t = 0; t < count; ++t)
                memmove(stream + t * width, stream + step.wanted[t] * width, sizeof(float) * size_t(width));
        }
        attend_all(c, step, group, shape, units, units_here,
                   {qkv, planes, shape.qkv_width(), stack.attention_scale, stack.softcap, layer.sinks, attended});
        if (stack.is_parallel && !layer.mixture) widen(c, stack, layer, stream, count, hooks, inner);
        join(c, stack, layer.out, attended, count, Before(), layer.after_attention, hooks, Product::kOut, stream);
        if (layer.mixture) {
            mix(c, stack, layer, count, hooks, stream);
            continue;
        }
        if (!stack.is_parallel) widen(c, stack, layer, stream, count, hooks, inner);
        join(c, stack, layer.down, inner, count, activated, layer.after_mlp, hooks, Product::kDown, stream);
    }
    const int64_t last = narrows ? step.num_wanted : tokens;
    if (!stack.norm.weight) {  // a later pipeline stage has the norm
        memcpy(out, stream, sizeof(float) * size_t(last * width));
        return;
    }
    c.pool.share(last, grain(last, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t t = first; t < stop; ++t)
            run_norm(*c.kernels, stack.norm, stack.eps, stack.takes_mean, stream + t * width, width, out + t * width);
    });
}

}  // namespace quire
