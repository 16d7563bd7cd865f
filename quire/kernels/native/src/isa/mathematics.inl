// Exponential and logarithm of a vector, to about 1e-7. Included after a `simd_*.h`.

namespace {

inline Floats exponential(Floats x) {
    x = smaller(splat(88.0f), larger(splat(-87.0f), x));  // this order preserves NaN
    Floats n = nearest(mul(x, splat(1.44269504f)));
    Floats r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);  // ln 2 in two parts
    Floats p = splat(1.0f / 5040);
    static const float kSeries[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (float c : kSeries) p = fma(p, r, splat(c));
    return scale_by_power(p, n);
}

inline Floats logarithm(Floats x) {  // of normal positive numbers
    Floats m, e;
    split_exponent(x, m, e);
    Floats big = splat(1.41421356f);
    e = select_less(big, m, add(e, splat(1.0f)), e);
    m = select_less(big, m, mul(m, splat(0.5f)), m);
    Floats f = sub(m, splat(1.0f)), s = div(f, add(f, splat(2.0f))), z = mul(s, s);
    Floats p = splat(2.0f / 9);
    static const float kSeries[] = {2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f};
    for (float c : kSeries) p = fma(p, z, splat(c));
    return fma(e, splat(0.693147181f), mul(s, p));
}

}  // namespace
