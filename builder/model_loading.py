"""Loads a build's models: the target, and a draft fitted to the target's tokens or an EAGLE-3 head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .build_context import BuildContext
from .frontend import checkpoint as checkpoints
from .frontend.eagle3_head import EagleHead, load_head
from .frontend.hidden_state_taps import Taps
from .frontend.vocabulary import fit
from .prepare import Sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = "draft_tokens.json"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights.

    Attributes:
        name: "target" or "draft".
        net: The model.
        parameters: How many parameters its checkpoint has.
        head: The EAGLE-3 head that drafts for this target, or that this draft is.
        tokens: The target's token id of each column of a draft's logits; None if column i is token i.
    """

    name: str
    net: PreTrainedModel
    parameters: int
    head: EagleHead | None = None
    tokens: list[int] | None = None

    @property
    def taps(self) -> Taps | None:
        """The hidden states that this target's head reads; None for a head itself and for models without one."""
        return Taps(self.head.config.taps, self.head.fc) if self.head and self.head is not self.net else None


def load_target(source: Sources) -> LoadedModel:
    """Load the target, and the EAGLE-3 head, if there is one, with the target's embedding."""
    net = checkpoints.load(source.target, "eager")
    head = load_head(source.head, net.get_input_embeddings().weight) if source.head else None
    return LoadedModel("target", net, net.num_parameters(), head)


def load_draft(source: Sources, head: EagleHead | None) -> LoadedModel:
    """Load the draft and fit it to the target's tokens; or describe `head`, which was loaded with the target."""
    if head:
        parameters = sum(p.numel() for p in head.parameters()) - head.embed_tokens.weight.numel()
        tokens: list[int] = head.tokens.tolist()
        every = tokens == list(range(source.target.vocab_size))
        return LoadedModel("draft", head, parameters, head, None if every else tokens)
    assert source.draft is not None
    net = checkpoints.load(source.draft, "eager")
    parameters, vocabulary = net.num_parameters(), source.vocabulary
    if vocabulary:
        fit(net, vocabulary)
    known = vocabulary.tokens if vocabulary else None
    return LoadedModel("draft", net, parameters, tokens=None if known is None else list(known))


def columns_of(context: BuildContext, loaded: LoadedModel) -> int:
    """Return how many columns a model's logits have; on GPUs a draft's have one for each of the target's tokens."""
    by_token = not loaded.tokens or context.config.descriptor.on_gpu
    return context.source.target.vocab_size if by_token else len(loaded.tokens or ())


def save_tokens(folder: Path, tokens: Sequence[int] | None) -> str | None:
    """Write the token id of each column of the draft's logits and return the file; None if column i is token i."""
    if tokens is None:
        return None
    (folder / TOKENS).write_text(json.dumps(tokens) + "\n", encoding="utf-8")
    return TOKENS
