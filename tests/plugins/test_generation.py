"""Whole generations in which the kernels choose, walk, commit and grow in NumPy's place give the same tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Array, Growths, cache_struct, choose, commit, history, ints, tree_arrays, walk
from device import HostKernels
from numpy.typing import NDArray

from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.backends.cpu.kv_cache import KVCache
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.drafting import factory
from specbuild.runtime.drafting import model as draft_module
from specbuild.runtime.drafting.model import ModelDrafter, Text
from specbuild.runtime.engine import composition
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import Tree, TreeSpec
from specbuild.runtime.speculation.tree_growth import Growth

PARAMS = (
    SamplingParams(max_new_tokens=20),
    SamplingParams(max_new_tokens=20, temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(max_new_tokens=20, temperature=1.1, top_k=50, min_p=0.02, repetition_penalty=1.1, seed=2),
    SamplingParams(
        max_new_tokens=20,
        temperature=0.9,
        frequency_penalty=0.5,
        presence_penalty=0.3,
        logit_bias={10: 2.0, 11: -5.0},
        seed=3,
    ),
    SamplingParams(max_new_tokens=20, repetition_penalty=1.3),
)
used: dict[str, int] = {}  # how often each kernel took NumPy's place


def chosen(
    kernels: HostKernels, sequence: Sequence, tree: Tree, logits: Array, position: int, rows: Array | None, best: int
) -> tuple[Array, Array]:
    """The choose kernel for the rows of one sequence."""
    used["choose"] = used.get("choose", 0) + 1
    tokens, parents, _ = tree_arrays([tree], len(tree))
    prompt = sequence.tokens[: len(sequence.tokens) - len(sequence.output)]
    past = history(logits.shape[1], prompt, sequence.output)[None]
    one = [sequence.params], [sequence.sampler.seed], [position]
    choices, scores = choose(
        kernels, np.ascontiguousarray(logits)[None], *one, tokens, parents, best, row_nodes=rows, history=past
    )
    return choices, scores


@pytest.fixture
def replaced(kernels: HostKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines loaded from here on run the kernels."""

    class KernelLoop(HostLoop):
        """All nodes' choices at once, and the walk along them."""

        def accept(self, sequence: Sequence, tree: Tree, logits: NDArray[np.float32]) -> None:
            root, drafted = sequence.cached, sequence.drafts
            choices, _ = chosen(kernels, sequence, tree, logits, root, None, 1)
            tokens, parents, _ = tree_arrays([tree], len(tree))
            out = walk(kernels, tokens, parents, choices[..., 0])
            used["walk"] = used.get("walk", 0) + 1
            path = list[int]()
            for node, token in zip(out["path"][0], out["emitted"][0, : out["length"][0]].tolist(), strict=False):
                path.append(int(node))
                sequence.emit(token, self.emission.eos)
                if sequence.finish_reason:
                    break
            self.target.commit(sequence.slot, [root + node for node in path], root)
            sequence.cached += len(path)
            if drafted and self.drafter:
                self.drafter.commit(sequence, path)
                if len(tree) > 1:
                    sequence.metrics.speculative_decoding.record(len(tree) - 1, len(path) - 1)

    class KernelDrafter(ModelDrafter):
        """Children as the kernel chooses them; scores in the likelihoods' place."""

        def _text(self, sequence: Sequence, shape: TreeSpec) -> Text:
            self.of = getattr(self, "of", {}) | {sequence.slot: sequence}
            return super()._text(sequence, shape)

        def _children(self, text: Text, logits: NDArray[np.float32]) -> Any:
            growth, sequence, position = text.growth, self.of[text.slot], len(text.tokens) - 1
            rows = ints([growth.frontier])
            return chosen(kernels, sequence, growth.pool, logits, position, rows, growth.spec.branch)

    class KernelGrowth(Growth):
        """The pool, the frontier, its rows and the final tree from the kernel."""

        state: Growths

        def grow(self, tokens: Any, scores: Any) -> None:
            if self.depth == 0:
                self.state = Growths(kernels, [self.spec], [self.pool.tokens[0]], [0])
            rows = self.state.frontiers if self.depth else 1
            shape = 1, rows, self.state.best
            choices, all_scores = np.full(shape, -1, dtype=np.int32), np.full(shape, -np.inf, dtype=np.float32)
            choices[:, : tokens.shape[1]], all_scores[:, : tokens.shape[1]] = tokens, scores
            self.state.grow(choices, all_scores)
            a, used["grow"] = self.state.arrays, used.get("grow", 0) + 1
            for node in range(len(self.pool), self.state.shapes[0].size):
                self.pool.add(int(a["pool_tokens"][0, node]), int(a["pool_parents"][0, node]))
            self.depth, self.run = self.depth + 1, int(a["level_offset"][0])
            self.rows = a["pool_rows"][0, : len(self.pool)].tolist()
            self.frontier = a["frontier"][0, : a["level_counts"][0]].tolist()

        def place(self) -> NDArray[np.bool_] | None:
            first, self.run = self.run, self.run + len(self.frontier)
            if self.spec.width == 1:
                return None
            seen = np.eye(self.run, dtype=bool)
            for row, parent in enumerate(self.state.arrays["level_parents"][0, : self.run]):
                if parent >= 0:
                    seen[row] |= seen[parent]
            return seen[first:]

        def tree(self) -> Tree:
            self.state.finish()
            count = self.state.arrays["tree_counts"][0]
            self.kept = self.state.arrays["tree_nodes"][0, :count].tolist()
            rows = self.state.arrays["node_rows"][0, 1:count] - 1
            assert [max(row, -1) for row in rows.tolist()] == [self.rows[node] for node in self.kept[1:]]
            return self.state.tree(0)

    def gather(cache: KVCache, slot: int, rows: list[int], start: int) -> None:
        if not rows:
            return
        length = np.zeros(cache.slots, dtype=np.int32)
        path = np.tile(np.arange(len(rows), dtype=np.int32), (cache.slots, 1))
        length[slot], base = len(rows), ints([start] * cache.slots)
        node_rows = ints(np.tile([row - start for row in rows], (cache.slots, 1)))
        out = commit(kernels, path, length, cache_struct(kernels, cache.rows, base, base, node_rows))
        assert out["kept"][0, slot] == len(rows)
        used["commit"] = used.get("commit", 0) + 1

    used.clear()
    monkeypatch.setattr(composition, "HostLoop", KernelLoop)
    monkeypatch.setattr(factory, "ModelDrafter", KernelDrafter)
    monkeypatch.setattr(draft_module, "Growth", KernelGrowth)
    monkeypatch.setattr(KVCache, "gather", gather)


@pytest.fixture(scope="module")
def plain(bundle: Path, prompts: list[str]) -> list[list[int]]:
    """Tokens without speculation, NumPy throughout."""
    with Engine.load(bundle, batch_size=2) as engine:
        params = [replace(p, speculation="off") for p in PARAMS]
        return [result.token_ids for result in engine.generate(prompts[14 : 14 + len(PARAMS)], params)]


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["chain:4", "topk:2,3", "best:12"])
def test_the_tokens_are_the_same(
    replaced: None, plain: list[list[int]], bundle: Path, prompts: list[str], tree: str
) -> None:
    params = [replace(p, speculation=tree) for p in PARAMS]
    with Engine.load(bundle, drafter="model", batch_size=2) as engine:
        results = engine.generate(prompts[14 : 14 + len(PARAMS)], params)
    assert [result.token_ids for result in results] == plain
    assert set(used) == {"choose", "walk", "commit", "grow"}
    accepted = sum(result.metrics.speculative_decoding.num_accepted_draft_tokens for result in results)
    assert accepted > 10
