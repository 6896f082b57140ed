"""The engine on the reference pair, used as a service would: from several threads, with some of them giving up."""

import subprocess
import sys


def test_a_program_that_ends_without_closing_ends_well(bundle):
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
