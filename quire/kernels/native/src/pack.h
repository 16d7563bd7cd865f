// Matrices into tiles, from GGUF's blocks or from floats, and single rows back out of them.
#pragma once

#include "layout.h"

namespace quire {

// Bytes of one source row: GGUF's blocks of that form, or plain floats for the float forms.
int64_t source_row_bytes(Form form, int64_t columns);

// One tile. `source`: rows as GGUF keeps them; `order[r]` is the source row that becomes row r (null: as they come).
void pack_tile(const Matrix& m, int64_t tile, const uint8_t* source, const int64_t* order, uint8_t* out);

// Float rows to GGUF's blocks of a form (or halves, or floats as they are), `source_row_bytes` of them.
void encode_row(Form form, const float* x, int64_t columns, uint8_t* out);

void unpack_row(const Matrix& m, int64_t row, float* out);

}  // namespace quire
