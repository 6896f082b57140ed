"""A round on a device: trees, a target step over them, the walk along the target's choices, the commit."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.gpu.device import MAX_NODES, Device, Tensor
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.gpu.step_tensors import slot_parts
from specbuild.runtime.backends.kernels.abi import Cache
from specbuild.runtime.backends.kernels.interface import Kernels
from specbuild.runtime.decoding.round_result import RoundResult

from .graphs import Graphs
from .launches import Launcher
from .memory import Block
from .slots import Plan, ProcessorFlags, Slots
from .tree_grower import TreeGrower


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
        self.target, self.launch, self._trunk = target, Launcher(kernels, target), trunk
        batch, max_nodes, empty = target.batch_size, min(target.buckets[-1], MAX_NODES), self.device.empty
        self.slots = Slots(self.device, batch, target.spec.vocab_size)
        self.grower = TreeGrower(draft, kernels, self.slots, max_nodes) if draft else None
        self.graphs = Graphs(target)
        self.blocks = {nodes: _block(target, nodes) for nodes in target.buckets}  # by nodes of the step
        self._choices, self._tickets = (empty((batch, max_nodes), dtype) for dtype in (np.int32, np.uint32))
        self._workspace = self.launch.workspace(max_nodes, 1)
        self._commit_state = {"kept": empty((2, batch), np.int32), "ticket": empty((1,), np.uint32)}
        self._draft_len = empty((batch,), np.int32)  # never read: the host tracks how many rows the draft has at least
        self._layers = [_layer_addresses(executor) for executor in self.executors]

    @property
    def device(self) -> Device:
        """The device of all models."""
        return self.target.device

    @property
    def executors(self) -> list[StandardExecutor]:
        """The executors whose accepted rows a round moves."""
        return [self.target, *([self.grower.executor] if self.grower else [])]

    def bucket(self, plan: Plan) -> int:
        """Return the nodes of the smallest step that holds all trees of a plan."""
        return self.target.bucket(max(proposal.nodes for _, proposal in plan))

    def draft(self, plan: Plan, nodes: int, flags: ProcessorFlags) -> None:
        """Put every sequence's tree into the round's block: the draft grows it, or the host uploads it."""
        block, stream = self.blocks[nodes], self.target.stream
        shapes = [proposal.shape for _, proposal in plan if proposal.shape]
        if self.grower and shapes:
            self.grower.catch_up([sequence for sequence, proposal in plan if proposal.shape])
            self.slots.update(plan, self.grower.executor.stream)
            self.grower.draft(shapes, flags, block, nodes)
            self.device.after(stream, self.grower.executor.stream)
        else:
            self.slots.update(plan, stream)
            for name, padding in (("tokens", 0), ("parents", -1), ("node_rows", -1), ("counts", 0)):
                block.host[name][:] = padding
        for sequence, proposal in plan:
            if proposal.shape is None:
                slot, tree = sequence.slot, proposal.tree
                block.host["tokens"][slot, : len(tree)] = tree.tokens
                block.host["parents"][slot, : len(tree)] = tree.parents
                block.host["counts"][slot] = len(tree)
                for name in ("tokens", "parents", "counts") if shapes else ():
                    block.upload_row(name, slot, stream)
        if not shapes:
            block.upload("tokens", "counts", stream)
        if flags.masks:
            self.slots.constrain([each for each in plan if each[1].shape is None], nodes, stream)

    def verify(self, nodes: int, flags: ProcessorFlags) -> None:
        """Enqueue a round whose trees are in place, and the copy that the host reads."""
        self.graphs.run((nodes, flags), lambda: self._verify(nodes, flags))

    def _verify(self, nodes: int, flags: ProcessorFlags) -> None:
        self.advance(nodes, flags)
        self.blocks[nodes].download("counts", "path", self.target.stream)

    def advance(self, nodes: int, flags: ProcessorFlags) -> None:
        """Enqueue a target step over all trees, the walk along the target's choices, and the commit in both caches."""
        model, slots, at, vocab = self.target.model, self.slots, self.blocks[nodes].at, self.target.spec.vocab_size
        tree = {name: at[name] for name in ("parents", "counts", "fault")}
        with nvtx.range("verify"):
            self.device.copy(model.tensors.tokens, at["tokens"], self.target.stream)
            self.launch.tree_inputs(slots.at["cache_len"], nodes, tree_nodes=nodes, **tree)
            model.enqueue(nodes, self.target.stream)
        with nvtx.range("accept"):
            self.launch(
                "choose_tokens",
                **tree,
                **slots.choice_fields(flags),
                tokens=at["tokens"],
                logits=model.tensors.logits,
                masks=slots.masks(flags, nodes),
                choices=self._choices,
                tickets=self._tickets,
                workspace=self._workspace,
                nodes=nodes,
                tree_nodes=nodes,
                stride=vocab,
                best=1,
            )
            self.launch(
                "walk_tree",
                **tree,
                **{name: at[name] for name in ("tokens", "path", "length", "emitted")},
                roots=slots.at["roots"],
                pair=slots.at["pair"],
                choices=self._choices,
                history=slots.history(flags),
                nodes=nodes,
                vocab=vocab,
                trunk=int(self._trunk),
            )
        with nvtx.range("commit"):
            path = {name: at[name] for name in ("path", "length", "fault")}
            self.launch("commit_path", **path, **self._commit_state, caches=self._caches(at["node_rows"]), nodes=nodes)

    def _caches(self, draft_rows: Tensor) -> Any:
        """Return both caches for the commit, which advances the target's length; both count rows from it."""
        base, pages = self.slots.at["cache_len"].address, self.target.model.pages
        lengths, rows = (base, self._draft_len.address), (None, draft_rows.address)
        paged: dict[str, Any] = {"page_table": pages.tensor.address, "page_rows": pages.rows} if pages else {}
        caches = [
            Cache(
                layers=self._layers[i].address,
                **paged,
                base=base,
                node_rows=rows[i],
                cache_len=lengths[i],
                count=2 * executor.spec.layers,
                heads=executor.spec.kv_heads,
                row_bytes=executor.spec.head_dim * executor.model.tensors.cache.dtype.itemsize,
                capacity=executor.spec.capacity,
                pages=executor.model.tensors.cache.shape[1] if pages else 0,
            )
            for i, executor in enumerate(self.executors)
        ]
        return (Cache * 2)(*caches)

    def results(self, plan: Plan, nodes: int) -> list[RoundResult]:
        """Return what the round that the host has just read made of each sequence."""
        host, results = self.blocks[nodes].host, list[RoundResult]()
        for sequence, proposal in plan:
            slot = sequence.slot
            count, length, fault = (int(host[name][slot]) for name in ("counts", "length", "fault"))
            path, tokens = (host[name][slot, :length].tolist() for name in ("path", "emitted"))
            rows = [slot * nodes + node for node in path]
            results.append(RoundResult(sequence, proposal, count - 1, path, tokens, fault, rows))
        return results

    def clear_faults(self, nodes: int) -> None:
        """Clear reported faults, so that a slot's next sequence has none."""
        block = self.blocks[nodes]
        block.host["fault"][:] = 0
        block.upload("fault", "fault", self.target.stream)
        self.target.wait()

    def close(self) -> None:
        """Wait for all that is enqueued, ignoring errors, and drop the graphs."""
        for executor in reversed(self.executors):
            with suppress(Exception):  # reported when it happened, or of no interest any more
                executor.wait()
        self.graphs.clear()
        if self.grower:
            self.grower.graphs.clear()


def _block(target: StandardExecutor, nodes: int) -> Block:
    """Return a round's block: the host's inputs up to `counts`, the results from `counts` on."""
    one, each = (target.batch_size,), (target.batch_size, nodes)
    shapes = {"tokens": each, "parents": each, "node_rows": each, "counts": one, "fault": one, "length": one}
    shapes |= {"emitted": each, "path": each}
    return Block(target.device, {name: (shape, np.int32) for name, shape in shapes.items()})


def _layer_addresses(executor: StandardExecutor) -> Tensor:
    """Return the addresses of each layer's keys and values, `uint64[2·layers]`, on the device."""
    addresses = [part.address for part in slot_parts(executor.model.tensors.cache)]
    block = Block(executor.device, {"layers": ((len(addresses),), np.uint64)})
    block.host["layers"][:] = addresses
    block.upload("layers", "layers", executor.stream)
    executor.wait()
    return block.at["layers"]
