#include "stack.h"

#include <math.h>
#include <string.h>

#include <algorithm>

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

// So few tokens are bound by the bytes of the weights: their activations are rounded finely, at no cost. A lone row's
// prompt is, too, while it is short: that is worth a few milliseconds more to whoever asked one question.
constexpr int64_t kFineTokens = 2, kFinePrompt = 128;

int64_t grain(int64_t count, int threads) { return std::max<int64_t>(1, count / (threads * 6)); }

// --------------------------------------------------------------------------------------------------------------------
// Products

struct Needs {
    bool floats = false, blocks = false;
};

Needs needs(const LinearDesc& linear) {
    Needs found;
    for (int64_t i = 0; i < linear.num_parts; ++i)
        (is_float(linear.parts[i].form) ? found.floats : found.blocks) = true;
    return found;
}

void reserve_inputs(Context& c, int64_t num_tokens, int64_t columns) {
    const int64_t rows = std::max(num_tokens, 2 * std::min(num_tokens, c.fine_tokens));
    c.floats.take_as<float>(num_tokens * columns);
    c.values.take_as<int8_t>(rows * columns);
    c.scales.take_as<float>(rows * (columns / kBlock + 1));
    c.sums.take_as<int32_t>(rows * (columns / kBlock + 1));
}

// Norm or SiLU-mul, then rounding.
Inputs prepare(Context& c, const LinearDesc& linear, const float* x, int64_t num_tokens, int64_t columns,
               const float* norm, float eps, bool silu) {
    const Needs need = needs(linear);
    const bool fine = num_tokens <= c.fine_tokens;
    const int64_t blocks = columns / kBlock, rows = fine ? 2 : 1;
    float* floats = static_cast<float*>(c.floats.take(0));
    int8_t* values = static_cast<int8_t*>(c.values.take(0));
    float* scales = static_cast<float*>(c.scales.take(0));
    int32_t* sums = static_cast<int32_t*>(c.sums.take(0));
    c.pool.share(num_tokens, grain(num_tokens, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t t = first; t < stop; ++t) {
            const float* row = x + t * columns * (silu ? 2 : 1);
            float* ready = floats + t * columns;
            if (norm) c.kernels->norm(row, norm, eps, columns, ready);
            else if (silu) c.kernels->silu_mul(row, row + columns, columns, ready);
            else ready = const_cast<float*>(row);
            if (need.blocks)
                c.kernels->quantize(ready, columns, fine, values + t * rows * columns, scales + t * rows * blocks,
                                    sums + t * rows * blocks);
        }
    });
    return {norm || silu ? floats : x, values, scales, sums, fine};
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

void apply(Context& c, const LinearDesc& linear, const float* x, int64_t num_tokens, const float* norm,
           float eps, bool silu, const float* residual, float* out) {
    const Inputs in = prepare(c, linear, x, num_tokens, linear.parts[0].columns, norm, eps, silu);
    multiply(c, linear, in, num_tokens, residual, out);
}

// --------------------------------------------------------------------------------------------------------------------
// Attention

struct Unit {  // tokens of one row that attend together, and where their outputs go
    int64_t row, first, count, out;
};

int64_t list_units(Context& c, const StepDesc& step, const Shape& shape) {
    const int64_t most = std::max<int64_t>(1, std::min<int64_t>(kQueryTokens, kQueryTokens * 64 / shape.group()));
    Unit* units = c.units.take_as<Unit>(step.num_tokens);
    int64_t count = 0;
    for (int64_t row = 0; row < step.num_rows; ++row)
        for (int64_t t = step.query_starts[row]; t < step.query_starts[row + 1]; t += most)
            units[count++] = {row, t, std::min<int64_t>(most, step.query_starts[row + 1] - t), t};
    // The longest first, so that no thread is left with one at the end.
    std::sort(units, units + count, [&](const Unit& a, const Unit& b) {
        return step.positions[a.first] * a.count > step.positions[b.first] * b.count;
    });
    return count;
}

