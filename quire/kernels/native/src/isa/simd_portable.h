// Eight lanes as plain arrays: what runs where there is no faster twin, and what the others are tested against.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "half.h"

namespace {

constexpr int W = 8;
constexpr int kMaxTokens = 4;  // of a product's register tile

struct Floats {
    float v[W];
};
struct Bytes {
    uint8_t v[4 * W];
};
struct Sum {
    int32_t v[W];
};

#define LANES for (int i = 0; i < W; ++i)
inline Floats splat(float x) { Floats r; LANES r.v[i] = x; return r; }
inline Floats load(const float* p) { Floats r; memcpy(r.v, p, sizeof r.v); return r; }
inline void store(float* p, Floats a) { memcpy(p, a.v, sizeof a.v); }
inline Floats load_some(const float* p, int n) { Floats r = splat(0); memcpy(r.v, p, 4 * n); return r; }
inline void store_some(float* p, Floats a, int n) { memcpy(p, a.v, 4 * n); }
inline Floats load_half(const uint16_t* p) { Floats r; LANES r.v[i] = quire::half_to_float(p[i]); return r; }
inline Floats add(Floats a, Floats b) { LANES a.v[i] += b.v[i]; return a; }
inline Floats sub(Floats a, Floats b) { LANES a.v[i] -= b.v[i]; return a; }
inline Floats mul(Floats a, Floats b) { LANES a.v[i] *= b.v[i]; return a; }
inline Floats div(Floats a, Floats b) { LANES a.v[i] /= b.v[i]; return a; }
inline Floats fma(Floats a, Floats b, Floats c) { LANES c.v[i] += a.v[i] * b.v[i]; return c; }
inline Floats larger(Floats a, Floats b) { LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline Floats smaller(Floats a, Floats b) { LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
inline float total(Floats a) { float s = 0; LANES s += a.v[i]; return s; }
inline float largest(Floats a) { float s = a.v[0]; LANES s = a.v[i] > s ? a.v[i] : s; return s; }
inline Floats nearest(Floats a) { LANES a.v[i] = nearbyintf(a.v[i]); return a; }
// The larger magnitude by its bits: NaN beats infinity beats every number.
inline Floats larger_magnitude(Floats a, Floats b) {
    LANES {
        uint32_t x, y;
        memcpy(&x, &a.v[i], 4); memcpy(&y, &b.v[i], 4);
        x &= 0x7fffffff; y &= 0x7fffffff;
        if (y > x) x = y;
        memcpy(&a.v[i], &x, 4);
    }
    return a;
}
inline Floats scale_by_power(Floats a, Floats n) { LANES a.v[i] = ldexpf(a.v[i], int(n.v[i])); return a; }
// Writes whole numbers of 16 bits, columns `at` to at + W - 1 of a block, as `add_products` reads them; returns their sum.
inline int32_t store_whole(int8_t* block, int at, Floats a) {
    int32_t sum = 0;
    int16_t x[W];
    LANES sum += x[i] = int16_t(a.v[i]);
    memcpy(block + 2 * at, x, sizeof x);
    return sum;
}
inline void transpose(const float* const* rows, int columns, float* out) {  // [W][columns] -> [columns][W]
    for (int c = 0; c < columns; ++c) LANES out[c * W + i] = rows[i][c];
}

inline Bytes load_bytes(const uint8_t* p) { Bytes r; memcpy(r.v, p, sizeof r.v); return r; }
// The bits of `mask` in every byte, after a shift to the right (or to the left by -shift).
inline Bytes pick(Bytes a, int shift, int mask) {
    for (uint8_t& x : a.v) x = uint8_t((shift > 0 ? x >> shift : x << -shift) & mask);
    return a;
}
inline Bytes join(Bytes a, Bytes b) { for (int i = 0; i < 4 * W; ++i) a.v[i] |= b.v[i]; return a; }
inline Bytes look_up(Bytes places, const int8_t* table) {  // of 16 bytes
    for (uint8_t& x : places.v) x = uint8_t(table[x]);
    return places;
}
// W bytes as numbers: the bits of `mask` after a shift to the right; all bits, with a sign; the power of two less 128.
inline Floats load_bits(const uint8_t* p, int shift, int mask) {
    Floats r;
    LANES r.v[i] = float(p[i] >> shift & mask);
    return r;
}
inline Floats load_signed_bytes(const uint8_t* p) { Floats r; LANES r.v[i] = float(int8_t(p[i])); return r; }
inline Floats load_power(const uint8_t* p) {
    Floats r;
    LANES {
        const uint32_t bits = uint32_t(p[i] > 1 ? p[i] - 1 : 0) << 23;
        memcpy(&r.v[i], &bits, 4);
    }
    return r;
}
inline Floats load_upper(const uint16_t* p) {  // the upper halves of floats
    Floats r;
    LANES {
        const uint32_t bits = uint32_t(p[i]) << 16;
        memcpy(&r.v[i], &bits, 4);
    }
    return r;
}
// Four columns of every row as a product takes them. Sums of a block of 32 are whole numbers that fit into 32 bits.
struct Weights {
    int16_t v[4 * W];
};
template <bool kIsSigned>
inline Weights to_weights(Bytes a) {
    Weights r;
    for (int i = 0; i < 4 * W; ++i) r.v[i] = kIsSigned ? int8_t(a.v[i]) : a.v[i];
    return r;
}
inline Sum begin_sum() { Sum r; LANES r.v[i] = 0; return r; }
inline void add_products(Sum& s, const Weights& w, const int8_t* block, int group) {
    int16_t x[4];
    memcpy(x, block + 8 * group, sizeof x);
    LANES for (int j = 0; j < 4; ++j) s.v[i] += int32_t(w.v[4 * i + j]) * x[j];
}
template <bool kIsSigned>
inline Floats end_sum(const Sum& s, int32_t) { Floats r; LANES r.v[i] = float(s.v[i]); return r; }  // the number: `Factors`
// Activations of 8 bits lie in blocks as those of 16 do, and have the same products.
using ByteSum = Sum;
inline ByteSum begin_bytes() { return begin_sum(); }
inline void add_byte_products(ByteSum& s, const Weights& w, const int8_t* block, int group) {
    add_products(s, w, block, group);
}
inline Floats end_bytes(const ByteSum& s, int32_t offset) { return end_sum<true>(s, offset); }

// Random bits of W token ids from `first` on, as floats (31 bits, not negative).
inline Floats noise_bits(uint32_t first, uint32_t whiten, uint32_t multiply) {
    Floats r;
    LANES {
        int32_t x = int32_t((((first + i) * 0x9E3779B1u) ^ whiten) * multiply);
        x = int32_t(uint32_t(x ^ (x >> 15)) * 0x85EBCA6Bu);
        x = int32_t(uint32_t(x ^ (x >> 13)) * 0xC2B2AE35u);
        r.v[i] = float(x ^ (x >> 16));
    }
    return r;
}
inline void split_exponent(Floats a, Floats& mantissa, Floats& exponent) {  // a = mantissa * 2^exponent, in [1, 2)
    LANES {
        uint32_t x;
        memcpy(&x, &a.v[i], 4);
        exponent.v[i] = float(int32_t(x >> 23) - 127);
        x = (x & 0x7fffff) | 0x3f800000;
        memcpy(&mantissa.v[i], &x, 4);
    }
}
inline Floats select_less(Floats a, Floats b, Floats yes, Floats no) {  // a < b ? yes : no
    LANES yes.v[i] = a.v[i] < b.v[i] ? yes.v[i] : no.v[i];
    return yes;
}
#undef LANES

}  // namespace
