"""Decoding on a device gives plain decoding's tokens: on a host's memory, whose streams run as late as they may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny_models
from device_requests import Made, Words, prompt_of, request_of, requests, run
from host_device import HostDevice, HostQueue, QueuedModel
from small_models import reference
from tiny_models import CAPACITY, CHUNK, TEXT, VOCAB, executor, torch_model

from specbuild.builder.frontend import checkpoint
from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.gpu.onnxruntime_cuda import OrtModel
from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.decoding.device.loop import DeviceLoop
from specbuild.runtime.decoding.device.rounds import Draft
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import Tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[..., list[Sequence]]:
    """`plain(requests, name)`: the same requests decoded one by one by the loop on the host."""

    def decode(wanted: list[Sequence], name: str = "target") -> list[Sequence]:
        target = executor(name, HostDevice(), folder, 1)
        loop = HostLoop(target, None, CHUNK, frozenset())
        return run(loop, wanted)

    return decode


@pytest.fixture(scope="module")
def expected(plain: Callable[..., list[Sequence]]) -> list[list[int]]:
    return [s.output for s in plain(requests("off"))]


@pytest.mark.slow(but=("chain:1", "chain:4"))
@pytest.mark.parametrize("tree", ["chain:4", "topk:2,3", "best:7", "chain:1"])
def test_tokens_are_plain_decodings(host: KernelLibrary, folder: Path, expected: list[list[int]], tree: str) -> None:
    """Prompts of many lengths join and leave, with every processor, two without speculation."""
    made = Made(host, folder)
    done = run(made.loop, requests(tree))
    assert [s.output for s in done] == expected
    assert {s.finish_reason for s in done} == {"length"}
    drafted = [s.metrics.speculative_decoding for s in done if s.tree]
    assert all(s.num_spec_steps for s in drafted)
    assert sum(s.num_accepted_draft_tokens for s in drafted) > 10
    assert not any(s.metrics.speculative_decoding.num_spec_steps for s in done if not s.tree)
    assert made.loop.stats.emitted == sum(map(len, expected))
    assert made.loop.stats.draft > 0
    assert made.device.captured < made.loop.stats.rounds


def test_statistics_are_the_host_loops(host: KernelLibrary, folder: Path) -> None:
    """The same trees are drafted, verified and accepted as `ModelDrafter` and `Loop` do with the same models.

    How deep a tree was that grew on the device, nobody tells the host.
    """
    made, other = Made(host, folder, 3), HostDevice()
    wanted = [("chain:3", {}), ("topk:2,3", {"temperature": 0.7}), ("best:6", {"repetition_penalty": 1.3})]
    batch = [request_of(prompt_of(i, 5 + i), speculation=tree, **more) for i, (tree, more) in enumerate(wanted)]
    again = [request_of(prompt_of(i, 5 + i), speculation=tree, **more) for i, (tree, more) in enumerate(wanted)]
    target, draft = (executor(name, other, folder, 3) for name in ("target", "draft"))
    run(made.loop, batch)
    run(HostLoop(target, ModelDrafter(draft, 8), 16, frozenset()), again)
    for mine, theirs in zip(batch, again, strict=True):
        assert mine.output == theirs.output
        told = replace(theirs.metrics.speculative_decoding, depth_histogram=[])
        assert mine.metrics.speculative_decoding == told
        assert mine.metrics.speculative_decoding.num_accepted_draft_tokens


@pytest.mark.parametrize("names", [("target",), ("target", "draft")], ids=["alone", "with a draft"])
def test_lookups_are_sent(
    host: KernelLibrary, folder: Path, plain: Any, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """A text that repeats itself is drafted from; the draft model, where there is one, catches up afterwards."""
    loop_of = [17, 4, 29, 61, 8, 2, 55, 90, 31]
    prompts = [loop_of * 3, prompt_of(5, 9), loop_of[2:] + loop_of]
    bias = dict.fromkeys(loop_of, 30.0)  # one of them is always chosen, and penalties make it another

    def wanted(tree: str) -> list[Sequence]:
        more = [{"logit_bias": bias, "max_new_tokens": 24}, {"temperature": 0.6}, {"max_new_tokens": 20}]
        return [request_of(prompt, speculation=tree, **each) for prompt, each in zip(prompts, more, strict=True)]

    made, sent = Made(host, folder, 2, names, drafter=None), list[int]()
    plan = made.loop.proposals.plan

    def noted(sequences: list[Sequence]) -> list[Draft]:
        drafts = plan(sequences)
        sent.extend(len(draft.tree) if draft.tree else 0 for draft in drafts)
        return drafts

    monkeypatch.setattr(type(made.loop.proposals), "plan", lambda _, sequences: noted(sequences))
    done = run(made.loop, wanted("best:6"))
    assert [s.output for s in done] == [s.output for s in plain(wanted("off"))]
    assert max(sent) == 7
    assert (0 in sent) == (len(names) == 2)  # the model's
    assert sum(s.metrics.speculative_decoding.num_accepted_draft_tokens for s in done) > 5


def test_without_speculation_nothing_is_drafted(host: KernelLibrary, folder: Path, expected: list[list[int]]) -> None:
    made = Made(host, folder, 3)
    assert [s.output for s in run(made.loop, requests("off"))] == expected
    assert made.loop.rounds.grower
    assert not made.loop.rounds.grower.executor.model.steps  # type: ignore[attr-defined]


@pytest.mark.slow
def test_windows_and_a_perfect_draft(host: KernelLibrary, folder: Path, plain: Any) -> None:
    def wanted(tree: str) -> list[Sequence]:
        return [request_of(prompt_of(i, n), speculation=tree, max_new_tokens=25) for i, n in enumerate((30, 4))]

    for tree in ("chain:3", "topk:2,3"):
        made = Made(host, folder, 2, ("windowed", "windowed"))
        done = run(made.loop, wanted(tree))
        assert [s.output for s in done] == [s.output for s in plain(wanted("off"), "windowed")]
        assert all(s.metrics.speculative_decoding.mean_acceptance_length == 4 for s in done)


def test_trees_end_where_the_cache_does(host: KernelLibrary, folder: Path, plain: Any) -> None:
    """A draft whose levels have no more room is not asked, and no kernel finds a fault."""

    def wanted(tree: str) -> list[Sequence]:
        return [request_of(prompt_of(i, TEXT - 22), speculation=tree, max_new_tokens=22) for i in range(2)]

    reference = [s.output for s in plain(wanted("off"))]
    for tree in ("best:7", "topk:5,3"):
        assert [s.output for s in run(Made(host, folder).loop, wanted(tree))] == reference


def test_ends_inside_an_accepted_path(host: KernelLibrary, folder: Path, plain: Any) -> None:
    """An end-of-sequence token or a stop string; the slot's next request finds nothing of it."""
    (full,) = plain([request_of(prompt_of(3, 6), speculation="off")])
    made = Made(host, folder, 1, ("target", "target"))
    for at in range(1, 7):
        stop = Words().decode(full.output[at - 1 : at + 1])
        (stopped,) = plain([request_of(prompt_of(3, 6), speculation="off", stop=stop)])
        (one,) = run(made.loop, [request_of(prompt_of(3, 6), speculation="chain:4", stop=stop)])
        assert (one.output, one.finish_reason) == (stopped.output, "stop")
        made.loop.emission.eos = frozenset({full.output[at]})
        (other,) = run(made.loop, [request_of(prompt_of(3, 6), speculation="topk:2,3")])
        assert other.output == full.output[: full.output.index(full.output[at]) + 1]
        assert other.finish_reason == "stop"
        made.loop.emission.eos = frozenset()


