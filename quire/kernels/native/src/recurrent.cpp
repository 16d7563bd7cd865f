// See recurrent.h. First the channels of all rows are convolved, distributed over threads in pieces; then heads are
// distributed; Mamba2's norm, which is over many heads, comes last, token by token.
#include "recurrent.h"

#include <math.h>

#include <algorithm>

namespace quire {

namespace {

constexpr float kL2Eps = 1e-6f;
constexpr int64_t kPiece = 512;  // channels
constexpr int64_t kFew = 4;      // fewer pieces of single tokens than this use no further thread

int64_t first_of(const RowsDesc& rows, int64_t row) { return rows.firsts ? rows.firsts[row] : row; }
int64_t end_of(const RowsDesc& rows, int64_t row) {
    return first_of(rows, row) + (rows.counts ? rows.counts[row] : 1);
}
float* state_of(const RowsDesc& rows, int64_t row) { return rows.state + rows.slots[row] * rows.slot_stride; }

float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// out[c] = the channel's taps times its last inputs, of which x is the newest and is stored in the ring.
void convolve(const float* x, const float* gate, float* ring, int64_t channels, int64_t first, int64_t stop,
              int64_t position, const float* conv, int64_t conv_len, const float* bias, float* out) {
    position = std::max<int64_t>(position, 0);  // padding rows have position -1
    float* own = ring + position % conv_len * channels;
    for (int64_t c = first; c < stop; ++c) {
        const float input = gate ? x[c] * gate[c] : x[c];
        own[c] = input;
        out[c] = (bias ? bias[c] : 0.0f) + input * conv[c * conv_len + conv_len - 1];
    }
    for (int64_t age = 1; age < conv_len; ++age) {
        const float* past = ring + (position - age + conv_len) % conv_len * channels;
        const float* taps = conv + conv_len - 1 - age;
        for (int64_t c = first; c < stop; ++c) out[c] += past[c] * taps[c * conv_len];
    }
}

// A copy of length 1, times `scale`.
void copy_normed(const float* x, int64_t n, float scale, float* out) {
    float square = 0;
    for (int64_t i = 0; i < n; ++i) square += x[i] * x[i];
    scale /= sqrtf(square + kL2Eps);
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale;
}

}  // namespace

void run_recurrent(Context& context, const RecurrentDesc& layer, const RowsDesc& rows, Columns mixed, Columns gate,
                   Columns beta, Columns decay, float* out) {
    std::lock_guard<std::mutex> lock(context.busy);
    const Kernels& kernels = *context.kernels;
    const bool is_delta = layer.skip == nullptr;
    const int64_t heads = layer.num_heads, key_dim = layer.key_dim, value_dim = layer.value_dim;
    const int64_t keys = layer.num_groups * key_dim, values = heads * value_dim, channels = values + 2 * keys;
    const int64_t pieces = (channels + kPiece - 1) / kPiece;
    float* convolved = context.convolved.take_as<float>(rows.num_tokens * channels);
    const int64_t each = (3 * key_dim + value_dim + 15) / 16 * 16;  // per thread, in separate cache lines
    float* scratch = context.heads.take_as<float>(context.pool.size() * each);

    Run run(context.pool);
    context.pool.share(rows.num_rows * pieces, rows.counts ? 1 : kFew, [&](int64_t begin, int64_t end, int) {
        for (int64_t item = begin; item < end; ++item) {
            const int64_t row = item / pieces, first = item % pieces * kPiece, stop = std::min(channels, first + kPiece);
            float* ring = state_of(rows, row) + values * key_dim;
            for (int64_t token = first_of(rows, row); token < end_of(rows, row); ++token) {
                float* to = convolved + token * channels;
                convolve(mixed.x + token * mixed.stride, nullptr, ring, channels, first, stop, rows.positions[token],
                         layer.conv, layer.conv_len, layer.conv_bias, to);
                kernels.activate(Activation::kSilu, to + first, nullptr, stop - first, to + first);
            }
        }
    });
    const int64_t q_at = is_delta ? 0 : values + keys, k_at = is_delta ? keys : values, v_at = is_delta ? 2 * keys : 0;
    auto step = [&](int64_t row, int64_t h, int64_t token, float* key) {
        float *query = key + key_dim, *fade = query + key_dim, *scaled = fade + key_dim;
        const int64_t group = h / (heads / layer.num_groups);
        const float* from = convolved + token * channels;
        const float *q = from + q_at + group * key_dim, *k = from + k_at + group * key_dim;
        const float* v = from + v_at + h * value_dim;
        const float* steps = decay.x + token * decay.stride;
        const float speed = -expf(layer.a_log[h]);
        Head head = {state_of(rows, row) + h * value_dim * key_dim, k, q, fade, v, out + token * values + h * value_dim,
                     key_dim, value_dim, 0.0f, is_delta ? 1 : 0};
        if (layer.by_channel) {
            for (int64_t c = 0; c < key_dim; ++c)
                fade[c] = expf(speed * softplus(steps[h * key_dim + c] + layer.dt_bias[h * key_dim + c]));
        } else {
            float length = softplus(steps[h] + layer.dt_bias[h]);
            if (!is_delta) {
                length = std::min(std::max(length, layer.dt_low), layer.dt_high);
                for (int64_t c = 0; c < value_dim; ++c) scaled[c] = v[c] * length;
                head.value = scaled;
            }
            std::fill(fade, fade + key_dim, expf(speed * length));
        }
        if (is_delta) {
            copy_normed(k, key_dim, 1.0f, key);
            copy_normed(q, key_dim, 1.0f / sqrtf(float(key_dim)), query);
            head.key = key;
            head.query = query;
            head.beta = layer.beta_top * sigmoid(beta.x[token * beta.stride + h]);
        }
        kernels.recur(head);
        const float* bent = gate.x + token * gate.stride + h * value_dim;
        if (is_delta) {
            kernels.norm(head.out, layer.norm, layer.eps, value_dim, head.out);
            const Activation how = layer.by_channel ? Activation::kSigmoid : Activation::kSilu;
            kernels.activate(how, bent, head.out, value_dim, head.out);
            return;
        }
        for (int64_t c = 0; c < value_dim; ++c) head.out[c] += layer.skip[h] * v[c];
        if (!layer.norm || layer.gate_first) kernels.activate(Activation::kSilu, bent, head.out, value_dim, head.out);
    };
    context.pool.share(rows.num_rows * heads, 1, [&](int64_t begin, int64_t end, int thread) {
        float* own = scratch + thread * each;
        for (int64_t item = begin; item < end; ++item) {
            const int64_t row = item / heads;
            for (int64_t token = first_of(rows, row); token < end_of(rows, row); ++token)
                step(row, item % heads, token, own);
        }
    });
    if (is_delta || !layer.norm) return;
    const int64_t width = values / layer.norm_groups;
    context.pool.share(rows.num_tokens * layer.norm_groups, 4, [&](int64_t begin, int64_t end, int) {
        for (int64_t item = begin; item < end; ++item) {
            const int64_t token = item / layer.norm_groups, at = item % layer.norm_groups * width;
            float* part = out + token * values + at;
            kernels.norm(part, layer.norm + at, layer.eps, width, part);
            if (!layer.gate_first)
                kernels.activate(Activation::kSilu, gate.x + token * gate.stride + at, part, width, part);
        }
    });
}

void run_short_conv(Context& context, const float* conv, const float* bias, int64_t channels, int64_t conv_len,
                    const RowsDesc& rows, Columns x, float* out) {
    std::lock_guard<std::mutex> lock(context.busy);
    const int64_t pieces = (channels + kPiece - 1) / kPiece;
    Run run(context.pool);
    context.pool.share(rows.num_rows * pieces, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t item = begin; item < end; ++item) {
            const int64_t row = item / pieces, first = item % pieces * kPiece, stop = std::min(channels, first + kPiece);
            for (int64_t token = first_of(rows, row); token < end_of(rows, row); ++token) {
                const float *in_gate = x.x + token * x.stride, *out_gate = in_gate + channels;
                float* to = out + token * channels;
                convolve(out_gate + channels, in_gate, state_of(rows, row), channels, first, stop, rows.positions[token],
                         conv, conv_len, bias, to);
                for (int64_t c = first; c < stop; ++c) to[c] *= out_gate[c];
            }
        }
    });
}

}  // namespace quire
