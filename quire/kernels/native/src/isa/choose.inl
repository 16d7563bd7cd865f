// The best token of a range of the vocabulary: the largest logit, or the largest of logit / temperature + noise. The
// noise is that of `quire.sampling.noise`, up to the last bits of the logarithms.

namespace {

inline Floats gumbel(Floats u) {  // -log(-log(1 - u)) for u in [0, 1); accurate near 0
    Floats p = splat(0.25f);
    static const float kSeries[] = {0.33333333f, 0.5f, 1.0f};
    for (float c : kSeries) p = fma(p, u, splat(c));
    Floats inner = sub(splat(0), logarithm(sub(splat(1.0f), u)));
    inner = select_less(u, splat(0.015625f), mul(u, p), inner);
    return sub(splat(0), logarithm(add(inner, splat(2.3283064365386963e-10f))));
}

void choose(Choice& choice) {
    const bool greedy = choice.inv_temperature == 0;
    const float to_unit = 4.656612873077393e-10f * (1.0f - 5.9604645e-08f);
    Floats scale = splat(greedy ? 1.0f : choice.inv_temperature), infinity = splat(INFINITY), lowest = splat(-INFINITY);
    Floats best = lowest, token = splat(0), unfit = splat(0);
    float lanes[W];
    for (int i = 0; i < W; ++i) lanes[i] = float(i);
    const Floats step = load(lanes);
    for (int64_t at = choice.first; at < choice.stop; at += W) {
        Floats x;
        if (at + W <= choice.stop) {
            x = load(choice.logits + at);
        } else {
            for (int i = 0; i < W; ++i) lanes[i] = at + i < choice.stop ? choice.logits[at + i] : -INFINITY;
            x = load(lanes);
        }
        unfit = larger(unfit, select_less(x, infinity, splat(0), splat(1)));
        x = mul(select_less(x, infinity, x, lowest), scale);
        if (choice.mask) {
            for (int i = 0; i < W; ++i) {
                int64_t id = at + i < choice.stop ? at + i : choice.stop - 1;
                lanes[i] = choice.mask[id / 32] >> (id % 32) & 1 ? 1.0f : 0.0f;
            }
            x = select_less(load(lanes), splat(0.5f), lowest, x);
        }
        if (!greedy) x = add(x, gumbel(mul(noise_bits(uint32_t(at), choice.whiten, choice.multiply), splat(to_unit))));
        token = select_less(best, x, add(splat(float(at)), step), token);
        best = larger(best, x);
    }
    float scores[W], tokens[W];
    store(scores, best);
    store(tokens, token);
    choice.best = -INFINITY;
    choice.token = 0;
    for (int i = 0; i < W; ++i) {
        if (scores[i] > choice.best || (scores[i] == choice.best && scores[i] > -INFINITY && tokens[i] < choice.token)) {
            choice.best = scores[i];
            choice.token = int64_t(tokens[i]);
        }
    }
    choice.unfit = largest(unfit) > 0;
}

}  // namespace
