"""Check that an engine's inputs and outputs are those that the bundle's manifest requires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.errors import BundleError

CACHES = {"HALF": "float16", "BF16": "uint16", "FLOAT": "float32", "FP8": "uint8"}  # NumPy dtypes by TensorRT's name


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An engine's input or output: TensorRT's type name, its shape (−1: dynamic), and the input that it aliases."""

    dtype: str
    shape: tuple[int, ...]
    alias: str | None = None


def expected_tensors(
    spec: ModelSpec, cache: str, attention: str = "native", block_size: int = 0
) -> dict[str, TensorInfo]:
    """Return the inputs and outputs that a plan must have, by name.

    The plugin writes in place without TensorRT's knowledge, so its `present_*` outputs are no aliases of `past_*`.

    Args:
        spec: The model.
        cache: TensorRT's name of the cache's type.
        attention: "native" or "plugin", as in EngineRecord.
        block_size: Rows of a cache page, as in EngineRecord; 0: linear caches.
    """
    past = TensorInfo(cache, (-1, spec.kv_heads, block_size or spec.capacity, spec.head_dim))
    names = [f"{kind}.{layer}" for layer in range(spec.layers) for kind in ("key", "value")]
    each, one, plugin = TensorInfo("INT32", (-1, -1)), TensorInfo("INT32", (-1,)), attention == "plugin"
    masks = {f"mask.{window}": TensorInfo("BOOL", (-1, 1, -1, spec.capacity)) for window in spec.windows}
    trees = {"parents": each, "cache_len": one, "tree_offset": one, "counts": one}
    trees |= {"page_table": TensorInfo("INT32", (-1, spec.capacity // block_size))} if block_size else {}
    states = TensorInfo("FLOAT", (-1, -1, spec.hidden))
    return {
        "input_ids": each,
        "logit_nodes": one,
        **({"hidden_in": states} if spec.reads_hidden else {}),
        **({"hidden": states} if spec.hidden else {}),
        **(trees if plugin else {"position_ids": each, "write_rows": one, **masks}),
        **{f"past_{name}": past for name in names},
        "logits": TensorInfo("FLOAT", (-1, -1, spec.vocab_size)),
        **{f"present_{name}": TensorInfo(cache, past.shape, None if plugin else f"past_{name}") for name in names},
    }


def check_tensors(
    spec: ModelSpec,
    tensors: Mapping[str, TensorInfo],
    attention: str = "native",
    kv_cache_dtype: str = "auto",
    block_size: int = 0,
) -> str:
    """Check a plan's inputs and outputs, and return TensorRT's name of the cache's type.

    Args:
        spec: The model.
        tensors: The plan's inputs and outputs, by name.
        attention: "native" or "plugin", as in EngineRecord.
        kv_cache_dtype: "auto" or "fp8", as in EngineRecord.
        block_size: Rows of a cache page, as in EngineRecord; 0: linear caches.

    Raises:
        BundleError: For the first tensor that is not as the manifest says.
    """
    cache = tensors["past_key.0"].dtype if "past_key.0" in tensors else "HALF"
    if cache not in CACHES:
        raise BundleError(f"the {spec.name}'s plan has a cache of {cache}: build it in fp16, bf16 or fp32")
    if (cache == "FP8") != (kv_cache_dtype == "fp8"):
        raise BundleError(
            f"the {spec.name}'s plan has past_key.0 as {cache}, its record a cache of {kv_cache_dtype}: build the "
            "bundle again"
        )
    expected = expected_tensors(spec, cache, attention, block_size)
    for name in sorted(expected.keys() ^ tensors.keys()):
        what = "lacks" if name in expected else "has, and should not,"
        raise BundleError(f"the {spec.name}'s plan {what} tensor {name}: build the bundle again")
    for name, info in expected.items():
        tensor = tensors[name]
        shape = tuple(-1 if fixed == -1 else size for size, fixed in zip(tensor.shape, info.shape, strict=False))
        same = (tensor.dtype, shape, tensor.alias) == (info.dtype, info.shape, info.alias)
        if len(tensor.shape) != len(info.shape) or not same:
            raise BundleError(f"the {spec.name}'s plan has {name} as {tensor}, not {info}: build the bundle again")
    return cache
