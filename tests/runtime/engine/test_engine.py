"""The engine on the reference pair, used as a service would: from several threads, with some of them giving up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_program_that_ends_without_closing_ends_well(bundle: Path) -> None:
    code = """
import sys
from specbuild.runtime import Engine, SamplingParams
engine = Engine.load(sys.argv[1])
handle = engine.submit("x", SamplingParams(max_new_tokens=900, ignore_eos=True))
next(iter(handle))
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code, str(bundle)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