// Each wanted token by itself, for a last layer of which nothing else is read.
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

void attend_all(Context& c, const StepDesc& step, const GroupDesc& group, const Shape& shape,
                const Unit* units, int64_t num_units, const float* q, int64_t q_stride, const float* k, const float* v, float scale,
                float softcap, float* out) {
    const int64_t heads = shape.group(), dim = shape.head_dim;
    const int64_t room = attend_scratch_floats(int(dim), int(heads));
    c.pool.share(num_units * shape.num_kv_heads, 1, [&](int64_t first, int64_t stop, int thread) {
        float* scratch = static_cast<float*>(c.scratch.take(0)) + thread * room;
        for (int64_t i = first; i < stop; ++i) {
            const Unit& unit = units[i / shape.num_kv_heads];
            const int64_t head = i % shape.num_kv_heads;
            const Queries queries = {q + unit.first * q_stride + head * heads * dim,
                                     out + unit.out * shape.q_width() + head * heads * dim,
                                     q_stride, shape.q_width(), int32_t(unit.count), int32_t(heads),
                                     step.positions[unit.first]};
            const Keys keys = {k + head * dim, v + head * dim, group.table + unit.row * group.table_stride,
                               shape.kv_width(), int32_t(group.page_tokens), int32_t(dim), group.window, scale, softcap};
            c.kernels->attend(queries, keys, scratch);
        }
    });
}

// Angles of token t: cos and sin of position * frequency, as torch works them out in float32.
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

void rope_write(Context& c, const StepDesc& step, const GroupDesc& group, const Shape& shape, float* qkv,
                const float* q_norm, const float* k_norm, float eps, const float* cos, const float* sin, float* k,
                float* v) {
    const int64_t dim = shape.head_dim, half = dim / 2;
    c.pool.share(step.num_tokens, grain(step.num_tokens, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t t = first; t < stop; ++t) {
            float* row = qkv + t * shape.qkv_width();
            for (int64_t h = 0; h < shape.num_heads + shape.num_kv_heads; ++h) {
                float* head = row + h * dim;
                const float* norm = h < shape.num_heads ? q_norm : k_norm;
                if (norm) c.kernels->norm(head, norm, eps, dim, head);
                c.kernels->turn(head, cos + t * half, sin + t * half, half);
            }
            const size_t bytes = sizeof(float) * size_t(shape.kv_width());
            memcpy(k + group.slots[t] * shape.kv_width(), row + shape.q_width(), bytes);
            memcpy(v + group.slots[t] * shape.kv_width(), row + shape.q_width() + shape.kv_width(), bytes);
        }
    });
}

}  // namespace

// --------------------------------------------------------------------------------------------------------------------
// Calls

void run_linear(Context& c, const LinearDesc& linear, const float* x, int64_t num_tokens, const float* norm, float eps,
                bool silu, const float* residual, float* out) {
    std::lock_guard<std::mutex> lock(c.busy);
    c.fine_tokens = kFineTokens;
    reserve_inputs(c, num_tokens, linear.parts[0].columns);
    Run run(c.pool);
    apply(c, linear, x, num_tokens, norm, eps, silu, residual, out);
}

void run_attention(Context& c, const StepDesc& step, const float* q, int64_t num_heads, int64_t num_kv_heads,
                   int64_t head_dim, const float* k, const float* v, float scale, float softcap, float* out) {
    std::lock_guard<std::mutex> lock(c.busy);
    const Shape shape = {num_heads, num_kv_heads, head_dim};
    const int64_t num_units = list_units(c, step, shape);
    reserve_attention(c, shape);
    Run run(c.pool);
    const Unit* units = static_cast<Unit*>(c.units.take(0));
    attend_all(c, step, step.groups[0], shape, units, num_units, q, shape.q_width(), k, v, scale, softcap, out);
}

