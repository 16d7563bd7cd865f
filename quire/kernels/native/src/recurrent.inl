// One token of one head of a recurrent layer: its matrix fades, takes something up, and is read.

namespace {

void recur(const Head& head) {
    const int64_t n = head.key_dim;
    const Floats zero = splat(0);
    for (int64_t v = 0; v < head.value_dim; ++v) {
        float* row = head.matrix + v * n;
        float update = head.value[v];
        if (head.is_delta) {  // what the matrix has for this key already is not written again
            Floats sum = zero;
            int64_t k = 0;
            for (; k + W <= n; k += W) sum = fma(mul(load(row + k), load(head.fade + k)), load(head.key + k), sum);
            if (k < n) {
                const int rest = int(n - k);
                const Floats faded = mul(load_some(row + k, rest), load_some(head.fade + k, rest));
                sum = fma(faded, load_some(head.key + k, rest), sum);
            }
            update = head.beta * (update - total(sum));
        }
        const Floats u = splat(update);
        Floats sum = zero;
        int64_t k = 0;
        for (; k + W <= n; k += W) {
            const Floats s = fma(u, load(head.key + k), mul(load(row + k), load(head.fade + k)));
            store(row + k, s);
            sum = fma(s, load(head.query + k), sum);
        }
        if (k < n) {
            const int rest = int(n - k);
            const Floats faded = mul(load_some(row + k, rest), load_some(head.fade + k, rest));
            const Floats s = fma(u, load_some(head.key + k, rest), faded);
            store_some(row + k, s, rest);
            sum = fma(s, load_some(head.query + k, rest), sum);
        }
        head.out[v] = total(sum);
    }
}

}  // namespace
