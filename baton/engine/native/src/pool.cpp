#include "pool.h"

#include <algorithm>
#include <chrono>

#if defined(__linux__)
#include <sched.h>
#include <time.h>
#endif

namespace baton {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kSpinsPerLook = 64;
constexpr uint64_t kNothingToTake = 0xffffffff;

// A guest that had no core for so long while it computed has lost it to another program.
constexpr std::chrono::nanoseconds kLost = std::chrono::milliseconds(1);
constexpr int kAwayForEach = 10;
constexpr std::chrono::nanoseconds kAwayAtMost = std::chrono::seconds(1);
constexpr std::chrono::nanoseconds kLooksForEnd = std::chrono::milliseconds(100);

// Of this thread.
std::chrono::nanoseconds processor_time() {
#if defined(__linux__)
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
#else
    return {};  // no guests
#endif
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether this thread runs on that core alone from now on.
bool run_on(int core) {
#if defined(__linux__)
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (core < 0 || core >= CPU_SETSIZE) return false;
    CPU_SET(core, &cores);
    return sched_setaffinity(0, sizeof cores, &cores) == 0;
#else
    return core < 0;  // no other system says which cores are whose
#endif
}

}  // namespace

Pool::Pool(int num_threads, const std::vector<Guest>& guests) : guests_(guests) {
    for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
    for (const Guest& guest : guests_) {
        const int thread = max_threads();
        threads_.emplace_back([this, &guest, thread] { serve_as(guest, thread); });
    }
}

Pool::~Pool() {
    operation_.fetch_or(1);
    operation_.notify_all();
    for (const Guest& guest : guests_) guest.loan->wake();
    for (auto& thread : threads_) thread.join();
}

int Pool::num_threads() const {
    int count = max_threads() - static_cast<int>(guests_.size());
    for (const Guest& guest : guests_) count += guest.may_compute();
    return count;
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
    take_tiles(operation, 0, nullptr);
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < num_tiles; ++spins) {
        if (spins < 4096) {
            relax();
        } else {
            std::this_thread::yield();  // the last tile is with a thread that has lost its core
        }
    }
}

void Pool::take_tiles(uint32_t operation, int thread, const Guest* guest) {
    // Read before a tile is taken: if the word below still has this operation's number then, they belong to it.
    const Tile compute = compute_.load(std::memory_order_acquire);
    const void* work = work_.load(std::memory_order_acquire);
    const int64_t num_tiles = num_tiles_.load(std::memory_order_acquire);
    uint64_t next = next_.load(std::memory_order_acquire);
    while (next >> 32 == operation && static_cast<int64_t>(next & 0xffffffff) < num_tiles) {
        if (guest != nullptr && !guest->may_compute()) return;
        if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
        compute(work, static_cast<int64_t>(next & 0xffffffff), thread);
        num_done_.fetch_add(1, std::memory_order_acq_rel);
        next = next_.load(std::memory_order_acquire);
    }
}

uint32_t Pool::wait_for_operation(uint32_t seen, const Guest* guest) {
    const auto sleeps_at = std::chrono::steady_clock::now() + kSpin;
    uint32_t operation = operation_.load(std::memory_order_acquire);
    while (operation == seen && std::chrono::steady_clock::now() < sleeps_at) {
        if (guest != nullptr && !guest->may_compute()) return operation;
        for (int spin = 0; spin < kSpinsPerLook; ++spin) relax();
        operation = operation_.load(std::memory_order_acquire);
    }
    if (operation == seen) {
        operation_.wait(seen, std::memory_order_acquire);
        operation = operation_.load(std::memory_order_acquire);
    }
    return operation;
}

void Pool::serve(int thread) {
    uint32_t seen = 0;
    for (;;) {
        const uint32_t operation = wait_for_operation(seen, nullptr);
        if (operation & 1) return;
        if (operation != seen) take_tiles(operation, thread, nullptr);
        seen = operation;
    }
}

void Pool::serve_as(const Guest& guest, int thread) {
    if (!run_on(guest.core)) return;
    uint32_t seen = 0;
    for (;;) {
        while (!(operation_.load(std::memory_order_acquire) & 1) && !guest.may_compute()) guest.wait();
        const uint32_t operation = wait_for_operation(seen, &guest);
        if (operation & 1) return;
        if (operation != seen) take_tiles_as(guest, operation, thread);
        // one that it had to leave is looked at again
        if (guest.may_compute()) seen = operation;
    }
}

void Pool::take_tiles_as(const Guest& guest, uint32_t operation, int thread) {
    const auto begun = std::chrono::steady_clock::now();
    const auto computed = processor_time();
    take_tiles(operation, thread, &guest);
    const auto lost = std::chrono::steady_clock::now() - begun - (processor_time() - computed);
    // an owner that has come back takes its core by right
    if (lost > kLost && guest.loan->is_open())
        guest.own->stay_away(std::min(kAwayForEach * std::chrono::nanoseconds(lost), kAwayAtMost).count());
}

void Guest::wait() const {
    const std::chrono::nanoseconds away(own->away_ns());
    if (away.count() > 0) {
        std::this_thread::sleep_for(std::min(away, kLooksForEnd));
    } else {
        loan->wait();
    }
}

}  // namespace baton
