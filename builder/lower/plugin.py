"""Lowers the portable graph for TensorRT with specbuild's own attention, the plugin `TreeAttention` of plugins/trt.

The nodes of B sequences are padded to `[B, N]`; each sequence has `counts [B]` of them. The tree is passed as
`parents [B, M]`, without masks or positions, which the kernel derives. Activations, weights and caches share one 16-bit
type; tables, norms and logits are float32, indices int32. Caches may be E4M3 instead, with a float32 scale for each KV
head. Past and present of a cache must be bound to one address. A paged cache consists of pages of `page_rows` rows, and
`page_table [B, capacity / page_rows]` names those of each sequence.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from specbuild.builder.passes import clean
from specbuild.builder.passes.pattern import constant, dims, initializer, insert, permutation, producer, replace
from specbuild.builder.quantize.fp8_caches import Scales
from specbuild.builder.targets import HEAD_DIMS
from specbuild.runtime.errors import OptionError

from .standard import DTYPES, convert, expand, graph_input, narrow, window_of

OPSET = 23
DOMAIN = "trt.plugins"  # marks a plugin for other tools; TensorRT's parser looks at operator and attributes
ROTARY_MULTIPLE = 16  # of the rotary widths that the kernel supports
INSTEAD = "build with --attention native"
INPUTS = {
    "tokens": "input_ids",
    "parents": "parents",
    "cache_len": "cache_len",
    "tree_offset": "tree_offset",
    "counts": "counts",
    "logit_nodes": "logit_nodes",
    "past_key": "past_key.{layer}",
    "past_value": "past_value.{layer}",
}
PAGED = {"page_table": "page_table"}  # the additional input of paged caches
OUTPUTS = {"logits": "logits", "present_key": "present_key.{layer}", "present_value": "present_value.{layer}"}


def lower(
    portable: ir.Model, precision: str, capacity: int, scales: Scales | None = None, page_rows: int = 0
) -> ir.Model:
    """Return a new model; the portable one is not changed.

    The numbers of sequences, nodes, tree nodes, pages and logits stay dynamic.

    Args:
        portable: The fused portable graph.
        precision: The type of activations, a key of DTYPES.
        capacity: Cache rows per slot.
        scales: Scales of E4M3 caches; None: caches have the type of activations.
        page_rows: Rows per page of the caches; 0: linear caches.

    Raises:
        OptionError: The plugin does not support a head size, a rotary width, or a use of positions outside attention,
            or a weight is too large for the type.
    """
    model = portable.clone()
    graph = model.graph
    by_name = {value.name: value for value in graph.inputs}
    counts = graph_input("counts", ir.DataType.INT32, ["batch"])
    attentions = [node for node in graph if node.op_type == "TreeAttention"]
    if page_rows:
        by_name["page_table"] = graph_input("page_table", ir.DataType.INT32, ["batch", capacity // page_rows])
    cache = ["pages" if page_rows else "batch", page_rows or capacity], by_name.get("page_table")
    plugins = [_lower_attention(node, layer, counts, *cache, scales) for layer, node in enumerate(attentions)]
    tables = {v: v.const_value for plugin in plugins for v in plugin.inputs if v is not None and v.is_initializer()}
    if others := by_name["position_ids"].uses():
        kinds = ", ".join(sorted({use.node.op_type for use in others}))
        raise OptionError(
            f"the plugin's positions are for attention alone, and the model's {kinds} wants them: {INSTEAD}"
        )
    expand(graph)
    convert(graph, DTYPES[precision])
    for table, content in tables.items():
        table.const_value, table.type = content, ir.TensorType(ir.DataType.FLOAT)
    narrow(graph, [by_name["input_ids"], by_name["logit_nodes"]])
    past = [value for value in graph.inputs if str(value.name).startswith("past_")]
    names = [*INPUTS.values(), *(PAGED.values() if page_rows else ())]
    first = [counts if name == "counts" else by_name[name] for name in names if "{" not in name]
    first += [by_name["hidden_in"]] if "hidden_in" in by_name else []
    graph.inputs.clear()
    graph.inputs.extend([*first, *past])
    clean(model)
    graph.opset_imports[""] = OPSET
    return model


def _lower_attention(
    node: ir.Node, layer: int, counts: ir.Value, rows: list[str | int], table: ir.Value | None, scales: Scales | None
) -> ir.Node:
    """Replace a portable `TreeAttention` by the plugin's, which puts nodes before heads and takes no positions.

    It is named by its layer. `rows`: the first and third dimension of a cache; `table`: the page table of a paged one.
    """
    past_key, past_value, _, parents, cache_len, tree_offset = node.inputs[3:9]
    _, kv_heads, _, size = dims(past_key)  # type: ignore[misc]
    cos_sin = dict(zip(("cos", "sin"), node.inputs[9:], strict=False))
    _check(int(size), 2 * int(dims(cos_sin["cos"])[1]) if cos_sin else 0)  # type: ignore[index]
    for past in (past_key, past_value):
        past.shape = ir.Shape([rows[0], kv_heads, rows[1], size])  # type: ignore[union-attr]
    inputs = {
        **_projections(node),
        "past_key": past_key,
        "past_value": past_value,
        "parents": parents,
        "cache_len": cache_len,
        "tree_offset": tree_offset,
        **cos_sin,
        "counts": counts,
        **({"page_table": table} if table else {}),
    }
    for kind in ("key", "value") if scales else ():
        scale = ir.tensor(getattr(scales, kind)[layer], name=f"{kind}_scale.{layer}")
        inputs[f"{kind}_scale"] = initializer(node.graph, scale)  # type: ignore[arg-type]
    attributes = {
        "scale": node.attributes["scale"].as_float(),
        "softcap": node.attributes["softcap"].as_float(),
        "window": window_of(node),
        "inputs": ",".join(inputs),
        "in_place": "address",
        "plugin_version": "1",
        "plugin_namespace": "specbuild",
    }
    plugin = insert(node, "TreeAttention", list(inputs.values()), DOMAIN, attributes, 3)
    plugin.name = f"attention.{layer}"
    _, heads, _, _ = dims(node.inputs[0])  # type: ignore[misc]
    plugin.outputs[0].shape = ir.Shape(["batch", "nodes", heads, size])
    plugin.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    for old, new in zip(node.outputs, plugin.outputs, strict=True):
        replace(old, new)
    for cache in (past_key, past_value, *plugin.outputs[1:]) if scales else ():
        cache.type = ir.TensorType(ir.DataType.FLOAT8E4M3FN)  # type: ignore[union-attr]
    node.graph.remove(node, safe=True)  # type: ignore[union-attr]
    return plugin


def _check(size: int, width: int) -> None:
    """Raise OptionError for a head size or a rotary width that the kernel does not support."""
    if size not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise OptionError(f"head size {size}: the plugin's attention has {sizes} alone: {INSTEAD}")
    if width % ROTARY_MULTIPLE:
        raise OptionError(
            f"{width} rotated dimensions: the plugin's attention has multiples of {ROTARY_MULTIPLE}: {INSTEAD}"
        )


def _projections(node: ir.Node) -> dict[str, ir.Value | None]:
    """Return query, key and value `[B, N, heads, D]` by name, or as "qkv" the product that they are a Split of."""
    rows = [_rows(node, value) for value in node.inputs[:3]]
    reshapes = [producer(value, "Reshape") for value in rows]
    parts = [reshape.inputs[0] for reshape in reshapes if reshape]
    split = producer(parts[0], "Split") if len(parts) == 3 else None
    if split is None or list(split.outputs) != parts or len(dims(parts[0]) or ()) != 3:
        return dict(zip(("query", "key", "value"), rows, strict=True))
    *_, size = dims(rows[0])  # type: ignore[misc]
    heads = sum(int(dims(value)[2]) for value in rows)  # type: ignore[index, misc]
    shape = constant(node.graph, f"shape_{heads}_{size}", np.array([0, 0, heads, int(size)], dtype=np.int64))  # type: ignore[arg-type]
    packed = insert(node, "Reshape", [split.inputs[0], shape]).outputs[0]
    packed.shape, packed.type = ir.Shape(["batch", "nodes", heads, size]), ir.TensorType(ir.DataType.FLOAT)
    return {"qkv": packed}


def _rows(before: ir.Node, value: ir.Value | None) -> ir.Value | None:
    """Return `[B, H, N, D]` as `[B, N, H, D]`: the input of the Transpose that made it, if one did."""
    transpose = producer(value, "Transpose")
    if transpose is not None and permutation(transpose) == (0, 2, 1, 3):
        return transpose.inputs[0]
    turned = insert(before, "Transpose", [value], attributes={"perm": [0, 2, 1, 3]}).outputs[0]
    _, heads, _, size = dims(value)  # type: ignore[misc]
    turned.shape, turned.type = ir.Shape(["batch", "nodes", heads, size]), ir.TensorType(ir.DataType.FLOAT)
    return turned
