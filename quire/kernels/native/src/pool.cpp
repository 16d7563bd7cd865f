#include "pool.h"

#include <unistd.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace quire {

namespace {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr int kSpins = 500;       // before a waiting thread yields its core
constexpr int kYields = 200;      // before it sleeps: 0.1 ms if no other thread wants the core
constexpr int kIdleSpins = 1000;  // before a thread without work goes to sleep: some tens of microseconds

}  // namespace

Pool::Pool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads), process_(getpid()) {
    for (int i = 1; i < num_threads_; ++i) threads_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
    if (getpid() != process_) {  // after a fork these threads do not exist, so they can't be joined
        for (std::thread& thread : threads_) thread.detach();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(sleep_);
        closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Pool::begin() {
    alone_ = num_threads_ == 1 || getpid() != process_;  // after a fork only the caller is left
    if (alone_) return;
    active_.store(true);
    wake();
}

void Pool::wake() {
    calls_.fetch_add(1);
    if (sleepers_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(sleep_); }
    wake_.notify_all();
}

void Pool::end() {
    active_.store(false);
    alone_ = true;
}

void Pool::hand_out(int64_t count, int64_t grain, void* argument, Call call) {
    Phase& phase = phases_[++number_ % kPhases];
    phase.call = call;
    phase.argument = argument;
    phase.count = count;
    phase.grain = grain;
    phase.num_pieces = (count + grain - 1) / grain;
    phase.done.store(0, std::memory_order_relaxed);
    next_.store(number_ << kPieceBits);
    if (dozes_.load(std::memory_order_relaxed) && dozes_.exchange(false)) wake();
    while (take_piece(0)) {}
    wait_for(phase);
}

void Pool::wait_for(const Phase& phase) {
    const auto is_done = [&] { return phase.done.load() >= phase.num_pieces; };
    for (int spins = 0; !is_done(); ++spins) {
        if (spins < kSpins) {
            pause();
        } else if (spins < kSpins + kYields) {
            std::this_thread::yield();
        } else {
            std::unique_lock<std::mutex> lock(sleep_);
            caller_sleeps_.store(true);
            done_.wait(lock, is_done);
            caller_sleeps_.store(false);
        }
    }
}

bool Pool::take_piece(int thread) {
    uint64_t now = next_.load(std::memory_order_acquire);
    for (;;) {
        Phase& phase = phases_[(now >> kPieceBits) % kPhases];
        const int64_t piece = int64_t(now & ((uint64_t(1) << kPieceBits) - 1));
        if (piece >= phase.num_pieces) return false;
        if (!next_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        const int64_t first = piece * phase.grain, stop = first + phase.grain;
        phase.call(phase.argument, first, stop < phase.count ? stop : phase.count, thread);
        phase.done.fetch_add(1);
        if (caller_sleeps_.load()) {
            { std::lock_guard<std::mutex> lock(sleep_); }  // the thread is asleep, or has not checked yet
            done_.notify_one();
        }
        return true;
    }
}

void Pool::work(int thread) {
    int spins = 0;
    while (!closing_.load(std::memory_order_relaxed)) {
        if (take_piece(thread)) {
            spins = 0;
        } else if (active_.load(std::memory_order_relaxed) && ++spins < kSpins + kYields) {
            if (spins < kSpins) pause();
            else std::this_thread::yield();
        } else if (!active_.load(std::memory_order_relaxed) && ++spins < kIdleSpins) {
            pause();
        } else {
            const uint64_t heard = calls_.load();
            dozes_.store(active_.load());  // during a run: the next phase must wake it
            if (take_piece(thread)) continue;
            std::unique_lock<std::mutex> lock(sleep_);
            sleepers_.fetch_add(1);
            wake_.wait(lock, [&] { return closing_.load() || calls_.load() != heard; });
            sleepers_.fetch_sub(1);
            spins = 0;
        }
    }
}

}  // namespace quire