def test_logprobs_are_plain_decodings(host: KernelLibrary, folder: Path, plain: Any) -> None:
    def wanted(tree: str) -> list[Sequence]:
        more = [{"logprobs": 3, "temperature": 0.8}, {}, {"logprobs": 0}]
        return [request_of(prompt_of(i, 5), speculation=tree, **fields) for i, fields in enumerate(more)]

    for one, other in zip(run(Made(host, folder).loop, wanted("topk:2,3")), plain(wanted("off")), strict=True):
        assert one.output == other.output
        assert len(one.logprobs) == (0 if one.params.logprobs is None else len(one.output))
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


@pytest.mark.parametrize("names", [("target",), ("target", "draft")], ids=["alone", "with a draft"])
def test_what_is_no_logit_ends_its_sequence_alone(
    host: KernelLibrary, folder: Path, plain: Any, names: tuple[str, ...]
) -> None:
    def wanted(tree: str) -> list[Sequence]:
        return [request_of(prompt_of(i, 5), speculation=tree, temperature=i % 2, logprobs=1) for i in range(3)]

    made, reference = Made(host, folder, 2, names, None), plain(wanted("off"))
    model, steps = made.target.model, [0]

    def spoil(nodes: int) -> None:
        steps[0] += 1
        if steps[0] == 3:
            made.device.array(model.logits).ravel()[nodes * VOCAB : 2 * nodes * VOCAB] = np.nan
            for each in made.loop._executors:  # the slot's next sequence must find none of it
                made.device.array(each.model.cache)[:, 1] = np.nan

    model.spoil = spoil  # type: ignore[attr-defined]
    first, second, third = run(made.loop, wanted("chain:3"))
    assert (second.finish_reason, type(second.error)) == ("error", ExecutionError)
    assert "gave nan as a token's logit" in str(second.error)
    assert second.output == reference[1].output[: len(second.output)]
    assert [first.output, third.output] == [reference[0].output, reference[2].output]


