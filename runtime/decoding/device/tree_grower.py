"""The draft model on a device: it grows every sequence's tree in one graph, without the host.

The model always reruns a text's last two tokens. No more than their rows can be missing after a round: the last
accepted leaf, which no level has run, and the bonus token. A row that was right is written again as it was.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.backends.gpu.device import MAX_NODES, Tensor
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.kernels.interface import Kernels
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.errors import BundleError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import BEST_DEPTH, TreeSpec

from .graphs import Graphs
from .launches import Launcher
from .memory import Block
from .slots import ProcessorFlags, Slots

_PAIR = 2
_SHORT = 4  # steps of the largest bucket that read a text sooner than one of its own would: they are graphs


@dataclass(frozen=True, slots=True)
class Extent:
    """Sizes of what one graph grows: the largest that any of its trees asks for, in whole buckets."""

    levels: int
    branch: int
    frontiers: int
    pool: int
    rows: int
    nodes: int

    @classmethod
    def of(cls, specs: Seq[TreeSpec], executor: StandardExecutor, nodes: int) -> Extent:
        """Return the extent of trees of these shapes, which are verified `nodes` at a time."""
        levels, branch, expand = (max(getattr(s, name) for s in specs) for name in ("depth", "branch", "expand"))
        frontiers, pool = executor.bucket(expand), 1 + max(spec.width * spec.depth for spec in specs)
        rows = max(frontiers, *(spec.expand * (spec.depth - 1) for spec in specs))
        return cls(levels, branch, frontiers, pool, rows, nodes)


class TreeGrower:
    """Grows trees of the shapes in `Slots` into a round's `Block`; memory for the largest is allocated once."""

    def __init__(self, executor: StandardExecutor, kernels: Kernels, slots: Slots, max_nodes: int) -> None:
        """Allocate for trees of at most `max_nodes` nodes, the root included; raises BundleError if no step has two."""
        if _PAIR not in executor.model.buckets:
            raise BundleError("the draft has no step of two nodes: build it with a bucket of 2")
        self.executor, self._launch, self._slots = executor, Launcher(kernels, executor), slots
        self.graphs = Graphs(executor)
        self.drafter = ModelDrafter(executor, executor.model.chunk)  # over the same cache; the host grows its trees
        self._cached = self.drafter.cached  # per slot: tokens whose rows are right; there may be more
        batch, wide, branch = executor.batch_size, executor.model.buckets[-1], max_nodes - 1

        def empty(*shape: int, dtype: type = np.int32) -> Tensor:
            return executor.device.empty((batch, *shape), dtype)

        pool = 1 + BEST_DEPTH * branch
        self._tree = {f"pool_{name}": empty(pool) for name in ("tokens", "parents", "rows")}
        self._tree |= {"pool_scores": empty(pool, dtype=np.float64), "frontier": empty(wide)}
        self._tree |= {name: empty() for name in ("level_counts", "level_offset")}
        self._tree |= {name: empty(MAX_NODES) for name in ("level_parents", "tree_nodes")}
        self._tree |= {"choices": empty(wide, branch), "scores": empty(wide, branch, dtype=np.float32)}
        self._tickets, self._workspace = empty(wide, dtype=np.uint32), self._launch.workspace(wide, branch)
        self._pair = _pair_of(executor)

    def catch_up(self, sequences: Seq[Sequence]) -> None:
        """Prefill what each sequence's cache lacks, except for the last two tokens."""
        while behind := [s for s in sequences if len(s.tokens) - self._cached[s.slot] > _PAIR]:
            self.executor.step([self._chunk(sequence) for sequence in behind])
            for sequence in behind:
                self.executor.commit(sequence.slot, (), self._cached[sequence.slot])

    def _chunk(self, sequence: Sequence) -> StepInput:
        """Return a sequence's next chunk; a long one is a step of its own, several short ones are one step of all."""
        start, stop, short = self._cached[sequence.slot], len(sequence.tokens) - _PAIR, self.executor.buckets[-1]
        stop = min(stop, start + (short if stop - start <= _SHORT * short else self.executor.model.chunk))
        self._cached[sequence.slot] = stop
        return StepInput(sequence.slot, start, start, sequence.tokens[start:stop], range(start, stop), None, 0)

    def draft(self, specs: Seq[TreeSpec], flags: ProcessorFlags, block: Block, nodes: int) -> None:
        """Enqueue the growth of trees of at most `nodes` nodes, on the draft's stream."""
        extent = Extent.of(specs, self.executor, nodes)
        self.graphs.run((extent, flags), lambda: self.grow(extent, flags, block))

    def grow(self, extent: Extent, flags: ProcessorFlags, block: Block) -> None:
        """Enqueue the root's children, one level after another below them, and the choice of the final tree."""
        model, stream, at = self.executor.model, self.executor.stream, self._slots.at
        tensors, tree, fault, roots = model.tensors, self._tree, block.at["fault"], at["cache_len"]
        fields = self._fields(extent, block)
        with nvtx.range("draft level"):
            self.executor.device.copy(tensors.tokens, at["pair"], stream)
            self._launch.tree_inputs(roots, _PAIR, fault=fault, shift=-1, **self._pair)
            model.enqueue(_PAIR, stream)
        row = tensors.logits.dtype.itemsize * self.executor.spec.vocab_size
        self._choose(extent, flags, fault, nodes=1, logits=tensors.logits.address + row, rows_apart=_PAIR)
        self._launch("grow_level", **fields, first=1)
        for _ in range(extent.levels - 1):
            level = {"parents": tree["level_parents"], "tree_nodes": extent.rows, "counts": tree["level_counts"]}
            with nvtx.range("draft level"):
                offset = tree["level_offset"]
                self._launch.tree_inputs(roots, extent.frontiers, **level, tree_offset=offset, fault=fault, shift=1)
                model.enqueue(extent.frontiers, stream)
            choice = {"row_nodes": tree["frontier"], "counts": tree["level_counts"], "nodes": extent.frontiers}
            self._choose(extent, flags, fault, **choice, logits=tensors.logits, rows_apart=1)
            self._launch("grow_level", **fields)
        self._launch("finish_tree", **fields)

    def _fields(self, extent: Extent, block: Block) -> dict[str, Any]:
        """Return `specbuild_grow` without `first`; a level's tokens and positions are the model's own inputs."""
        tensors, at = self.executor.model.tensors, self._slots.at
        return {
            **self._tree,
            "growths": at["growths"],
            "roots": at["roots"],
            "root_position": at["cache_len"],
            "level_tokens": tensors.tokens,
            "positions": tensors.positions,
            **{f"tree_{name}": block.at[name] for name in ("tokens", "parents", "counts")},
            **{name: block.at[name] for name in ("node_rows", "fault")},
            **{name: getattr(extent, name) for name in ("pool", "frontiers", "rows", "nodes")},
            "best": extent.branch,
        }

    def _choose(self, extent: Extent, flags: ProcessorFlags, fault: Tensor, rows_apart: int, **fields: Any) -> None:
        """Enqueue the choice of each run node's best children, by the target's own processors and noise."""
        self._launch(
            "choose_tokens",
            **self._slots.choice_fields(flags),
            **fields,
            tokens=self._tree["pool_tokens"],
            parents=self._tree["pool_parents"],
            choices=self._tree["choices"],
            scores=self._tree["scores"],
            workspace=self._workspace,
            tickets=self._tickets,
            fault=fault,
            stride=rows_apart * self.executor.spec.vocab_size,
            tree_nodes=extent.pool,
            best=extent.branch,
        )

    def commit(self, sequence: Sequence, rows: int) -> None:
        """Note that the cache has at least `rows` rows of the text now."""
        self._cached[sequence.slot] = rows
        self.executor.commit(sequence.slot, (), rows)


def _pair_of(executor: StandardExecutor) -> dict[str, Any]:
    """Return a chain of every slot's last two nodes, as fields of `enqueue_tree_inputs`."""
    one = (executor.batch_size,)
    shapes = {"parents": (*one, _PAIR), "counts": one, "tree_offset": one}
    block = Block(executor.device, {name: (shape, np.int32) for name, shape in shapes.items()})
    block.host["parents"][:], block.host["counts"][:] = np.arange(_PAIR) - 1, _PAIR
    block.upload("parents", "counts", executor.stream)
    executor.wait()  # the block's host part is freed on return
    return {**block.at, "tree_nodes": _PAIR}
