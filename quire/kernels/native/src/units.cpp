#include "units.h"

#include <string.h>

#include "half.h"

namespace quire {

namespace {

constexpr uint32_t kLow4 = 0x0f0f0f0f, kLow2 = 0x03030303, kLow1 = 0x01010101;

// `count` words of nibbles, low ones first and high ones `count` words later.
void take_nibbles(const uint8_t* from, int count, uint32_t* out) {
    uint32_t pairs[32];
    memcpy(pairs, from, size_t(4 * count));
    for (int i = 0; i < count; ++i) {
        out[i] = pairs[i] & kLow4;
        out[i + count] = pairs[i] >> 4 & kLow4;
    }
}

// GGUF's fifth bits of a block of 32: bit i belongs to column i. Spread over the lowest bits of a word's bytes.
uint32_t four_bits(uint32_t bits, int g) { return (bits >> 4 * g & 15) * 0x00204081 & kLow1; }

void take_fifth_bits(const uint8_t* from, uint32_t* words) {
    uint32_t bits;
    memcpy(&bits, from, 4);
    for (int g = 0; g < 8; ++g) words[g] |= four_bits(bits, g) << 4;
}

// K types: bit `shift` of 32 bytes is that of 32 columns, a word of them at a time.
void take_bits(const uint8_t* from, int shift, uint32_t mask, int up, uint32_t* words) {
    uint32_t all[8];
    memcpy(all, from, 32);
    for (int g = 0; g < 8; ++g) words[g] |= (all[g] >> shift & mask) << up;
}

// The eight 6-bit scales and least values of Q4_K and Q5_K, in turn.
void take_k_scales(const uint8_t* p, uint8_t* out) {
    for (int i = 0; i < 4; ++i) {
        out[2 * i] = p[i] & 63;
        out[2 * i + 1] = p[4 + i] & 63;
        out[2 * i + 8] = uint8_t((p[8 + i] & 15) | p[i] >> 6 << 4);
        out[2 * i + 9] = uint8_t(p[8 + i] >> 4 | p[4 + i] >> 6 << 4);
    }
}

}  // namespace

int64_t source_unit_bytes(Form form) {
    // What is packed differs from the source where 6-bit numbers became bytes.
    switch (form) {
        case Form::kQ4_K: return 144;
        case Form::kQ5_K: return 176;
        case Form::kIQ4_XS: return 136;
        default: return unit_bytes(form);
    }
}

void read_unit(Form form, const uint8_t* p, Unit& unit) {
    uint32_t* words = unit.words;
    switch (form) {
        case Form::kW8A8: memcpy(words, p, 32); return;
        case Form::kQ8_0:
            memcpy(unit.halves, p, 2);
            memcpy(words, p + 2, 32);
            return;
        case Form::kQ4_0:
        case Form::kIQ4_NL:
            memcpy(unit.halves, p, 2);
            return take_nibbles(p + 2, 4, words);
        case Form::kQ4_1:
            memcpy(unit.halves, p, 4);
            return take_nibbles(p + 4, 4, words);
        case Form::kMXFP4:
            unit.bytes[0] = p[0];
            return take_nibbles(p + 1, 4, words);
        case Form::kQ5_0:
            memcpy(unit.halves, p, 2);
            take_nibbles(p + 6, 4, words);
            return take_fifth_bits(p + 2, words);
        case Form::kQ5_1:
            memcpy(unit.halves, p, 4);
            take_nibbles(p + 8, 4, words);
            return take_fifth_bits(p + 4, words);
        case Form::kQ4_K:
        case Form::kQ5_K: {
            const bool is_five = form == Form::kQ5_K;
            memcpy(unit.halves, p, 4);
            take_k_scales(p + 4, unit.bytes);
            for (int i = 0; i < 4; ++i) take_nibbles(p + (is_five ? 48 : 16) + 32 * i, 8, words + 16 * i);
            for (int i = 0; is_five && i < 8; ++i) take_bits(p + 16, i, kLow1, 4, words + 8 * i);
            return;
        }
        case Form::kQ6_K:
            for (int i = 0; i < 2; ++i) {
                take_nibbles(p + 64 * i, 16, words + 32 * i);
                for (int j = 0; j < 4; ++j) take_bits(p + 128 + 32 * i, 2 * j, kLow2, 4, words + 32 * i + 8 * j);
            }
            memcpy(unit.bytes, p + 192, 16);
            memcpy(unit.halves, p + 208, 2);
            return;
        case Form::kQ3_K:
        case Form::kQ2_K: {
            const bool is_three = form == Form::kQ3_K;
            memset(words, 0, sizeof unit.words);
            for (int i = 0; i < 8; ++i) {
                take_bits(p + (is_three ? 32 : 16) + 32 * (i / 4), 2 * (i % 4), kLow2, 0, words + 8 * i);
                if (is_three) take_bits(p, i, kLow1, 2, words + 8 * i);
            }
            if (is_three) {
                memcpy(unit.bytes, p + 96, 12);
                memcpy(unit.halves, p + 108, 2);
            } else {
                memcpy(unit.bytes, p, 16);
                memcpy(unit.halves, p + 80, 4);
            }
            return;
        }
        case Form::kIQ4_XS: {
            uint16_t high;
            memcpy(unit.halves, p, 2);
            memcpy(&high, p + 2, 2);
            for (int i = 0; i < 8; ++i)
                unit.bytes[i] = uint8_t(((p[4 + i / 2] >> 4 * (i % 2) & 15) | (high >> 2 * i & 3) << 4) - 32);
            for (int i = 0; i < 8; ++i) take_nibbles(p + 8 + 16 * i, 4, words + 8 * i);
            return;
        }
        default: return;
    }
}

void spread_words(Spread spread, const uint32_t* in, uint32_t* out) {
    switch (spread) {
        case Spread::kBytes: memcpy(out, in, 32); return;
        case Spread::kFive:
            out[4] = 0;
            for (int g = 0; g < 8; ++g) out[4] |= (in[g] >> 4 & kLow1) << g;
            [[fallthrough]];
        case Spread::kNibbles:
            for (int g = 0; g < 4; ++g) out[g] = (in[g] & kLow4) | (in[g + 4] & kLow4) << 4;
            return;
        case Spread::kThree:
            out[2] = 0;
            for (int g = 0; g < 8; ++g) out[2] |= (in[g] >> 2 & kLow1) << g;
            [[fallthrough]];
        case Spread::kTwo:
            for (int h = 0; h < 2; ++h) {
                out[h] = 0;
                for (int k = 0; k < 4; ++k) out[h] |= (in[4 * h + k] & kLow2) << 2 * k;
            }
            return;
        case Spread::kSix:
            for (int h = 0; h < 2; ++h) {
                const uint32_t* w = in + 4 * h;
                for (int k = 0; k < 2; ++k) out[2 * h + k] = (w[k] & kLow4) | (w[k + 2] & kLow4) << 4;
                out[4 + h] = 0;
                for (int k = 0; k < 4; ++k) out[4 + h] |= (w[k] >> 4 & kLow2) << 2 * k;
            }
            return;
        default: return;
    }
}

void gather_words(Spread spread, const uint32_t* in, uint32_t* out) {
    switch (spread) {
        case Spread::kBytes: memcpy(out, in, 32); return;
        case Spread::kNibbles:
        case Spread::kFive:
            for (int g = 0; g < 8; ++g) {
                out[g] = in[g % 4] >> (g < 4 ? 0 : 4) & kLow4;
                if (spread == Spread::kFive) out[g] |= (in[4] >> g & kLow1) << 4;
            }
            return;
        case Spread::kTwo:
        case Spread::kThree:
            for (int g = 0; g < 8; ++g) {
                out[g] = in[g / 4] >> 2 * (g % 4) & kLow2;
                if (spread == Spread::kThree) out[g] |= (in[2] >> g & kLow1) << 2;
            }
            return;
        case Spread::kSix:
            for (int g = 0; g < 8; ++g)
                out[g] = (in[g / 4 * 2 + g % 2] >> (g % 4 < 2 ? 0 : 4) & kLow4) |
                         (in[4 + g / 4] >> 2 * (g % 4) & kLow2) << 4;
            return;
        default: return;
    }
}

void decode_unit(Form form, const Unit& unit, float* out) {
    const float d = half_to_float(unit.halves[0]), e = half_to_float(unit.halves[1]);
    const uint8_t* cells = unit.bytes;
    for (int c = 0; c < layout_of(form).columns / 16; ++c) {
        float scale = d, least = 0;
        const int8_t* table = nullptr;
        switch (form) {
            case Form::kQ4_0: least = -8 * d; break;
            case Form::kQ5_0: least = -16 * d; break;
            case Form::kQ4_1:
            case Form::kQ5_1: least = e; break;
            case Form::kIQ4_NL: table = kUnevenValues; break;
            case Form::kIQ4_XS:
                scale = d * float(int8_t(cells[c / 2]));
                table = kUnevenValues;
                break;
            case Form::kMXFP4: {
                const uint32_t bits = uint32_t(cells[0] > 1 ? cells[0] - 1 : 0) << 23;
                memcpy(&scale, &bits, 4);
                least = -float(kFp4Raised) * scale;
                table = kFp4Values;
                break;
            }
            case Form::kQ4_K:
            case Form::kQ5_K:
                scale = d * float(cells[c / 2 * 2]);
                least = -e * float(cells[c / 2 * 2 + 1]);
                break;
            case Form::kQ6_K:
                scale = d * float(int8_t(cells[c]));
                least = -32 * scale;
                break;
            case Form::kQ3_K:
                scale = d * float((cells[c % 8] >> c / 8 * 4 & 15) + 16 * (cells[8 + c % 4] >> c / 4 * 2 & 3) - 32);
                least = -4 * scale;
                break;
            case Form::kQ2_K:
                scale = d * float(cells[c] & 15);
                least = -e * float(cells[c] >> 4);
                break;
            case Form::kW8A8: scale = 1; break;  // the row's scale is not the unit's
            default: break;
        }
        const bool has_sign = form == Form::kQ8_0 || form == Form::kW8A8;
        for (int i = 0; i < 16; ++i) {
            const uint8_t byte = uint8_t(unit.words[4 * c + i / 4] >> 8 * (i % 4));
            const float value = table ? float(table[byte]) : has_sign ? float(int8_t(byte)) : float(byte);
            out[16 * c + i] = scale * value + least;
        }
    }
}

}  // namespace quire
