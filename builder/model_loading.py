"""What a build loads: the target, and a draft that takes the target's tokens, or its head."""

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
    """A model with its weights, and how many parameters its checkpoint has.

    `head`: the EAGLE-3 head that drafts for this target, or that this draft is. `tokens`: the target's tokens that a
    draft's columns are; None where column i is token i.
    """

    name: str
    net: PreTrainedModel
    parameters: int
    head: EagleHead | None = None
    tokens: list[int] | None = None

    @property
    def taps(self) -> Taps | None:
        """What its head reads of a target."""
        return Taps(self.head.config.taps, self.head.fc) if self.head and self.head is not self.net else None


def load_target(source: Sources) -> LoadedModel:
    """The target, and with it the head that takes its embedding."""
    net = checkpoints.load(source.target, "eager")
    head = load_head(source.head, net.get_input_embeddings().weight) if source.head else None
    return LoadedModel("target", net, net.num_parameters(), head)


def load_draft(source: Sources, head: EagleHead | None) -> LoadedModel:
    """The draft, which takes the target's tokens; or the head that was loaded with the target."""
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
    """Of a model's logits; runtimes on GPUs take a draft's by token."""
    by_token = not loaded.tokens or context.config.descriptor.on_gpu
    return context.source.target.vocab_size if by_token else len(loaded.tokens or ())


def save_tokens(folder: Path, tokens: Sequence[int] | None) -> str | None:
    """The tokens of the draft's columns, where they are not their numbers."""
    if tokens is None:
        return None
    (folder / TOKENS).write_text(json.dumps(tokens) + "\n", encoding="utf-8")
    return TOKENS
