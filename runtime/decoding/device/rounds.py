"""A round on a device: trees, a target step over them, the walk along the target's choices, the commit."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.gpu.device import MAX_NODES, Tensor
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.kernels.abi import Cache, Choose, Dtype
from specbuild.runtime.backends.kernels.interface import Kernels
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.controller import Proposal
from specbuild.runtime.speculation.tree import Tree, TreeSpec

from .state import Block, Graphs, ProcessorFlags, Slots, enqueue_tree_inputs, launch, layer_addresses, round_block
from .tree_grower import TreeGrower


@dataclass(slots=True)
class Draft:
    """A sequence's draft in a round: a tree that the host made, or the shape of one that the device grows."""

    sequence: Sequence
    proposal: Proposal
    spec: TreeSpec | None = None  # its shape, if the device grows the tree
    drafts: bool = False  # whether it was to draft, even if it drafts nothing in the end

    @property
    def tree(self) -> Tree | None:
        """The tree that the host made; None if the device grows it."""
        return None if self.spec else self.proposal.tree

    @property
    def nodes(self) -> int:
        """Nodes of the tree, its root included; the maximum if the device grows it."""
        return 1 + self.spec.nodes if self.spec else len(self.proposal.tree)


Entries = list[tuple[Draft, int, int, list[int]]]  # a round's drafts: each one's fault, nodes and emitted tokens


