"""The eager operators against plain attention, path by path, and against transformers' own rotation."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from specbuild.builder.frontend.portable_ops import ancestor_mask, rotary, tree_attention

SCALE = 0.3
CAPACITY = 24


def random_parents(nodes: int, generator: torch.Generator) -> list[int]:
    """A random tree, parents before children."""
    return [-1, *(int(torch.randint(0, node, (), generator=generator)) for node in range(1, nodes))]


def path_to(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def plain_attention(query: Tensor, keys: Tensor, values: Tensor, softcap: float = 0.0) -> Tensor:
    """One query `[H, D]` over keys and values `[Hkv, T, D]`, head by head: `[H·D]`."""
    group = len(query) // len(keys)
    rows = []
    for head, q in enumerate(query):
        scores = keys[head // group] @ q * SCALE
        weights = (softcap * (scores / softcap).tanh() if softcap else scores).softmax(0)
        rows.append(weights @ values[head // group])
    return torch.cat(rows)


def attend(
    *tensors: Tensor, parents: Tensor, length: Tensor, offset: Tensor, window: int = 0, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """`tree_attention` at the positions that `parents` says."""
    nodes = tensors[0].shape[2]
    depths = ancestor_mask(parents).sum(-1) - 1
    positions = torch.stack([n + d[o : o + nodes] for n, d, o in zip(length, depths, offset, strict=True)])
    place = [positions, parents, length, offset]
    out, keys, values = tree_attention(*tensors[:3], list(tensors[3:]), place, SCALE, window, softcap)
    return out.flatten(2), keys, values


def tensors(batch: int, heads: int, kv_heads: int, nodes: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, nodes, 8), *[(batch, kv_heads, nodes, 8)] * 2, *[(batch, kv_heads, CAPACITY, 8)] * 2]
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("committed", [0, 7])
def test_a_chain_is_causal_attention(heads: int, kv_heads: int, committed: int) -> None:
    nodes = 5
    q, k, v, past_k, past_v = tensors(1, heads, kv_heads, nodes, seed=heads + committed)
    parents = torch.arange(-1, nodes - 1, dtype=torch.int32)[None]
    zero = torch.zeros(1, dtype=torch.int32)
    out, _, _ = attend(q, k, v, past_k, past_v, parents=parents, length=torch.tensor([committed]), offset=zero)
    keys, values = (torch.cat((past[:, :, :committed], new), 2) for past, new in ((past_k, k), (past_v, v)))
    mask = torch.ones(nodes, committed + nodes, dtype=torch.bool).tril(committed)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, mask, scale=SCALE, enable_gqa=heads != kv_heads
    )
    torch.testing.assert_close(out, expected.transpose(1, 2).reshape(1, nodes, -1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (2, 0.0), (5, 1.5), (0, 0.7)])
def test_a_node_of_a_tree_sees_its_own_path(seed: int, window: int, softcap: float) -> None:
    nodes, lengths = 9, [3, 11]
    q, k, v, past_k, past_v = tensors(2, 4, 2, nodes, seed)
    generator = torch.Generator().manual_seed(seed)
    trees = [random_parents(nodes, generator) for _ in lengths]
    out, _, _ = attend(
        q,
        k,
        v,
        past_k,
        past_v,
        parents=torch.tensor(trees, dtype=torch.int32),
        length=torch.tensor(lengths, dtype=torch.int32),
        offset=torch.zeros(2, dtype=torch.int32),
        window=window,
        softcap=softcap,
    )
    for b, (parents, committed) in enumerate(zip(trees, lengths, strict=True)):
        for node in range(nodes):
            path = path_to(parents, node)
            keys = torch.cat((past_k[b, :, :committed], k[b][:, path]), 1)
            values = torch.cat((past_v[b, :, :committed], v[b][:, path]), 1)
            keys, values = (x[:, -window:] if window else x for x in (keys, values))  # of positions, not of slots
            torch.testing.assert_close(out[b, node], plain_attention(q[b, :, node], keys, values, softcap))


@pytest.mark.parametrize("first", [1, 4, 8])
@pytest.mark.parametrize("window", [0, 3])
def test_a_tree_in_two_parts_is_the_tree_in_one(first: int, window: int) -> None:
    nodes = 9
    q, k, v, past_k, past_v = tensors(1, 4, 2, nodes, seed=first)
    parents = torch.tensor([random_parents(nodes, torch.Generator().manual_seed(first))], dtype=torch.int32)
    length, zero = torch.tensor([6], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    at = {"length": length, "window": window}
    whole, whole_k, whole_v = attend(q, k, v, past_k, past_v, parents=parents, offset=zero, **at)
    head = [x[:, :, :first] for x in (q, k, v)]
    tail = [x[:, :, first:] for x in (q, k, v)]
    one, past_k, past_v = attend(*head, past_k, past_v, parents=parents[:, :first], offset=zero, **at)
    two, past_k, past_v = attend(*tail, past_k, past_v, parents=parents, offset=zero + first, **at)
    torch.testing.assert_close(torch.cat((one, two), 1), whole)
    torch.testing.assert_close((past_k, past_v), (whole_k, whole_v), rtol=0, atol=0)


def test_rows_go_to_their_slots_and_inputs_stay() -> None:
    q, k, v, past_k, past_v = tensors(2, 2, 2, 3, seed=5)
    before = past_k.clone(), past_v.clone()
    lengths, offset = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    parents = torch.tensor([[-1, 0, 1, 2, 3], [-1, 0, 0, 1, 1]], dtype=torch.int32)
    _, new_k, new_v = attend(q, k, v, past_k, past_v, parents=parents, length=lengths, offset=offset)
    torch.testing.assert_close((past_k, past_v), before, rtol=0, atol=0)
    for b, start in enumerate((2, 9)):
        for past, new, rows in ((past_k, new_k, k), (past_v, new_v, v)):
            expected = past[b].clone()
            expected[:, start : start + 3] = rows[b]
            torch.testing.assert_close(new[b], expected, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_ancestor_mask_holds_paths(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    trees = [random_parents(12, generator) for _ in range(3)]
    trees[0][5] = -1  # a second root: its parent is committed already
    mask = ancestor_mask(torch.tensor(trees, dtype=torch.int32))
    for parents, rows in zip(trees, mask, strict=True):
        for node, row in enumerate(rows):
            assert row.nonzero().flatten().tolist() == sorted(path_to(parents, node))


def test_rotary_is_transformers_own() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 5, 16, generator=generator), torch.randn(2, 2, 5, 16, generator=generator)
    angles = torch.randn(2, 5, 8, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    expected = apply_rotary_pos_emb(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    torch.testing.assert_close((rotary(q, cos, sin), rotary(k, cos, sin)), expected)


def test_rotary_leaves_what_is_past_the_tables() -> None:
    x, angles = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(0)), torch.ones(1, 3, 4)
    rotated = rotary(x, angles.cos(), angles.sin())
    torch.testing.assert_close(rotated[..., 8:], x[..., 8:], rtol=0, atol=0)
    torch.testing.assert_close(rotated[..., :8], rotary(x[..., :8].contiguous(), angles.cos(), angles.sin()))


def test_the_operators_trace_as_they_run() -> None:
    q, k, v, past_k, past_v = tensors(1, 2, 1, 3, seed=0)
    place = [
        torch.tensor([[4, 5, 5]]),
        torch.tensor([[-1, 0, 0]], dtype=torch.int32),
        torch.tensor([4]),
        torch.tensor([0]),
    ]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(tree_attention, (q, k, v, [past_k, past_v], place, SCALE, 3, 2.0), test_utils=checks)
    torch.library.opcheck(rotary, (q, torch.ones(1, 3, 4), torch.ones(1, 3, 4)), test_utils=checks)


def test_onnx_knows_the_portable_operator() -> None:
    schema = onnx.defs.get_schema("TreeAttention", domain="specbuild")
    assert [value.name for value in schema.inputs] == [
        *("query", "key", "value", "past_key", "past_value", "position_ids", "parents", "cache_len", "tree_offset"),
        *("cos", "sin"),
    ]
    assert [value.name for value in schema.outputs] == ["output", "present_key", "present_value"]
    assert schema.attributes["scale"].required
