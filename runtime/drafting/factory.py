"""Makes the drafter for the kind of a bundle's draft."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import Token
from specbuild.runtime.checked_json import JSON_BYTES, checked, decode
from specbuild.runtime.errors import BundleError
from specbuild.runtime.speculation.cost_model import CostModel

from .eagle3 import EagleDrafter
from .model import ModelDrafter
from .pard import PardDrafter


def drafter_of(
    bundle: Bundle, draft: Executor, target: Executor, chunk: int, cost: CostModel | None = None
) -> ModelDrafter:
    """Return the drafter for the kind of a bundle's draft.

    Args:
        bundle: The bundle.
        draft: Executor of the draft.
        target: Executor of the target, whose hidden states an EAGLE-3 head reads.
        chunk: Maximum nodes of a text in a step of the draft.
        cost: Records what its steps take; None: nothing does.

    Raises:
        BundleError: If the token ids of the draft's columns are invalid.
    """
    record, tokens = bundle.manifest.models["draft"], _tokens(bundle)
    if record.is_head:
        return EagleDrafter(draft, chunk, target, tokens=tokens, cost=cost)
    if record.mask_token is not None:
        return PardDrafter(draft, chunk, record.mask_token, tokens=tokens, cost=cost)
    return ModelDrafter(draft, chunk, tokens, cost=cost)


def _tokens(bundle: Bundle) -> NDArray[np.int64] | None:
    """Return the token id of each column of the draft's logits; None: the column's number."""
    record, vocabulary = bundle.manifest.models["draft"], bundle.manifest.models["target"].vocab_size
    if record.tokens is None:
        return None
    try:
        tokens = checked(decode(bundle.read(record.tokens, JSON_BYTES)), list[Token])
    except ValueError:
        tokens = []
    if len(tokens) != record.vocab_size or len({*tokens}) != len(tokens) or max(tokens) >= vocabulary:
        raise BundleError(
            f"{bundle.path(record.tokens)} does not name {record.vocab_size} of {vocabulary} tokens: build the bundle "
            "again"
        )
    return np.array(tokens, dtype=np.int64)
