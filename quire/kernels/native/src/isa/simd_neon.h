// Four lanes of Arm's Advanced SIMD with dot products of bytes; with i8mm, with products of small matrices of bytes.
#pragma once

#include <arm_neon.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace {

constexpr int W = 4;
constexpr int kMaxTokens = 8;

using Floats = float32x4_t;
using Bytes = uint8x16_t;

inline Floats splat(float x) { return vdupq_n_f32(x); }
inline Floats load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Floats a) { vst1q_f32(p, a); }
inline Floats load_some(const float* p, int n) {
    float lanes[W] = {0, 0, 0, 0};
    memcpy(lanes, p, sizeof(float) * size_t(n));
    return load(lanes);
}
inline void store_some(float* p, Floats a, int n) {
    float lanes[W];
    store(lanes, a);
    memcpy(p, lanes, sizeof(float) * size_t(n));
}
inline Floats load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
inline Floats sub(Floats a, Floats b) { return vsubq_f32(a, b); }
inline Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Floats div(Floats a, Floats b) { return vdivq_f32(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Floats larger(Floats a, Floats b) { return vmaxq_f32(a, b); }
inline Floats smaller(Floats a, Floats b) { return vminq_f32(a, b); }
inline float total(Floats a) { return vaddvq_f32(a); }
inline float largest(Floats a) { return vmaxvq_f32(a); }
inline Floats nearest(Floats a) { return vrndnq_f32(a); }
inline Floats larger_magnitude(Floats a, Floats b) {
    const uint32x4_t bits = vdupq_n_u32(0x7fffffff);
    const uint32x4_t x = vandq_u32(vreinterpretq_u32_f32(a), bits), y = vandq_u32(vreinterpretq_u32_f32(b), bits);
    return vreinterpretq_f32_u32(vmaxq_u32(x, y));
}
inline Floats scale_by_power(Floats a, Floats n) {
    const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vmulq_f32(a, vreinterpretq_f32_s32(power));
}
// Of four columns the high bytes and then the low ones, each with a sign: a number is 256 times the one plus the other.
inline int32_t store_whole(int8_t* block, int at, Floats a) {
    const int32x4_t x = vcvtq_s32_f32(a), high = vshrq_n_s32(vaddq_s32(x, vdupq_n_s32(128)), 8);
    int32_t upper[W], lower[W];
    vst1q_s32(upper, high);
    vst1q_s32(lower, x);
    for (int i = 0; i < W; ++i) {
        block[2 * at + i] = int8_t(upper[i]);
        block[2 * at + W + i] = int8_t(uint8_t(lower[i] & 255));
    }
    return vaddvq_s32(x);
}
inline void transpose(const float* const* rows, int columns, float* out) {
    int c = 0;
    for (; c + W <= columns; c += W) {
        const Floats a = load(rows[0] + c), b = load(rows[1] + c), d = load(rows[2] + c), e = load(rows[3] + c);
        const float64x2_t even = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), odd = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
        const float64x2_t even_too = vreinterpretq_f64_f32(vtrn1q_f32(d, e));
        const float64x2_t odd_too = vreinterpretq_f64_f32(vtrn2q_f32(d, e));
        store(out + c * W, vreinterpretq_f32_f64(vtrn1q_f64(even, even_too)));
        store(out + (c + 1) * W, vreinterpretq_f32_f64(vtrn1q_f64(odd, odd_too)));
        store(out + (c + 2) * W, vreinterpretq_f32_f64(vtrn2q_f64(even, even_too)));
        store(out + (c + 3) * W, vreinterpretq_f32_f64(vtrn2q_f64(odd, odd_too)));
    }
    for (; c < columns; ++c)
        for (int i = 0; i < W; ++i) out[c * W + i] = rows[i][c];
}

inline Bytes load_bytes(const uint8_t* p) { return vld1q_u8(p); }
// The bits of `mask` in every byte, after a shift to the right (or to the left by -shift).
inline Bytes pick(Bytes a, int shift, int mask) {
    return vandq_u8(vshlq_u8(a, vdupq_n_s8(int8_t(-shift))), vdupq_n_u8(uint8_t(mask)));
}
inline Bytes join(Bytes a, Bytes b) { return vorrq_u8(a, b); }
inline Bytes look_up(Bytes places, const int8_t* table) {  // of 16 bytes
    return vqtbl1q_u8(vreinterpretq_u8_s8(vld1q_s8(table)), places);
}
inline uint32x4_t widen(const uint8_t* p) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(word)))));
}
// W bytes as numbers: the bits of `mask` after a shift to the right; all bits, with a sign; the power of two less 128.
inline Floats load_bits(const uint8_t* p, int shift, int mask) {
    const uint32x4_t x = vshlq_u32(widen(p), vdupq_n_s32(-shift));
    return vcvtq_f32_u32(vandq_u32(x, vdupq_n_u32(uint32_t(mask))));
}
inline Floats load_signed_bytes(const uint8_t* p) {
    const int32x4_t x = vreinterpretq_s32_u32(vshlq_n_u32(widen(p), 24));
    return vcvtq_f32_s32(vshrq_n_s32(x, 24));
}
inline Floats load_power(const uint8_t* p) {
    const uint32x4_t one = vdupq_n_u32(1);
    return vreinterpretq_f32_u32(vshlq_n_u32(vsubq_u32(vmaxq_u32(widen(p), one), one), 23));
}
inline Floats load_upper(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }

