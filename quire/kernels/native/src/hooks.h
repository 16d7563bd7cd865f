// Where a step calls code that is not its own: a reduction over ranks after a block's last product, and adapters beside
// every product. Both are null by default, and then cost one comparison at each place. The thread that runs the step
// calls a hook between two phases of the pool: no other thread holds a piece of work then, so a hook may read and write
// its rows freely and share phases of its own. It returns 0, or any other number to end the step with an error.
// The structs are filled in by `quire/kernels/native/library.py`.
#pragma once

#include <stdint.h>

namespace quire {

struct ReductionDesc {
    // rows [num_rows, width]: this rank's share of a block's output, which the hook replaces by the sum over ranks.
    // stage: 2 * layer for attention, 2 * layer + 1 for the feed-forward block.
    int32_t (*call)(void* context, float* rows, int64_t num_rows, int64_t width, int64_t stage);
    void* context;
};

enum class Product : int32_t {
    kQuery = 0, kKey = 1, kValue = 2, kOut = 3, kGate = 4, kUp = 5, kDown = 6, kHead = 7,
    kRouter = 8, kSharedGate = 9, kSharedUp = 10, kSharedDown = 11, kSharedWeight = 12,
};

struct ProductDesc {
    int64_t layer;          // -1: the head
    int64_t expert;         // -1: the product is of no routed expert
    const float* x;         // [num_rows, columns]: the product's input, after norm or activation, before any rounding
    int64_t num_rows, columns;
    float* out;             // [num_rows, width]: the product and its bias, and nothing else yet
    int64_t width, stride;  // stride: floats between rows of `out`
    const int64_t* tokens;  // [num_rows]: each row's token in the step; null: in order
    Product product;
};

struct AdaptersDesc {
    int32_t (*call)(void* context, const ProductDesc* product);  // adds to `out`
    void* context;
};

struct HookFailed {};  // thrown by the thread that runs the step

// The hooks as one layer of a step has them.
struct Hooks {
    const ReductionDesc* reduction = nullptr;
    const AdaptersDesc* adapters = nullptr;
    int64_t layer = -1;
    const int64_t* tokens = nullptr;  // as in `ProductDesc`

    bool are_set() const { return reduction || adapters; }

    void reduce(float* rows, int64_t num_rows, int64_t width, int64_t stage) const {
        if (reduction && reduction->call(reduction->context, rows, num_rows, width, stage)) throw HookFailed();
    }

    void adapt(const ProductDesc& product) const {
        if (adapters->call(adapters->context, &product)) throw HookFailed();
    }

    // A product with an output of its own. Without adapters it does nothing.
    void adapt(Product product, const float* x, int64_t num_rows, int64_t columns, float* out, int64_t width) const {
        if (adapters) adapt({layer, -1, x, num_rows, columns, out, width, width, tokens, product});
    }

    // Two products with outputs side by side, each of this width.
    void adapt_pair(Product first, Product second, const float* x, int64_t num_rows, int64_t columns, float* out,
                    int64_t width) const {
        if (!adapters) return;
        adapt({layer, -1, x, num_rows, columns, out, width, 2 * width, tokens, first});
        adapt({layer, -1, x, num_rows, columns, out + width, width, 2 * width, tokens, second});
    }
};

}  // namespace quire
