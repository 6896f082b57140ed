"""Writes a model in parts: each graph once, the weights of all, and the file that says how they belong together."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import onnx_ir as ir

from specbuild.builder.config.progress import Progress
from specbuild.builder.lower.parts import cut
from specbuild.builder.passes.pattern import counted, dims
from specbuild.runtime.backends.onnxruntime_cuda.parts_file import (
    PARTS,
    AttentionRecord,
    PartRecord,
    PartsFile,
    Value,
    Weight,
)

WEIGHTS = "weights.bin"
_TABLES = "cos", "sin"  # of an attention's inputs, those that are weights


def save_parts(folder: Path, name: str, lowered: ir.Model, progress: Progress = lambda phase, share: None) -> str:
    """Write a lowered model's parts into the bundle, and return the name of the file of parts.

    Args:
        folder: The bundle.
        name: "target" or "draft".
        lowered: The model, lowered by `lower.parts`.
        progress: Called while weights are written, with the phase and its share that is done.
    """
    place, graphs, records = folder / name, dict[bytes, str](), list[PartRecord]()
    parts = cut(lowered)
    for part in parts:
        data = ir.to_proto(part.graph).SerializeToString(deterministic=True)
        file = graphs.setdefault(data, f"part{len(graphs)}.onnx")
        records.append(PartRecord(file, [str(v.name) for v in part.inputs], [str(v.name) for v in part.outputs]))
    for data, file in graphs.items():
        (place / file).write_bytes(data)
    attentions = [(node, _inputs(node)) for node in lowered.graph if node.op_type == "TreeAttention"]
    used = [v for part in parts for v in part.inputs] + [v for _, inputs in attentions for v in inputs.values()]
    weights = list(dict.fromkeys(value for value in used if value.is_initializer()))
    values = {v for part in parts for v in part.outputs} | {node.outputs[0] for node, _ in attentions}
    written = PartsFile(
        records,
        [_record(node, inputs) for node, inputs in attentions],
        _saved(weights, place, progress),
        {str(v.name): Value(_type(v), list(dims(v) or ())) for v in values if not v.is_graph_output()},
    )
    (place / PARTS).write_text(json.dumps(asdict(written), sort_keys=True, indent=1) + "\n", encoding="utf-8")
    return f"{name}/{PARTS}"


def _inputs(node: ir.Node) -> dict[str, ir.Value]:
    """Return an attention's inputs that parts or weights give, by name; those of a step are the runtime's."""
    named = zip(node.attributes["inputs"].as_string().split(","), node.inputs, strict=True)
    return {name: value for name, value in named if value is not None and (not value.is_graph_input())}


def _record(node: ir.Node, inputs: dict[str, ir.Value]) -> AttentionRecord:
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
