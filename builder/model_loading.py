"""Loads a build's models: the target, and a draft fitted to the target's tokens or an EAGLE-3 head."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .build_context import BuildContext
from .frontend.checkpoint import model_of
from .frontend.eagle3_head import EagleHead, load_head, trim_head
from .frontend.hidden_state_taps import Taps
from .frontend.layer_by_layer import LayeredModel
from .frontend.lazy_weights import Weight, of_model
from .frontend.vocabulary import Vocabulary, fit, trim
from .prepare import Sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = "draft_tokens.json"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and its weights.

    Attributes:
        name: "target" or "draft".
        net: The model, which may have no weights of its own.
        parameters: How many parameters its checkpoint has.
        weights: Its weights by its names, read when they are needed.
        head: The EAGLE-3 head that drafts for this target, or that this draft is.
        tokens: The target's token id of each column of the logits; None if column i is token i.
    """

    name: str
    net: PreTrainedModel
    parameters: int
    weights: Mapping[str, Weight]
    head: EagleHead | None = None
    tokens: list[int] | None = None

    @property
    def taps(self) -> Taps | None:
        """The hidden states that this target's head reads; None for a head itself and for models without one."""
        return Taps(self.head.config.taps, self.head.fc) if self.head and self.head is not self.net else None

    def layered(self, vocab_size: int) -> LayeredModel:
        """Return the model as it runs a layer at a time, with logits for so many tokens."""
        return LayeredModel(self.net, self.weights, self.tokens, vocab_size)


def load_target(source: Sources) -> LoadedModel:
    """Load the target without the rows of no token, and the EAGLE-3 head, if there is one, with its embedding."""
    net, weights = model_of(source.target)
    names = {each: name for name, each in net.named_modules()}
    embedding = weights[f"{names[net.get_input_embeddings()]}.weight"]
    head = load_head(source.head, embedding.read()) if source.head else None
    parameters = net.num_parameters()
    if head:
        trim_head(head, source.target.token_ids)
    tokens = _listed(trim(net, source.target, weights))
    return LoadedModel("target", net, parameters, weights, head, tokens)


def load_draft(source: Sources, head: EagleHead | None) -> LoadedModel:
    """Load the draft and fit it to the target's tokens; or describe `head`, which was loaded with the target."""
    if head:
        parameters = sum(p.numel() for p in head.parameters()) - head.embed_tokens.weight.numel()
        tokens: list[int] = head.tokens.tolist()
        every = tokens == list(range(source.target.token_rows))
        return LoadedModel("draft", head, parameters, of_model(head), head, None if every else tokens)
    assert source.draft is not None
    net, weights = model_of(source.draft)
    parameters, vocabulary = net.num_parameters(), source.vocabulary
    if vocabulary:
        fit(net, vocabulary, weights)
    else:  # the target itself
        vocabulary = trim(net, source.draft, weights)
    return LoadedModel("draft", net, parameters, weights, tokens=_listed(vocabulary))


def _listed(vocabulary: Vocabulary) -> list[int] | None:
    return None if vocabulary.tokens is None else list(vocabulary.tokens)


def unspread(context: BuildContext, loaded: LoadedModel) -> list[int] | None:
    """Return the tokens of a draft's columns if its graph has no others: on a CPU. Other graphs spread theirs."""
    return None if loaded.name == "target" or context.config.descriptor.on_gpu else loaded.tokens


def columns_of(context: BuildContext, loaded: LoadedModel) -> int:
    """Return how many columns a graph's logits have."""
    tokens = unspread(context, loaded)
    return context.source.target.token_rows if tokens is None else len(tokens)


def save_tokens(folder: Path, tokens: Sequence[int] | None) -> str | None:
    """Write the token id of each column of the draft's logits and return the file; None if column i is token i."""
    if tokens is None:
        return None
    (folder / TOKENS).write_text(json.dumps(tokens) + "\n", encoding="utf-8")
    return TOKENS
