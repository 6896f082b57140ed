"""A model's file of parts: which graph runs with which weights, and what the kernels between them read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from specbuild.runtime.backends.onnx_graph import GraphFile
from specbuild.runtime.checked_json import Text, checked, decode
from specbuild.runtime.errors import BundleError

PARTS = "parts.json"
# The dtype in memory of a type, by ONNX's name.
TYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in ("float16", "float32", "int32", "int64", "uint8")}
TYPES["bfloat16"] = np.dtype(np.uint16)
BLOCKS = 16, 32, 64, 128  # columns of a weight's block
Size = Annotated[int, Meta(ge=0, le=1 << 40)]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor between parts: ONNX's name of its type, and its shape, in which "batch" and "nodes" may occur."""

    dtype: Text
    shape: list[Size | Text]


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight: its type, its shape, the file beside this one that holds it, and from which byte on."""

    dtype: Text
    shape: list[Size]
    file: Text
    offset: Size


class PartRecord(Struct, frozen=True, tag="part"):
    """A part: its graph's file, and its inputs and outputs in the graph's order, by name."""

    graph: Text
    inputs: list[Text]
    outputs: list[Text]

    @property
    def named(self) -> list[str]:
        """The values that it reads and makes."""
        return [*self.inputs, *self.outputs]


class AttentionRecord(Struct, frozen=True, tag="attention"):
    """An attention: the values that it reads, "query", "key" and "value" or all three side by side as "qkv", and makes.

    `cos` and `sin` are weights `float32 [positions, rotary_dim / 2]`, None where nothing is rotated.
    """

    inputs: dict[Text, Text]
    output: Text
    heads: Size
    scale: float
    softcap: float
    window: Size
    cos: Text | None
    sin: Text | None

    @property
    def named(self) -> list[str]:
        """The values that it reads and makes."""
        return [*self.inputs.values(), self.output]


class ProductRecord(Struct, frozen=True, tag="product"):
    """A product of the rows of a value with a weight in blocks, packed as plugins/kernels.h says, and what it makes."""

    input: Text
    output: Text
    codes: Text
    factors: Text
    inner: Size
    columns: Size
    bits: Size
    block: Size
    scale_bits: Size
    minimum_bits: Size

    @property
    def named(self) -> list[str]:
        """The values that it reads and makes."""
        return [self.input, self.output]

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shapes of its codes and factors, in bytes."""
        panels, blocks, of_step = -(-self.columns // 16), self.inner // self.block, -(-self.inner // 256)
        factors = blocks * (self.scale_bits + self.minimum_bits) * 2
        steps = of_step * 64 * (1 + bool(self.minimum_bits)) if self.scale_bits == 8 else 0
        return {self.codes: [panels, 2 * self.inner * self.bits], self.factors: [panels, factors + steps]}


@dataclass(frozen=True, slots=True)
class PartsFile:
    """A model in parts, and the kernels between them, in the order in which they run."""

    steps: list[PartRecord | AttentionRecord | ProductRecord]
    weights: dict[Text, Weight]
    values: dict[Text, Value]

    @property
    def attentions(self) -> list[AttentionRecord]:
        """The attentions, one for each layer, in order."""
        return [step for step in self.steps if isinstance(step, AttentionRecord)]

    @classmethod
    def read(cls, graph: GraphFile) -> PartsFile:
        """Read a file of parts; raise BundleError if no build can have written it."""
        try:
            file = checked(decode(graph.data), cls)
            file._check()
        except ValueError as error:
            raise BundleError(f"{graph.path} is malformed ({str(error)[:300]}): build the bundle again") from None
        return file

    def _width(self, name: str) -> int:
        """Return how many numbers a value has for each node."""
        return math.prod(size for size in self.values[name].shape if isinstance(size, int))

    def _check(self) -> None:
        """Raise ValueError if a step reads what is not there, or has another form than its kernel takes."""
        ends = {"input_ids", "logit_nodes", "hidden_in", "logits", "hidden"}
        for step in self.steps:
            known = self.values.keys() | (self.weights.keys() | ends if isinstance(step, PartRecord) else set())
            if set(step.named) - known:
                raise ValueError("a step reads what is not there")
            if isinstance(step, AttentionRecord):
                inputs, tables = set(step.inputs), {step.cos, step.sin} - {None}
                if inputs not in ({"qkv"}, {"query", "key", "value"}) or tables - self.weights.keys():
                    raise ValueError("an attention reads what is not there")
            if isinstance(step, ProductRecord):
                shapes = {n: self.weights[n].shape for n in (step.codes, step.factors) if n in self.weights}
                widths = self._width(step.input), self._width(step.output)
                if step.block not in BLOCKS or shapes != step.shapes or widths != (step.inner, step.columns):
                    raise ValueError("a product's weight or a value has another size")
        types = {each.dtype for each in self.weights.values()} | {each.dtype for each in self.values.values()}
        if types - TYPES.keys():
            raise ValueError("a type that no build writes")
