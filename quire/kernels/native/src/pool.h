// The thread pool. During a run, the calling thread executes the work's sequence of phases, and threads that are awake
// take pieces of each phase. The caller never waits for a thread without a piece, so a thread that is asleep or not
// scheduled costs its share of the speed and nothing more. A waiting thread (the caller for the last piece, another one
// for the next phase) spins for some microseconds, then yields its core, and soon sleeps: on a busy machine the thread
// that it waits for may need the core.
#pragma once

#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace quire {

class Pool {
  public:
    explicit Pool(int num_threads);
    ~Pool();
    int size() const { return num_threads_; }

    // Between these calls the other threads watch for phases; outside they sleep.
    void begin();
    void end();

    // Calls body(first, stop, thread) for pieces of `grain` out of `count` and returns when all are done.
    template <class Body>
    void share(int64_t count, int64_t grain, Body&& body) {
        if (count <= 0) return;
        if (alone_ || count <= grain) {
            body(int64_t(0), count, 0);
            return;
        }
        hand_out(count, grain, &body, [](void* argument, int64_t first, int64_t stop, int thread) {
            (*static_cast<std::remove_reference_t<Body>*>(argument))(first, stop, thread);
        });
    }

  private:
    using Call = void (*)(void*, int64_t, int64_t, int);
    struct alignas(64) Phase {
        Call call;
        void* argument;
        int64_t count, grain, num_pieces = 0;
        alignas(64) std::atomic<int64_t> done{0};
    };
    // A phase is unchanged during the next three phases, so that a late thread can read it safely: it then fails to
    // take a piece, because `next_` holds another phase's number.
    static constexpr int kPhases = 4;
    static constexpr int kPieceBits = 24;

    void wake();
    void wait_for(const Phase& phase);
    void hand_out(int64_t count, int64_t grain, void* argument, Call call);
    bool take_piece(int thread);
    void work(int thread);

    const int num_threads_;
    const int64_t process_;
    bool alone_ = true;
    uint64_t number_ = 0;  // of the current phase
    Phase phases_[kPhases];
    alignas(64) std::atomic<uint64_t> next_{0};  // number of the phase, then its next piece
    alignas(64) std::atomic<bool> active_{false};
    std::atomic<int> sleepers_{0};
    std::atomic<uint64_t> calls_{0};   // a sleeping thread that has seen fewer wakes up
    std::atomic<bool> dozes_{false};   // a thread went to sleep during a run
    std::atomic<bool> closing_{false};
    std::atomic<bool> caller_sleeps_{false};
    std::mutex sleep_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> threads_;
};

// A run of the pool that ends with its scope.
class Run {
  public:
    explicit Run(Pool& pool) : pool_(pool) { pool_.begin(); }
    ~Run() { pool_.end(); }
    Run(const Run&) = delete;

  private:
    Pool& pool_;
};

}  // namespace quire
