// IEEE half precision without hardware for it.
#pragma once

#include <stdint.h>
#include <string.h>

namespace quire {

static inline float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff, bits;
    if (magnitude >= 0x7c00) {
        bits = 0x7f800000 | ((magnitude & 0x3ff) << 13);
    } else if (magnitude >= 0x400) {
        bits = (magnitude << 13) + (112u << 23);
    } else {  // subnormal: a whole number of 2^-24
        float value = float(magnitude) * 5.9604644775390625e-08f;
        memcpy(&bits, &value, 4);
    }
    bits |= sign;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t float_to_half(float value) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds past the largest half
    if (bits < 0x38800000) {                       // subnormal: let the float unit round
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        uint32_t rounded;
        memcpy(&rounded, &magnitude, 4);
        return sign | uint16_t(rounded - 0x3f000000);
    }
    uint32_t odd = (bits >> 13) & 1;
    return sign | uint16_t((bits + 0xfff + odd - (112u << 23)) >> 13);
}

}  // namespace quire