def test_a_fault_ends_its_sequence_alone(
    host: KernelLibrary, folder: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wanted(tree: str) -> list[Sequence]:
        return [request_of(prompt_of(i, 5), speculation=tree) for i in range(3)]

    made, reference = Made(host, folder, names=("target",)), [s.output for s in plain(wanted("off"))]
    batch = wanted("chain:3")
    found, plan = list[int](), made.loop.proposals.plan

    def wrong(sequences: list[Sequence]) -> list[Draft]:
        drafts = plan(sequences)
        for draft, sequence in zip(drafts, sequences, strict=True):
            if sequence is batch[0] and len(sequence.output) > 3:
                found.append(len(sequence.output))
                draft.tree = Tree([sequence.tokens[-1], 5, 6], [-1, 2, 0], [0, 1, 1])
        return drafts

    monkeypatch.setattr(type(made.loop.proposals), "plan", lambda _, sequences: wrong(sequences))
    run(made.loop, batch)
    assert "fault PARENT" in str(batch[0].error)
    assert batch[0].output == reference[0][: found[0]]
    assert [s.output for s in batch[1:]] == reference[1:]
    assert found == [len(batch[0].output)]


def test_a_step_that_fails_leaves_the_loop_usable(host: KernelLibrary, folder: Path, expected: list[list[int]]) -> None:
    made = Made(host, folder)
    batch = requests("topk:2,3")[:2]
    for slot, sequence in enumerate(batch):
        sequence.slot = slot
    for _ in range(4):
        made.loop.round(batch)

    def fail(nodes: int) -> None:
        raise ExecutionError("out of luck")

    made.target.model.spoil = fail  # type: ignore[attr-defined]
    with pytest.raises(ExecutionError, match="out of luck"):
        made.loop.round(batch)
    made.target.model.spoil = None  # type: ignore[attr-defined]
    for slot in range(2):
        made.loop.release(slot)
    assert [s.output for s in run(made.loop, requests("topk:2,3"))] == expected


def conversations(tree: str, **fields: Any) -> list[list[Sequence]]:
    """Texts that go on, or begin like another, some at a time; a long one is left alone for a while."""
    system, long = prompt_of(3, 30), prompt_of(4, TEXT - 16)
    turns = [[system, prompt_of(5, 3), long], [[*system, 5], [*system[:20], 6]], [[*system, 5, 7]], [long, system[:2]]]
    asked: dict[str, Any] = {"speculation": tree, "max_new_tokens": 12, **fields}
    return [
        [request_of(prompt, **asked, seed=at, temperature=at % 2) for at, prompt in enumerate(turn)] for turn in turns
    ]


@pytest.mark.slow(but=("target-chain:4", "target-off"))
@pytest.mark.parametrize("tree", ["chain:4", "best:7", "off"])
@pytest.mark.parametrize("name", ["target", "windowed"])
def test_prompts_are_read_from_where_a_cache_has_them(
    host: KernelLibrary, folder: Path, plain: Any, tree: str, name: str
) -> None:
    """Nothing that other slots' steps write meanwhile is in the rows, of either model."""
    made = Made(host, folder, 3, (name, name))
    done = [s for turn in conversations(tree) for s in run(made.loop, turn)]
    cached = [s.metrics.num_cached_tokens for s in done]
    assert all(some >= wanted for some, wanted in zip(cached[3:], [30, 20, 31, TEXT - 17, 1], strict=True)), cached
    assert [s.output for s in done] == [s.output for turn in conversations("off") for s in plain(turn, name)]
    if tree == "chain:4":  # a perfect draft, that has the rows it needs
        assert all(
            s.metrics.speculative_decoding.mean_acceptance_length > 3.5 for s in done if not s.params.temperature
        )


def test_whole_texts_go_on(host: KernelLibrary, folder: Path, plain: Any) -> None:
    """One that was drafted for and one that was not, while a third was decoded; the draft is perfect."""
    made, asked = Made(host, folder, 3, ("target", "target")), {"speculation": "chain:4", "max_new_tokens": 14}
    first = [request_of(prompt_of(1, 20), **asked), request_of(prompt_of(2, 20), **asked | {"speculation": "off"})]
    run(made.loop, [*first, request_of(prompt_of(3, 20), **asked | {"max_new_tokens": 40})])
    texts = [[*s.tokens, 8] for s in first]
    done = run(made.loop, [request_of(text, **asked) for text in texts])
    assert [s.metrics.num_cached_tokens for s in done] == [33, 33]
    assert [s.output for s in done] == [s.output for s in plain([request_of(text, **asked) for text in texts])]
    for sequence in done:
        histogram = sequence.metrics.speculative_decoding.acceptance_histogram
        assert sum(histogram[:4]) <= 1 < histogram[4], histogram


def test_logits_for_measuring(host: KernelLibrary, folder: Path) -> None:
    made, text = Made(host, folder), prompt_of(1, 60)
    wanted = reference(torch_model("target"), text)
    np.testing.assert_allclose(made.loop.logits(text), wanted[-1:], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(made.loop.logits(text, 30), wanted[-30:], rtol=1e-4, atol=1e-4)
    assert made.loop.cache_bytes == 2 * made.target.cache_bytes == 2 * 4 * (2 * 2 * 2 * 2 * CAPACITY * 16)
    made.loop.close()


@pytest.mark.slow
def test_an_engine_of_the_reference_pair(
    host: KernelLibrary, bundle: Path, pair: Path, prompts: list[str], tmp_path: Path
) -> None:
    """Texts of a real pair, through the scheduler, are those of the CPU's engine."""
    params = [
        SamplingParams(max_new_tokens=16, speculation="best:8"),
        SamplingParams(max_new_tokens=16, temperature=0.8, top_p=0.95, seed=1, speculation="topk:2,3"),
        SamplingParams(max_new_tokens=16, temperature=1.0, repetition_penalty=1.1, seed=2, speculation="chain:4"),
    ]
    asked = [prompts[index] for index in (21, 24, 26)]  # some 100 tokens each
    device, buckets = HostDevice(), (1, 2, 4, 8, 16)
    with Engine.load(bundle, batch_size=2) as engine:
        results = engine.generate(asked, params)
        manifest, tokenizer = engine.manifest, engine.tokenizer
    executors = []
    for name, record in manifest.models.items():
        trained = checkpoint.load(checkpoint.find(str(pair / name)), "eager")
        ir.save(tiny_models.lower_model(trained, 200), tmp_path / name)
        shape = record.layers, record.kv_heads, record.head_dim, record.vocab_size
        spec = ModelSpec(name, *shape, 200, buckets[-1])
        stream = device.stream()
        model = OrtModel(tmp_path / name, spec, device, 2, buckets, 64, "cpu", stream)
        executors.append(StandardExecutor(device, QueuedModel(model, device), stream))
    loop = DeviceLoop(*executors, HostQueue(host, device), frozenset(manifest.eos_token_ids))
    with Engine(manifest, tokenizer, loop, 2) as engine:
        mine = engine.generate(asked, params)
    assert [result.token_ids for result in mine] == [result.token_ids for result in results]
    assert all(r.metrics.speculative_decoding.num_accepted_draft_tokens for r in mine)
