"""Lowers the portable graph for ONNX Runtime on a CPU: attention in lanes, its fused norms and block products.

The lowered graph takes all sequences' nodes as one flat list `[1, T]`. Attention is split into one lane per cache slot
(`lanes.py`); everything else is computed on T rows at once, without padding. `lane_sizes` has each lane's number of
rows; `bias.w.j [1, 1, n, S]` encodes the tree and the window of w positions (0: none) as 0 or −inf per cache row of
lane j; `last_row.j` is the last cache row that lane j writes.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from specbuild.builder.passes import clean
from specbuild.builder.passes.pattern import constant, dims, initializer, insert, renamed, replace

from .lanes import cache_width, lower_attention, make_lanes, window_of
from .standard import batch_of_tokens, swiglu

_MS = "com.microsoft"
INPUTS = {
    "tokens": "input_ids",
    "positions": "position_ids",
    "logit_nodes": "logit_nodes",
    "attention_rows": "attention_rows",
    "node_rows": "node_rows",
    "lane_sizes": "lane_sizes",
    "tree_bias": "bias.{window}.{slot}",
    "last_row": "last_row.{slot}",
    "past_key": "past_key.{layer}.{slot}",
    "past_value": "past_value.{layer}.{slot}",
}
OUTPUTS = {
    "logits": "logits",
    "present_key": "present_key.{layer}.{slot}",
    "present_value": "present_value.{layer}.{slot}",
}


def lower(portable: ir.Model, batch_size: int, capacity: int) -> ir.Model:
    """Return a new model for `batch_size` lanes over caches of `capacity` rows; the portable one is not changed."""
    model = portable.clone()
    graph = model.graph
    by_name = {value.name: value for value in graph.inputs}
    positions = by_name["position_ids"]
    batch_of_tokens(graph)  # the portable cache inputs are removed below
    attentions = [node for node in graph if node.op_type == "TreeAttention"]
    windows = sorted({window_of(node) for node in attentions})
    lanes = make_lanes(attentions[0], positions, batch_size, capacity, windows)
    for layer, node in enumerate(attentions):
        lower_attention(graph, node, layer, lanes)
    for node in list(graph):
        if node.op_type in _LOWERED:
            outputs = _LOWERED[node.op_type](node)
            for old, new in zip(node.outputs, outputs, strict=True):
                replace(old, new)
            graph.remove(node, safe=True)
    (logits,) = (value for value in graph.outputs if value.name == "logits")
    hidden = [value for value in graph.outputs if value.name == "hidden"]
    flat = [by_name["input_ids"], positions, by_name["logit_nodes"]]
    if "hidden_in" in by_name:
        flat.append(by_name["hidden_in"])
    for value in (by_name["input_ids"], positions, *flat[3:], *hidden):
        value.shape = ir.Shape([1, "nodes", *(dims(value) or ())[2:]])
    logits.shape = ir.Shape([1, "logit_nodes", dims(logits)[-1]])  # type: ignore[index]
    biases = [value for window in windows for value in lanes.bias[window]]
    graph.inputs.clear()
    graph.inputs.extend(flat + lanes.shared + biases + lanes.last_row + lanes.caches)
    graph.outputs.clear()
    graph.outputs.extend([logits, *hidden, *lanes.presents])
    clean(model)
    for node in graph:  # these shapes are the portable graph's: ONNX Runtime infers its own
        for output in node.outputs:
            if not output.is_graph_output():
                output.shape = None
    return model


def _norm(node: ir.Node) -> list[ir.Value]:
    """Lower RMSNormalization to ONNX Runtime's own kernel."""
    attributes = {"axis": -1, "epsilon": node.attributes["epsilon"].as_float(), "stash_type": 1}
    return list(insert(node, "SimplifiedLayerNormalization", node.inputs, attributes=attributes).outputs)


