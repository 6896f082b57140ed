"""Two drafters in one: the text where it repeats itself, the model elsewhere, and the model none the wiser."""

from __future__ import annotations

from typing import Any

from hash_models import HashExecutor, HashModel, sequence_of

from specbuild.runtime.drafting.lookup_first import LookupDrafter
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.sampling.sampler import SamplingParams

REPEATING, FRESH = [1, 2, 3, 4, 5, 1, 2, 3, 4], [6, 7, 8, 9]


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    text = list(tokens)
    for _ in range(count):
        text.append(int(model(text).argmax()))
    return text[len(tokens) - 1 :]


def test_each_sequence_gets_its_own_kind_of_tree() -> None:
    model = HashModel(4)
    executor = HashExecutor(model, 3)
    drafter = LookupDrafter(ModelDrafter(executor, 8))
    params = SamplingParams(speculation="chain:3")
    requests = [sequence_of(prompt, params, slot=slot) for slot, prompt in enumerate((FRESH, REPEATING, FRESH[::-1]))]
    trees = drafter.propose(requests)
    assert trees[0].tokens == greedy(model, FRESH, 3)
    assert trees[1].tokens == [4, 5, 1, 2]
    assert trees[2].tokens == greedy(model, FRESH[::-1], 3)
    for request in requests:
        drafter.commit(request, [0])
        request.emit(9, frozenset())  # none repeats itself any longer
    trees = drafter.propose(requests)
    assert trees[1].tokens == greedy(model, [*REPEATING, 9], 3)
    assert trees[2].tokens == greedy(model, [*FRESH[::-1], 9], 3)