class Rounds:
    """A round's memory, its graphs, and the order of its kernels; not the choice of what to draft."""

    def __init__(
        self, target: StandardExecutor, draft: StandardExecutor | None, kernels: Kernels, trunk: bool = False
    ) -> None:
        """Allocate what rounds need.

        Args:
            target: Executor of the target.
            draft: Executor of a draft whose trees the device grows; None: there is none.
            kernels: Kernels of the device.
            trunk: Whether only a tree's trunk is accepted. A choice that leaves the trunk is emitted as the next root.

        Raises:
            BundleError: If the draft has no step of two nodes.
        """
        self.target, self.device, self.kernels, self._trunk = target, target.device, kernels, trunk
        batch, vocab, max_nodes = target.batch_size, target.spec.vocab_size, min(target.buckets[-1], MAX_NODES)
        self.slots = Slots(self.device, batch, vocab)
        self.grower = TreeGrower(draft, kernels, self.slots, max_nodes) if draft else None
        self.graphs, empty = Graphs(target), self.device.empty
        self.blocks = {n: round_block(target, n) for n in target.buckets}  # by nodes of the step
        self._choices, self._tickets = empty((batch, max_nodes), np.int32), empty((batch, max_nodes), np.uint32)
        largest = Choose(batch=batch, nodes=max_nodes, vocab=vocab, best=1)
        self._workspace = empty((kernels.workspace(largest),), np.uint8)
        self._kept, self._ticket = empty((2, batch), np.int32), empty((1,), np.uint32)
        self._draft_len = empty((batch,), np.int32)  # never read: the host tracks how many rows the draft has at least
        self._committed = [target, *([draft] if draft else [])]  # executors whose rows a round moves
        self._layers = [layer_addresses(executor) for executor in self._committed]

    def bucket(self, drafts: Seq[Draft]) -> int:
        """Return the nodes of the smallest step that holds all their trees."""
        return self.target.bucket(max(draft.nodes for draft in drafts))

    def draft(self, drafts: Seq[Draft], nodes: int, asked: ProcessorFlags) -> None:
        """Put every sequence's tree into the round's block: the draft grows it, or the host uploads it."""
        block, stream = self.blocks[nodes], self.target.stream
        growing, state = [d for d in drafts if d.spec], [(d.sequence, d.spec) for d in drafts]
        if self.grower and growing:
            self.grower.catch_up([d.sequence for d in growing])
            self.slots.update(state, self.grower.executor.stream)
            self.grower.draft([d.spec for d in growing if d.spec], asked, block, nodes)
            self.device.after(stream, self.grower.executor.stream)
        else:
            self.slots.update(state, stream)
            for name, nothing in (("tokens", 0), ("parents", -1), ("node_rows", -1), ("counts", 0)):
                block.host[name][:] = nothing
        for d in drafts:
            if tree := d.tree:
                slot = d.sequence.slot
                block.host["tokens"][slot, : len(tree)] = tree.tokens
                block.host["parents"][slot, : len(tree)] = tree.parents
                block.host["counts"][slot] = len(tree)
                for name in ("tokens", "parents", "counts") if growing else ():
                    block.upload_row(name, slot, stream)
        if not growing:
            block.upload("tokens", "counts", stream)
        if asked.masks:
            self.slots.constrain([(d.sequence, d.tree) for d in drafts if d.tree], nodes, stream)

    def verify(self, nodes: int, asked: ProcessorFlags) -> None:
        """Enqueue a round whose trees are in place, and the copy that the host reads."""
        self.graphs.run((nodes, asked), lambda: self._verify(nodes, asked))

    def _verify(self, nodes: int, asked: ProcessorFlags) -> None:
        self.advance(nodes, asked)
        self.blocks[nodes].download("counts", "path", self.target.stream)

    def advance(self, nodes: int, asked: ProcessorFlags) -> None:
        """Enqueue a target step over all trees, the walk along the target's choices, and the commit in both caches."""
        target, model, stream, slots = self.target, self.target.model, self.target.stream, self.slots.at
        block = self.blocks[nodes]
        at, size = block.at, {"batch": target.batch_size, "nodes": nodes}
        tree = {"parents": at["parents"], "counts": at["counts"], "fault": at["fault"]}
        with nvtx.range("verify"):
            self.device.copy(model.tokens, at["tokens"], stream)
            enqueue_tree_inputs(self.kernels, target, slots["cache_len"], nodes, tree_nodes=nodes, **tree)
            model.enqueue(nodes, stream)
        with nvtx.range("accept"):
            self._walk(block, size, tree, asked)
        with nvtx.range("commit"):
            self._commit(block, size)

    def _walk(self, block: Block, size: dict[str, int], tree: dict[str, Tensor], asked: ProcessorFlags) -> None:
        """Enqueue the target's choices at all nodes and the walk along them."""
        target, stream, slots, at, nodes = self.target, self.target.stream, self.slots.at, block.at, size["nodes"]
        given: dict[str, Any] = {"logits": target.model.logits, "tokens": at["tokens"], "choices": self._choices}
        given |= {"workspace": self._workspace, "tickets": self._tickets, "best": 1, "dtype": Dtype.F32}
        given |= {"masks": self.slots.masks(asked, nodes), "tree_nodes": nodes, "stride": target.spec.vocab_size}
        launch(self.kernels, "choose_tokens", stream, **self.slots.choosing(asked), **size, **tree, **given)
        out = {name: at[name] for name in ("tokens", "path", "length", "emitted")}
        out |= {"roots": slots["roots"], "pair": slots["pair"], "choices": self._choices}
        history = {"history": self.slots.history(asked), "vocab": target.spec.vocab_size, "trunk": int(self._trunk)}
        launch(self.kernels, "walk_tree", stream, **size, **tree, **out, **history)

    def _commit(self, block: Block, size: dict[str, int]) -> None:
        """Enqueue the moves of accepted rows in both caches."""
        accepted: dict[str, Any] = {name: block.at[name] for name in ("path", "length", "fault")}
        own: dict[str, Any] = {"caches": self._caches(block), "kept": self._kept, "ticket": self._ticket}
        launch(self.kernels, "commit_path", self.target.stream, **size, **accepted, **own)

    def _caches(self, block: Block) -> Any:
        """Return both caches for the commit, which advances the target's length; both count rows from it."""
        base, table = self.slots.at["cache_len"].address, self.target.model.pages
        lengths, rows = (base, self._draft_len.address), (None, block.at["node_rows"].address)
        paged: dict[str, Any] = {"page_table": table.tensor.address, "page_rows": table.rows} if table else {}
        caches = [
            Cache(
                layers=self._layers[i].address,
                **paged,
                base=base,
                node_rows=rows[i],
                cache_len=lengths[i],
                count=2 * executor.spec.layers,
                heads=executor.spec.kv_heads,
                row_bytes=executor.spec.head_dim * executor.model.cache.dtype.itemsize,
                capacity=executor.spec.capacity,
                pages=executor.model.cache.shape[1] if table else 0,
            )
            for i, executor in enumerate(self._committed)
        ]
        return (Cache * 2)(*caches)

    def keep_hidden(self, plan: Seq[Draft], nodes: int) -> None:
        """Keep the target's hidden states of the accepted nodes for a draft head."""
        host = self.blocks[nodes].host
        paths = [(d.sequence, host["path"][d.sequence.slot, : host["length"][d.sequence.slot]]) for d in plan]
        self.target.keep([(s.slot, s.cached, (s.slot * nodes + path).tolist()) for s, path in paths if len(path)])

    def forget_faults(self, nodes: int) -> None:
        """Clear reported faults, so that a slot's next sequence has none."""
        block = self.blocks[nodes]
        block.host["fault"][:] = 0
        block.upload("fault", "fault", self.target.stream)
        self.target.wait()

    def settle(self) -> None:
        """Wait for all that is enqueued, ignoring errors, and drop the graphs."""
        for executor in reversed(self._committed):
            with suppress(Exception):  # reported when it happened, or of no interest any more
                executor.wait()
        for graphs in (self.graphs, *([self.grower.graphs] if self.grower else [])):
            graphs.clear()
