"""The state of the sequences that a device decodes, one slot each, and how it is uploaded."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from specbuild.runtime.backends.gpu.device import Device, Tensor
from specbuild.runtime.backends.kernels.abi import Dtype, Request, Shape
from specbuild.runtime.decoding.error_isolation import isolate
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.constraint import tree_masks, words
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.proposal import Proposal
from specbuild.runtime.speculation.tree import TreeSpec

from .memory import Block

Plan = Seq[tuple[Sequence, Proposal]]  # what each sequence of a round drafts


@dataclass(frozen=True, slots=True)
class ProcessorFlags:
    """Which processors any sequence of a round asks for, and a graph therefore has."""

    cut_offs: bool
    history: bool
    bias: bool
    masks: bool = False

    @classmethod
    def of(cls, params: Seq[SamplingParams]) -> ProcessorFlags:
        """Return what these requests together ask for."""
        return cls(
            any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params),
            any(p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty for p in params),
            any(p.logit_bias for p in params),
            any(p.constraint for p in params),
        )


class Slots:
    """Every slot's text and request on the device; the host's twin is written from the sequences themselves.

    `cache_len`: position of the root. In a slot that decodes nothing, rows from there on may be overwritten.
    """

    def __init__(self, device: Device, batch_size: int, vocab_size: int) -> None:
        self._device, self._vocab = device, vocab_size
        fields: dict[str, tuple[tuple[int, ...], DTypeLike]] = {
            "cache_len": ((batch_size,), np.int32),
            "roots": ((batch_size,), np.int32),
            "pair": ((batch_size, 2), np.int32),
            "requests": ((batch_size, ctypes.sizeof(Request)), np.uint8),
            "growths": ((batch_size, ctypes.sizeof(Shape)), np.uint8),
        }
        self._block = Block(device, fields)
        self.at = self._block.at
        self._optional: dict[str, Block] = {}
        self._decoding: list[tuple[Sequence | None, TreeSpec | None]] = [(None, None)] * batch_size
        self._changed = True
        self._block.host["cache_len"][:] = 1

    def hold(self, slot: int, rows: int) -> None:
        """Mark a slot as decoding nothing; its rows from `rows` on may be overwritten."""
        self._decoding[slot], self._changed = (None, None), True
        self._block.host["cache_len"][slot] = max(rows, 1)  # a draft step of two nodes begins a row earlier
        self._block.host["growths"][slot] = 0

    def update(self, plan: Plan, stream: int) -> None:
        """Enqueue the upload of what changed: which sequences decode, and the shape of the tree grown for each."""
        host = self._block.host
        for sequence, proposal in plan:
            before, shape = self._decoding[sequence.slot], proposal.shape
            if before[0] is not sequence:
                self._enter(sequence, stream)
            if before[0] is not sequence or before[1] != shape:
                growth = Shape(shape.branch, shape.width, shape.expand, shape.depth, shape.nodes) if shape else Shape()
                host["growths"][sequence.slot] = np.frombuffer(bytes(growth), dtype=np.uint8)
                self._decoding[sequence.slot], self._changed = (sequence, shape), True
        if self._changed:
            for sequence, _ in plan:
                host["cache_len"][sequence.slot], host["roots"][sequence.slot] = sequence.cached, sequence.tokens[-1]
                host["pair"][sequence.slot] = sequence.tokens[-2:]
            self._block.upload("cache_len", "growths", stream)
            self._changed = False

    def choice_fields(self, flags: ProcessorFlags) -> dict[str, Any]:
        """Return the fields of `specbuild_choose` that describe the slots."""
        bias = self._optional["bias"].at if flags.bias else {}
        return {
            "requests": self.at["requests"],
            "root_position": self.at["cache_len"],
            "history": self.history(flags),
            "bias_tokens": bias.get("tokens"),
            "bias_values": bias.get("values"),
            "cut_offs": int(flags.cut_offs),
            "vocab": self._vocab,
            "dtype": Dtype.F32,
        }

    def history(self, flags: ProcessorFlags) -> Tensor | None:
        """Return the history `uint32[B, V]`; None if no sequence has penalties."""
        return self._optional["history"].at["counts"] if flags.history else None

    def masks(self, flags: ProcessorFlags, nodes: int) -> Tensor | None:
        """Return the tokens that are legal after each node of a round, `uint32[B, nodes, words]`; None: all are."""
        return self._masks(nodes).at["masks"] if flags.masks else None

    def constrain(self, plan: Plan, nodes: int, stream: int) -> None:
        """Enqueue the upload of a round's masks of legal tokens; for an unconstrained sequence every token is legal.

        A sequence whose constraint raises fails alone.
        """
        block = self._masks(nodes)
        block.host["masks"][:] = np.uint32(0xFFFFFFFF)
        for sequence, proposal in plan:
            if (matcher := sequence.sampler.matcher) is not None:
                try:
                    tree_masks(matcher, proposal.tree, self._vocab, block.host["masks"][sequence.slot])
                except BaseException as error:
                    isolate(sequence, error)
        block.upload("masks", "masks", stream)

    def _masks(self, nodes: int) -> Block:
        return self._block_of(f"masks of {nodes}", (nodes, words(self._vocab)), masks=np.uint32)

    def _enter(self, sequence: Sequence, stream: int) -> None:
        """Write a sequence's request and, if it asks for them, upload its history and its bias, at V times its slot."""
        slot, p = sequence.slot, sequence.params
        begin, flags = slot * self._vocab, ProcessorFlags.of([p])
        floor = math.log(p.min_p) if p.min_p > 0 else -math.inf
        penalties = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        ends = begin, begin + len(p.logit_bias)
        request = Request(sequence.sampler.seed, p.top_p, floor, p.temperature, *penalties, p.top_k, *ends)
        self._block.host["requests"][slot] = np.frombuffer(bytes(request), dtype=np.uint8)
        if flags.history:
            block = self._block_of("history", (self._vocab,), counts=np.uint32)
            counts = np.bincount(np.array(sequence.output, dtype=np.int64), minlength=self._vocab)
            block.host["counts"][slot] = counts
            block.host["counts"][slot, sequence.tokens] |= np.uint32(1 << 31)
            block.upload_row("counts", slot, stream)
        if flags.bias:
            block = self._block_of("bias", (self._vocab,), tokens=np.int32, values=np.float32)
            tokens = sorted(p.logit_bias)
            block.host["tokens"][slot, : len(tokens)] = tokens
            block.host["values"][slot, : len(tokens)] = [p.logit_bias[token] for token in tokens]
            block.upload_row("tokens", slot, stream)
            block.upload_row("values", slot, stream)

    def _block_of(self, name: str, shape: tuple[int, ...], **dtypes: DTypeLike) -> Block:
        """Return a block with arrays of a shape for every slot, made when the first sequence asks for it."""
        if name not in self._optional:
            fields = {field: ((len(self._decoding), *shape), dtype) for field, dtype in dtypes.items()}
            self._optional[name] = Block(self._device, fields)
        return self._optional[name]
