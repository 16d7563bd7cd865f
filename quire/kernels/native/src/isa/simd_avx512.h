// Sixteen lanes of AVX-512 (F, BW, DQ, VL) with VNNI.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

constexpr int W = 16;
constexpr int kMaxTokens = 8;

using Floats = __m512;
using Bytes = __m512i;
struct Sum {
    __m512i high, low;
};

inline __mmask16 lane_mask(int n) { return __mmask16((1u << n) - 1); }
inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a); }
inline Floats load_some(const float* p, int n) { return _mm512_maskz_loadu_ps(lane_mask(n), p); }
inline void store_some(float* p, Floats a, int n) { _mm512_mask_storeu_ps(p, lane_mask(n), a); }
inline Floats load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline float total(Floats a) { return _mm512_reduce_add_ps(a); }
inline float largest(Floats a) { return _mm512_reduce_max_ps(a); }
inline Floats nearest(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats larger_magnitude(Floats a, Floats b) {
    const __m512i bits = _mm512_set1_epi32(0x7fffffff);
    __m512i x = _mm512_and_si512(_mm512_castps_si512(a), bits), y = _mm512_and_si512(_mm512_castps_si512(b), bits);
    return _mm512_castsi512_ps(_mm512_max_epi32(x, y));
}
inline Floats scale_by_power(Floats a, Floats n) { return _mm512_scalef_ps(a, n); }
// The high bytes of 32 columns, then the low ones, each with a sign: a number is 256 times the one plus the other.
inline int32_t store_whole(int8_t* block, int at, Floats a) {
    const __m512i x = _mm512_cvtps_epi32(a);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128((__m128i*)(block + at), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i*)(block + 32 + at), _mm512_cvtepi32_epi8(x));  // the lowest byte of each
    return _mm512_reduce_add_epi32(x);
}
inline void transpose(const float* const* rows, int columns, float* out) {
    int c = 0;
    for (; c + 16 <= columns; c += 16) {
        __m512 r[16], s[16];
        for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(rows[i] + c);
        for (int i = 0; i < 8; ++i) {
            s[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            s[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        for (int h = 0; h < 4; ++h) {
            r[4 * h] = _mm512_shuffle_ps(s[4 * h], s[4 * h + 2], 0x44);
            r[4 * h + 1] = _mm512_shuffle_ps(s[4 * h], s[4 * h + 2], 0xee);
            r[4 * h + 2] = _mm512_shuffle_ps(s[4 * h + 1], s[4 * h + 3], 0x44);
            r[4 * h + 3] = _mm512_shuffle_ps(s[4 * h + 1], s[4 * h + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {  // r[4h + i]: columns i, i + 4, i + 8, i + 12 of rows 4h..4h+3, a quarter each
            __m512 a = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88), b = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
            __m512 d = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
            __m512 e = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
            store(out + (c + i) * W, _mm512_shuffle_f32x4(a, d, 0x88));
            store(out + (c + i + 4) * W, _mm512_shuffle_f32x4(b, e, 0x88));
            store(out + (c + i + 8) * W, _mm512_shuffle_f32x4(a, d, 0xdd));
            store(out + (c + i + 12) * W, _mm512_shuffle_f32x4(b, e, 0xdd));
        }
    }
    for (; c < columns; ++c)
        for (int i = 0; i < W; ++i) out[c * W + i] = rows[i][c];
}

inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
// The bits of `mask` in every byte, after a shift to the right (or to the left by -shift) that moves no others there.
inline Bytes pick(Bytes a, int shift, int mask) {
    const __m512i moved = shift > 0 ? _mm512_srli_epi16(a, shift) : shift < 0 ? _mm512_slli_epi16(a, -shift) : a;
    return _mm512_and_si512(moved, _mm512_set1_epi8(char(mask)));
}
inline Bytes join(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
inline Bytes look_up(Bytes places, const int8_t* table) {  // of 16 bytes
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), places);
}
// W bytes as numbers: the bits of `mask` after a shift to the right; all bits, with a sign; the power of two less 128.
inline Floats load_bits(const uint8_t* p, int shift, int mask) {
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srl_epi32(x, _mm_cvtsi32_si128(shift)), _mm512_set1_epi32(mask)));
}
inline Floats load_signed_bytes(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline Floats load_power(const uint8_t* p) {
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), one = _mm512_set1_epi32(1);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_max_epi32(x, one), one), 23));
}
inline Floats load_upper(const uint16_t* p) {  // the upper halves of floats
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
// The instruction wants its first factor without a sign: 128 is added to it here, and taken off the sum in the end.
using Weights = __m512i;
template <bool kIsSigned>
inline Weights to_weights(Bytes a) { return kIsSigned ? _mm512_xor_si512(a, _mm512_set1_epi8(-128)) : a; }
inline Sum begin_sum() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
// By hand, because compilers load the four bytes with an instruction of their own, and there are as many as products.
inline void add_four(__m512i& sum, __m512i w, const int8_t* a) {
    typedef int32_t Word __attribute__((may_alias));
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const Word*)a));
}
inline void add_products(Sum& s, Weights w, const int8_t* block, int group) {
    add_four(s.high, w, block + 4 * group);
    add_four(s.low, w, block + 32 + 4 * group);
}
// Activations of 8 bits are the low bytes of a block; their high bytes are 0.
using ByteSum = __m512i;
inline ByteSum begin_bytes() { return _mm512_setzero_si512(); }
inline void add_byte_products(ByteSum& s, Weights w, const int8_t* block, int group) {
    add_four(s, w, block + 32 + 4 * group);
}
inline Floats end_bytes(const ByteSum& s, int32_t offset) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(s, _mm512_set1_epi32(offset)));
}
template <bool kIsSigned>
inline Floats end_sum(const Sum& s, int32_t offset) {
    const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(s.high, 8), s.low);
    return _mm512_cvtepi32_ps(kIsSigned ? _mm512_add_epi32(whole, _mm512_set1_epi32(offset)) : whole);
}

inline Floats noise_bits(uint32_t first, uint32_t whiten, uint32_t multiply) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i x = _mm512_add_epi32(_mm512_set1_epi32(int(first)), lanes);
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(int(0x9E3779B1u)));
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_set1_epi32(int(whiten))), _mm512_set1_epi32(int(multiply)));
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srai_epi32(x, 15)), _mm512_set1_epi32(int(0x85EBCA6Bu)));
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srai_epi32(x, 13)), _mm512_set1_epi32(int(0xC2B2AE35u)));
    return _mm512_cvtepi32_ps(_mm512_xor_si512(x, _mm512_srai_epi32(x, 16)));
}
inline void split_exponent(Floats a, Floats& mantissa, Floats& exponent) {
    __m512i x = _mm512_castps_si512(a);
    exponent = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(x, 23), _mm512_set1_epi32(127)));
    x = _mm512_or_si512(_mm512_and_si512(x, _mm512_set1_epi32(0x7fffff)), _mm512_set1_epi32(0x3f800000));
    mantissa = _mm512_castsi512_ps(x);
}
inline Floats select_less(Floats a, Floats b, Floats yes, Floats no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}

}  // namespace
