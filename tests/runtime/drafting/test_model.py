"""The model drafter: a draft that equals the target is accepted fully, drafting ahead changes no token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.drafting.lookup_first import LookupDrafter
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.requests.tokenizer import Tokenizer
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.tree import TreeSpec

PARAMS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.2},
    {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.2},
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("text", ["chain:4", "topk:1,3", "best:1", "topk:2,3", "topk:4,4", "best:5", "best:16"])
@pytest.mark.parametrize("params", PARAMS)
def test_a_draft_that_equals_the_target_is_accepted(
    hash_model: Any, hash_executor: Any, request_of: Any, text: str, params: dict[str, float], overlap: bool
) -> None:
    model, spec = hash_model(5), TreeSpec.parse(text)
    drafter = ModelDrafter(hash_executor(model), 8, overlap)
    loop = HostLoop(hash_executor(model), drafter, 8, frozenset())
    sequence = request_of([1, 2, 3], SamplingParams(max_new_tokens=60, speculation=text, seed=4, **params))
    while not sequence.finish_reason:
        before, drafted = len(sequence.output), sequence.drafts
        loop.round([sequence])
        if not sequence.finish_reason:
            emitted = len(sequence.output) - before
            assert emitted == 1 + spec.depth if drafted and spec.width == 1 else emitted >= 1 + drafted
    assert len(sequence.output) == 60
    if spec.width == 1:
        assert drafter.hit == drafter.guessed > 0 if overlap else drafter.guessed == 0
    loop.close()


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("text", ["chain:3", "topk:3,3", "best:6"])
@pytest.mark.parametrize("looks_up", [False, True])
def test_drafting_ahead_changes_no_token(
    hash_model: Any, hash_executor: Any, request_of: Any, text: str, params: dict[str, float], looks_up: bool
) -> None:
    """Right guesses or wrong, three sequences in a round, one of them decoding plainly, and slots used again."""
    model, outputs, drafters = hash_model(6), list[list[list[int]]](), list[ModelDrafter]()
    for overlap in (False, True):
        drafters.append(ModelDrafter(hash_executor(hash_model(6, error=0.4), 3), 8, overlap))
        loop = HostLoop(hash_executor(model, 3), LookupDrafter(drafters[-1], looks_up), 8, frozenset())
        found = []
        for first in (1, 4):
            active = [
                request_of(
                    [first, slot],
                    SamplingParams(max_new_tokens=50 + slot, speculation=tree, seed=slot, **params),
                    slot=slot,
                )
                for slot, tree in enumerate((text, "off", text))
            ]
            found += active
            while active:
                loop.round(active)
                for sequence in (s for s in active if s.finish_reason):
                    loop.release(sequence.slot)
                active = [s for s in active if not s.finish_reason]
        assert all(sequence.error is None for sequence in found)
        outputs.append([sequence.output for sequence in found])
        loop.close()
    assert outputs[0] == outputs[1]
    assert drafters[1].guessed > drafters[1].hit > 0


def test_what_drafting_ahead_raises_the_round_raises(hash_model: Any, hash_executor: Any, request_of: Any) -> None:
    drafter = ModelDrafter(hash_executor(hash_model(5)), 8, overlap=True)
    loop = HostLoop(hash_executor(hash_model(5)), drafter, 8, frozenset())
    sequence = request_of([1, 2, 3], SamplingParams(max_new_tokens=20, speculation="chain:3"))
    loop.round([sequence])
    step, steps = drafter.executor.step, list[int]()

    def fails(shares: Any) -> Any:
        steps.append(1)
        if len(steps) > 3:  # a chain's steps; those that follow are ahead
            raise RuntimeError("out of memory")
        return step(shares)

    drafter.executor.step = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.round([sequence])
    loop.close()


@pytest.mark.parametrize(("text", "temperature"), [("chain:4", 0.0), ("chain:4", 1.0), ("topk:4,1", 1.0)])
def test_the_real_target_as_its_own_draft_is_accepted_fully(
    load: Any, request_of: Any, tokenizer: Tokenizer, prompts: list[str], text: str, temperature: float
) -> None:
    loop = HostLoop(load("target", 2), ModelDrafter(load("target", 2), 64), 64, frozenset())
    params = SamplingParams(max_new_tokens=30, speculation=text, temperature=temperature, seed=7)
    chosen = [tokenizer.encode(prompt) for prompt in prompts[20:22]]
    active = [
        request_of(tokens, params, slot=slot, vocab_size=4096, tokenizer=tokenizer)
        for slot, tokens in enumerate(chosen)
    ]
    while active:
        before = [(len(s.output), s.drafts) for s in active]
        loop.round(active)
        for sequence, (count, drafted) in zip(active, before, strict=True):
            if drafted and not sequence.finish_reason:
                assert len(sequence.output) - count == 1 + TreeSpec.parse(text).depth
        active = [s for s in active if not s.finish_reason]


@pytest.mark.parametrize(("text", "nodes"), [("chain:4", 5), ("topk:3,3", 8)])
def test_a_draft_runs_no_node_twice(
    hash_model: Any, hash_executor: Any, request_of: Any, text: str, nodes: int
) -> None:
    """A round runs what was emitted and not run, the last leaf and the bonus at most, and its own inner nodes."""
    model = hash_model(5)
    executor = hash_executor(model)
    loop, ran = HostLoop(hash_executor(model), ModelDrafter(executor, 8), 8, frozenset()), list[int]()
    step = executor.step
    executor.step = lambda shares: (ran.append(sum(len(share.tokens) for share in shares)), step(shares))[1]
    sequence = request_of([1, 2, 3], SamplingParams(max_new_tokens=60, speculation=text))
    rounds = 0
    while not sequence.finish_reason:
        before, rounds = sum(ran), rounds + 1
        loop.round([sequence])
        assert rounds <= 2 or sum(ran) - before <= nodes


def test_a_draft_catches_up_with_what_it_did_not_see(hash_model: Any, hash_executor: Any, request_of: Any) -> None:
    executor = hash_executor(hash_model(5), 2)
    drafter = ModelDrafter(executor, 4)
    long, short = (
        request_of(prompt, SamplingParams(speculation="chain:3"), slot=slot)
        for slot, prompt in enumerate(([1] * 11, [2, 3]))
    )
    for _ in range(2):
        trees = drafter.propose([long, short])
        for sequence, tree in zip((long, short), trees, strict=True):
            tokens = list(sequence.tokens)
            while len(tokens) < len(sequence.tokens) + 3:
                tokens.append(int(hash_model(5)(tokens).argmax()))
            assert tree.tokens == tokens[len(sequence.tokens) - 1 :]
            drafter.commit(sequence, [0])
        short.emit(7, frozenset())
        for token in range(9):  # eight of them without the draft
            long.emit(token, frozenset())
    drafter.release(0)
    drafter.keep(0, 1, 2)  # of [2, 3, …]
    other = request_of([2, 3, 6], SamplingParams(speculation="chain:3"), slot=0)
    steps, step = [], executor.step
    executor.step = lambda shares: steps.append(shares[0].start) or step(shares)
    (tree,) = drafter.propose([other])
    assert tree.tokens[1] == int(hash_model(5)([2, 3, 6]).argmax())
    assert steps[0] == 2
    drafter.release(0)
    drafter.keep(0, 0, 0)
    fresh = request_of([4, 5, 6], SamplingParams(speculation="chain:3"), slot=0)
    (tree,) = drafter.propose([fresh])
    assert tree.tokens[1] == int(hash_model(5)([4, 5, 6]).argmax())


def test_a_guess_that_finds_no_bonus_leaves_the_rows_of_the_text(
    hash_model: Any, hash_executor: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut-offs may leave the draft nothing after the guessed leaf; the path's rows have been moved by then."""
    drafter = ModelDrafter(hash_executor(hash_model(6, error=0.4)), 8, overlap=True)
    best = drafter._best

    def nothing(text: Any, logits: Any) -> Any:
        tokens, likely = best(text, logits)
        return tokens, np.full_like(likely, -np.inf) if text.growth.before else likely

    monkeypatch.setattr(drafter, "_best", nothing)
    loop = HostLoop(hash_executor(hash_model(6)), drafter, 8, frozenset())
    sequence = request_of([1, 2, 3], SamplingParams(max_new_tokens=60, speculation="best:5"))
    while not sequence.finish_reason:
        loop.round([sequence])
    assert (sequence.error, len(sequence.output), drafter.guessed) == (None, 60, 0)
    loop.close()


def test_a_tree_near_the_end_of_the_longest_text_is_as_deep_as_its_rows(
    hash_model: Any, hash_executor: Any, request_of: Any
) -> None:
    """`best:31` runs up to 56 nodes of its pool, more than a cache has rows of behind a text of almost full length."""
    model, outputs = hash_model(5), []
    for text in ("off", "best:31"):
        loop = HostLoop(hash_executor(model), ModelDrafter(hash_executor(model, 1, 64 + 32), 8), 8, frozenset())
        sequence = request_of([1, 2, 3], SamplingParams(max_new_tokens=60, speculation=text, temperature=1.0, seed=4))
        while not sequence.finish_reason:
            loop.round([sequence])
        assert sequence.error is None
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1]
