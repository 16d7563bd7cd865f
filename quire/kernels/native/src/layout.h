// How each form's weights lie in a packed tile. The vector code (`forms.inl`), the packer (`units.cpp`) and the sizes that
// Python asks for all follow this one table.
#pragma once

#include "kernels.h"

namespace quire {

// Values of four neighbouring columns are a word of four bytes in every lane. Where they have fewer than eight bits, words
// share their bits: `g` is a word's place in its block of 32 columns (0 to 7), `h` its half (g / 4), `k` its place there.
enum class Spread : int32_t {
    kFloats,   // no blocks: one value after the other
    kBytes,    // eight words as they are
    kNibbles,  // four words: word g below word g + 4
    kFive,     // kNibbles, then one word of fifth bits: bit g of each byte belongs to word g
    kTwo,      // two words: word (h, k) at bits 2k of word h
    kThree,   // kTwo, then one word of third bits: bit g of each byte belongs to word g
    kSix,      // four words: (h, k) below (h, k + 2), k < 2; then two words of fifth and sixth bits as kTwo
};

// A unit is the fewest columns of a row that can be read alone.
struct Layout {
    int columns;  // of a unit: 1 for floats, 32, or 256 for the K types
    int halves;   // 16-bit numbers at the head of a unit (scale, least value, both of them factors in K types)
    int bytes;    // 8-bit numbers after these
    Spread spread;
};

static constexpr int num_words(Spread spread) {  // of a block of 32 columns
    switch (spread) {
        case Spread::kBytes: return 8;
        case Spread::kSix: return 6;
        case Spread::kFive: return 5;
        case Spread::kNibbles: return 4;
        case Spread::kThree: return 3;
        case Spread::kTwo: return 2;
        default: return 0;
    }
}

static constexpr Layout layout_of(Form form) {
    switch (form) {
        case Form::kF32:
        case Form::kF16:
        case Form::kBF16: return {1, 0, 0, Spread::kFloats};
        case Form::kQ8_0: return {32, 1, 0, Spread::kBytes};
        case Form::kQ4_0:
        case Form::kIQ4_NL: return {32, 1, 0, Spread::kNibbles};
        case Form::kQ4_1: return {32, 2, 0, Spread::kNibbles};
        case Form::kMXFP4: return {32, 0, 1, Spread::kNibbles};
        case Form::kQ5_0: return {32, 1, 0, Spread::kFive};
        case Form::kQ5_1: return {32, 2, 0, Spread::kFive};
        case Form::kQ4_K: return {256, 2, 16, Spread::kNibbles};  // a scale and a least value for each block of 32
        case Form::kQ5_K: return {256, 2, 16, Spread::kFive};
        case Form::kQ6_K: return {256, 1, 16, Spread::kSix};      // a scale for each 16 columns
        case Form::kQ3_K: return {256, 1, 12, Spread::kThree};    // the same in six bits: eight bytes of nibbles, four of pairs
        case Form::kQ2_K: return {256, 2, 16, Spread::kTwo};      // a scale below a least value for each 16 columns
        case Form::kIQ4_XS: return {256, 1, 8, Spread::kNibbles};
        case Form::kW8A8: return {32, 0, 0, Spread::kBytes};  // and a float32 for each row behind a tile's last unit
    }
    return {1, 0, 0, Spread::kFloats};
}

static constexpr bool takes_bytes(Form form) { return form == Form::kW8A8; }  // activations of 8 bits
static constexpr bool is_float(Form form) { return layout_of(form).spread == Spread::kFloats; }

static constexpr int head_bytes(const Layout& l) { return 2 * l.halves + l.bytes; }  // of one row

// Bytes of a unit of one row; of one column for float forms.
static constexpr int unit_bytes(Form form) {
    const Layout l = layout_of(form);
    if (is_float(form)) return form == Form::kF32 ? 4 : 2;
    return head_bytes(l) + 4 * num_words(l.spread) * (l.columns / kBlock);
}

static constexpr int row_scale_bytes(Form form) { return form == Form::kW8A8 ? 4 : 0; }

static inline int64_t tile_bytes(const Matrix& m) {
    const int64_t units = int64_t(unit_bytes(m.form)) * (m.columns / layout_of(m.form).columns);
    return (units + row_scale_bytes(m.form)) * m.lanes;
}

static inline int64_t num_tiles(const Matrix& m) { return (m.rows + m.lanes - 1) / m.lanes; }

// Values of IQ4's sixteen codes, and twice those of FP4's, raised by 12 so that none is negative.
constexpr int8_t kUnevenValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int kFp4Raised = 12;
constexpr int8_t kFp4Values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

}  // namespace quire
