// Cores that a node lends to the others of its machine, for as long as it computes nothing.
//
// Owns one line of memory that the nodes share. The node whose cores they are writes it, and threads of other nodes, its
// guests, look at it before each tile. What stands there decides about speed alone: a guest that sees a wrong value
// shares a core with its owner for a tile or more, or does nothing.
//
// A loan ends when the owner takes it back, or at a time that was set when it was given: a guest takes no tile that could
// outlast it, so an owner that sleeps until then finds its core free.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "kernels.h"

namespace baton {

class Loan {
public:
    // Lend the cores for so long, or until they are taken back when it is negative.
    void give(int64_t for_ns);
    // Also says that the owner computes now: it is called again and again while it does.
    void take_back();
    // Whether a guest may take a tile.
    bool is_open() const {
        if (is_lent_.load(std::memory_order_acquire) == 0) return false;
        const int64_t until = until_ns_.load(std::memory_order_relaxed);
        return until == kNoEnd || now_ns() + kTileNs < until;
    }

    // Of the owner's own guests, wherever they are: let them take no tile for so long.
    void stay_away(int64_t for_ns);
    // For how long they still do.
    int64_t away_ns() const {
        const int64_t until = away_until_ns_.load(std::memory_order_relaxed);
        return until == 0 ? 0 : std::max<int64_t>(until - now_ns(), 0);
    }

    // How long ago the owner said that it computes; negative when it does not, or its guests stay away.
    int64_t computing_ns() const;

    // Return when it is lent, or after 100 ms. It may have been taken back again.
    void wait() const;
    // Let all who wait look again.
    void wake() const;

private:
    // Longer than most tiles take.
    static constexpr int64_t kTileNs = 120'000, kNoEnd = INT64_MAX;

    static int64_t now_ns() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }

    std::atomic<uint32_t> is_lent_;
    std::atomic<int64_t> until_ns_, taken_at_ns_, away_until_ns_;
};

static_assert(sizeof(Loan) <= BATON_LOAN_BYTES && std::atomic<int64_t>::is_always_lock_free);

// The loan in memory that was made as zeros.
inline Loan* loan_at(void* memory) { return static_cast<Loan*>(memory); }

}  // namespace baton
