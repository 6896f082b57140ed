"""Passes over the portable graph: one per file, with pre- and postconditions and a report of what they matched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import onnx_ir as ir
import onnx_ir.passes.common as common

from .gate_up import FuseGateUp
from .gather_logits import GatherLogits
from .gemm import SplitGemm
from .merge import MergeProducts
from .pattern import FusionPass
from .qkv import FuseQKV
from .residual_norm import FuseResidualNorm
from .rms_norm import FuseRMSNorm
from .rotary import FuseRotary
from .row_sum import RowSum
from .static_reshape import StaticReshape
from .swiglu import FuseSwiGLU
from .tied_head import FoldTiedHead

PORTABLE: tuple[type[FusionPass], ...] = (
    StaticReshape,
    GatherLogits,
    SplitGemm,
    RowSum,
    FuseRMSNorm,
    FuseRotary,
    FuseSwiGLU,
    FuseQKV,
    FuseGateUp,
    FuseResidualNorm,
    FoldTiedHead,
)


def run_portable(model: ir.Model, forms: Mapping[str, object] | None = None) -> dict[str, int]:
    """Run every portable pass in place; return how often each matched, by its name.

    `forms` has each weight's form by its name, where they differ: only weights of one form are merged.
    """
    matched = {}
    for kind in PORTABLE:
        fusion = kind(forms or {}) if issubclass(kind, MergeProducts) else kind()
        fusion(model)
        matched[kind.__name__] = fusion.matched
    clean(model)
    return matched


def census(model: ir.Model) -> dict[str, int]:
    """Return how many nodes of each operator a graph has, by the operator's name."""
    return dict(sorted(Counter(node.op_type for node in model.graph).items()))


def clean(model: ir.Model) -> None:
    """Remove unused nodes, initializers and opsets and the exporter's metadata, and make names unique."""
    for tidy in (
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
        common.ClearMetadataAndDocStringPass(),
        common.NameFixPass(),
    ):
        tidy(model)
