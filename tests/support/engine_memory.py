"""What a process holds, when it is at rest: resident memory and threads."""

import ctypes
import gc
import threading
from pathlib import Path


def memory():
    """Resident bytes, without what the allocator only keeps for later."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    (line,) = [s for s in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if s.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def settled(before):
    """Every thread that was not there before ends within ten seconds."""
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread.name
