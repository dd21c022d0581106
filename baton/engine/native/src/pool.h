// Threads that share the tiles of one operation after another.
//
// Owns the threads and the one operation that runs. Knows nothing about what a tile computes.
//
// An operation is divided into tiles, which threads take one by one: a thread that has lost its core keeps at most the
// tile in its hands, and all others are computed by the rest. The caller takes tiles like all threads, and returns when
// all of them are done. Between two operations a thread spins for some microseconds, since the next one of a step comes
// at once, and then sleeps.
//
// The next tile and the number of its operation are one atomic word: a thread that comes late cannot take a tile of an
// operation with the arguments of another.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "loan.h"

namespace baton {

// A thread on a core of another node, which takes a tile only while that node lends it.
//
// If other programs take the core from it, the operation waits for the tile in its hands: all guests of the node stay
// away then, ten times as long as the core was away, so that this costs a tenth at most.
struct Guest {
    const Loan* loan;
    Loan* own;  // of the node whose threads these are
    int core;

    bool may_compute() const { return loan->is_open() && own->away_ns() == 0; }
    void wait() const;
};

class Pool {
public:
    using Tile = void (*)(const void* work, int64_t tile, int thread);

    // `num_threads`: with the caller's, and without guests.
    explicit Pool(int num_threads, const std::vector<Guest>& guests = {});
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // How many threads take tiles now: guests that may not do not count. It may be another number the next time.
    int num_threads() const;
    int max_threads() const { return static_cast<int>(threads_.size()) + 1; }

    // Call `compute(work, tile, thread)` for each tile below `num_tiles`, and wait for all. `thread`: 0 is the caller;
    // no two calls at once have the same. At most 2^31 tiles.
    void run(Tile compute, const void* work, int64_t num_tiles);

    // The same with a callable `compute(tile, thread)`.
    template <class Compute>
    void each(int64_t num_tiles, const Compute& compute) {
        run([](const void* work, int64_t tile, int thread) { (*static_cast<const Compute*>(work))(tile, thread); },
            &compute, num_tiles);
    }

private:
    void serve(int thread);
    void serve_as(const Guest& guest, int thread);
    // Wait until there is an operation after `seen`, or, for a guest, until it may not compute any more.
    uint32_t wait_for_operation(uint32_t seen, const Guest* guest);
    void take_tiles(uint32_t operation, int thread, const Guest* guest);
    void take_tiles_as(const Guest& guest, uint32_t operation, int thread);

    // Next tile in the low half, number of the operation in the high half.
    alignas(64) std::atomic<uint64_t> next_{0};
    alignas(64) std::atomic<int64_t> num_done_{0};
    // What is waited for, written last. Odd values end the threads.
    alignas(64) std::atomic<uint32_t> operation_{0};
    std::atomic<Tile> compute_{nullptr};
    std::atomic<const void*> work_{nullptr};
    std::atomic<int64_t> num_tiles_{0};
    const std::vector<Guest> guests_;
    std::vector<std::thread> threads_;
};

}  // namespace baton
