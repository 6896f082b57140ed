"""A model's file of parts: which graph runs with which weights, and what the attention between two of them reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from specbuild.runtime.backends.onnx_graph import GraphFile
from specbuild.runtime.checked_json import Text, checked, decode
from specbuild.runtime.errors import BundleError

PARTS = "parts.json"
# The dtype in memory of a type, by ONNX's name.
TYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in ("float16", "float32", "int32", "int64")}
TYPES["bfloat16"] = np.dtype(np.uint16)
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


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A part: its graph's file, and its inputs and outputs in the graph's order, by name."""

    graph: Text
    inputs: list[Text]
    outputs: list[Text]


@dataclass(frozen=True, slots=True)
class AttentionRecord:
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


@dataclass(frozen=True, slots=True)
class PartsFile:
    """A model in parts, with one attention between each and the next."""

    parts: list[PartRecord]
    attentions: list[AttentionRecord]
    weights: dict[Text, Weight]
    values: dict[Text, Value]

    @classmethod
    def read(cls, graph: GraphFile) -> PartsFile:
        """Read a file of parts; raise BundleError if no build can have written it."""
        try:
            file = checked(decode(graph.data), cls)
            ends = {"input_ids", "logit_nodes", "hidden_in", "logits", "hidden"}
            named = [name for part in file.parts for name in (*part.inputs, *part.outputs)]
            unknown = set(named) - file.weights.keys() - file.values.keys() - ends
            if len(file.parts) != len(file.attentions) + 1 or unknown:
                raise ValueError("parts and attentions do not fit each other")
            for each in file.attentions:
                read, tables = {*each.inputs.values(), each.output}, {each.cos, each.sin} - {None}
                known = set(each.inputs) in ({"qkv"}, {"query", "key", "value"})
                if not known or read - file.values.keys() or tables - file.weights.keys():
                    raise ValueError("an attention reads what is not there")
            types = {each.dtype for each in file.weights.values()} | {each.dtype for each in file.values.values()}
            if types - TYPES.keys():
                raise ValueError("a type that no build writes")
        except ValueError as error:
            raise BundleError(f"{graph.path} is malformed ({str(error)[:300]}): build the bundle again") from None
        return file
