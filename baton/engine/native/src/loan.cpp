#include "loan.h"

#include <ctime>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace baton {
namespace {

// How long a guest sleeps at most: its own pool may have ended, and a lender that has died says nothing.
constexpr std::chrono::milliseconds kLookAgain(100);
// How long when what was lent is over and has not been taken back: the owner comes any moment, unless it has died.
constexpr std::chrono::milliseconds kIsOver(1);
constexpr int64_t kOwnerComesNs = 10'000'000;

#if defined(__linux__)
// Not private: those who wait are in other processes.
void futex(const std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
    syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}
#endif

}  // namespace

void Loan::give(int64_t for_ns) {
    until_ns_.store(for_ns < 0 ? kNoEnd : now_ns() + for_ns, std::memory_order_relaxed);
    is_lent_.store(1, std::memory_order_release);
    wake();
}

void Loan::take_back() {
    taken_at_ns_.store(now_ns(), std::memory_order_relaxed);
    is_lent_.store(0, std::memory_order_release);
}

void Loan::stay_away(int64_t for_ns) { away_until_ns_.store(now_ns() + for_ns, std::memory_order_relaxed); }

int64_t Loan::computing_ns() const {
    const int64_t taken_at = taken_at_ns_.load(std::memory_order_relaxed);
    const bool computes = is_lent_.load(std::memory_order_acquire) == 0 && taken_at != 0 && away_ns() == 0;
    return computes ? now_ns() - taken_at : -1;
}

void Loan::wait() const {
#if defined(__linux__)
    if (is_lent_.load(std::memory_order_acquire) == 0) {
        const timespec timeout = {0, std::chrono::nanoseconds(kLookAgain).count()};
        return futex(is_lent_, FUTEX_WAIT, 0, &timeout);
    }
    const bool comes = now_ns() - until_ns_.load(std::memory_order_relaxed) < kOwnerComesNs;
    std::this_thread::sleep_for(comes ? kIsOver : kLookAgain);
#else
    std::this_thread::sleep_for(kLookAgain);
#endif
}

void Loan::wake() const {
#if defined(__linux__)
    futex(is_lent_, FUTEX_WAKE, INT32_MAX, nullptr);
#endif
}

}  // namespace baton
