#include "pack.h"

#include <math.h>
#include <string.h>

#include "half.h"
#include "units.h"

namespace quire {

namespace {

void encode_q8_0(const float* x, uint8_t* out) {
    float most = 0;
    for (int i = 0; i < kBlock; ++i) most = fmaxf(most, fabsf(x[i]));
    const float scale = most / 127;
    const uint16_t half = float_to_half(scale);
    const float inverse = scale > 0 ? 1 / scale : 0;
    memcpy(out, &half, 2);
    for (int i = 0; i < kBlock; ++i) out[2 + i] = uint8_t(int8_t(lrintf(x[i] * inverse)));
}

// The whole row's bytes, then its scale.
void encode_w8a8(const float* x, int64_t columns, uint8_t* out) {
    float most = 0;
    for (int64_t i = 0; i < columns; ++i) most = fmaxf(most, fabsf(x[i]));
    const float scale = most / 127, inverse = scale > 0 ? 1 / scale : 0;
    for (int64_t i = 0; i < columns; ++i) out[i] = uint8_t(int8_t(lrintf(x[i] * inverse)));
    memcpy(out + columns, &scale, 4);
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
    return columns / layout_of(form).columns * source_unit_bytes(form) + row_scale_bytes(form);
}

void encode_row(Form form, const float* x, int64_t columns, uint8_t* out) {
    if (form == Form::kF32) {
        memcpy(out, x, size_t(4 * columns));
    } else if (form == Form::kF16) {
        for (int64_t i = 0; i < columns; ++i) {
            const uint16_t half = float_to_half(x[i]);
            memcpy(out + 2 * i, &half, 2);
        }
    } else if (form == Form::kBF16) {
        for (int64_t i = 0; i < columns; ++i) {
            uint32_t bits;
            memcpy(&bits, x + i, 4);
            const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
            const uint16_t upper = is_nan ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // ties to even
            memcpy(out + 2 * i, &upper, 2);
        }
    } else if (form == Form::kW8A8) {
        encode_w8a8(x, columns, out);
    } else {
        for (int64_t i = 0; i < columns; i += kBlock, out += source_unit_bytes(form))
            form == Form::kQ8_0 ? encode_q8_0(x + i, out) : encode_q4_0(x + i, out);
    }
}

namespace {

// Where the parts of a row's unit lie in a tile.
struct Place {
    const Layout layout;
    const int lanes, lane;

    int64_t half(int i) const { return 2 * (int64_t(i) * lanes + lane); }
    int64_t byte(int i) const { return int64_t(2 * layout.halves + i) * lanes + lane; }
    int64_t word(int i) const { return int64_t(head_bytes(layout)) * lanes + 4 * (int64_t(i) * lanes + lane); }
};

void write_unit(const Place& place, const Unit& unit, uint8_t* out) {
    const Layout& l = place.layout;
    for (int i = 0; i < l.halves; ++i) memcpy(out + place.half(i), &unit.halves[i], 2);
    for (int i = 0; i < l.bytes; ++i) out[place.byte(i)] = unit.bytes[i];
    const int count = num_words(l.spread);
    for (int b = 0; b < l.columns / kBlock; ++b) {
        uint32_t words[8];
        spread_words(l.spread, unit.words + 8 * b, words);
        for (int i = 0; i < count; ++i) memcpy(out + place.word(b * count + i), &words[i], 4);
    }
}

void read_back(const Place& place, const uint8_t* p, Unit& unit) {
    const Layout& l = place.layout;
    for (int i = 0; i < l.halves; ++i) memcpy(&unit.halves[i], p + place.half(i), 2);
    for (int i = 0; i < l.bytes; ++i) unit.bytes[i] = p[place.byte(i)];
    const int count = num_words(l.spread);
    for (int b = 0; b < l.columns / kBlock; ++b) {
        uint32_t words[8];
        for (int i = 0; i < count; ++i) memcpy(&words[i], p + place.word(b * count + i), 4);
        gather_words(l.spread, words, unit.words + 8 * b);
    }
}

// By type, so that what depends on it is decided once.
template <class Number>
void pack_numbers(const Matrix& m, const uint8_t* const* rows, int count, uint8_t* out) {
    for (int64_t c = 0; c < m.columns; ++c)
        for (int lane = 0; lane < count; ++lane)
            memcpy(out + (c * m.lanes + lane) * int64_t(sizeof(Number)), rows[lane] + c * int64_t(sizeof(Number)),
                   sizeof(Number));
}

}  // namespace

void pack_tile(const Matrix& m, int64_t tile, const uint8_t* source, const int64_t* order, uint8_t* out) {
    const int64_t first = tile * m.lanes, row_bytes = source_row_bytes(m.form, m.columns);
    const int count = m.rows - first < m.lanes ? int(m.rows - first) : m.lanes;
    const uint8_t* rows[64];
    for (int lane = 0; lane < count; ++lane)
        rows[lane] = source + (order ? order[first + lane] : first + lane) * row_bytes;
    if (count < m.lanes) memset(out, 0, size_t(tile_bytes(m)));
    if (m.form == Form::kF32) return pack_numbers<uint32_t>(m, rows, count, out);
    if (is_float(m.form)) return pack_numbers<uint16_t>(m, rows, count, out);
    const Layout layout = layout_of(m.form);
    const int64_t unit = unit_bytes(m.form) * m.lanes, step = source_unit_bytes(m.form);
    // Unit after unit, so that what is written stays in the first cache.
    Unit read = {};  // once: zeros for every 32 columns would cost as much as packing them, and a form sets what it reads
    for (int64_t u = 0; u < m.columns / layout.columns; ++u, out += unit) {
        for (int lane = 0; lane < count; ++lane) {
            read_unit(m.form, rows[lane] + u * step, read);
            write_unit({layout, m.lanes, lane}, read, out);
        }
    }
    if (row_scale_bytes(m.form))
        for (int lane = 0; lane < count; ++lane) memcpy(out + 4 * lane, rows[lane] + m.columns, 4);
}

void unpack_row(const Matrix& m, int64_t row, float* out) {
    const int lanes = m.lanes, lane = int(row % lanes);
    const uint8_t* p = m.data + row / lanes * tile_bytes(m);
    const Layout layout = layout_of(m.form);
    if (!is_float(m.form)) {
        Unit unit = {};
        for (int64_t u = 0; u < m.columns / layout.columns; ++u, p += unit_bytes(m.form) * lanes) {
            read_back({layout, lanes, lane}, p, unit);
            decode_unit(m.form, unit, out + u * layout.columns);
        }
        if (row_scale_bytes(m.form)) {
            float scale;
            memcpy(&scale, p + 4 * lane, 4);
            for (int64_t c = 0; c < m.columns; ++c) out[c] *= scale;
        }
        return;
    }
    for (int64_t c = 0; c < m.columns; ++c) {
        if (m.form == Form::kF32) {
            memcpy(out + c, p + (c * lanes + lane) * 4, 4);
            continue;
        }
        uint16_t half;
        memcpy(&half, p + (c * lanes + lane) * 2, 2);
        const uint32_t bits = uint32_t(half) << 16;
        if (m.form == Form::kBF16) memcpy(out + c, &bits, 4);
        else out[c] = half_to_float(half);
    }
}

}  // namespace quire
