// Layers and whole models on top of the kernels, as one call from Python runs them. `quire/kernels/native/library.py`
// fills the structs; the order of fields must be equal there.
#pragma once

#include <stdlib.h>

#include <mutex>
#include <new>
#include <vector>

#include "hooks.h"
#include "layout.h"
#include "pool.h"

namespace quire {

struct LinearDesc {
    const Matrix* parts;  // stacked by rows
    int64_t num_parts;
    const float* bias;  // or null
};

struct NormDesc {
    const float* weight;  // null: no norm here
    const float* bias;    // or null
};

struct MixtureDesc;  // mixture.h

struct LayerDesc {
    NormDesc before_attention, after_attention, before_mlp, after_mlp;
    LinearDesc qkv, out, up, down;  // up: gate and up, where there is a gate
    const float *q_norm, *k_norm;   // or null
    const float* sinks;             // [heads], or null
    const MixtureDesc* mixture;     // in place of up and down, or null
    int64_t group, cache_index, rope;
};

struct StackDesc {
    Matrix embedding;
    const LayerDesc* layers;
    int64_t num_layers;
    NormDesc norm;  // without a weight: the stream is the result
    const float* frequencies;  // [ropes, head_dim / 2]
    const float* rope_scales;  // [ropes]
    int64_t num_ropes, width, num_heads, num_kv_heads, head_dim, inner_width;
    Activation activation;
    int32_t has_gate, takes_mean;      // takes_mean: norms are layer norms
    int32_t is_parallel, is_wide;      // both blocks read the layer's input; QK norm over all heads
    float eps, attention_scale, softcap, embedding_scale, residual_scale;
    const ReductionDesc* reduction;  // or null
};

struct GroupDesc {  // one paged group in one step
    const int32_t* table;  // [rows, table_stride]
    int64_t table_stride;
    const int64_t* slots;  // [tokens]
    void* cache;           // floats [layers, 2, plane], or entries [layers, plane]
    int64_t plane;         // elements of a plane
    int64_t page_tokens, window;
    CacheForm form;
};

struct StepDesc {
    const int64_t* tokens;     // null if no stack runs
    const int64_t* positions;  // [tokens]
    const int32_t* query_starts;  // [rows + 1]
    int64_t num_tokens, num_rows;
    const GroupDesc* groups;
    const int64_t* wanted;  // tokens whose hidden states are wanted, ascending
    int64_t num_wanted;     // -1: all
    const AdaptersDesc* adapters;  // or null
    const float* vectors;  // [tokens, width]: the tokens' embeddings, scaled; null: the stack looks them up
};

// Memory for the duration of one call, which never shrinks. Throws std::bad_alloc and is empty afterwards.
class Buffer {
  public:
    ~Buffer() { free(data_); }
    void* take(size_t bytes) {
        if (bytes > size_) {
            const size_t more = (bytes + bytes / 4 + 63) / 64 * 64;
            free(data_);
            size_ = 0;
            data_ = aligned_alloc(64, more);
            if (!data_) throw std::bad_alloc();
            size_ = more;
        }
        return data_;
    }
    template <class T>
    T* take_as(int64_t count) { return static_cast<T*>(take(sizeof(T) * size_t(count))); }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

struct LoraEntry;

struct LoraJob {  // one matrix pair of an adapter and neighbouring rows that use it
    const LoraEntry* entry;
    int64_t row, count;
    int64_t first_tile;  // of the second matrix, among the tiles of all jobs
    float* inner;        // [count, rank]
};

// The kernels, threads and working memory of a call. Only one call may run at a time.
struct Context {
    Context(const Kernels* chosen, int num_threads) : kernels(chosen), pool(num_threads) {}
    const Kernels* kernels;
    Pool pool;
    std::mutex busy;
    Buffer floats, blocks, factors, scratch, stream, qkv, attended, inner, branch, cos, sin, units, last_units, pieces,
        parts, convolved, heads, places, jobs,
        shares, expert_inner, normed, logits, chosen, weights, ranks, routed, bytes, byte_factors, lora_inner;
    std::vector<LoraJob> lora_jobs;
};

void run_linear(Context& context, const LinearDesc& linear, const float* x, int64_t num_tokens, const float* norm,
                float eps, bool silu, const float* residual, float* out, const AdaptersDesc* adapters);

void run_stack(Context& context, const StackDesc& stack, const StepDesc& step, float* out);

void run_attention(Context& context, const StepDesc& step, const float* q, int64_t num_heads, int64_t num_kv_heads,
                   int64_t head_dim, void* k, void* v, float scale, float softcap, const float* sinks, float* out);

void run_rope_write(Context& context, const StepDesc& step, float* qkv, const float* q_norm, const float* k_norm,
                    float eps, const float* frequencies, float rope_scale, int64_t num_heads, int64_t num_kv_heads,
                    int64_t head_dim, void* k, void* v);

}  // namespace quire
