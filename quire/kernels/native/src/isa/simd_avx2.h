// Eight lanes of AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

constexpr int W = 8;
constexpr int kMaxTokens = 8;

using Floats = __m256;
using Bytes = __m256i;
struct Sum {
    __m256i v;
};

inline __m256i lane_mask(int n) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes);
}
inline Floats splat(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats a) { _mm256_storeu_ps(p, a); }
inline Floats load_some(const float* p, int n) { return _mm256_maskload_ps(p, lane_mask(n)); }
inline void store_some(float* p, Floats a, int n) { _mm256_maskstore_ps(p, lane_mask(n), a); }
inline Floats load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline float total(Floats a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float largest(Floats a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline Floats nearest(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats larger_magnitude(Floats a, Floats b) {
    const __m256i bits = _mm256_set1_epi32(0x7fffffff);
    __m256i x = _mm256_and_si256(_mm256_castps_si256(a), bits), y = _mm256_and_si256(_mm256_castps_si256(b), bits);
    return _mm256_castsi256_ps(_mm256_max_epi32(x, y));
}
inline Floats scale_by_power(Floats a, Floats n) {
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(power));
}
// Of four columns the first and third lie beside each other, and the others: the pairs that `add_products` multiplies.
inline int32_t store_whole(int8_t* block, int at, Floats a) {
    __m256i x = _mm256_cvtps_epi32(a);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storeu_si128((__m128i*)(block + 2 * at), _mm_shufflehi_epi16(_mm_shufflelo_epi16(words, 0xd8), 0xd8));
    __m128i s = _mm_madd_epi16(words, _mm_set1_epi16(1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
inline void transpose(const float* const* rows, int columns, float* out) {
    int c = 0;
    for (; c + 8 <= columns; c += 8) {
        __m256 r[8], s[8];
        for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(rows[i] + c);
        for (int i = 0; i < 4; ++i) {
            s[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            s[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        for (int h = 0; h < 2; ++h) {
            r[4 * h] = _mm256_shuffle_ps(s[4 * h], s[4 * h + 2], 0x44);
            r[4 * h + 1] = _mm256_shuffle_ps(s[4 * h], s[4 * h + 2], 0xee);
            r[4 * h + 2] = _mm256_shuffle_ps(s[4 * h + 1], s[4 * h + 3], 0x44);
            r[4 * h + 3] = _mm256_shuffle_ps(s[4 * h + 1], s[4 * h + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            store(out + (c + i) * W, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
            store(out + (c + i + 4) * W, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
        }
    }
    for (; c < columns; ++c)
        for (int i = 0; i < W; ++i) out[c * W + i] = rows[i][c];
}

inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
// The bits of `mask` in every byte, after a shift to the right (or to the left by -shift) that moves no others there.
inline Bytes pick(Bytes a, int shift, int mask) {
    const __m256i moved = shift > 0 ? _mm256_srli_epi16(a, shift) : shift < 0 ? _mm256_slli_epi16(a, -shift) : a;
    return _mm256_and_si256(moved, _mm256_set1_epi8(char(mask)));
}
inline Bytes join(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
inline Bytes look_up(Bytes places, const int8_t* table) {  // of 16 bytes
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), places);
}
// W bytes as numbers: the bits of `mask` after a shift to the right; all bits, with a sign; the power of two less 128.
inline Floats load_bits(const uint8_t* p, int shift, int mask) {
    const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(x, _mm_cvtsi32_si128(shift)), _mm256_set1_epi32(mask)));
}
inline Floats load_signed_bytes(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline Floats load_power(const uint8_t* p) {
    const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), one = _mm256_set1_epi32(1);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(_mm256_max_epi32(x, one), one), 23));
}
inline Floats load_upper(const uint16_t* p) {  // the upper halves of floats
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
// Weights in 16 bits, so that a product takes whole activations and a token needs one register for its sums.
struct Weights {
    __m256i even, odd;  // of each four columns the first and third, the second and fourth
};
template <bool kIsSigned>
inline Weights to_weights(Bytes a) {
    if constexpr (kIsSigned) return {_mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), _mm256_srai_epi16(a, 8)};
    return {_mm256_and_si256(a, _mm256_set1_epi16(255)), _mm256_srli_epi16(a, 8)};
}
inline __m256i pair(const int8_t* a) {
    int32_t word;
    memcpy(&word, a, 4);
    return _mm256_set1_epi32(word);
}
inline Sum begin_sum() { return {_mm256_setzero_si256()}; }
inline void add_products(Sum& s, const Weights& w, const int8_t* block, int group) {
    s.v = _mm256_add_epi32(s.v, _mm256_madd_epi16(w.even, pair(block + 8 * group)));
    asm("" : "+x"(s.v));  // else compilers compute all products of a block first, and spill them
    s.v = _mm256_add_epi32(s.v, _mm256_madd_epi16(w.odd, pair(block + 8 * group + 4)));
    asm("" : "+x"(s.v));
}
template <bool kIsSigned>
inline Floats end_sum(const Sum& s, int32_t) { return _mm256_cvtepi32_ps(s.v); }
// Activations of 8 bits lie in blocks as those of 16 do, and have the same products.
using ByteSum = Sum;
inline ByteSum begin_bytes() { return begin_sum(); }
inline void add_byte_products(ByteSum& s, const Weights& w, const int8_t* block, int group) {
    add_products(s, w, block, group);
}
inline Floats end_bytes(const ByteSum& s, int32_t offset) { return end_sum<true>(s, offset); }

inline Floats noise_bits(uint32_t first, uint32_t whiten, uint32_t multiply) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i x = _mm256_add_epi32(_mm256_set1_epi32(int(first)), lanes);
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(int(0x9E3779B1u)));
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_set1_epi32(int(whiten))), _mm256_set1_epi32(int(multiply)));
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srai_epi32(x, 15)), _mm256_set1_epi32(int(0x85EBCA6Bu)));
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srai_epi32(x, 13)), _mm256_set1_epi32(int(0xC2B2AE35u)));
    return _mm256_cvtepi32_ps(_mm256_xor_si256(x, _mm256_srai_epi32(x, 16)));
}
inline void split_exponent(Floats a, Floats& mantissa, Floats& exponent) {
    __m256i x = _mm256_castps_si256(a);
    exponent = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(x, 23), _mm256_set1_epi32(127)));
    x = _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi32(0x7fffff)), _mm256_set1_epi32(0x3f800000));
    mantissa = _mm256_castsi256_ps(x);
}
inline Floats select_less(Floats a, Floats b, Floats yes, Floats no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

}  // namespace
