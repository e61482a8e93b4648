"""A wall clock that a test may set while real processes run: a library loaded before libc.

It adds a number of seconds to what libc answers for the wall clock, and nothing to other clocks.
The number lies in a file that all the processes map, so a jump reaches all of them at once.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const long *ahead_s;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("TEST_WALL_CLOCK"), O_RDONLY | O_CLOEXEC);
    void *page = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    ahead_s = page == MAP_FAILED ? 0 : page;
}

int clock_gettime(clockid_t clock, struct timespec *out) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, out);
    if (!failed && ahead_s && clock == CLOCK_REALTIME) out->tv_sec += *ahead_s;
    return failed;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


class WallClock:
    """The wall clock of the processes that are started with ``environment``.

    Attributes:
        can_jump: False where there is no C compiler; then it is the machine's.
        environment: variables for the processes.
    """

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "ahead", folder / "wall_clock.so"
        self._file.write_bytes(struct.pack("l", 0))
        compiler = shutil.which("cc")
        self.can_jump = compiler is not None
        self.environment: dict[str, str] = {}
        if compiler is not None:
            command = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library)]
            subprocess.run([*command, "-ldl"], input=_SOURCE.encode(), check=True)
            self.environment = {"LD_PRELOAD": str(library), "TEST_WALL_CLOCK": str(self._file)}

    def jump(self, ahead_s: int) -> None:
        """Set the clock to so many seconds after the machine's."""
        with self._file.open("r+b") as out:
            out.write(struct.pack("l", ahead_s))
