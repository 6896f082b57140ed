"""The kernels called with NumPy arrays, wherever they run."""

import math

import ml_dtypes
import numpy as np

from specbuild.runtime.backends.kernels.abi import Cache, Choose, Commit, Dtype, Grow, Noise, Request, Shape, Walk
from specbuild.runtime.speculation.tree import Tree

POISON = 0x5EED
DTYPES = {
    np.dtype(np.float32): Dtype.F32,
    np.dtype(np.float16): Dtype.F16,
    np.dtype(ml_dtypes.bfloat16): Dtype.BF16,
    np.dtype(np.bool_): Dtype.BOOL,
}


def poisoned(*shape, dtype=np.int32):
    """An output nobody has written."""
    return np.full(shape, POISON, dtype=dtype)


def ints(values):
    """`int32`, contiguous."""
    return np.ascontiguousarray(values, dtype=np.int32)


def struct(kernels, kind, **values):
    """A struct for one launch, whose arrays live as long as it does."""
    found = {}
    for name, value in values.items():
        array = isinstance(value, np.ndarray)
        assert not array or value.flags.c_contiguous
        found[name] = kernels.at(value) if array else value
    params = kind(**found)
    params.keep = values
    return params


def requests(params, seeds):
    """The requests' bytes, and their biases' tokens and values."""
    made, tokens, values = [], list[int](), list[float]()
    for p, seed in zip(params, seeds, strict=True):
        begin = len(tokens)
        for token, value in sorted(p.logit_bias.items()):
            tokens.append(token)
            values.append(value)
        floor = math.log(p.min_p) if p.min_p > 0 else -math.inf
        penalties = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        made.append(Request(seed, p.top_p, floor, p.temperature, *penalties, p.top_k, begin, len(tokens)))
    biased = (ints(tokens), np.array(values, dtype=np.float32)) if tokens else (None, None)
    return np.frombuffer((Request * len(made))(*made), dtype=np.uint8), *biased


def history(vocab, prompt, output):
    """One sequence's `uint32[V]`."""
    counts = np.bincount(ints(output), minlength=vocab).astype(np.uint32)
    counts[[*prompt, *output]] |= np.uint32(1 << 31)
    return counts


def tree_arrays(trees, width):
    """Tokens, parents and counts, `[B, width]` and `[B]`; padding has no meaning."""
    tokens, parents = poisoned(len(trees), width), poisoned(len(trees), width)
    for b, tree in enumerate(trees):
        tokens[b, : len(tree)], parents[b, : len(tree)] = tree.tokens, tree.parents
    return tokens, parents, ints([len(tree) for tree in trees])


