// The functions that Python calls, with C linkage and plain types; `quire/kernels/native/library.py` declares them.
#include <math.h>
#include <string.h>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__)
#include <sys/sysctl.h>
#endif

#include <algorithm>
#include <new>
#include <vector>

#include "experts.h"
#include "adapters/lora.h"
#include "mixture.h"
#include "pack.h"
#include "recurrent.h"
#include "stack.h"

#ifndef QUIRE_SOURCES
#define QUIRE_SOURCES "unknown"
#endif

using namespace quire;

namespace {

#if defined(__aarch64__) && defined(__linux__)
bool has_dot_products() { return getauxval(AT_HWCAP) >> 20 & 1; }    // HWCAP_ASIMDDP
bool has_byte_matrices() { return getauxval(AT_HWCAP2) >> 13 & 1; }  // HWCAP2_I8MM
#elif defined(__aarch64__)
bool has_feature(const char* name) {
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname(name, &found, &size, nullptr, 0) == 0 && found;
}
bool has_dot_products() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_byte_matrices() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#endif

const Kernels* find_kernels(const char* name) {
    if (strcmp(name, "portable") == 0) return portable_kernels();
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
    if (strcmp(name, "avx512") == 0) return avx512 ? avx512_kernels() : nullptr;
    if (strcmp(name, "avx2") == 0) return avx2 ? avx2_kernels() : nullptr;
#elif defined(__aarch64__)
    if (strcmp(name, "dotprod") == 0) return has_dot_products() ? dotprod_kernels() : nullptr;
    if (strcmp(name, "i8mm") == 0) return has_dot_products() && has_byte_matrices() ? i8mm_kernels() : nullptr;
#endif
    return nullptr;
}

uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

constexpr int32_t kDone = 0, kNoMemory = 1, kHookFailed = 2;

// Return codes of calls that allocate memory or call hooks. Python raises an error for any code but 0.
template <class Work>
int32_t attempt(Work&& work) {
    try {
        work();
        return kDone;
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    } catch (const HookFailed&) {
        return kHookFailed;
    }
}

}  // namespace

