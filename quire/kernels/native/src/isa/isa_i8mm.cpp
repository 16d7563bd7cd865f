// One instruction set's copy of the kernels; its compiler flags are in quire/kernels/native/building.py.
#include <math.h>
#include "kernels.h"
#include "layout.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)

#include "simd_neon.h"

using namespace quire;

#include "mathematics.inl"
#include "rows.inl"
#include "forms.inl"
#include "product.inl"
#include "cache_entry.inl"
#include "attend.inl"
#include "choose.inl"
#include "recurrent.inl"

namespace quire {

const Kernels* i8mm_kernels() {
    static const Kernels kernels = {"i8mm", W, norm, layer_norm, add_scaled, activate,
                                    quantize, quantize_bytes, turn, product, write_entry, attend, merge, choose, recur};
    return &kernels;
}

}  // namespace quire

#else

const quire::Kernels* quire::i8mm_kernels() { return nullptr; }

#endif
