"""Check that a graph's inputs and outputs are those that the bundle's manifest requires."""

from __future__ import annotations

from typing import Any

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.errors import BundleError

Tensor = tuple[str, tuple[int | None, ...]]  # ONNX Runtime's type name, and a shape; None: any size


def expected_tensors(spec: ModelSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the inputs and the outputs that a graph must have, by name."""
    hidden = "tensor(float)", (1, None, spec.hidden)
    inputs: dict[str, Tensor] = {
        **dict.fromkeys(("input_ids", "position_ids"), ("tensor(int64)", (1, None))),
        "logit_nodes": ("tensor(int64)", (None,)),
        **dict.fromkeys(("slots", "rows", "committed"), ("tensor(int32)", (None,))),
        "visible": ("tensor(bool)", (None, None)),
        **({"row_positions": ("tensor(int32)", (None, spec.capacity))} if any(spec.windows) else {}),
        **({"hidden_in": hidden} if spec.reads_hidden else {}),
    }
    for layer, cache in enumerate(spec.shapes):
        for kind, size in (("keys", cache.key), ("values", cache.value)):
            inputs[f"{kind}.{layer}"] = "tensor(float)", (None, cache.heads, spec.capacity, size)
        if cache.state:
            inputs[f"states.{layer}"] = "tensor(float)", (None, cache.state)
            inputs["state_rows"] = "tensor(int32)", (None,)
    outputs: dict[str, Tensor] = {"logits": ("tensor(float)", (1, None, spec.vocab_size))}
    return inputs, outputs | ({"hidden": hidden} if spec.hidden else {})


def check_tensors(session: Any, spec: ModelSpec) -> None:
    """Raise BundleError for the first tensor of a session's graph that is not as the manifest says."""
    for expected, found in zip(expected_tensors(spec), (session.get_inputs(), session.get_outputs()), strict=True):
        has = {each.name: each for each in found}
        for name in sorted(expected.keys() ^ has.keys()):
            what = "lacks" if name in expected else "has, and should not,"
            raise BundleError(f"the {spec.name}'s graph {what} tensor {name[:80]}: build the bundle again")
        for name, (dtype, shape) in expected.items():
            sizes = [size if isinstance(size, int) else None for size in has[name].shape or ()]
            fits = len(sizes) == len(shape) and all(
                wanted is None or size in (None, wanted) for size, wanted in zip(sizes, shape, strict=True)
            )
            if has[name].type != dtype or not fits:
                raise BundleError(
                    f"the {spec.name}'s graph has {name} as {has[name].type} {sizes}, not {dtype} {list(shape)}: "
                    "build the bundle again"
                )
