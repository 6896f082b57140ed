"""Writes a model in parts: each graph once, the weights of all, and the file that says how they belong together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir

from specbuild.builder.config.progress import Progress
from specbuild.builder.lower.parts import Part, cut
from specbuild.builder.passes.pattern import counted, dims
from specbuild.runtime.backends.onnxruntime_cuda.parts_file import (
    PARTS,
    AttentionRecord,
    PartRecord,
    PartsFile,
    ProductRecord,
    Value,
    Weight,
)

WEIGHTS = "weights.bin"
_TABLES = "cos", "sin"  # of an attention's inputs, those that are weights
_PRODUCT = "input", "codes", "factors"  # a product's inputs


def save_parts(folder: Path, name: str, lowered: ir.Model, progress: Progress = lambda phase, share: None) -> str:
    """Write a lowered model's parts into the bundle, and return the name of the file of parts.

    Args:
        folder: The bundle.
        name: "target" or "draft".
        lowered: The model, lowered by `lower.parts`.
        progress: Called while weights are written, with the phase and its share that is done.
    """
    place, graphs = folder / name, dict[bytes, str]()
    steps = cut(lowered)
    read = [value for step in steps for value in (step.inputs if isinstance(step, Part) else _inputs(step).values())]
    made = {value for step in steps for value in (step.outputs if isinstance(step, Part) else step.outputs[:1])}
    weights = list(dict.fromkeys(value for value in read if value.is_initializer()))
    records = [_part(step, graphs) if isinstance(step, Part) else _kernel(step) for step in steps]
    for data, file in graphs.items():
        (place / file).write_bytes(data)
    written = PartsFile(
        records,
        _saved(weights, place, progress),
        {str(v.name): Value(_type(v), list(dims(v) or ())) for v in made if not v.is_graph_output()},
    )
    text = json.dumps(msgspec.to_builtins(written), sort_keys=True, indent=1)
    (place / PARTS).write_text(text + "\n", encoding="utf-8")
    return f"{name}/{PARTS}"


def _part(part: Part, graphs: dict[bytes, str]) -> PartRecord:
    """Return a part's record; `graphs` has the files of the graphs so far."""
    data = ir.to_proto(part.graph).SerializeToString(deterministic=True)
    file = graphs.setdefault(data, f"part{len(graphs)}.onnx")
    return PartRecord(file, [str(v.name) for v in part.inputs], [str(v.name) for v in part.outputs])


def _kernel(node: ir.Node) -> AttentionRecord | ProductRecord:
    return _attention(node) if node.op_type == "TreeAttention" else _product(node)


def _inputs(node: ir.Node) -> dict[str, ir.Value]:
    """Return a kernel's inputs that steps or weights give, by name; an attention's others are the runtime's."""
    names = node.attributes["inputs"].as_string().split(",") if "inputs" in node.attributes else _PRODUCT
    named = zip(names, node.inputs, strict=True)
    return {name: value for name, value in named if value is not None and (not value.is_graph_input())}


def _attention(node: ir.Node) -> AttentionRecord:
    inputs = _inputs(node)
    _, _, heads, _ = dims(node.outputs[0])  # type: ignore[misc]
    tables = {name: str(inputs[name].name) if name in inputs else None for name in _TABLES}
    return AttentionRecord(
        inputs={name: str(value.name) for name, value in inputs.items() if name not in _TABLES},
        output=str(node.outputs[0].name),
        heads=int(heads),
        scale=node.attributes["scale"].as_float(),
        softcap=node.attributes["softcap"].as_float(),
        window=node.attributes["window"].as_int(),
        **tables,
    )


def _product(node: ir.Node) -> ProductRecord:
    fields: dict[str, Any] = {name: str(value.name) for name, value in _inputs(node).items()}
    fields |= {name: attribute.as_int() for name, attribute in node.attributes.items()}
    return ProductRecord(output=str(node.outputs[0].name), **fields)


def _saved(weights: list[ir.Value], place: Path, progress: Progress) -> dict[str, Weight]:
    """Write the weights' file, and return where each of them lies in it."""
    tensors = [value.const_value for value in weights]
    callback = counted(tensors, progress)  # type: ignore[arg-type]
    written = ir.external_data.convert_tensors_to_external(tensors, place, WEIGHTS, callback=callback)  # type: ignore[arg-type]
    return {
        str(value.name): Weight(_type(value), list(tensor.shape.numpy()), WEIGHTS, int(tensor.offset or 0))
        for value, tensor in zip(weights, written, strict=True)
    }


def _type(value: ir.Value) -> str:
    return value.dtype.name.lower() if value.dtype != ir.DataType.FLOAT else "float32"  # type: ignore[union-attr]
