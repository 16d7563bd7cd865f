// A group of processes on one machine that exchange tensors through shared memory: the sum over ranks that a step needs
// after `out` and `down`, and the gathering of byte strings. All ranks call the same operations in the same order.
//
// Each rank has two slots, used in turn, and a counter of the operations it has joined. A rank writes its part to a
// slot, raises its counter and waits for the counters of the others. One wait per operation is enough: a slot is
// written again two operations later, and by then every rank has joined the operation in between, so it has read it.
#pragma once

#include <stdint.h>

#include <atomic>

namespace quire {

constexpr int64_t kMaxRanks = 64;

// One per rank, in shared memory, each on a cache line of its own.
struct alignas(64) RankBoard {
    std::atomic<uint64_t> joined;  // number of operations that the rank has joined
    std::atomic<uint64_t> step;    // the step that the rank runs, written by its process
    std::atomic<uint64_t> ended;   // 1: the rank has left, so waiting for it is useless
};

struct Group {
    RankBoard* boards;  // [size]
    char* slots;        // [size, 2, slot_bytes]
    int64_t rank, size, slot_bytes;
    double seconds;  // deadline of an operation
    uint64_t joined;
    int64_t missing;  // the rank that did not join the last operation, -1: none

    char* slot(int64_t of) const { return slots + (2 * of + int64_t(joined & 1)) * slot_bytes; }
    bool meet();  // waits until all ranks have joined the operation; false: one is missing
    bool reduce(float* values, int64_t count);
    bool gather(const char* mine, const int64_t* bytes, char* out);
};

}  // namespace quire
