// What every instruction set implements, and the plain structs it works on. `product.inl`, `rows.inl`, `attend.inl`,
// `choose.inl` and `recurrent.inl` hold the code; each `isa_*.cpp` compiles it once over its own vectors and fills one `Kernels`.
// Plain C types only: nothing here may pull in a template that the linker could take from the wrong instruction set.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace quire {

constexpr int kBlock = 32;        // columns that share a scale
constexpr int kQueryTokens = 16;  // tokens of one row that attention takes at a time
constexpr int kKeyBlock = 64;     // keys that attention takes at a time
constexpr int kSplitKeys = 512;   // keys of one piece; pieces are summed separately and merged
constexpr int kSplitTokens = 2;   // at most this many tokens with many keys: threads share the pieces
constexpr int kFewTasks = 4;      // with fewer attention tasks per thread: threads share the pieces of more tokens, too

// The types of GGUF that have kernels; `layout.h` says how each lies in memory. The numbers are those of `library.py`.
enum class Form : int32_t {
    kF32 = 0,
    kF16 = 1,
    kQ8_0 = 2,
    kQ4_0 = 3,
    kQ4_1 = 4,
    kBF16 = 5,
    kQ5_0 = 6,
    kQ5_1 = 7,
    kIQ4_NL = 8,
    kMXFP4 = 9,
    kQ4_K = 10,
    kQ5_K = 11,
    kQ6_K = 12,
    kQ3_K = 13,
    kQ2_K = 14,
    kIQ4_XS = 15,
    kW8A8 = 16,  // no type of GGUF: bytes with a sign, a float32 scale for each row; activations are bytes, too
};

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2, kRelu = 3, kRelu2 = 4, kSigmoid = 5 };

// How the KV cache holds a token's key and value of one head. Packed forms are entries of bytes: the key's numbers, its
// scale, the value's numbers, its scale. `cache_forms.py` has the same layout.
enum class CacheForm : int32_t { kFloats = 0, kInt8 = 1, kK8V4 = 2, kQ4 = 3 };

constexpr int key_bits(CacheForm form) { return form == CacheForm::kQ4 ? 4 : 8; }
constexpr int value_bits(CacheForm form) { return form == CacheForm::kInt8 ? 8 : 4; }
// Numbers of 8 bits have a sign and a scale of 16 bits; numbers of 4 bits have a scale and a least value.
constexpr int64_t number_bytes(int bits, int64_t head_dim) { return head_dim * bits / 8; }
constexpr int64_t side_bytes(int bits, int64_t head_dim) { return number_bytes(bits, head_dim) + (bits == 8 ? 2 : 4); }
constexpr int64_t entry_bytes(CacheForm form, int64_t head_dim) {
    return side_bytes(key_bits(form), head_dim) + side_bytes(value_bits(form), head_dim);
}

// A matrix in tiles of `lanes` rows. Within a tile lie, unit by unit, the scales of all its rows and then the values,
// four columns of each row in turn (one column in turn for float forms): a vector holds the same columns of all rows,
// so that a product needs no sum across lanes. Rows past the last are zeros.
struct Matrix {
    Form form;
    int32_t lanes;
    int64_t rows, columns;
    const uint8_t* data;
};

// 32 activations as whole numbers of 16 bits, to be multiplied by the block's scale. One line of the cache; how they lie in
// it is up to the instruction set (`store_whole`).
struct Block {
    int8_t bytes[2 * kBlock];
};

struct Factors {  // of a block
    float scale;
    float sum;       // of all its values, with their scale
    int32_t offset;  // -128 times the sum of all its values without it
    float halves[2];  // `sum` of its first 16 values and of the others
};

struct ByteFactors {  // of a block whose activations are whole numbers of 8 bits
    float scale;
    int32_t offset;  // -128 times the sum of its numbers
};

// Activations of some tokens, as floats, as blocks and as bytes; a product reads what its matrix's form needs.
struct Inputs {
    const float* x;          // [tokens, columns]
    const Block* blocks;     // [tokens, columns / 32]
    const Factors* factors;  // [columns / 32, tokens]: neighbours' lie side by side
    const Block* bytes;      // [tokens, columns / 32]: numbers of 8 bits, where blocks have those of 16
    const ByteFactors* byte_factors;  // [columns / 32, tokens]
    int64_t num_tokens;
};

