"""The engine on the reference pair, used as a service would: from several threads, with some of them giving up."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from engine_checks import at_rest

from specbuild.runtime import Engine, Limits, Result, SamplingParams
from specbuild.runtime.errors import OptionError, QueueFullError

THREADS, EACH = 8, 25


@pytest.mark.nightly
@pytest.mark.parametrize("batch_size", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_stress(bundle: Path, prompts: list[str], batch_size: int) -> None:
    """200 requests of 8 threads: all answered, no slot lost, tokens those of plain decoding."""
    answers = list[tuple[str, SamplingParams, Result]]()

    def caller(engine: Engine, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(EACH):
            prompt, fate = rng.choice(prompts), rng.choice(["wait", "wait", "cancel", "deadline", "logits"])
            params = SamplingParams(rng.randint(1, 24), rng.choice([0.0, 0.8]), seed=rng.randrange(3))
            late = replace(params, deadline=rng.choice([1e-9, 0.01, 0.05])) if fate == "deadline" else params
            try:
                handle = engine.submit(prompt, late, wait=False)
            except QueueFullError:
                handle = engine.submit(prompt, late)
            if fate == "logits" and rng.random() < 0.2:
                engine.logits(engine.encode(prompt))
            if fate == "cancel":
                next(iter(handle)) if rng.random() < 0.5 else None
                handle.cancel()
            answers.append((prompt, params, handle.result(timeout=120)))

    with Engine.load(bundle, batch_size=batch_size, max_waiting=6) as engine:
        threads = [threading.Thread(target=caller, args=(engine, seed)) for seed in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        at_rest(engine)
        assert len(answers) == THREADS * EACH
        reasons = Counter(result.finish_reason for *_, result in answers)
        assert set(reasons) <= {"stop", "length", "cancelled", "deadline"}
        assert min(reasons["length"], reasons["cancelled"], reasons["deadline"]) > 5, reasons
        asked = [replace(params, speculation="off") for _, params, _ in answers]
        plain = engine.generate([prompt for prompt, *_ in answers], asked)
    for (*_, found), right in zip(answers, plain, strict=True):
        whole = found.finish_reason in ("stop", "length")
        assert found.token_ids == right.token_ids[: None if whole else len(found.token_ids)]


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
    with Engine.load(bundle, batch_size=3) as engine:
        expected = engine.generate(prompts[:3], asked)
    schedule = {"1-1": 4, "2-2": 2, "3-9": 0}
    with Engine.load(
        bundle, drafter="model", batch_size=3, limits=Limits(num_speculative_tokens_per_batch_size=schedule)
    ) as engine:
        (alone,), together = engine.generate(prompts[:1], asked), engine.generate(prompts[:3], asked)
    for found, right in zip([alone, *together], [expected[0], *expected], strict=True):
        assert found.token_ids == right.token_ids
    drafting = alone.metrics.speculative_decoding
    assert drafting.num_draft_tokens == 4 * drafting.num_spec_steps > 0
    crowded = [each.metrics.speculative_decoding for each in together]
    assert sum(each.num_draft_tokens for each in crowded) < drafting.num_draft_tokens


def test_a_tree_past_the_limit_is_refused_and_the_default_is_cut(bundle: Path, prompts: list[str]) -> None:
    with Engine.load(bundle, limits=Limits(max_draft_tokens=3)) as engine:
        with pytest.raises(OptionError, match="best:4 drafts 4 nodes, max_draft_tokens allows 3"):
            engine.submit(prompts[0], SamplingParams(speculation="best:4"))
        (result,) = engine.generate(prompts[0], SamplingParams(max_new_tokens=24))
    drafting = result.metrics.speculative_decoding
    assert 0 < drafting.num_draft_tokens <= 3 * drafting.num_spec_steps
