"""Attention in lanes is the portable operator's, sequence by sequence, whatever the size of its heads."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from graphs import parse, run
from torch import Tensor

from specbuild.builder.frontend.portable_ops import ancestor_mask, rotary, tree_attention
from specbuild.builder.lower.lanes import Lanes, cache_width, lower_attention, make_lanes, window_of
from specbuild.builder.passes import clean

CAPACITY, SCALE, SOFTCAP = 16, 0.4, 1.5
ROLES = {"q": 4, "k": 2, "v": 2}  # how many heads
TREES = [[-1, 0, 0, 1], [-1, 0, 1, 1, 3, 0]]  # each lane's nodes, by their parents
STARTS = [5, 0]  # committed rows of each lane's cache


def portable(size: int, rotated: int, window: int = 0) -> ir.Model:
    """One attention over a merged projection x, whose result is read as rows and as heads; `rotated`: dimensions."""
    cache, half = f"float[B, 2, S, {size}]", f"float[32, {rotated // 2}]"
    flat = [f"float[1, N, {count * size}] {role}0" for role, count in ROLES.items()]
    apart = [f"float[1, N, {count}, {size}] {role}1" for role, count in ROLES.items()]
    turned = [f"float[1, {count}, N, {size}] {role}" for role, count in ROLES.items()]
    sizes = [f"int64[4] s{role} = {{0, 0, {count}, {size}}}" for role, count in ROLES.items()]
    heads = [f"{r}1 = Reshape ({r}0, s{r})  {r} = Transpose <perm = [0, 2, 1, 3]> ({r}1)" for r in ROLES]
    return parse(
        f"""g (float[1, N, {8 * size}] x, int64[1, N] position_ids, {half} cos, {half} sin, {cache} past_key,
        {cache} past_value, int32[B, M] parents, int32[B] cache_len, int32[B] tree_offset)
        => (float[1, N, {4 * size}] rows, float[1, N, 4, {size}] negated, {cache} key, {cache} value)
        <{", ".join([*flat, *apart, *turned, *sizes])}, float[1, N, 4, {size}] heads,
        int64[3] parts = {{{4 * size}, {2 * size}, {2 * size}}}, int64[3] shape = {{0, 0, {4 * size}}}> {{
        q0, k0, v0 = Split <axis = -1> (x, parts)
        {"  ".join(heads)}
        heads, key, value = specbuild.TreeAttention <scale = {SCALE}, softcap = {SOFTCAP}, window = {window}> (q, k, v,
            past_key, past_value, position_ids, parents, cache_len, tree_offset{", cos, sin" if rotated else ""})
        rows = Reshape (heads, shape)
        negated = Neg (heads)
    }}"""
    )


def lowered(model: ir.Model, batch_size: int) -> Lanes:
    """The attention in lanes, in place; the graph takes and gives what lanes do."""
    graph = model.graph
    (node,) = (node for node in graph if node.op_type == "TreeAttention")
    lanes = make_lanes(node, graph.inputs[1], batch_size, CAPACITY, [window_of(node)])
    lower_attention(graph, node, 3, lanes)
    del graph.inputs[4 if len(node.inputs) > 9 else 2 :]
    graph.inputs.extend([*lanes.shared, *lanes.bias[0], *lanes.last_row, *lanes.caches])
    graph.outputs.extend(lanes.presents)
    clean(model)
    return lanes


def lane(slot: int, size: int, tables: list[Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    """What a lane shares with the others, along the nodes; what is its own; output and new rows of the caches."""
    generator = torch.Generator().manual_seed(slot)
    parents, start, nodes = torch.tensor([TREES[slot]], dtype=torch.int32), STARTS[slot], len(TREES[slot])
    visible, width = ancestor_mask(parents), cache_width(size)
    positions = start - 1 + visible.sum(-1)
    x = torch.randn(1, nodes, 8 * size, generator=generator)
    past = torch.randn(2, 1, 2, CAPACITY, size, generator=generator)
    heads = [part.unflatten(-1, (-1, size)).transpose(1, 2) for part in x.split([4 * size, 2 * size, 2 * size], -1)]
    if tables:
        heads[:2] = (rotary(part, *(table[positions] for table in tables)) for part in heads[:2])
    length, zero = torch.tensor([start], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    out, *caches = tree_attention(*heads, [*past], [positions, parents, length, zero], SCALE, 0, SOFTCAP)
    bias = torch.zeros(1, 1, nodes + 1, CAPACITY)  # a row more than there are nodes
    bias[0, 0, :nodes, start : start + nodes] = torch.zeros(nodes, nodes).masked_fill(~visible[0], -torch.inf)
    own = {f"bias.0.{slot}": bias, f"last_row.{slot}": length + nodes}
    for kind, rows in zip(("key", "value"), past, strict=True):
        own[f"past_{kind}.3.{slot}"] = torch.nn.functional.pad(rows, (0, width - size))
    new = slice(start, start + nodes)
    written = [torch.nn.functional.pad(cache[:, :, new], (0, width - size)) for cache in caches]
    return {"x": x, "position_ids": positions}, own, [out, *written]


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(("size", "rotated"), [(16, 16), (32, 16), (8, 0), (24, 24), (24, 16), (32, 8), (6, 0), (6, 4)])
def test_each_lane_is_the_portable_operators_attention(size: int, rotated: int, batch_size: int) -> None:
    model = portable(size, rotated)
    lowered(model, batch_size)
    angles = torch.rand(32, rotated // 2, generator=torch.Generator().manual_seed(9))
    rotation = {"cos": angles.cos(), "sin": angles.sin()} if rotated else {}
    lanes = [lane(slot, size, list(rotation.values())) for slot in range(batch_size)]
    feeds = rotation | {name: torch.cat([shared[name] for shared, _, _ in lanes], 1) for name in lanes[0][0]}
    feeds |= {name: tensor for _, own, _ in lanes for name, tensor in own.items()}
    counts = [len(tree) for tree in TREES[:batch_size]]
    first = [sum(counts[:slot]) for slot in range(batch_size)]
    nodes = [[*range(at, at + count)] for at, count in zip(first, counts, strict=True)]
    feeds["attention_rows"] = torch.tensor([node for each in nodes for node in (*each, each[-1])])
    feeds["node_rows"] = torch.tensor([node + slot for slot, each in enumerate(nodes) for node in each])
    if batch_size > 1:
        feeds["lane_sizes"] = torch.tensor([count + 1 for count in counts])
    rows, negated, *presents = run(model, {name: tensor.numpy() for name, tensor in feeds.items()})
    expected = torch.cat([results[0] for _, _, results in lanes], 1).numpy()
    np.testing.assert_allclose(-negated, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(rows, -negated.reshape(rows.shape))
    for slot, (_, own, (_, *written)) in enumerate(lanes):
        last = int(own[f"last_row.{slot}"])
        for cache, new in zip(presents[2 * slot : 2 * slot + 2], written, strict=True):
            np.testing.assert_allclose(cache[:, :, STARTS[slot] : last], new, rtol=1e-4, atol=1e-5)