// Four columns of four rows. No form without a sign has bytes above 127, so all of them may be read with one.
using Weights = int8x16_t;
template <bool kIsSigned>
inline Weights to_weights(Bytes a) { return vreinterpretq_s8_u8(a); }

#ifdef __ARM_FEATURE_MATMUL_INT8

// A product of matrices takes eight columns of two rows, and as its other factor the high and the low bytes of a token.
// Two groups of four columns make one product, so the first of them waits for the second.
struct Sum {
    int32x4_t upper_rows, lower_rows;  // of either two rows: high, low, high, low
    Weights waiting;
    const int8_t* place;  // the activations of the waiting weights; null: none wait
};
inline Sum begin_sum() { return {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s8(0), nullptr}; }
inline void add_products(Sum& s, Weights w, const int8_t* block, int group) {
    const int8_t* place = block + 8 * group;
    if (!s.place) {
        s.waiting = w;
        s.place = place;
        return;
    }
    const int32x4_t first = vreinterpretq_s32_s8(s.waiting), second = vreinterpretq_s32_s8(w);
    const int32x2x2_t bytes = vzip_s32(vreinterpret_s32_s8(vld1_s8(s.place)), vreinterpret_s32_s8(vld1_s8(place)));
    const int8x16_t token = vreinterpretq_s8_s32(vcombine_s32(bytes.val[0], bytes.val[1]));
    s.upper_rows = vmmlaq_s32(s.upper_rows, vreinterpretq_s8_s32(vzip1q_s32(first, second)), token);
    s.lower_rows = vmmlaq_s32(s.lower_rows, vreinterpretq_s8_s32(vzip2q_s32(first, second)), token);
    s.place = nullptr;
}
template <bool kIsSigned>
inline Floats end_sum(const Sum& s, int32_t) {
    const int32x4_t high = vuzp1q_s32(s.upper_rows, s.lower_rows), low = vuzp2q_s32(s.upper_rows, s.lower_rows);
    return vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(high, 8), low));
}

#else

struct Sum {
    int32x4_t high, low;
};
inline Sum begin_sum() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
inline void add_products(Sum& s, Weights w, const int8_t* block, int group) {
    const int8x8_t token = vld1_s8(block + 8 * group);
    s.high = vdotq_lane_s32(s.high, w, token, 0);
    s.low = vdotq_lane_s32(s.low, w, token, 1);
}
template <bool kIsSigned>
inline Floats end_sum(const Sum& s, int32_t) { return vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(s.high, 8), s.low)); }

#endif

// Activations of 8 bits are the low bytes of a block; their high bytes are 0.
using ByteSum = int32x4_t;
inline ByteSum begin_bytes() { return vdupq_n_s32(0); }
inline void add_byte_products(ByteSum& s, Weights w, const int8_t* block, int group) {
    s = vdotq_lane_s32(s, w, vld1_s8(block + 8 * group), 1);
}
inline Floats end_bytes(const ByteSum& s, int32_t) { return vcvtq_f32_s32(s); }

inline Floats noise_bits(uint32_t first, uint32_t whiten, uint32_t multiply) {
    const uint32_t start[W] = {first, first + 1, first + 2, first + 3};
    uint32x4_t x = vmulq_u32(vld1q_u32(start), vdupq_n_u32(0x9E3779B1u));
    x = vmulq_u32(veorq_u32(x, vdupq_n_u32(whiten)), vdupq_n_u32(multiply));
    const auto shifted = [](uint32x4_t v, int count) {
        return vreinterpretq_u32_s32(vshlq_s32(vreinterpretq_s32_u32(v), vdupq_n_s32(-count)));
    };
    x = vmulq_u32(veorq_u32(x, shifted(x, 15)), vdupq_n_u32(0x85EBCA6Bu));
    x = vmulq_u32(veorq_u32(x, shifted(x, 13)), vdupq_n_u32(0xC2B2AE35u));
    return vcvtq_f32_s32(vreinterpretq_s32_u32(veorq_u32(x, shifted(x, 16))));
}
inline void split_exponent(Floats a, Floats& mantissa, Floats& exponent) {
    const uint32x4_t x = vreinterpretq_u32_f32(a);
    exponent = vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(vshrq_n_u32(x, 23)), vdupq_n_s32(127)));
    mantissa = vreinterpretq_f32_u32(vorrq_u32(vandq_u32(x, vdupq_n_u32(0x7fffff)), vdupq_n_u32(0x3f800000)));
}
inline Floats select_less(Floats a, Floats b, Floats yes, Floats no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }

}  // namespace