void run_rope_write(Context& c, const StepDesc& step, float* qkv, const float* q_norm, const float* k_norm, float eps,
                    const float* frequencies, float rope_scale, int64_t num_heads, int64_t num_kv_heads,
                    int64_t head_dim, float* k, float* v) {
    std::lock_guard<std::mutex> lock(c.busy);
    const Shape shape = {num_heads, num_kv_heads, head_dim};
    float* cos = c.cos.take_as<float>(step.num_tokens * head_dim / 2);
    float* sin = c.sin.take_as<float>(step.num_tokens * head_dim / 2);
    Run run(c.pool);
    angles(c, step, frequencies, rope_scale, head_dim / 2, cos, sin);
    rope_write(c, step, step.groups[0], shape, qkv, q_norm, k_norm, eps, cos, sin, k, v);
}

void run_stack(Context& c, const StackDesc& stack, const StepDesc& step, float* out) {
    std::lock_guard<std::mutex> lock(c.busy);
    const Shape shape = {stack.num_heads, stack.num_kv_heads, stack.head_dim};
    const int64_t tokens = step.num_tokens, width = stack.width, half = stack.head_dim / 2;
    c.fine_tokens = step.num_rows == 1 ? kFinePrompt : kFineTokens;
    reserve_inputs(c, tokens, std::max({width, stack.inner_width, shape.q_width()}));
    reserve_attention(c, shape);
    float* stream = c.stream.take_as<float>(tokens * width);
    float* qkv = c.qkv.take_as<float>(tokens * shape.qkv_width());
    float* attended = c.attended.take_as<float>(tokens * shape.q_width());
    float* inner = c.inner.take_as<float>(tokens * 2 * stack.inner_width);
    float* cos = c.cos.take_as<float>(tokens * half);
    float* sin = c.sin.take_as<float>(tokens * half);
    const int64_t num_units = list_units(c, step, shape);
    const bool narrows = step.num_wanted >= 0 && step.num_wanted < tokens;
    if (narrows) list_wanted(c, step);
    Run run(c.pool);
    c.pool.share(tokens, grain(tokens, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t t = first; t < stop; ++t) unpack_row(stack.embedding, step.tokens[t], stream + t * width);
    });
    angles(c, step, stack.frequencies, stack.rope_scale, half, cos, sin);
    for (int64_t i = 0; i < stack.num_layers; ++i) {
        const LayerDesc& layer = stack.layers[i];
        const GroupDesc& group = step.groups[layer.group];
        float* k = group.cache + 2 * layer.cache_index * group.plane;
        float* v = k + group.plane;
        apply(c, layer.qkv, stream, tokens, layer.attention_norm, stack.eps, false, nullptr, qkv);
        rope_write(c, step, group, shape, qkv, layer.q_norm, layer.k_norm, stack.eps, cos, sin, k, v);
        int64_t count = tokens, units_here = num_units;
        const Unit* units = static_cast<Unit*>(c.units.take(0));
        if (narrows && i == stack.num_layers - 1) {  // the last layer works for the wanted tokens only
            count = units_here = step.num_wanted;
            if (count == 0) return;
            units = static_cast<Unit*>(c.last_units.take(0));
            // They ascend, so none is overwritten before it is moved.
            for (int64_t t = 0; t < count; ++t)
                memmove(stream + t * width, stream + step.wanted[t] * width, sizeof(float) * size_t(width));
        }
        attend_all(c, step, group, shape, units, units_here, qkv, shape.qkv_width(), k, v,
                   stack.attention_scale, 0, attended);
        apply(c, layer.out, attended, count, nullptr, 0, false, stream, stream);
        apply(c, layer.gate_up, stream, count, layer.mlp_norm, stack.eps, false, nullptr, inner);
        apply(c, layer.down, inner, count, nullptr, 0, true, stream, stream);
    }
    const int64_t last = narrows ? step.num_wanted : tokens;
    c.pool.share(last, grain(last, c.pool.size()), [&](int64_t first, int64_t stop, int) {
        for (int64_t t = first; t < stop; ++t)
            c.kernels->norm(stream + t * width, stack.norm, stack.eps, width, out + t * width);
    });
}

}  // namespace quire
