// Runs products and attention of an aarch64 build of the native library, for `test_native_aarch64.py`.
//   driver product IN OUT: IN has form, rows, columns, tokens (int32), the matrix in GGUF's blocks and activations;
//   driver attend IN OUT: IN has cache form, tokens, heads, KV heads, head size (int32), and queries, keys and values.
// OUT gets the results of the portable kernels, of dotprod and of i8mm, one after the other.
#include <stdio.h>
#include <string.h>

#include <vector>

#include "pack.h"
#include "stack.h"

using namespace quire;

extern "C" {
Context* quire_open(const char* isa, int32_t num_threads);
int32_t quire_lanes(Context* context);
int64_t quire_matrix_bytes(const Matrix* m);
void quire_pack(Context*, const Matrix*, const uint8_t* source, const int64_t* order, int32_t from_floats, uint8_t* out);
int32_t quire_linear(Context*, const LinearDesc*, const float* x, int64_t num_tokens, const float* norm, float eps,
                     int32_t silu, const float* residual, float* out, const AdaptersDesc*);
int32_t quire_rope_write(Context*, const StepDesc*, float* qkv, const float*, const float*, float eps,
                         const float* frequencies, float rope_scale, int64_t num_heads, int64_t num_kv_heads,
                         int64_t head_dim, void* k, void* v);
int32_t quire_attend(Context*, const StepDesc*, const float* q, int64_t num_heads, int64_t num_kv_heads,
                     int64_t head_dim, void* k, void* v, float scale, float softcap, const float* sinks, float* out);
}

namespace {

std::vector<uint8_t> read_rest(FILE* file) {
    std::vector<uint8_t> bytes;
    uint8_t part[1 << 14];
    for (size_t count; (count = fread(part, 1, sizeof part, file)) > 0;) bytes.insert(bytes.end(), part, part + count);
    return bytes;
}

void product(Context* context, const int32_t* sizes, const std::vector<uint8_t>& given, std::vector<float>& out) {
    const int64_t tokens = sizes[3];
    Matrix m = {Form(sizes[0]), quire_lanes(context), sizes[1], sizes[2], nullptr};
    const size_t source = size_t(source_row_bytes(m.form, m.columns) * m.rows);
    std::vector<uint8_t> packed(size_t(quire_matrix_bytes(&m)) + 64);
    quire_pack(context, &m, given.data(), nullptr, 0, packed.data());
    m.data = packed.data();
    std::vector<float> x(size_t(tokens * m.columns));
    memcpy(x.data(), given.data() + source, x.size() * sizeof(float));
    const LinearDesc linear = {&m, 1, nullptr};
    out.resize(size_t(tokens * m.rows));
    quire_linear(context, &linear, x.data(), tokens, nullptr, 0, 0, nullptr, out.data(), nullptr);
}

void attend(Context* context, const int32_t* sizes, const std::vector<uint8_t>& given, std::vector<float>& out) {
    const int64_t tokens = sizes[1], heads = sizes[2], kv_heads = sizes[3], dim = sizes[4], page_tokens = 16;
    const int64_t pages = (tokens + page_tokens - 1) / page_tokens, width = (heads + 2 * kv_heads) * dim;
    const CacheForm form = CacheForm(sizes[0]);
    std::vector<float> qkv(size_t(tokens * width)), q(size_t(tokens * heads * dim)), frequencies(size_t(dim / 2), 0.01f);
    memcpy(qkv.data(), given.data(), qkv.size() * sizeof(float));
    const size_t floats = size_t(pages * page_tokens * kv_heads * dim);
    std::vector<float> k(floats), v(floats);
    std::vector<uint8_t> entries(size_t(pages * page_tokens * kv_heads * entry_bytes(form, dim)));
    std::vector<int32_t> table;
    std::vector<int64_t> slots, positions;
    for (int64_t p = 0; p < pages; ++p) table.push_back(int32_t(pages - 1 - p));
    for (int64_t t = 0; t < tokens; ++t) {
        positions.push_back(t);
        slots.push_back(table[size_t(t / page_tokens)] * page_tokens + t % page_tokens);
    }
    const int32_t starts[2] = {0, int32_t(tokens)};
    GroupDesc group = {table.data(), pages, slots.data(), nullptr, 0, page_tokens, 0, form};
    StepDesc step = {nullptr, positions.data(), starts, tokens, 1, &group, nullptr, -1, nullptr, nullptr};
    void* first = form == CacheForm::kFloats ? static_cast<void*>(k.data()) : entries.data();
    quire_rope_write(context, &step, qkv.data(), nullptr, nullptr, 0, frequencies.data(), 1, heads, kv_heads, dim, first,
                     v.data());
    for (int64_t t = 0; t < tokens; ++t)
        memcpy(&q[size_t(t * heads * dim)], &qkv[size_t(t * width)], sizeof(float) * size_t(heads * dim));
    out.resize(q.size());
    quire_attend(context, &step, q.data(), heads, kv_heads, dim, first, v.data(), 0.125f, 0, nullptr, out.data());
}

}  // namespace

int main(int argc, char** argv) {
    FILE* in = argc == 4 ? fopen(argv[2], "rb") : nullptr;
    FILE* to = in ? fopen(argv[3], "wb") : nullptr;
    if (!to) return 2;
    const bool is_product = strcmp(argv[1], "product") == 0;
    int32_t sizes[5];
    const size_t count = is_product ? 4 : 5;
    if (fread(sizes, sizeof(int32_t), count, in) != count) return 3;
    const std::vector<uint8_t> given = read_rest(in);
    for (const char* isa : {"portable", "dotprod", "i8mm"}) {
        Context* context = quire_open(isa, 2);
        if (!context) return 4;
        std::vector<float> out;
        (is_product ? product : attend)(context, sizes, given, out);
        fwrite(out.data(), sizeof(float), out.size(), to);
    }
    return fclose(to) == 0 ? 0 : 5;
}
