"""Wall clocks that lie: each process of a campaign has another one, which jumps and drifts.

A library that is loaded before all others (LD_PRELOAD) answers for CLOCK_REALTIME: by up to an hour before or behind,
by the number of the process, up to 10 % too fast or too slow, and with a jump of ten minutes to and fro every 20 s. All
other clocks are the kernel's. It is compiled here, with the C compiler that the kernels need too.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = r"""
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const long long second = 1000000000LL;

static long long lied_ns(void)
{
    struct timespec real, monotonic;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &real);
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &monotonic);
    long long kind = getpid() % 5 - 2, passed_ns = monotonic.tv_sec * second + monotonic.tv_nsec;
    long long jump_s = monotonic.tv_sec / 20 % 2 ? 600 : 0;
    return real.tv_sec * second + real.tv_nsec + kind * 1800 * second + passed_ns % (100000 * second) / 20 * kind
        + jump_s * second;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)
        return (int)syscall(SYS_clock_gettime, clock, now);
    long long now_ns = lied_ns();
    *now = (struct timespec){now_ns / second, now_ns % second};
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    (void)zone;
    long long now_ns = lied_ns();
    *now = (struct timeval){now_ns / second, now_ns % second / 1000};
    return 0;
}

time_t time(time_t *now)
{
    time_t now_s = lied_ns() / second;
    if (now != NULL)
        *now = now_s;
    return now_s;
}
"""


def compile_liar(folder: Path) -> Path:
    """The library. Raises `subprocess.CalledProcessError`, or `OSError` without a compiler."""
    source, library = folder / "clocks.c", folder / "clocks.so"
    source.write_text(_SOURCE)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library
