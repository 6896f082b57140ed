"""The engine on the reference pair, used as a service would: from several threads, with some of them giving up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specbuild.runtime import Engine, Limits, SamplingParams
from specbuild.runtime.errors import OptionError


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


def test_limits_hold_for_trees_that_were_asked_for(bundle: Path, prompts: list[str]) -> None:
    """By how many sequences draft together; and no token depends on it."""
    asked = SamplingParams(max_new_tokens=24, speculation="best:8", ignore_eos=True)
    limits = Limits(num_speculative_tokens_per_batch_size={"1-1": 4, "2-2": 2, "3-9": 0})
    with Engine.load(bundle, drafter="model", batch_size=3) as engine:
        expected = engine.generate(prompts[:3], asked)
        engine.limits = limits
        (alone,), together = engine.generate(prompts[:1], asked), engine.generate(prompts[:3], asked)
    assert [each.token_ids for each in (alone, *together)] == [each.token_ids for each in (expected[0], *expected)]
    drafting = alone.metrics.speculative_decoding
    assert drafting.num_draft_tokens == 4 * drafting.num_spec_steps > 0
    assert sum(each.metrics.speculative_decoding.num_draft_tokens for each in together) < drafting.num_draft_tokens


def test_a_tree_past_the_limit_is_refused_and_the_default_is_cut(bundle: Path, prompts: list[str]) -> None:
    with Engine.load(bundle, limits=Limits(max_draft_tokens=3)) as engine:
        with pytest.raises(OptionError, match="best:4 drafts 4 nodes, max_draft_tokens allows 3"):
            engine.submit(prompts[0], SamplingParams(speculation="best:4"))
        (result,) = engine.generate(prompts[0], SamplingParams(max_new_tokens=24))
    drafting = result.metrics.speculative_decoding
    assert 0 < drafting.num_draft_tokens <= 3 * drafting.num_spec_steps
