"""Loads a build's models: the target, and a draft fitted to the target's tokens or a head."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .build_context import BuildContext
from .frontend.checkpoint import Checkpoint, model_of
from .frontend.draft_head import DraftHead
from .frontend.eagle3_head import EagleCheckpoint, load_head, trim_head
from .frontend.hidden_state_taps import Taps
from .frontend.layer_by_layer import LayeredModel
from .frontend.lazy_weights import Weight, of_model
from .frontend.mtp_head import MtpCheckpoint, load_mtp
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
        tokens: The target's token id of each column of the logits; None if column i is token i.
        head: The head that drafts for this target, which is loaded with it.
    """

    name: str
    net: PreTrainedModel
    parameters: int
    weights: Mapping[str, Weight]
    tokens: list[int] | None = None
    head: LoadedModel | None = None

    @property
    def is_head(self) -> bool:
        """Return whether it reads the target's hidden states."""
        return isinstance(self.net, DraftHead)

    @property
    def taps(self) -> Taps | None:
        """The hidden states that this target's head reads; None if it has none."""
        return self.head.net.taps if self.head else None

    @property
    def hidden(self) -> int:
        """The width of the hidden states that the model writes; 0 if it writes none."""
        head = self if self.is_head else self.head
        return int(head.net.config.hidden_size) if head else 0

    def layered(self, vocab_size: int) -> LayeredModel:
        """Return the model as it runs a layer at a time, with logits for so many tokens."""
        return LayeredModel(self.net, self.weights, self.tokens, vocab_size)


def load_target(source: Sources) -> LoadedModel:
    """Load the target without the rows of no token, and its head, if there is one."""
    net, weights = model_of(source.target)
    parameters, names = net.num_parameters(), {each: name for name, each in net.named_modules()}
    embedding, head = weights[f"{names[net.get_input_embeddings()]}.weight"], None
    if isinstance(source.head, EagleCheckpoint):
        head = _load_eagle(source.target, source.head, embedding)
    tokens = _listed(trim(net, source.target, weights))
    if isinstance(source.head, MtpCheckpoint):
        head = _load_mtp(source.head, net, weights, tokens)
    return LoadedModel("target", net, parameters, weights, tokens, head)


def _load_eagle(target: Checkpoint, found: EagleCheckpoint, embedding: Weight) -> LoadedModel:
    """Load an EAGLE-3 head, without the tokens that its target has not."""
    head = load_head(found, embedding.read())
    trim_head(head, target.token_ids)
    parameters = sum(p.numel() for p in head.parameters()) - head.embed_tokens.weight.numel()
    tokens: list[int] = head.tokens.tolist()
    every = tokens == list(range(target.token_rows))
    return LoadedModel("draft", head, parameters, of_model(head), None if every else tokens)


def _load_mtp(
    found: MtpCheckpoint, target: PreTrainedModel, weights: Mapping[str, Weight], tokens: list[int] | None
) -> LoadedModel:
    """Load the MTP layer of a target without the rows of no token, whose weights it shares."""
    layer = load_mtp(found, target)
    theirs = {each: weights[name] for name, each in target.named_parameters(remove_duplicate=False)}
    shared = {name: theirs[each] for name, each in layer.named_parameters(remove_duplicate=False) if each in theirs}
    return LoadedModel("draft", layer, found.parameters, of_model(layer) | shared, tokens)


def load_draft(source: Sources) -> LoadedModel:
    """Load the draft and fit it to the target's tokens."""
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