extern "C" {

// The digest of the sources that the library was built from; Python compares it with that of its own sources.
const char* quire_sources() { return QUIRE_SOURCES; }

// `isa`: avx512, avx2, i8mm, dotprod or portable. Returns null if the machine or the build does not have it.
Context* quire_open(const char* isa, int32_t num_threads) {
    const Kernels* kernels = find_kernels(isa);
    return kernels ? new (std::nothrow) Context(kernels, num_threads) : nullptr;
}

void quire_close(Context* context) { delete context; }

int32_t quire_lanes(Context* context) { return context->kernels->lanes; }

int64_t quire_matrix_bytes(const Matrix* m) { return num_tiles(*m) * tile_bytes(*m); }

// Fills a matrix's memory. `from_floats`: the source is float32 rows, which are quantized to the matrix's form first.
void quire_pack(Context* context, const Matrix* m, const uint8_t* source, const int64_t* order, int32_t from_floats,
                uint8_t* out) {
    std::lock_guard<std::mutex> lock(context->busy);
    Run run(context->pool);
    context->pool.share(num_tiles(*m), 16, [&](int64_t first, int64_t stop, int) {
        const int64_t row_bytes = source_row_bytes(m->form, m->columns);
        std::vector<uint8_t> encoded(from_floats ? size_t(row_bytes * m->lanes) : 0);
        for (int64_t tile = first; tile < stop; ++tile) {
            uint8_t* to = out + tile * tile_bytes(*m);
            if (!from_floats) {
                pack_tile(*m, tile, source, order, to);
                continue;
            }
            Matrix part = *m;
            part.rows = std::min<int64_t>(m->lanes, m->rows - tile * m->lanes);
            for (int64_t r = 0; r < part.rows; ++r) {
                const int64_t row = tile * m->lanes + r;
                const float* x = reinterpret_cast<const float*>(source) + (order ? order[row] : row) * m->columns;
                encode_row(m->form, x, m->columns, encoded.data() + r * row_bytes);
            }
            pack_tile(part, 0, encoded.data(), nullptr, to);
        }
    });
}

void quire_rows(Context* context, const Matrix* m, const int64_t* ids, int64_t count, float* out) {
    std::lock_guard<std::mutex> lock(context->busy);
    for (int64_t i = 0; i < count; ++i) unpack_row(*m, ids[i], out + i * m->columns);
}

void quire_norm(Context* context, const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* out) {
    for (int64_t i = 0; i < rows; ++i) context->kernels->norm(x + i * n, weight, eps, n, out + i * n);
}

void quire_silu_mul(Context* context, const float* gate_up, int64_t rows, int64_t n, float* out) {
    for (int64_t i = 0; i < rows; ++i)
        context->kernels->activate(Activation::kSilu, gate_up + i * 2 * n, gate_up + i * 2 * n + n, n, out + i * n);
}

// `adapters`: called for the output as that of the head; or null.
int32_t quire_linear(Context* context, const LinearDesc* linear, const float* x, int64_t num_tokens, const float* norm,
                     float eps, int32_t silu, const float* residual, float* out, const AdaptersDesc* adapters) {
    return attempt([&] { run_linear(*context, *linear, x, num_tokens, norm, eps, silu != 0, residual, out, adapters); });
}

// The hook of LoRA adapters; `argument` is a LoraDesc.
int32_t quire_lora(void* argument, const ProductDesc* product) {
    return attempt([&] { run_lora(*static_cast<const LoraDesc*>(argument), *product); });
}

// `k` and `v`: a layer's planes. Where the step's group has a packed form, `k` is its entries and `v` is not read.
int32_t quire_rope_write(Context* context, const StepDesc* step, float* qkv, const float* q_norm, const float* k_norm,
                         float eps, const float* frequencies, float rope_scale, int64_t num_heads, int64_t num_kv_heads,
                         int64_t head_dim, void* k, void* v) {
    return attempt([&] {
        run_rope_write(*context, *step, qkv, q_norm, k_norm, eps, frequencies, rope_scale, num_heads, num_kv_heads,
                       head_dim, k, v);
    });
}

int32_t quire_attend(Context* context, const StepDesc* step, const float* q, int64_t num_heads, int64_t num_kv_heads,
                     int64_t head_dim, void* k, void* v, float scale, float softcap, const float* sinks,
                     float* out) {
    return attempt([&] {
        run_attention(*context, *step, q, num_heads, num_kv_heads, head_dim, k, v, scale, softcap, sinks, out);
    });
}

int32_t quire_stack(Context* context, const StackDesc* stack, const StepDesc* step, float* out) {
    return attempt([&] { run_stack(*context, *stack, *step, out); });
}

int32_t quire_experts(Context* context, const ExpertsDesc* experts, const float* x, int64_t num_tokens,
                      const int64_t* chosen, const float* weights, int64_t num_sent, const float* residual, float* out) {
    return attempt([&] { run_experts(*context, *experts, x, num_tokens, chosen, weights, num_sent, residual, out); });
}

int32_t quire_mixture(Context* context, const MixtureDesc* mixture, const float* x, int64_t num_tokens, float* onto) {
    return attempt([&] {
        std::lock_guard<std::mutex> lock(context->busy);
        Run run(context->pool);
        run_mixture(*context, *mixture, x, num_tokens, onto, Hooks());
    });
}

int32_t quire_recurrent(Context* context, const RecurrentDesc* layer, const RowsDesc* rows, const Columns* mixed,
                        const Columns* gate, const Columns* beta, const Columns* decay, float* out) {
    return attempt([&] { run_recurrent(*context, *layer, *rows, *mixed, *gate, *beta, *decay, out); });
}

int32_t quire_short_conv(Context* context, const float* conv, const float* bias, int64_t channels, int64_t conv_len,
                         const RowsDesc* rows, const Columns* x, float* out) {
    return attempt([&] { run_short_conv(*context, conv, bias, channels, conv_len, *rows, *x, out); });
}

// A token for each row of logits: greedy where inv_temperature is 0, else by noise of (key, position).
int32_t quire_choose(Context* context, const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                     const int64_t* keys, const int64_t* positions, const float* inv_temperature, const uint32_t* masks,
                     int64_t mask_stride, int64_t* tokens, uint8_t* bad) {
    return attempt([&] {
        std::lock_guard<std::mutex> lock(context->busy);
        constexpr int64_t kChunk = 8192;
        const int64_t chunks = (vocab + kChunk - 1) / kChunk;
        std::vector<Choice> choices(size_t(rows * chunks));
        {
            Run run(context->pool);
            context->pool.share(rows * chunks, 1, [&](int64_t first, int64_t stop, int) {
                for (int64_t i = first; i < stop; ++i) {
                    const int64_t row = i / chunks, chunk = i % chunks;
                    const uint64_t words = mix(uint64_t(keys[row]) + uint64_t(positions[row]) * 0x9E3779B97F4A7C15u);
                    Choice& choice = choices[size_t(i)];
                    choice.logits = logits + row * stride;
                    choice.first = chunk * kChunk;
                    choice.stop = std::min(vocab, choice.first + kChunk);
                    choice.inv_temperature = inv_temperature[row];
                    choice.whiten = uint32_t(words);
                    choice.multiply = uint32_t(words >> 32) | 1;
                    choice.mask = masks ? masks + row * mask_stride : nullptr;
                    context->kernels->choose(choice);
                }
            });
        }
        for (int64_t row = 0; row < rows; ++row) {
            float best = -INFINITY;
            tokens[row] = 0;
            bad[row] = 0;
            for (int64_t chunk = 0; chunk < chunks; ++chunk) {
                const Choice& choice = choices[size_t(row * chunks + chunk)];
                if (choice.best > best) {
                    best = choice.best;
                    tokens[row] = choice.token;
                }
                bad[row] |= choice.unfit;
            }
            if (best == -INFINITY) bad[row] = 1;
            if (bad[row]) tokens[row] = 0;
        }
    });
}

}  // extern "C"
