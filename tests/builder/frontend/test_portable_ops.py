"""The eager operators against plain attention, path by path, and against transformers' own rotation."""

import pytest
import torch

from specbuild.builder.frontend.portable_ops import ancestor_mask, tree_attention

SCALE = 0.3
CAPACITY = 24


def random_parents(nodes, generator):
    """A random tree, parents before children."""
    return [-1, *(int(torch.randint(0, node, (), generator=generator)) for node in range(1, nodes))]


def path_to(parents, node):
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def plain_attention(query, keys, values, softcap=0.0):
    """One query `[H, D]` over keys and values `[Hkv, T, D]`, head by head: `[H·D]`."""
    group = len(query) // len(keys)
    rows = []
    for head, q in enumerate(query):
        scores = keys[head // group] @ q * SCALE
        weights = (softcap * (scores / softcap).tanh() if softcap else scores).softmax(0)
        rows.append(weights @ values[head // group])
    return torch.cat(rows)


def attend(*tensors, parents, length, offset, window=0, softcap=0.0):
    """`tree_attention` at the positions that `parents` says."""
    nodes = tensors[0].shape[2]
    depths = ancestor_mask(parents).sum(-1) - 1
    positions = torch.stack([n + d[o : o + nodes] for n, d, o in zip(length, depths, offset, strict=True)])
    place = [positions, parents, length, offset]
    out, keys, values = tree_attention(*tensors[:3], list(tensors[3:]), place, None, SCALE, window, softcap)
    return out.flatten(2), keys, values


def tensors(batch, heads, kv_heads, nodes, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, nodes, 8), *[(batch, kv_heads, nodes, 8)] * 2, *[(batch, kv_heads, CAPACITY, 8)] * 2]
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


@pytest.mark.parametrize(("window", "softcap", "kv_heads"), [(0, 0.0, 4), (2, 0.0, 2), (5, 1.5, 2), (0, 0.7, 1)])
def test_a_node_of_a_tree_sees_its_own_path(window, softcap, kv_heads):
    """And its row goes to the slot after those that are committed; the caches that were given stay."""
    nodes, lengths = 9, [3, 11]
    q, k, v, past_k, past_v = tensors(2, 4, kv_heads, nodes, window)
    before, generator = (past_k.clone(), past_v.clone()), torch.Generator().manual_seed(window)
    trees = [random_parents(nodes, generator), list(range(-1, nodes - 1))]
    parents, length = torch.tensor(trees, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    at = {"parents": parents, "length": length, "offset": torch.zeros(2, dtype=torch.int32)}
    out, new_k, new_v = attend(q, k, v, past_k, past_v, **at, window=window, softcap=softcap)
    torch.testing.assert_close((past_k, past_v), before, rtol=0, atol=0)
    for b, (tree, committed) in enumerate(zip(trees, lengths, strict=True)):
        for past, new, rows in ((past_k, new_k, k), (past_v, new_v, v)):
            expected = torch.cat((past[b, :, :committed], rows[b], past[b, :, committed + nodes :]), 1)
            assert torch.equal(new[b], expected)
        for node in range(nodes):
            path = path_to(tree, node)
            keys = torch.cat((past_k[b, :, :committed], k[b][:, path]), 1)
            values = torch.cat((past_v[b, :, :committed], v[b][:, path]), 1)
            keys, values = (x[:, -window:] if window else x for x in (keys, values))  # of positions, not of slots
            torch.testing.assert_close(out[b, node], plain_attention(q[b, :, node], keys, values, softcap))
