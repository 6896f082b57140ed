"""Near-ties are settled: texts are plain decoding's where side branches, and all that builds on them, are rounded."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
from device_requests import run
from hash_models import HashExecutor, HashModel, plain_text, sequence_of
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.decoding.loop import LoopOptions
from specbuild.runtime.drafting.lookup_first import LookupDrafter
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.sampling.sampler import SamplingParams

CHUNK = 8
TREES = ["off", "chain:4", "topk:2,3", "topk:4,4", "best:16"]
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.5, "repetition_penalty": 1.4, "presence_penalty": 0.4},
]


class RoundingExecutor(HashExecutor):
    """A node behind a row that it does not see, or that sees such a node's row, has other logits each time.

    By at most half the bound each, so that two of them lie at most the bound farther apart.
    """

    bound, seed = 0.0, 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rounded = [[False] * self.spec.capacity for _ in range(self.batch_size)]

    def step(self, inputs: Seq[StepInput]) -> list[NDArray[np.float32]]:
        logits = super().step(inputs)
        for given_input, rows in zip(inputs, logits, strict=True):
            nodes = self._round(given_input)
            for row, rounded in zip(rows, nodes[len(nodes) - len(rows) :], strict=True):
                if rounded:
                    self.seed += 1
                    row += np.random.default_rng(self.seed).uniform(-0.5, 0.5, len(row)) * self.bound
        return logits

    def _round(self, given: StepInput) -> list[bool]:
        rows, start, committed = self.rounded[given.slot], given.start, given.committed
        nodes = []
        for node in range(len(given.tokens)):
            seen = np.ones(start + node + 1 - committed, dtype=np.bool_)
            if given.visible is not None:
                seen = given.visible[node, : len(seen)]
            above = rows[:committed] + [rows[committed + int(row)] for row in np.flatnonzero(seen[:-1])]
            rows[start + node] = not seen.all() or any(above)
            nodes.append(rows[start + node])
        return nodes

    def commit(self, slot: int, rows: Seq[int], start: int) -> None:
        super().commit(slot, rows, start)
        kept = self.rounded[slot]
        kept[start : start + len(rows)] = [kept[row] for row in rows]

    def copy(self, slot: int, source: int, rows: int) -> None:
        super().copy(slot, source, rows)
        self.rounded[slot][:rows] = self.rounded[source][:rows]


def loop_of(model: Any, draft: Any, bound: float, batch_size: int = 1, exact: bool = True) -> HostLoop:
    target = RoundingExecutor(model, batch_size, 256, 64)
    target.bound = bound
    drafter = LookupDrafter(ModelDrafter(HashExecutor(draft, batch_size, 256, 64), CHUNK))
    exactness = ExactnessClass(1, 2) if exact else None
    return HostLoop(target, drafter, CHUNK, frozenset(), LoopOptions(exactness=exactness, bound=bound))


@pytest.mark.slow(but=("1-0",))
@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
@pytest.mark.parametrize("batch_size", [1, 2])
def test_texts_are_plain_decodings_whatever_is_rounded(params: dict[str, Any], batch_size: int) -> None:
    """Also where one reads on from another's rows, and where side branches of a draft that is often wrong are taken."""
    model, draft = HashModel(5), HashModel(5, 0.7)
    loop, requests = loop_of(model, draft, 0.6, batch_size), []
    for index, tree in enumerate(TREES * 4):
        prompt = [3, 1, 4, 1, 5, 9, 2, 6][: 1 + index % 8]
        asked = SamplingParams(max_new_tokens=30, speculation=tree, seed=index // 5, **params)
        requests.append(sequence_of(prompt, asked, index))
    run(loop, requests)
    for request in requests:
        prompt = request.tokens[: request.metrics.num_prompt_tokens]
        assert request.output == plain_text(model, prompt, request.params)
    told = [request.metrics.speculative_decoding for request in requests]
    assert sum(each.num_unsettled_steps for each in told) > 5
    assert sum(each.num_recomputed_tokens for each in told) > 20
    chains = [each for each, request in zip(told, requests, strict=True) if request.params.speculation == "chain:4"]
    assert not any(each.num_unsettled_steps or each.num_recomputed_tokens for each in chains)


def test_what_is_not_in_the_class_would_be_another_text() -> None:
    """So the tests above can fail."""
    model = HashModel(5)
    requests = [
        sequence_of([1, n], SamplingParams(max_new_tokens=60, speculation="topk:4,4", seed=n)) for n in range(8)
    ]
    run(loop_of(model, HashModel(5, 0.7), 0.6, exact=False), requests)
    assert any(each.output != plain_text(model, each.tokens[:2], each.params) for each in requests)


@pytest.mark.nightly
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    error=st.floats(0, 2),
    bound=st.sampled_from([0.0, 0.05, 0.5, 3.0, 40.0]),
    tree=st.sampled_from(TREES),
    params=st.sampled_from(PARAMS),
)
def test_any_bound(seed: int, error: float, bound: float, tree: str, params: Any) -> None:
    model = HashModel(seed)
    loop = loop_of(model, HashModel(seed, error), bound, 2)
    asked = SamplingParams(max_new_tokens=24, speculation=tree, seed=seed, **params)
    requests = [sequence_of([seed % 12, 2, 3], asked, index) for index in range(3)]
    run(loop, requests)
    for request in requests:
        assert request.output == plain_text(model, request.tokens[:3], asked)
