// One token of one head of a recurrent layer: decays, updates and reads the head's matrix.

namespace {

// The parts of R vectors from k on, `lanes` of them.
template <bool kWhole>
inline Floats part(const float* p, int lanes) {
    if constexpr (kWhole) return load(p);
    return load_some(p, lanes);
}

// The product of R rows of the decayed matrix with this key.
template <int R, bool kWhole>
inline void ask(const Head& head, const float* rows, int64_t k, int lanes, Floats* sums) {
    const Floats fade = part<kWhole>(head.fade + k, lanes), key = part<kWhole>(head.key + k, lanes);
    for (int r = 0; r < R; ++r)
        sums[r] = fma(mul(part<kWhole>(rows + r * head.key_dim + k, lanes), fade), key, sums[r]);
}

template <int R, bool kWhole>
inline void write_and_read(const Head& head, float* rows, int64_t k, int lanes, const Floats* updates, Floats* sums) {
    const Floats fade = part<kWhole>(head.fade + k, lanes), key = part<kWhole>(head.key + k, lanes);
    const Floats query = part<kWhole>(head.query + k, lanes);
    for (int r = 0; r < R; ++r) {
        float* row = rows + r * head.key_dim + k;
        const Floats s = fma(updates[r], key, mul(part<kWhole>(row, lanes), fade));
        if constexpr (kWhole) store(row, s);
        else store_some(row, s, lanes);
        sums[r] = fma(s, query, sums[r]);
    }
}

// R values at a time: they share the loads of key, query and decay, and their sums are independent.
template <int R>
void recur_rows(const Head& head, int64_t v) {
    const int64_t n = head.key_dim, whole = n - n % W;
    float* rows = head.matrix + v * n;
    Floats updates[R], sums[R];
    for (int r = 0; r < R; ++r) sums[r] = splat(0);
    if (head.is_delta) {  // the delta rule subtracts the value stored for this key
        for (int64_t k = 0; k < whole; k += W) ask<R, true>(head, rows, k, W, sums);
        if (whole < n) ask<R, false>(head, rows, whole, int(n - whole), sums);
    }
    for (int r = 0; r < R; ++r) {
        const float value = head.value[v + r];
        updates[r] = splat(head.is_delta ? head.beta * (value - total(sums[r])) : value);
        sums[r] = splat(0);
    }
    for (int64_t k = 0; k < whole; k += W) write_and_read<R, true>(head, rows, k, W, updates, sums);
    if (whole < n) write_and_read<R, false>(head, rows, whole, int(n - whole), updates, sums);
    for (int r = 0; r < R; ++r) head.out[v + r] = total(sums[r]);
}

void recur(const Head& head) {
    int64_t v = 0;
    for (; v + 4 <= head.value_dim; v += 4) recur_rows<4>(head, v);
    for (; v < head.value_dim; ++v) recur_rows<1>(head, v);
}

}  // namespace
