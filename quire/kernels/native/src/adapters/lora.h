// LoRA adapters beside the products of a stack: the hook that adds (x A^T) B^T for the tokens of each adapter. All
// matrices are packed like weights, so the product is the one of the weights. The structs are filled in by
// `quire/kernels/native/adapters.py`.
#pragma once

#include "stack.h"

namespace quire {

constexpr int64_t kNumProducts = 13;  // of `Product`

struct LoraEntry {
    Matrix a;       // [rank, columns]
    Matrix b;       // [rows, rank]
    int64_t first;  // row of the product that `b` begins with
};

struct LoraSlot {
    const int32_t* starts;  // [layers * kNumProducts + 1]: the entries of each product; null: nothing is adapted
    const LoraEntry* entries;
};

struct LoraDesc {
    Context* context;
    const LoraSlot* slots;
    const int32_t* token_slots;  // [tokens of the step]: -1: the base model
};

void run_lora(const LoraDesc& lora, const ProductDesc& product);

}  // namespace quire
