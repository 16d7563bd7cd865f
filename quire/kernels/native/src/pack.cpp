#include "pack.h"

#include <math.h>
#include <string.h>

#include "half.h"

namespace quire {

namespace {

struct Layout {  // of a block, as GGUF keeps it
    int scale_bytes, value_bytes;
};

Layout layout(Form form) {
    switch (form) {
        case Form::kQ8_0: return {2, 32};
        case Form::kQ4_0: return {2, 16};
        case Form::kQ4_1: return {4, 16};
        default: return {0, 0};
    }
}

void encode_q8_0(const float* x, uint8_t* out) {
    float most = 0;
    for (int i = 0; i < kBlock; ++i) most = fmaxf(most, fabsf(x[i]));
    const float scale = most / 127;
    const uint16_t half = float_to_half(scale);
    const float inverse = scale > 0 ? 1 / scale : 0;
    memcpy(out, &half, 2);
    for (int i = 0; i < kBlock; ++i) out[2 + i] = uint8_t(int8_t(lrintf(x[i] * inverse)));
}

// A 4-bit scale is worth looking for: of several around the obvious one, the one with the least squared error is kept.
void encode_q4_0(const float* x, uint8_t* out) {
    float most = 0, extreme = 0;
    for (int i = 0; i < kBlock; ++i) {
        if (fabsf(x[i]) > most) {
            most = fabsf(x[i]);
            extreme = x[i];
        }
    }
    uint16_t best_half = 0;
    float best_error = INFINITY;
    for (int step = -4; step <= 8 && most > 0; ++step) {
        const float scale = extreme / (-8.0f + 0.15f * float(step));
        const uint16_t half = float_to_half(scale);
        const float kept = half_to_float(half), inverse = kept != 0 ? 1 / kept : 0;
        float error = 0;
        for (int i = 0; i < kBlock; ++i) {
            const float whole = fminf(7, fmaxf(-8, rintf(x[i] * inverse))), off = whole * kept - x[i];
            error += off * off;
        }
        if (error < best_error) {
            best_error = error;
            best_half = half;
        }
    }
    const float kept = half_to_float(best_half), inverse = kept != 0 ? 1 / kept : 0;
    int values[kBlock];
    for (int i = 0; i < kBlock; ++i) values[i] = int(fminf(7, fmaxf(-8, rintf(x[i] * inverse)))) + 8;
    memcpy(out, &best_half, 2);
    for (int i = 0; i < 16; ++i) out[2 + i] = uint8_t(values[i] | values[i + 16] << 4);
}

}  // namespace

int64_t source_row_bytes(Form form, int64_t columns) {
    if (form == Form::kF32) return 4 * columns;
    if (form == Form::kF16) return 2 * columns;
    const Layout l = layout(form);
    return columns / kBlock * (l.scale_bytes + l.value_bytes);
}

void encode_row(Form form, const float* x, int64_t columns, uint8_t* out) {
    if (form == Form::kF32) {
        memcpy(out, x, 4 * columns);
    } else if (form == Form::kF16) {
        for (int64_t i = 0; i < columns; ++i) {
            const uint16_t half = float_to_half(x[i]);
            memcpy(out + 2 * i, &half, 2);
        }
    } else {
        const Layout l = layout(form);
        for (int64_t i = 0; i < columns; i += kBlock, out += l.scale_bytes + l.value_bytes)
            form == Form::kQ8_0 ? encode_q8_0(x + i, out) : encode_q4_0(x + i, out);
    }
}

void pack_tile(const Matrix& m, int64_t tile, const uint8_t* source, const int64_t* order, uint8_t* out) {
    const int lanes = m.lanes;
    const int64_t row_bytes = source_row_bytes(m.form, m.columns);
    memset(out, 0, size_t(tile_bytes(m)));
    for (int lane = 0; lane < lanes && tile * lanes + lane < m.rows; ++lane) {
        const int64_t row = tile * lanes + lane;
        const uint8_t* from = source + (order ? order[row] : row) * row_bytes;
        if (is_float(m.form)) {
            const int size = m.form == Form::kF32 ? 4 : 2;
            for (int64_t c = 0; c < m.columns; ++c) memcpy(out + (c * lanes + lane) * size, from + c * size, size_t(size));
            continue;
        }
        const Layout l = layout(m.form);
        uint8_t* to = out;
        for (int64_t b = 0; b < m.columns / kBlock; ++b, to += block_bytes(m.form, lanes)) {
            for (int s = 0; s < l.scale_bytes; s += 2) memcpy(to + (s / 2 * lanes + lane) * 2, from + s, 2);
            from += l.scale_bytes;
            uint8_t* values = to + l.scale_bytes * lanes;
            for (int g = 0; g < l.value_bytes / 4; ++g) memcpy(values + (g * lanes + lane) * 4, from + 4 * g, 4);
            from += l.value_bytes;
        }
    }
}

void unpack_row(const Matrix& m, int64_t row, float* out) {
    const int lanes = m.lanes, lane = int(row % lanes);
    const uint8_t* p = m.data + row / lanes * tile_bytes(m);
    if (is_float(m.form)) {
        for (int64_t c = 0; c < m.columns; ++c) {
            if (m.form == Form::kF32) {
                memcpy(out + c, p + (c * lanes + lane) * 4, 4);
            } else {
                uint16_t half;
                memcpy(&half, p + (c * lanes + lane) * 2, 2);
                out[c] = half_to_float(half);
            }
        }
        return;
    }
    const Layout l = layout(m.form);
    for (int64_t b = 0; b < m.columns / kBlock; ++b, p += block_bytes(m.form, lanes), out += kBlock) {
        uint16_t half[2] = {0, 0};
        for (int s = 0; s < l.scale_bytes / 2; ++s) memcpy(&half[s], p + (s * lanes + lane) * 2, 2);
        const float scale = half_to_float(half[0]);
        const float offset = m.form == Form::kQ4_1 ? half_to_float(half[1]) : m.form == Form::kQ4_0 ? -8 * scale : 0;
        const uint8_t* values = p + l.scale_bytes * lanes;
        for (int i = 0; i < kBlock; ++i) {
            if (m.form == Form::kQ8_0) {
                out[i] = scale * float(int8_t(values[(i / 4 * lanes + lane) * 4 + i % 4]));
            } else {
                const uint8_t pair = values[(i % 16 / 4 * lanes + lane) * 4 + i % 4];
                out[i] = scale * float(i < 16 ? pair & 15 : pair >> 4) + offset;
            }
        }
    }
}

}  // namespace quire
