"""The cores are those that this process may use, however the system tells them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from specbuild.runtime.backends.cpu.cores import cores

has_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no process to cores")


@has_affinity
def test_a_process_that_is_bound_to_a_core_has_one() -> None:
    code = """import os
from specbuild.runtime.backends.cpu.cores import cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(cores())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


@pytest.mark.parametrize(("count", "found"), [(6, 6), (None, 1)])
def test_a_system_without_affinity_has_all_of_them(monkeypatch, count, found):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert cores() == found
