"""Measuring: whose turn it is, what a burst's tokens took, and the same tokens from every contender."""

import pytest

from specbuild.measure.bench.measure import Case, inter_token_latencies, measure, prepare
from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.errors import ExecutionError, PromptError
from specbuild.runtime.requests.prompt_file import Request

CONTENDERS = ["off", "auto", "topk:2,3"]


def test_contenders_take_turns_and_each_begins_once(bundle, monkeypatch):
    cases = [Case([first, 5], SamplingParams(max_new_tokens=2), None) for first in range(1, 6)]
    taken = []
    with Engine.load(bundle, batch_size=2, prefix_caching=False) as engine:
        requests = engine.requests

        def seen(prompts, params, errors):
            taken.append((params[0].speculation, [tokens[0] for tokens in prompts], params[0].cache_salt))
            return requests(prompts, params, errors)

        monkeypatch.setattr(engine, "requests", seen)
        measure(engine, CONTENDERS, cases, 2, lambda: None)
    off, auto, tree = CONTENDERS
    orders = [off, auto, tree], [off, auto, tree], [auto, tree, off], [tree, off, auto]
    turns = [
        (name, group) for group, names in zip(([1, 2], [1, 2], [3, 4], [5]), orders, strict=True) for name in names
    ]
    assert [(name, group) for name, group, _ in taken] == turns
    salts = {(place < 3 or name, salt) for place, (name, _, salt) in enumerate(taken)}
    assert len({salt for _, salt in salts}) == len(salts) == 4


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("concurrency", [1, 2])
def test_every_contender_decodes_the_same(bundle, prompts, concurrency):
    own, advanced = SamplingParams(max_new_tokens=12, temperature=0.8, seed=3), list[int]()
    requests = [Request(text, own, category=str(i)) for i, text in enumerate(prompts[-3:])]
    with Engine.load(bundle, batch_size=concurrency, prefix_caching=False) as engine:
        found = measure(engine, CONTENDERS, prepare(engine, requests), concurrency, lambda: advanced.append(1))
    assert len(advanced) == 3 * (1 + len(found["off"]))
    samples = {name: [sample for turn in turns for sample in turn.samples] for name, turns in found.items()}
    texts = {tuple(tuple(sample.tokens) for sample in each) for each in samples.values()}
    assert [[len(tokens) for tokens in each] for each in texts] == [[12, 12, 12]]
    for name, turns in found.items():
        assert [len(turn.samples) for turn in turns] == ([1, 1, 1] if concurrency == 1 else [2, 1])
        for turn in turns:
            assert turn.stats.emitted == sum(len(sample.tokens) for sample in turn.samples)
            assert max(turn.stats.total, *(sample.e2el for sample in turn.samples)) < turn.seconds
        assert [sample.category for sample in samples[name]] == ["0", "1", "2"]
        for sample in samples[name]:
            assert sum(sample.itl) == pytest.approx(sample.e2el - sample.ttft)
            assert sample.tpot == pytest.approx(sum(sample.itl) / 11)
            assert len(sample.itl) <= 11
        assert (samples[name][0].drafting.num_spec_steps > 0) == (name != "off")


def test_tokens_of_a_round_share_its_time():
    assert inter_token_latencies([(1.0, 1), (1.4, 3), (1.5, 4)]) == pytest.approx([0.2, 0.2, 0.1])


def test_a_request_that_fails_is_raised(bundle, monkeypatch):
    with Engine.load(bundle, prefix_caching=False) as engine:
        with engine.scheduler.exclusive() as loop:
            monkeypatch.setattr(loop, "propose", lambda _sequences: 1 / 0)
        with pytest.raises(ExecutionError, match="ZeroDivisionError"):
            measure(engine, ["off"], [Case([1, 2], SamplingParams(), None)], 1, lambda: None)


def test_a_prompt_that_cannot_run_is_named_by_its_line(bundle):
    requests = [Request("x", SamplingParams(), where="f:1"), Request("", SamplingParams(), where="f:3")]
    with Engine.load(bundle) as engine, pytest.raises(PromptError, match=r"^f:3: the prompt is empty"):
        prepare(engine, requests)
