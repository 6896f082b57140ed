"""What is measured for tuning makes a timing table, of prompts that fit, in a bundle that can be tuned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbuild.measure.tuning import trees
from specbuild.measure.tuning.chances import Record
from specbuild.measure.tuning.decode import AUTO, OFF, Decoded
from specbuild.measure.tuning.measure import (
    Seen,
    Tuning,
    _conclude,
    _in_time,
    _prompts,
    _take_turns,
    untunable,
)
from specbuild.runtime import Bundle, Engine, SamplingParams
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.prompt_file import Request
from specbuild.runtime.speculation.timings import TimingTable
from specbuild.runtime.speculation.tree import TreeSpec

HERE = {"processor": "abacus", "threads": 1}


def test_bundles_of_short_texts_are_refused(bundle: Path) -> None:
    manifest = Bundle.open(bundle).manifest
    assert untunable(manifest) is None
    assert untunable(replace(manifest, max_seq_len=32)) is None
    reason = "has texts of 31 tokens at most: too short to tune it by them"
    assert untunable(replace(manifest, max_seq_len=31)) == reason


def test_our_own_prompts_are_cut_and_a_users_are_not(bundle: Path) -> None:
    with Engine.load(bundle) as engine:
        whole = _prompts(engine, Tuning())
        assert len(whole) == 6
        short: Any = SimpleNamespace(manifest=replace(engine.manifest, max_seq_len=32), tokenizer=engine.tokenizer)
        assert _prompts(short, Tuning()) == [tokens[:16] for tokens in whole]
        text = " x" * 1008
        (tokens,) = _prompts(engine, Tuning([Request(text, SamplingParams(max_new_tokens=999))]))
        assert tokens == engine.tokenizer.encode(text)
        assert len(tokens) == 1024 - 16, "there is just room enough"
        with pytest.raises(OptionError, match=r"^p:7: leaves no room for 16 tokens in 1024: give a shorter one"):
            _prompts(engine, Tuning([Request(text + " x", SamplingParams(), where="p:7")]))


def test_when_the_time_is_up_a_few_prompts_are_run_all_the_same() -> None:
    prompts = [[number] for number in range(9)]
    told = list[tuple[str, int, int]]()

    def taken(prompts: list[list[int]], seconds: float) -> list[tuple[int, list[int]]]:
        return list(_in_time(prompts, seconds, "texts", lambda *what: told.append(what)))

    assert taken(prompts, 0.0) == [(0, [0]), (1, [1])]
    assert told == [("texts", number, 9) for number in range(2)]
    assert taken(prompts, math.inf) == list(enumerate(prompts))
    assert taken(prompts[:1], 0.0) == [(0, [0])]


def test_each_prompt_begins_with_another_contender() -> None:
    asked = list[tuple[str, Any]]()

    def decode(prompt: list[int], name: str, policy: Any) -> str:
        asked.append((name, policy))
        return f"{name} of {prompt[0]}"

    decoder: Any = SimpleNamespace(decode=decode)
    for number in range(3):
        found = _take_turns(decoder, [number], [OFF, "best:2", AUTO], number, policy="policy")  # type: ignore[arg-type]
        assert found == {name: f"{name} of {number}" for name in (OFF, "best:2", AUTO)}
    assert [name for name, _ in asked] == [OFF, "best:2", AUTO, "best:2", AUTO, OFF, AUTO, OFF, "best:2"]
    assert dict(asked) == {OFF: None, "best:2": None, AUTO: "policy"}


@pytest.mark.parametrize(
    ("node", "largest", "best", "widest"),
    [(0.0, 63, "best:32", "best:63"), (1.0, 63, "best:1", "best:8"), (1.0, 6, "best:1", "best:6")],
)
def test_the_best_tree_says_how_wide_auto_may_draft(
    decoded: Callable[..., Decoded], node: float, largest: int, best: str, widest: str
) -> None:
    """`node`: seconds of one more node; where nodes cost nothing the largest tree is best."""
    verify = [[nodes, 1.0 + node * (nodes - 1)] for nodes in (1, 2, largest + 1)]
    names = trees.names(trees.SIZES, largest)
    text = {OFF: decoded(2, 2, 1.0, 0.1, 0.0)}
    text |= {name: decoded(2, 4, 1.0 + node * TreeSpec.parse(name).nodes, 0.2) for name in names}
    probes = {name: text[name] for name in (OFF, *trees.names(trees.PROBES, largest))}
    records = [Record([-0.5], [True], [(0, 0, True)], [(largest, [0, 2, 3, 5, 9, 20])], [6])]
    seen = Seen([probes], [text], [probes], [records], [records])
    table, report = _conclude({1: {"verify": verify, "draft": [[1, 0.01]]}}, seen, largest, HERE, False)
    assert (report["tree"], table["widest"]) == (best, widest)
    assert report["speedup"] == max(tree["speedup"] for tree in report["trees"])
    assert report["measured"] == pytest.approx(2 * 1.1 / text[best].of("total"))
    assert TimingTable.of(table, largest + 1).widest == widest
    assert (report["machine"], report["prompts"], report["greedy"]["trials"]) == (HERE, 1, 1)


def test_a_table_without_a_draft_is_of_plain_rounds_and_lookups(decoded: Callable[..., Decoded]) -> None:
    plain = [{OFF: decoded(9, 9, 2.0)}]
    found = {1: {"verify": [[1, 1.0], [64, 9.0]], "draft": []}, 4: {"verify": [[1, 3.0]], "draft": []}}
    table, report = _conclude(found, Seen(plain, plain, plain), 63, HERE, False)
    assert (report["trees"], report["greedy"], "tree" in report) == ([], {}, False)
    timings = TimingTable.of(table, 64)
    assert (timings.widest, list(timings.times)) == ("best:32", [1, 4])
    assert [timings.at(batch).verify[1] for batch in (1, 2)] == [2.0, 6.0]
    assert timings.greedy.step == timings.sampled.step == 1 / 2
