"""The decode loop on a device: draft, verify, accept and commit without the host, which reads one small copy a round.

Prompts are read through the executors, as `Loop` does. From its first token on a sequence lives on the device: what is
emitted there is the next round's input, and the host learns of it when the round is over. Where the text repeats itself
the host drafts from it instead, and sends the tree; so it does with the trees of drafts that only the host grows, from
models on the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.gpu.device import MAX_NODES, Kernels, Tensor
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.kernels.abi import Cache, Choose, Dtype, Fault
from specbuild.runtime.drafting.lookup import from_text, lookup
from specbuild.runtime.drafting.model import DrafterName, ModelDrafter
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import Tree, TreeSpec

from .cache_loop import CacheLoop
from .state import Block, Graphs, ProcessorFlags, Slots, enqueue_tree_inputs, launch, layer_addresses, round_block
from .tree_grower import TreeGrower


class DeviceLoop(CacheLoop):
    """A `Loop` whose rounds run where the models are; the device is its own, and closed with it."""

    def __init__(
        self,
        target: StandardExecutor,
        draft: StandardExecutor | None,
        kernels: Kernels,
        eos: frozenset[int],
        drafter: DrafterName | None = None,
        hosted: ModelDrafter | None = None,
    ) -> None:
        """`drafter`: None is both, as in `Engine.load`; without a draft it is lookup. Raises BundleError.

        hosted: in place of `draft`, a drafter over a model of this device whose trees the host grows.
        """
        super().__init__(target, eos, hosted)
        self._device, self._kernels = target.device, kernels
        batch, vocab, max_nodes = target.batch_size, target.spec.vocab_size, min(target.model.buckets[-1], MAX_NODES)
        self._slots = Slots(self._device, batch, vocab)
        self._model = TreeGrower(draft, kernels, self._slots, max_nodes) if draft and drafter != "ngram" else None
        self._looks_up = drafter != "model"
        self._graphs, empty = Graphs(target), self._device.empty
        self._blocks = {n: round_block(target, n) for n in target.model.buckets}  # a round's, by its most nodes
        self._choices, self._tickets = empty((batch, max_nodes), np.int32), empty((batch, max_nodes), np.uint32)
        largest = Choose(batch=batch, nodes=max_nodes, vocab=vocab, best=1)
        self._workspace = empty((kernels.workspace(largest),), np.uint8)
        self._kept, self._ticket = empty((2, batch), np.int32), empty((1,), np.uint32)
        self._draft_len = empty((batch,), np.int32)  # nobody asks: the host knows what the draft's cache has at least
        self._committed = [target, *([self._model.executor] if self._model else [])]  # whose rows a round moves
        self._layers = [layer_addresses(executor) for executor in self._committed]

    def run(self, sequences: Seq[Sequence]) -> None:
        """A round: sequences that have emitted nothing yet read their prompts, the others decode."""
        self.enter(sequences)
        reading = [s for s in sequences if not s.output]
        decoding = [s for s in sequences if s.output]
        for sequence in reading:
            self._slots.hold(sequence.slot, len(sequence.tokens))
        if decoding:
            self._decode(decoding)
        if reading:
            super().run(reading)

    def _decode(self, sequences: Seq[Sequence]) -> None:
        """A round on the device, and what the host learns of it."""
        asked, trees = ProcessorFlags.of([s.params for s in sequences]), self._propose(sequences)
        hosted = dict[int, Tree]()
        if self.drafter:
            drafting = [s for s, tree in zip(sequences, trees, strict=True) if tree is None]
            hosted = {s.slot: tree for s, tree in zip(drafting, self.drafter.propose(drafting), strict=True)}
            trees = [tree or hosted[s.slot] for s, tree in zip(sequences, trees, strict=True)]
        nodes = self._target.bucket(max(max_nodes(s, tree) for s, tree in zip(sequences, trees, strict=True)))
        self._draft(sequences, trees, nodes, asked)
        self._graphs.run((nodes, asked), lambda: self._verify(nodes, asked))
        for executor in reversed(self._executors):  # everything is under way: only the times are told apart
            executor.wait()
        block = self._blocks[nodes]
        self._keep_hidden(sequences, block, nodes)
        for sequence, tree in zip(sequences, trees, strict=True):
            try:
                self._accept(sequence, tree is None, sequence.slot in hosted, block, nodes)
            except Exception as error:  # of this sequence alone: the others go on
                sequence.fail(error)
        if block.host["fault"].any():  # a slot's next sequence has none
            self._clear(block)

    def _keep_hidden(self, sequences: Seq[Sequence], block: Block, nodes: int) -> None:
        """What the target made of the accepted nodes, for a head."""
        if self.drafter and self._target.model.hidden:
            paths = [(s, block.host["path"][s.slot, : block.host["length"][s.slot]]) for s in sequences]
            kept = [(s.slot, s.cached, (s.slot * nodes + path).tolist()) for s, path in paths if len(path)]
            self._target.keep(kept)

    def _clear(self, block: Block) -> None:
        """Faults were told: forget them."""
        block.host["fault"][:] = 0
        block.upload("fault", "fault", self._target.stream)
        self._target.wait()

    def _propose(self, sequences: Seq[Sequence]) -> list[Tree | None]:
        """The trees that the host makes: the text's own continuation, or the root alone. None: the model's."""
        shapes = [s.tree for s in sequences if s.tree and s.drafts]
        return [self._proposed(s, s.tree, shapes) if s.tree and s.drafts else Tree([s.tokens[-1]]) for s in sequences]

    def _proposed(self, sequence: Sequence, shape: TreeSpec, shapes: Seq[TreeSpec]) -> Tree | None:
        last = min(executor.spec.max_positions for executor in self._executors)
        if len(sequence.tokens) + shape.nodes > last or self._room(sequence, shapes) < 0:
            return Tree([sequence.tokens[-1]])
        if self.draft_executor is None:
            return lookup(sequence.history, shape)
        return from_text(sequence, len(shapes), self._looks_up)

    def _draft(self, sequences: Seq[Sequence], trees: Seq[Tree | None], nodes: int, asked: ProcessorFlags) -> None:
        """Bring every sequence's tree into the round's block: the model grows it, or the host sends it."""
        block, stream = self._blocks[nodes], self._target.stream
        pairs = list(zip(sequences, trees, strict=True))
        growing = [s for s, tree in pairs if tree is None]
        state = [(s, None if tree else s.tree) for s, tree in pairs]
        if self._model and growing:
            self._model.catch_up(growing)
            self._slots.update(state, self._model.executor.stream)
            self._model.draft([s.tree for s in growing if s.tree], asked, block, nodes)
            self._device.after(stream, self._model.executor.stream)
        else:
            self._slots.update(state, stream)
            for name, nothing in (("tokens", 0), ("parents", -1), ("node_rows", -1), ("counts", 0)):
                block.host[name][:] = nothing
        for s, tree in pairs:
            if tree:
                block.host["tokens"][s.slot, : len(tree)] = tree.tokens
                block.host["parents"][s.slot, : len(tree)] = tree.parents
                block.host["counts"][s.slot] = len(tree)
                for name in ("tokens", "parents", "counts") if growing else ():
                    block.upload_row(name, s.slot, stream)
        if not growing:
            block.upload("tokens", "counts", stream)

    def _verify(self, nodes: int, asked: ProcessorFlags) -> None:
        """Enqueue a round from its trees on, and the copy of what the host reads."""
        self._advance(nodes, asked)
        self._blocks[nodes].download("counts", "path", self._target.stream)

    def _advance(self, nodes: int, asked: ProcessorFlags) -> None:
        """Enqueue one step of the target over all trees, the walk along its choices, and the commit in both caches."""
        target, model, stream, slots = self._target, self._target.model, self._target.stream, self._slots.at
        block = self._blocks[nodes]
        at, size = block.at, {"batch": target.batch_size, "nodes": nodes}
        tree = {"parents": at["parents"], "counts": at["counts"], "fault": at["fault"]}
        with nvtx.range("verify"):
            self._device.copy(model.tokens, at["tokens"], stream)
            enqueue_tree_inputs(self._kernels, target, slots["cache_len"], nodes, tree_nodes=nodes, **tree)
            model.enqueue(nodes, stream)
        with nvtx.range("accept"):
            self._walk(block, size, tree, asked)
        with nvtx.range("commit"):
            self._commit(block, size)

    def _walk(self, block: Block, size: dict[str, int], tree: dict[str, Tensor], asked: ProcessorFlags) -> None:
        """Enqueue the target's choices at all nodes, and the path along them."""
        target, stream, slots, at = self._target, self._target.stream, self._slots.at, block.at
        launch(
            self._kernels,
            "choose_tokens",
            stream,
            **self._slots.choosing(asked),
            **size,
            **tree,
            logits=target.model.logits,
            tokens=at["tokens"],
            choices=self._choices,
            workspace=self._workspace,
            tickets=self._tickets,
            stride=target.spec.vocab_size,
            tree_nodes=size["nodes"],
            best=1,
            dtype=Dtype.F32,
        )
        out = {name: at[name] for name in ("tokens", "path", "length", "emitted")}
        out |= {"roots": slots["roots"], "pair": slots["pair"], "choices": self._choices}
        history = {"history": self._slots.history(asked), "vocab": target.spec.vocab_size}
        launch(self._kernels, "walk_tree", stream, **size, **tree, **out, **history)

    def _commit(self, block: Block, size: dict[str, int]) -> None:
        """Enqueue the moves of accepted rows in both caches."""
        launch(
            self._kernels,
            "commit_path",
            self._target.stream,
            **size,
            caches=self._caches(block),
            path=block.at["path"],
            length=block.at["length"],
            fault=block.at["fault"],
            kept=self._kept,
            ticket=self._ticket,
        )

    def _caches(self, block: Block) -> Any:
        """Both caches for the commit: the target's length goes on, from which the draft's rows are counted as well."""
        base = self._slots.at["cache_len"].address
        lengths, rows = (base, self._draft_len.address), (None, block.at["node_rows"].address)
        pages = (self._table.tensor.address, self._table.pages.rows) if self._table else (None, 0)
        caches = [
            Cache(
                layers=self._layers[i].address,
                page_table=pages[0],
                base=base,
                node_rows=rows[i],
                cache_len=lengths[i],
                count=2 * executor.spec.layers,
                heads=executor.spec.kv_heads,
                row_bytes=executor.spec.head_dim * executor.model.cache.dtype.itemsize,
                capacity=executor.spec.capacity,
                page_rows=pages[1],
            )
            for i, executor in enumerate(self._committed)
        ]
        return (Cache * 2)(*caches)

    def _accept(self, sequence: Sequence, grown: bool, hosted: bool, block: Block, nodes: int) -> None:
        """Emit what a round's block says of a sequence. grown: its tree was, by the device; hosted: by `drafter`."""
        slot, host = sequence.slot, block.host
        length, drafted, fault = (int(host[name][slot]) for name in ("length", "counts", "fault"))
        emitted, path = host["emitted"][slot, :length].tolist(), host["path"][slot, :length]
        rows = None
        if sequence.params.logprobs is not None or min(emitted, default=0) < 0:
            rows = self._target.fetch((slot * nodes + path).tolist())
        root = sequence.cached
        self._emit(sequence, grown, fault, emitted, drafted - 1, rows)
        if self.drafter and hosted:
            self.drafter.commit(sequence, path[: sequence.cached - root].tolist())

    def _emit(
        self, sequence: Sequence, grown: bool, fault: int, emitted: list[int], drafted: int, rows: Any = None
    ) -> None:
        """Emit along the accepted path until the sequence ends; what lies behind its end is nobody's."""
        root = sequence.cached
        if fault:
            raise ExecutionError(f"a kernel refused the sequence's tree, fault {Fault(fault).name}: report it")
        for at, token in enumerate(emitted):
            if rows is not None:
                self.note(sequence, rows[at], token if token >= 0 else int(rows[at].argmax()))
            if token < 0:
                raise ExecutionError("no token's score is finite: use a milder temperature, penalties and bias")
            sequence.emit(token, self.eos)
            sequence.cached += 1
            if sequence.finish_reason:
                break
        self._target.commit(sequence.slot, (), sequence.cached)
        if self._model and grown:  # the draft may have no row of the last accepted node
            self._model.commit(sequence, root + max(len(emitted) - 1, 1))
        if drafted:
            sequence.metrics.speculative_decoding.record(drafted, sequence.cached - root - 1)

    def release(self, slot: int) -> None:
        """See `Loop.release`: what other slots' steps write in this one goes behind its rows, in both caches."""
        super().release(slot)
        self._slots.hold(slot, self.kept(slot) + 1)  # what runs a pair of nodes begins a row before
        if self._model:
            self._model.release(slot)

    @property
    def notes(self) -> list[str]:
        """Which steps are no graphs, and why."""
        return list(self._device.uncaptured)

    def close(self) -> None:
        """Free the models, and all of the device's memory, once nothing runs any more."""
        self._settle()
        with ExitStack() as stack:
            stack.callback(self._device.close)
            for executor in self._executors:
                stack.callback(executor.close)

    def _settle(self) -> None:
        """Wait for all that is enqueued, whatever comes of it, and drop the graphs."""
        for executor in reversed(self._executors):
            with suppress(Exception):  # it was told when it happened, or nobody asks any more
                executor.wait()
        for graphs in (self._graphs, *([self._model.graphs] if self._model else [])):
            graphs.clear()


def max_nodes(sequence: Sequence, tree: Tree | None) -> int:
    """Nodes of a tree, at most where the model grows it."""
    return len(tree) if tree else 1 + (sequence.tree.nodes if sequence.tree else 0)
