"""The graph around TensorRT's plugin, the plugin itself in Python: an operator for ONNX's evaluator, a `Model` on that.

What the plugin takes, by type, shape and name, is read from its source; what it computes is `attention_oracle.oracle`,
or the kernels' compiled for this CPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from attention_oracle import Case, oracle
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from specbuild.runtime.backends.gpu.device import Tensor
from specbuild.runtime.backends.gpu.step_tensors import StepTensors
from specbuild.runtime.backends.kernels.abi import Dtype

SOURCE = Path(__file__).parents[2] / "plugins" / "trt"
SPECS = re.findall(r'\{"(\w+)", Kind::(\w+), "(\w+)"\}', (SOURCE / "inputs.cpp").read_text(encoding="utf-8"))
FIELDS = re.findall(r'visit\("(\w+)"', (SOURCE / "plugin.h").read_text(encoding="utf-8"))
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = {np.dtype(np.float16): Dtype.F16, np.dtype(np.float32): Dtype.F32, E4M3: Dtype.E4M3}
MAX_NODES = 64  # of a tree
ALIGNED = 256  # bytes, of addresses that TensorRT is given
Compute = Callable[[Case], tuple[NDArray[Any], ...]]


class TreeAttention(OpRun):
    """The plugin by its README: what it refuses, and what it computes, into the caches that it is given."""

    op_domain = "trt.plugins"
    compute: Compute = staticmethod(oracle)

    def _run(self, *arrays, **fields):
        assert (fields.pop("plugin_version"), fields.pop("plugin_namespace")) == ("1", "specbuild")
        assert fields.keys() <= set(FIELDS)
        assert fields["in_place"] == "address"
        given = dict(zip(fields["inputs"].split(","), arrays, strict=True))
        sizes = {}
        specs = [spec for spec in SPECS if spec[0] in given]
        assert [name for name, *_ in specs] == list(given)
        table, page_rows = given.get("page_table"), 0
        cache = given["past_key"].dtype
        assert cache in (arrays[0].dtype, E4M3)
        assert ("key_scale" in given, "value_scale" in given) == (cache == E4M3,) * 2
        types = {"activation": arrays[0].dtype, "cache": cache, "index": np.int32, "table": np.float32}
        for name, kind, letters in specs:
            assert given[name].dtype == types[kind], name
            letters = "XKWD" if kind == "cache" and table is not None else letters
            for letter, size in zip(letters, given[name].shape, strict=True):
                assert sizes.setdefault(letter, size) == size, (name, letter)
        if table is not None:
            page_rows = sizes["W"]
            assert page_rows & (page_rows - 1) == 0
            assert 0 <= table.min() <= table.max() < sizes["X"]
        assert sizes["M"] == 0 or sizes["N"] <= sizes["M"] <= MAX_NODES
        kv_heads = sizes["K"]
        if "qkv" in given:
            heads = sizes["Q"] - 2 * kv_heads
            parts = np.split(given["qkv"], [heads, heads + kv_heads], axis=2)
        else:
            parts = [given[name] for name in ("query", "key", "value")]
        names = ("cache_len", "tree_offset", "counts", "cos", "sin", "key_scale", "value_scale")
        out, *present = type(self).compute(
            Case(
                *parts,
                key_cache=given["past_key"],
                value_cache=given["past_value"],
                dtype=DTYPES[arrays[0].dtype],
                cache_dtype=DTYPES[cache],
                scale=fields["scale"],
                softcap=fields["softcap"],
                window=fields["window"],
                parents=given["parents"] if sizes["M"] else None,
                page_table=table,
                page_rows=page_rows,
                **{name: given.get(name) for name in names},
            )
        )[:3]
        for past, new in zip((given["past_key"], given["past_value"]), present, strict=True):
            write(past, new, given)
        return out.astype(arrays[0].dtype), given["past_key"], given["past_value"]


def write(past, new, given):
    """Into a cache what a call wrote, out of a linear one: a page may be several sequences', of whom one writes it."""
    if "page_table" not in given:
        past[...] = new
        return
    rows = past.shape[2]
    for b, table in enumerate(given["page_table"]):
        start = int(given["cache_len"][b] + given["tree_offset"][b])
        for row in range(start, start + int(given["counts"][b])):
            past[table[row // rows], :, row % rows] = new[b, :, row]


class PluginModel:
    """See `Model`: as `TrtModel` does, every input is read at its address, and the cache is written at its own."""

    def __init__(
        self, graph, spec, device, batch_size, buckets, chunk, tree_nodes=MAX_NODES, compute=oracle, pages=None
    ):
        """`tree_nodes`: M; `compute`: what the plugin does; `pages`: of paged caches."""
        operator = type("TreeAttention", (TreeAttention,), {"compute": staticmethod(compute)})
        self._evaluator = ReferenceEvaluator(ir.to_proto(graph), new_ops=[operator])
        self.spec, self.batch_size, self.buckets, self.chunk, self._device = spec, batch_size, buckets, chunk, device
        self.lengths = sorted({buckets[-1], (buckets[-1] + chunk + 1) // 2, chunk})
        past = next(value for value in graph.graph.inputs if value.name == "past_key.0")
        self.pages = pages
        parts, rows = (1 + pages.count, pages.rows) if pages else (batch_size, spec.capacity)
        shape = 2 * spec.layers, parts, spec.kv_heads, rows, spec.head_dim
        self._number = past.dtype.numpy()
        cache = device.empty(shape, np.uint8 if self._number == E4M3 else self._number)  # as the runtime holds it
        self.tensors = StepTensors.allocate(device, spec, (batch_size, buckets[-1], chunk), cache, tree_nodes)

    def enqueue(self, nodes, stream):
        """See `Model.enqueue`."""
        self._run(slice(None), self.batch_size, nodes, np.arange(nodes))

    def prefill(self, slot, nodes, last, stream):
        """See `Model.prefill`."""
        self._run(slice(slot, slot + 1), 1, nodes, np.array([last]))

    def _run(self, slots, batch, nodes, wanted):
        given = self.tensors
        tree, cache = given.tree, self._device.array(given.cache).view(self._number)
        assert tree
        columns = tree.parents.shape[1] if nodes <= self.buckets[-1] else 0
        shapes = {"input_ids": (given.tokens, (batch, nodes)), "parents": (tree.parents, (batch, columns))}
        vectors = {"cache_len": tree.cache_len, "tree_offset": tree.tree_offset, "counts": tree.counts}
        shapes |= {name: (vector, (batch,)) for name, vector in vectors.items()}
        feed = {
            name: self._device.array(Tensor(tensor.address, shape, tensor.dtype))
            for name, (tensor, shape) in shapes.items()
        }
        feed["logit_nodes"] = wanted.astype(np.int32)
        if self.pages:
            first = self.pages.tensor.address
            if batch < self.batch_size:
                first = self.pages.line(slots.start)
                assert (first - self.pages.line(0)) % ALIGNED == 0
            table = Tensor(first, (batch, self.pages.tensor.shape[1]), np.dtype(np.int32))
            feed["page_table"] = self._device.array(table)
        for index, rows in enumerate(cache if self.pages else cache[:, slots]):
            feed[f"past_{('key', 'value')[index % 2]}.{index // 2}"] = rows
        if given.hidden_in:
            states = Tensor(given.hidden_in.address, (batch, nodes, self.spec.hidden), given.hidden_in.dtype)
            feed["hidden_in"] = self._device.array(states)
        outputs = dict(zip(self._evaluator.output_names, self._evaluator.run(None, feed), strict=True))
        for name, tensor in {"logits": given.logits, "hidden": given.hidden}.items():
            if tensor:
                self._device.array(tensor).reshape(-1)[: outputs[name].size] = outputs[name].ravel()

    def close(self):
        """See `Model.close`."""