// Where a product goes: token t, row r of the matrix lands at out[t * stride + r] (+ bias[r], + residual alike).
struct Target {
    float* out;
    int64_t stride;
    const float* bias;      // or null
    const float* residual;  // or null; same stride; may be `out`
};

// Tokens of one row that attend together to one key-value head.
struct Queries {
    const float* q;  // [tokens, stride], at the group's first head
    float* out;      // the same
    int64_t q_stride, out_stride;
    int32_t num_tokens, num_heads;  // query heads of the group
    int64_t first_position;
    float* part;  // null, or where one piece of the keys leaves `part_floats` for each query instead of an output
};

inline int64_t part_floats(int head_dim) { return head_dim + 2; }  // largest score, sum of weights, weighted values

struct Keys {
    const float* k;  // the layer's plane at this kv head: [pages, page_tokens, kv_heads, head_dim]
    const float* v;
    const int32_t* pages;  // of the row
    int64_t token_stride;  // kv_heads * head_dim, or kv_heads * entry_bytes
    int32_t page_tokens, head_dim;
    int64_t window;  // 0: none
    float scale, softcap;  // softcap 0: none
    const float* sinks;    // [query heads]: attention sinks, logits without a value; or null
    int64_t first, stop;   // the piece of keys to process; keys that a token may not see have weight 0
    CacheForm form;
    const uint8_t* entries;  // packed forms: in place of k and v, [pages, page_tokens, kv_heads, entry_bytes]
};

inline int64_t attend_scratch_floats(int head_dim, int num_heads) {
    int64_t queries = int64_t(kQueryTokens) * num_heads;
    const int64_t rounded = (head_dim / kBlock + 1) * int64_t(sizeof(Block) + sizeof(Factors)) / int64_t(sizeof(float));
    return kKeyBlock * (head_dim + 16) + queries * (kKeyBlock + head_dim + 16 + 4 + part_floats(head_dim) + rounded) + 256;
}

struct Choice {
    const float* logits;   // [vocab]
    int64_t first, stop;   // token ids to look at
    float inv_temperature; // 0: greedy
    uint32_t whiten, multiply;  // this row's words of noise
    const uint32_t* mask;  // one bit a token, or null
    float best;            // out: the best score, -inf if there is none
    int64_t token;         // out
    bool unfit;            // out: a NaN or +inf was seen
};

struct Head {  // one token of one head of a recurrent layer
    float* matrix;  // [value_dim, key_dim]
    const float *key, *query, *fade;  // [key_dim]
    const float* value;               // [value_dim]
    float* out;                       // [value_dim]
    int64_t key_dim, value_dim;
    float beta;        // of the delta rule
    int32_t is_delta;  // 0: the value is written unchanged
};

struct Kernels {
    const char* name;
    int lanes;
    void (*norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out);
    void (*add_scaled)(const float* x, float scale, int64_t n, float* out);
    void (*activate)(Activation how, const float* gate, const float* up, int64_t n, float* out);  // up: or null
    void (*quantize)(const float* x, int64_t n, Block* blocks, Factors* factors, int64_t stride);
    void (*quantize_bytes)(const float* x, int64_t n, Block* bytes, ByteFactors* factors, int64_t stride);
    void (*turn)(float* head, const float* cos, const float* sin, int64_t half);
    void (*product)(const Matrix& m, int64_t first_tile, int64_t stop_tile, const Inputs& in, int64_t num_tokens,
                    const Target& target);
    // Rounds the key and the value of one token and head to an entry. Both are rotated in place first.
    void (*write_entry)(CacheForm form, float* key, float* value, int64_t head_dim, uint8_t* entry);
    void (*attend)(const Queries& queries, const Keys& keys, float* scratch);
    void (*merge)(const Queries& queries, const Keys& keys, int64_t num_parts);  // parts lie one after the other
    void (*choose)(Choice& choice);
    void (*recur)(const Head& head);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();    // null where this build has none
const Kernels* avx512_kernels();  // AVX-512 with VNNI
const Kernels* dotprod_kernels();  // Arm with dot products of bytes
const Kernels* i8mm_kernels();     // and with products of matrices of bytes

}  // namespace quire
