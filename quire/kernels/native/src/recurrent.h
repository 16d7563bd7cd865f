// Recurrent layers, token by token: convolution, gates, update of the matrices, norm and gate. A head's matrix stays in
// the first-level cache over all its tokens, so prefill and decode share one code path. `quire/kernels/native/library.py`
// fills the structs; the order of fields must be equal there.
#pragma once

#include "stack.h"

namespace quire {

struct RecurrentDesc {  // a layer; shapes as in `quire/kernels/recurrent_types.py`
    const float* conv;       // [channels, conv_len]
    const float* conv_bias;  // [channels], or null
    const float* a_log;      // [heads]
    const float* dt_bias;    // [heads]; by channel [keys]
    const float* skip;       // [heads]: this is Mamba2; null: the delta rule
    const float* norm;       // [value_dim] for the delta rule, [values] for Mamba2, or null
    int64_t num_groups, num_heads, key_dim, value_dim, conv_len, norm_groups;
    float eps, dt_low, dt_high, beta_top;
    int32_t gate_first;  // of Mamba2: before the norm
    int32_t by_channel;  // one decay per key channel, and the gate is a sigmoid
};

struct Columns {  // of some projection, [tokens, stride]
    const float* x;
    int64_t stride;
};

struct RowsDesc {  // of a step
    float* state;         // [slots, slot_stride]: matrices, then the ring
    int64_t slot_stride;
    const int64_t* slots;      // [rows of the step]
    const int64_t* positions;  // [tokens of the step]
    const int64_t* firsts;     // [rows]: each row's first token; null: each row has one token, in order
    const int64_t* counts;     // [rows]: each row's number of tokens; or null
    int64_t num_rows, num_tokens;
};

// `mixed`: inputs of the convolution; `decay` and `beta`: inputs of these (beta's may be null). out [tokens, values].
void run_recurrent(Context& context, const RecurrentDesc& layer, const RowsDesc& rows, Columns mixed, Columns gate,
                   Columns beta, Columns decay, float* out);

// A layer that consists of a convolution between two gates; x [tokens, 3 channels]: input gate, output gate, input.
// conv [channels, conv_len]; out [tokens, channels].
void run_short_conv(Context& context, const float* conv, const float* bias, int64_t channels, int64_t conv_len,
                    const RowsDesc& rows, Columns x, float* out);

}  // namespace quire