def choose_struct(kernels, logits, params, seeds, positions, tokens, parents, best=1, **more):
    """`specbuild_choose` for logits `[B, N, V]`, outputs poisoned; `more`: further fields."""
    batch, nodes, vocab = logits.shape
    made, bias_tokens, bias_values = requests(params, seeds)
    fields = {
        "logits": logits,
        "requests": made,
        "bias_tokens": bias_tokens,
        "bias_values": bias_values,
        "tokens": tokens,
        "parents": parents,
        "root_position": ints(positions),
        "choices": poisoned(batch, nodes, best),
        "scores": poisoned(batch, nodes, best, dtype=np.float32),
        "tickets": np.zeros((batch, nodes), dtype=np.uint32),
        "fault": np.zeros(batch, dtype=np.int32),
        "stride": logits.strides[1] // logits.itemsize,
        "batch": batch,
        "nodes": nodes,
        "tree_nodes": tokens.shape[1],
        "vocab": vocab,
        "best": best,
        "cut_offs": 1,
        "dtype": DTYPES[logits.dtype],
    } | more
    size = kernels.library.workspace(struct(kernels, Choose, **fields))
    return struct(kernels, Choose, **fields, workspace=np.full(size // 4 + 2, 0xDEADBEEF, dtype=np.uint32))


def choose(kernels, *arguments, **more):
    """The choices and scores; the tickets are as they were, and nothing is found wrong."""
    params = choose_struct(kernels, *arguments, **more)
    kernels.launch("choose_tokens", params)
    assert not params.keep["tickets"].any()
    assert not params.keep["fault"].any()
    assert (params.keep["workspace"][-2:] == 0xDEADBEEF).all()
    return params.keep["choices"], params.keep["scores"]


def noise(kernels, seeds, positions, vocab):
    """g of each (seed, position), `[rows, vocab]`."""
    values = np.full((len(seeds), vocab), np.nan, dtype=np.float32)
    sizes = {"rows": len(seeds), "vocab": vocab}
    kernels.launch("make_noise", struct(kernels, Noise, seeds=seeds, positions=positions, noise=values, **sizes))
    return values


def walk(kernels, tokens, parents, choices, **more):
    """Path, length, emitted, roots, pair and fault."""
    batch, nodes = tokens.shape
    out = {name: poisoned(batch, nodes) for name in ("path", "emitted")}
    out |= {"length": poisoned(batch), "fault": np.zeros(batch, dtype=np.int32)}
    out |= {"roots": poisoned(batch), "pair": poisoned(batch, 2)}
    fields = {"tokens": tokens, "parents": parents, "choices": choices, "batch": batch, "nodes": nodes} | more
    kernels.launch("walk_tree", struct(kernels, Walk, **out | fields))
    return out


def cache_struct(kernels, rows, base, cache_len, node_rows=None, **more):
    """`specbuild_cache` of rows `[2·layers, B or pages, heads, S or rows a page, numbers]`."""
    layers = np.array([kernels.at(layer) for layer in rows], dtype=np.uint64)
    fields = {"layers": layers, "base": base, "cache_len": cache_len, "node_rows": node_rows, "count": len(rows)}
    fields |= {"heads": rows.shape[2], "row_bytes": rows.itemsize * rows.shape[4], "capacity": rows.shape[3]}
    return struct(kernels, Cache, **fields | more)


def commit(kernels, path, length, *caches, **more):
    """Kept, ticket and fault."""
    batch, nodes = path.shape
    out = {"kept": np.zeros((2, batch), dtype=np.int32), "ticket": np.zeros(1, dtype=np.uint32)}
    out["fault"] = np.zeros(batch, dtype=np.int32)
    fields = {"path": path, "length": length, "batch": batch, "nodes": nodes} | more
    params = struct(kernels, Commit, **out, **fields)
    for i, cache in enumerate(caches):
        params.caches[i] = cache
    kernels.launch("commit_path", params)
    return out


class Growths:
    """The state of growing trees, a sequence each, and the calls that move it on."""

    def __init__(self, kernels, specs, roots, positions):
        self.kernels, self.batch = kernels, len(specs)
        real = [spec for spec in specs if spec]
        self.best = max(spec.branch for spec in real)
        self.frontiers = max(spec.expand for spec in real)
        shapes = [Shape(s.branch, s.width, s.expand, s.depth, s.nodes) if s else Shape() for s in specs]
        pool = 1 + max(spec.width * spec.depth for spec in real)
        rows = max(1, *(spec.expand * (spec.depth - 1) for spec in real))
        nodes = 1 + max(spec.nodes for spec in real)
        b = self.batch
        self.shapes = (Shape * b)(*shapes)
        self.bytes = np.frombuffer(self.shapes, dtype=np.uint8)
        self.arrays = {name: poisoned(b, pool) for name in ("pool_tokens", "pool_parents", "pool_rows")}
        self.arrays["pool_scores"] = poisoned(b, pool, dtype=np.float64)
        self.arrays |= {name: poisoned(b, self.frontiers) for name in ("frontier", "level_tokens", "positions")}
        self.arrays |= {name: poisoned(b) for name in ("level_counts", "level_offset", "tree_counts")}
        self.arrays |= {name: poisoned(b, nodes) for name in ("tree_tokens", "tree_parents", "tree_nodes", "node_rows")}
        self.arrays["level_parents"] = poisoned(b, rows)
        self.arrays |= {"roots": ints(roots), "root_position": ints(positions), "fault": np.zeros(b, dtype=np.int32)}
        self.sizes = {"batch": b, "pool": pool, "frontiers": self.frontiers, "best": self.best}
        self.sizes |= {"rows": rows, "nodes": nodes}
        self.levels = 0

    def struct(self, choices, scores, **more):
        """`specbuild_grow`, as it stands."""
        fields = {**self.arrays, **self.sizes, "growths": self.bytes, "choices": choices, "scores": scores}
        return struct(self.kernels, Grow, **fields | {"first": int(self.levels == 0)} | more)

    def grow(self, choices, scores):
        """A level from the frontier's `[B, F, K]` best tokens; at first `[B, 1, K]`."""
        self.kernels.launch("grow_level", self.struct(choices, scores))
        self.levels += 1

    def finish(self):
        """The final trees."""
        self.kernels.launch("finish_tree", self.struct(poisoned(1), poisoned(1, dtype=np.float32)))

    def tree(self, b):
        """A finished tree."""
        count = int(self.arrays["tree_counts"][b])
        tree = Tree([int(self.arrays["tree_tokens"][b, 0])])
        for node in range(1, count):
            tree.add(int(self.arrays["tree_tokens"][b, node]), int(self.arrays["tree_parents"][b, node]))
        return tree
