"""Measuring: whose turn it is, what a burst's tokens took, and the same tokens from every contender."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbuild.measure.bench import measure as module
from specbuild.measure.bench.measure import Case, Stopwatch, inter_token_latencies, measure, prepare
from specbuild.runtime import Engine, RunStats, SamplingParams
from specbuild.runtime.errors import ExecutionError, PromptError
from specbuild.runtime.requests.prompt_file import Request

CONTENDERS = ["off", "auto", "topk:2,3"]


def test_tokens_of_a_round_share_its_time() -> None:
    assert inter_token_latencies([(1.0, 1), (1.4, 3), (1.5, 4)]) == pytest.approx([0.2, 0.2, 0.1])
    assert inter_token_latencies([(1.0, 1)]) == []


def test_a_reading_is_of_new_tokens_alone() -> None:
    watch = Stopwatch(SimpleNamespace(output=[]))  # type: ignore[arg-type]
    for tokens in ([], [5], [5], [5, 6, 7], [5, 6, 7]):
        watch.sequence.output = tokens
        watch.tick()
    assert [count for _, count in watch.readings] == [1, 3]


def test_contenders_take_turns_and_each_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody drafts by habits of what another contender, or the warm-up, has said."""
    taken: list[tuple[str, list[int]]] = []
    salts = dict[str, set[str]]()

    def turn(_engine: Any, group: list[Any], name: str, salt: str) -> str:
        taken.append((name, list(group)))
        salts.setdefault(salt, set()).add(name)
        return f"{name}{group[0]}"

    monkeypatch.setattr(module, "_turn", turn)
    advanced: list[int] = []
    found = measure(None, ["off", "a", "b"], [0, 1, 2, 3, 4], 2, lambda: advanced.append(1))  # type: ignore[arg-type,list-item]
    warm, groups = [("off", [0, 1]), ("a", [0, 1]), ("b", [0, 1])], [[0, 1], [2, 3], [4]]
    orders = [["off", "a", "b"], ["a", "b", "off"], ["b", "off", "a"]]
    assert taken == warm + [(name, group) for group, names in zip(groups, orders, strict=True) for name in names]
    assert found == {name: [f"{name}0", f"{name}2", f"{name}4"] for name in ("off", "a", "b")}
    assert len(advanced) == 12
    assert sorted(salts) == ["a 2", "b 2", "off 2", "warm-up"]
    assert all(len(salts[f"{name} 2"]) == 1 for name in ("off", "a", "b"))


@pytest.mark.parametrize("concurrency", [1, 2])
def test_every_contender_decodes_the_same(bundle: Path, prompts: list[str], concurrency: int) -> None:
    own = SamplingParams(max_new_tokens=12, temperature=0.8, seed=3)
    requests = [Request(text, own, category=str(i)) for i, text in enumerate(prompts[-3:])]
    with Engine.load(bundle, batch_size=concurrency, prefix_caching=False) as engine:
        found = measure(engine, CONTENDERS, prepare(engine, requests), concurrency, lambda: None)
    texts = {name: [sample.tokens for turn in turns for sample in turn.samples] for name, turns in found.items()}
    assert texts["off"] == texts["auto"] == texts["topk:2,3"]
    assert {len(tokens) for tokens in texts["off"]} == {12}
    for name, turns in found.items():
        assert [len(turn.samples) for turn in turns] == ([1, 1, 1] if concurrency == 1 else [2, 1])
        assert [sample.category for turn in turns for sample in turn.samples] == ["0", "1", "2"]
        for turn in turns:
            assert turn.stats.emitted == sum(len(sample.tokens) for sample in turn.samples)
            assert turn.stats.total < turn.seconds
            assert max(sample.e2el for sample in turn.samples) < turn.seconds
        for sample in (sample for turn in turns for sample in turn.samples):
            assert 0 < sample.ttft < sample.e2el
            assert sum(sample.itl) == pytest.approx(sample.e2el - sample.ttft)
            assert sample.tpot == pytest.approx(sum(sample.itl) / 11)
            assert sample.decode == (sample.e2el - sample.ttft, len(sample.itl))
        counts = {len(sample.itl) for turn in turns for sample in turn.samples}
        assert counts == {11} if name == "off" else max(counts) == 11  # a prompt's last token alone is drafted for
    drafted = {name: turns[0].samples[0].drafting.num_spec_steps for name, turns in found.items()}
    assert drafted["off"] == 0 < min(drafted["auto"], drafted["topk:2,3"])
    assert found["off"][0].stats != RunStats()


def test_a_request_that_fails_is_raised(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(bundle, prefix_caching=False) as engine:
        monkeypatch.setattr(engine.scheduler._loop, "draft", lambda _sequences: 1 / 0)
        with pytest.raises(ExecutionError, match="ZeroDivisionError"):
            measure(engine, ["off"], [Case([1, 2], SamplingParams(), None)], 1, lambda: None)


def test_a_prompt_that_cannot_run_is_named_by_its_line(bundle: Path) -> None:
    requests = [Request("x", SamplingParams(), where="f:1"), Request("", SamplingParams(), where="f:3")]
    with Engine.load(bundle) as engine, pytest.raises(PromptError, match=r"^f:3: the prompt is empty"):
        prepare(engine, requests)
