"""Passes over the portable graph: one per file, with pre- and postconditions and a report of what they matched."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from .gather_logits import GatherLogits
from .pattern import FusionPass
from .static_reshape import StaticReshape
from .swiglu import FuseSwiGLU

PORTABLE: tuple[type[FusionPass], ...] = (StaticReshape, GatherLogits, FuseSwiGLU)


def run_portable(model: ir.Model) -> dict[str, int]:
    """Run every portable pass in place; returns how often each matched, by its name."""
    matched = {}
    for kind in PORTABLE:
        fusion = kind()
        fusion(model)
        matched[kind.__name__] = fusion.matched
    clean(model)
    return matched


def clean(model: ir.Model) -> None:
    """Remove what nothing uses (nodes, initializers, opsets, the exporter's notes), and make names unique."""
    for tidy in (
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
        common.ClearMetadataAndDocStringPass(),
        common.NameFixPass(),
    ):
        tidy(model)
