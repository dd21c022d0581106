#include "pool.h"

#include <chrono>

namespace baton {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kSpinsPerLook = 64;
constexpr uint64_t kNothingToTake = 0xffffffff;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int num_threads) {
    for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
}

Pool::~Pool() {
    operation_.fetch_or(1);
    operation_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void Pool::run(Tile compute, const void* work, int64_t num_tiles) {
    if (threads_.empty() || num_tiles == 1) {
        for (int64_t tile = 0; tile < num_tiles; ++tile) compute(work, tile, 0);
        return;
    }
    if (num_tiles <= 0) return;
    const uint32_t operation = operation_.load(std::memory_order_relaxed) + 2;
    // Nothing can be taken while the arguments change: who sees one of the new ones also sees this word.
    next_.store(kNothingToTake, std::memory_order_relaxed);
    compute_.store(compute, std::memory_order_release);
    work_.store(work, std::memory_order_release);
    num_tiles_.store(num_tiles, std::memory_order_release);
    num_done_.store(0, std::memory_order_relaxed);
    next_.store(static_cast<uint64_t>(operation) << 32, std::memory_order_release);
    operation_.store(operation, std::memory_order_release);
    operation_.notify_all();
    take_tiles(operation, 0);
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < num_tiles; ++spins) {
        if (spins < 4096) {
            relax();
        } else {
            std::this_thread::yield();  // the last tile is with a thread that has lost its core
        }
    }
}

void Pool::take_tiles(uint32_t operation, int thread) {
    // Read before a tile is taken: if the word below still has this operation's number then, they belong to it.
    const Tile compute = compute_.load(std::memory_order_acquire);
    const void* work = work_.load(std::memory_order_acquire);
    const int64_t num_tiles = num_tiles_.load(std::memory_order_acquire);
    uint64_t next = next_.load(std::memory_order_acquire);
    while (next >> 32 == operation && static_cast<int64_t>(next & 0xffffffff) < num_tiles) {
        if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
        compute(work, static_cast<int64_t>(next & 0xffffffff), thread);
        num_done_.fetch_add(1, std::memory_order_acq_rel);
        next = next_.load(std::memory_order_acquire);
    }
}

void Pool::serve(int thread) {
    uint32_t seen = 0;
    for (;;) {
        const auto sleeps_at = std::chrono::steady_clock::now() + kSpin;
        uint32_t operation = operation_.load(std::memory_order_acquire);
        while (operation == seen && std::chrono::steady_clock::now() < sleeps_at) {
            for (int spin = 0; spin < kSpinsPerLook; ++spin) relax();
            operation = operation_.load(std::memory_order_acquire);
        }
        if (operation == seen) {
            operation_.wait(seen, std::memory_order_acquire);
            operation = operation_.load(std::memory_order_acquire);
        }
        if (operation & 1) return;
        if (operation != seen) take_tiles(operation, thread);
        seen = operation;
    }
}

}  // namespace baton
