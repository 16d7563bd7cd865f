// Entries of packed KV caches: the key and the value of one token and head in 8 or 4 bits. Both are rotated by a Hadamard
// matrix first, which spreads the few large elements of a head over all of them. `kernels/reference/packed_cache.py`
// writes the same bytes.

namespace {

// Multiplies a head by the Hadamard matrix of the largest power of two that divides it, block by block. The matrix is
// its own inverse.
void rotate(float* x, int64_t head_dim) {
    const int64_t size = head_dim & -head_dim;
    for (int64_t half = 1; half < size; half *= 2) {
        for (int64_t first = 0; first < head_dim; first += 2 * half) {
            float *a = x + first, *b = a + half;
            int64_t i = 0;
            for (; i + W <= half; i += W) {
                const Floats u = load(a + i), v = load(b + i);
                store(a + i, add(u, v));
                store(b + i, sub(u, v));
            }
            for (; i < half; ++i) {
                const float u = a[i], v = b[i];
                a[i] = u + v;
                b[i] = u - v;
            }
        }
    }
    const Floats scale = splat(1.0f / sqrtf(float(size)));
    for (int64_t i = 0; i < head_dim; i += W) store(x + i, mul(load(x + i), scale));  // a head has a multiple of 32
}

inline uint16_t to_upper_half(float x) {  // the nearest number with the upper 16 bits of a float alone, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_upper_half(const uint8_t* p) {
    uint16_t half;
    memcpy(&half, p, 2);
    const uint32_t bits = uint32_t(half) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// Numbers from -127 to 127 and their scale.
void write_bytes(const float* x, int64_t head_dim, uint8_t* out) {
    float most = 0;
    for (int64_t i = 0; i < head_dim; ++i) {
        const float size = fabsf(x[i]);
        if (!(size <= most)) most = size;  // NaN stays
    }
    const uint16_t half = to_upper_half(most * (1.0f / 127.0f));
    memcpy(out + head_dim, &half, 2);
    const float scale = from_upper_half(out + head_dim), inverse = scale > 0 && scale < INFINITY ? 1.0f / scale : 0.0f;
    for (int64_t i = 0; i < head_dim; ++i) {
        float number = nearbyintf(x[i] * inverse);
        number = number > 127.0f ? 127.0f : number > -127.0f ? number : -127.0f;
        out[i] = uint8_t(int8_t(number));
    }
}

// Numbers from 0 to 15, their scale and their least value. Of 32 columns byte i holds columns i and 16 + i.
void write_nibbles(const float* x, int64_t head_dim, uint8_t* out) {
    float low = x[0], high = x[0], bad = 0;
    for (int64_t i = 0; i < head_dim; ++i) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        bad += x[i] * 0.0f;  // NaN if any element is NaN or infinite
    }
    uint8_t* tail = out + head_dim / 2;
    const uint16_t least_half = to_upper_half(low + bad);
    memcpy(tail + 2, &least_half, 2);
    const float least = from_upper_half(tail + 2);
    const uint16_t half = to_upper_half((high - least) * (1.0f / 15.0f));
    memcpy(tail, &half, 2);
    const float scale = from_upper_half(tail), inverse = scale > 0 && scale < INFINITY ? 1.0f / scale : 0.0f;
    const auto number = [&](float value) {
        const float n = nearbyintf((value - least) * inverse);
        return uint8_t(n > 15.0f ? 15.0f : n > 0.0f ? n : 0.0f);
    };
    for (int64_t i = 0; i < head_dim / 2; ++i) {
        const int64_t column = i / 16 * 32 + i % 16;
        out[i] = uint8_t(number(x[column]) | number(x[column + 16]) << 4);
    }
}

void write_entry(CacheForm form, float* key, float* value, int64_t head_dim, uint8_t* entry) {
    rotate(key, head_dim);
    rotate(value, head_dim);
    uint8_t* second = entry + side_bytes(key_bits(form), head_dim);
    (key_bits(form) == 8 ? write_bytes : write_nibbles)(key, head_dim, entry);
    (value_bits(form) == 8 ? write_bytes : write_nibbles)(value, head_dim, second);
}

}  // namespace
