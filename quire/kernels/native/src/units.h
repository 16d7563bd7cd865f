// A unit of a row between GGUF's blocks and the packed tiles: the numbers at its head, and its values as one byte each.
// `pack.cpp` writes units into tiles and reads them back.
#pragma once

#include "layout.h"

namespace quire {

constexpr int kUnitColumns = 256;  // at most

struct Unit {
    uint16_t halves[2];
    uint8_t bytes[16];
    uint32_t words[kUnitColumns / 4];  // four columns each, as the form's bytes
};

int64_t source_unit_bytes(Form form);  // of GGUF's block

// From GGUF's block.
void read_unit(Form form, const uint8_t* source, Unit& unit);

// A block's eight words to those of the spread, and back.
void spread_words(Spread spread, const uint32_t* words, uint32_t* out);
void gather_words(Spread spread, const uint32_t* in, uint32_t* words);

// The floats that a unit stands for.
void decode_unit(Form form, const Unit& unit, float* out);

}  // namespace quire
