"""The drafter that a bundle's draft is made for, by its kind, and the habits that it brings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import Token
from specbuild.runtime.checked_json import JSON_BYTES, checked, decode
from specbuild.runtime.errors import BundleError

from .eagle3 import EagleDrafter
from .habits import FILE, Common, Habits
from .model import ModelDrafter
from .pard import PardDrafter


def drafter_of(bundle: Bundle, draft: Executor, target: Executor, chunk: int, overlap: bool) -> ModelDrafter:
    """`chunk`: nodes of a step of the draft at most. `overlap`: it drafts ahead, where its kind can.

    Raises BundleError for tokens of its head that are none.
    """
    record, tokens = bundle.manifest.models["draft"], _tokens(bundle)
    if record.kind == "eagle3":
        return EagleDrafter(draft, chunk, target, tokens)
    if record.mask_token is not None:
        return PardDrafter(draft, chunk, record.mask_token, tokens)
    return ModelDrafter(draft, chunk, overlap, tokens)


def habits_of(bundle: Bundle) -> Habits:
    """To begin with: what common texts say, where a bundle brings that; raises BundleError."""
    if FILE not in bundle.manifest.files:
        return Habits()
    try:
        record = decode(bundle.read(FILE, JSON_BYTES))
    except ValueError as error:
        raise BundleError(f"{bundle.path(FILE)} cannot be read as JSON ({error}): build the bundle again") from None
    return Habits(Common.of(record, bundle.manifest.models["target"].vocab_size))


def _tokens(bundle: Bundle) -> NDArray[np.int64] | None:
    """The token of each column of the draft's logits."""
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