def residual_norm(node: ir.Node) -> list[ir.Value]:
    """Lower AddRMSNorm to ONNX Runtime's own kernel."""
    attributes = {"epsilon": node.attributes["epsilon"].as_float()}
    new = insert(node, "SkipSimplifiedLayerNormalization", node.inputs, _MS, attributes, outputs=4)
    for unused in new.outputs[1:3]:
        unused.name = ""
    return [new.outputs[0], new.outputs[3]]


def transposed_product(node: ir.Node) -> list[ir.Value]:
    """Lower a product with a transposed weight to ONNX Runtime's own kernel, which reads it as it is stored."""
    return list(insert(node, "FusedMatMul", node.inputs, _MS, {"transB": 1}).outputs)


def _block_product(node: ir.Node) -> list[ir.Value]:
    """Lower `BlockMatMul` to MatMulNBits.

    Activations are quantized per block and row, too, except for weight-only schemes, in which INT8 is slow.
    """
    x, codes, scales, *zeros = node.inputs
    columns, bits, size, exact = (node.attributes[name].as_int() for name in ("columns", "bits", "block", "exact"))
    attributes = {"K": columns, "N": int(dims(codes)[0]), "bits": bits, "block_size": size}  # type: ignore[index]
    attributes["accuracy_level"] = 1 if exact else 4
    return list(insert(node, "MatMulNBits", [x, codes, scales, *zeros], _MS, attributes).outputs)


def _block_gather(node: ir.Node) -> list[ir.Value]:
    data, weight, scales, *zeros = node.inputs
    attributes = {"bits": node.attributes["bits"].as_int(), "block_size": node.attributes["block"].as_int()}
    attributes |= {"gather_axis": 0, "quantize_axis": 1}
    rows = _as_rows(node.graph, weight)  # type: ignore[arg-type]
    return list(insert(node, "GatherBlockQuantized", [rows, data, scales, *zeros], _MS, attributes).outputs)


def _scaled_product(node: ir.Node) -> list[ir.Value]:
    """Lower `ScaledMatMul` to a product of two unsigned integer tensors.

    On x86 processors without VNNI this kernel saturates if the weights are signed, and is ten times slower if both
    tensors are.
    """
    x, weight, scales, input_scale = node.inputs
    zero = constant(node.graph, "zero_uint8", np.array(128, dtype=np.uint8))  # type: ignore[arg-type]
    rounded = insert(node, "QuantizeLinear", [x, input_scale, zero]).outputs[0]
    codes = weight.const_value.numpy().view(np.uint8) ^ 128  # type: ignore[union-attr]
    unsigned = initializer(node.graph, ir.tensor(codes, name=f"{weight.name}_unsigned"))  # type: ignore
    inputs = [rounded, unsigned, input_scale, scales, zero, zero]
    return list(insert(node, "MatMulIntegerToFloat", inputs, _MS).outputs)


def _as_rows(graph: ir.Graph, weight: ir.Value) -> ir.Value:
    """Return packed codes `[N, blocks, bytes]` as `[N, blocks · bytes]` over the same bytes, for the lookup."""
    stored, name = weight.const_value, f"{weight.name}_rows"
    rows, blocks, size = (int(dim) for dim in dims(weight) or ())
    shape = ir.Shape([rows, blocks * size])
    if isinstance(stored, ir.ExternalTensor):
        tensor: ir.TensorProtocol = renamed(stored, name, shape)
    else:
        tensor = ir.tensor(stored.numpy().reshape(shape.numpy()), name=name)  # type: ignore[union-attr]
    return initializer(graph, tensor)


__all__ = ["INPUTS", "OUTPUTS", "cache_width", "lower", "residual_norm", "transposed_product"]
_LOWERED = {
    "RMSNormalization": _norm,
    "AddRMSNorm": residual_norm,
    "SwiGLU": swiglu,
    "MatMulNT": transposed_product,
    "BlockMatMul": _block_product,
    "BlockGather": _block_gather,
    "ScaledMatMul": _scaled_product,
}
