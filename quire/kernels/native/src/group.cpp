#include "group.h"

#include <string.h>
#include <time.h>

#include <algorithm>
#include <new>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace quire {

namespace {

constexpr int kSpins = 4000;             // about 20 to 100 microseconds
constexpr int kYields = 200;             // then the core is given to other threads
constexpr int64_t kSleepNanos = 50'000;  // then the rank sleeps between looks

void pause() {
#ifdef __x86_64__
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

void wait_a_little(int looks) {
    if (looks < kSpins) return pause();
    const timespec time{0, looks < kSpins + kYields ? 0 : kSleepNanos};
    nanosleep(&time, nullptr);  // with 0: the shortest sleep, which also gives the core away
}

}  // namespace

bool Group::meet() {
    const uint64_t number = ++joined;
    boards[rank].joined.store(number, std::memory_order_release);
    double deadline = 0;
    for (int64_t other = 0; other < size; other++) {
        for (int looks = 0; boards[other].joined.load(std::memory_order_acquire) < number; looks++) {
            const bool is_over = boards[other].ended.load(std::memory_order_relaxed);
            if (looks >= kSpins && deadline == 0) deadline = now() + seconds;
            if (is_over || (deadline != 0 && looks % 64 == 0 && now() > deadline)) {
                missing = other;
                return false;
            }
            wait_a_little(looks);
        }
    }
    return true;
}

bool Group::reduce(float* values, int64_t count) {
    const int64_t most = slot_bytes / int64_t(sizeof(float));
    for (int64_t first = 0; first < count; first += most) {
        const int64_t part = std::min(most, count - first);
        const uint64_t turn = joined & 1;
        memcpy(slot(rank), values + first, part * sizeof(float));
        if (!meet()) return false;
        // In the order of the ranks, so that all of them get the same bits.
        const auto of = [&](int64_t other) {
            return reinterpret_cast<const float*>(slots + (2 * other + int64_t(turn)) * slot_bytes);
        };
        float* out = values + first;
        memcpy(out, of(0), part * sizeof(float));
        for (int64_t other = 1; other < size; other++) {
            const float* in = of(other);
            for (int64_t i = 0; i < part; i++) out[i] += in[i];
        }
    }
    return true;
}

bool Group::gather(const char* mine, const int64_t* bytes, char* out) {
    const int64_t most = *std::max_element(bytes, bytes + size);
    for (int64_t first = 0; first < std::max<int64_t>(most, 1); first += slot_bytes) {
        const uint64_t turn = joined & 1;
        const int64_t part = std::clamp<int64_t>(bytes[rank] - first, 0, slot_bytes);
        if (part > 0) memcpy(slot(rank), mine + first, part);
        if (!meet()) return false;
        char* to = out;
        for (int64_t other = 0; other < size; other++) {
            const int64_t theirs = std::clamp<int64_t>(bytes[other] - first, 0, slot_bytes);
            if (theirs > 0) memcpy(to + first, slots + (2 * other + int64_t(turn)) * slot_bytes, theirs);
            to += bytes[other];
        }
    }
    return true;
}

}  // namespace quire

using quire::Group;
using quire::RankBoard;

extern "C" {

// Bytes of shared memory that a group needs. It must be zero before the first rank joins.
int64_t quire_group_bytes(int64_t size, int64_t slot_bytes) {
    return size * int64_t(sizeof(RankBoard)) + 2 * size * slot_bytes;
}

void* quire_group_join(void* memory, int64_t rank, int64_t size, int64_t slot_bytes, double seconds) {
    if (size < 1 || size > quire::kMaxRanks || rank < 0 || rank >= size || slot_bytes % 64) return nullptr;
    auto* boards = static_cast<RankBoard*>(memory);
    char* slots = static_cast<char*>(memory) + size * int64_t(sizeof(RankBoard));
    return new (std::nothrow) Group{boards, slots, rank, size, slot_bytes, seconds, 0, -1};
}

// Goes on in other memory, of a group that has been rebuilt with the same ranks. Operations are counted from 0 again.
void quire_group_rejoin(void* group, void* memory) {
    auto* ours = static_cast<Group*>(group);
    ours->boards = static_cast<RankBoard*>(memory);
    ours->slots = static_cast<char*>(memory) + ours->size * int64_t(sizeof(RankBoard));
    ours->joined = 0;
    ours->missing = -1;
}

// Says that a rank has ended, for a watcher that has mapped the memory: whoever waits for the rank stops at once.
void quire_group_end(void* memory, int64_t rank) {
    static_cast<RankBoard*>(memory)[rank].ended.store(1, std::memory_order_release);
}

int32_t quire_group_has_ended(const void* memory, int64_t rank) {
    return int32_t(static_cast<const RankBoard*>(memory)[rank].ended.load(std::memory_order_acquire));
}

void quire_group_leave(void* group) {
    auto* ours = static_cast<Group*>(group);
    ours->boards[ours->rank].ended.store(1, std::memory_order_release);
    delete ours;
}

// Sums the ranks' values in place. Returns 0, or 1 if a rank is missing.
int32_t quire_group_reduce(void* group, float* values, int64_t count) {
    return !static_cast<Group*>(group)->reduce(values, count);
}

// Writes all ranks' byte strings to `out`, one after the other. bytes [size]: their lengths.
int32_t quire_group_gather(void* group, const char* mine, const int64_t* bytes, char* out) {
    return !static_cast<Group*>(group)->gather(mine, bytes, out);
}

// The `ReductionDesc` call of a stack, with the group as its context.
int32_t quire_group_reduction(void* group, float* rows, int64_t num_rows, int64_t width, int64_t) {
    return !static_cast<Group*>(group)->reduce(rows, num_rows * width);
}

int64_t quire_group_missing(void* group) { return static_cast<Group*>(group)->missing; }

void quire_group_step(void* group, int64_t step) {
    auto* ours = static_cast<Group*>(group);
    ours->boards[ours->rank].step.store(uint64_t(step), std::memory_order_relaxed);
}

// Operations joined and current step of a rank, for a watcher that has mapped the memory.
void quire_group_read(const void* memory, int64_t rank, int64_t* joined, int64_t* step) {
    const auto& board = static_cast<const RankBoard*>(memory)[rank];
    *joined = int64_t(board.joined.load(std::memory_order_relaxed));
    *step = int64_t(board.step.load(std::memory_order_relaxed));
}

}  // extern "C"
