"""Is the machine busy with something else? Looked at before and during each answer, the same for every arm."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
MOST = 0.04
"""Share of all cores that others may take before an answer begins."""
_LOOK_SECONDS, _PATIENCE_SECONDS = 0.15, 30.0


class Others:
    """What the other processes of this machine take of it, stolen time included, from now on."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._before = _seconds()

    def share(self) -> float | None:
        """Of all cores, since this was made; None where the system does not say."""
        now, cores = _seconds(), os.cpu_count() or 1
        if self._before is None or now is None:
            return None
        taken = (now[0] - self._before[0]) - (now[1] - self._before[1])
        return max(0.0, taken / (cores * (time.perf_counter() - self._started)))


def wait() -> float:
    """Until others take next to nothing, or patience ends. Returns: seconds waited beyond the first look."""
    started = time.perf_counter()
    while True:
        others = Others()
        time.sleep(_LOOK_SECONDS)
        waited = time.perf_counter() - started - _LOOK_SECONDS
        share = others.share()
        if share is None or share <= MOST or waited > _PATIENCE_SECONDS:
            return waited


def _seconds() -> tuple[float, float] | None:
    """CPU seconds of all processes, and of this one."""
    try:
        fields = STAT.read_text(encoding="ascii").splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, *others = map(int, fields[:8])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK"), time.process_time()
