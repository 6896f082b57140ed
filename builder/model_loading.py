"""What a build loads: the target, and a draft that takes the target's tokens, or its head."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from specbuild.runtime.backends.executor import ON_GPU

from .build_state import BuildState
from .frontend import checkpoint as checkpoints
from .frontend.eagle3_head import load_head
from .frontend.vocabulary import fit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = "draft_tokens.json"


def load_model(work: BuildState, name: str) -> tuple[PreTrainedModel, int]:
    """A model and its parameters' number; a draft takes the target's tokens, and a target's head is read with it."""
    source, head = work.source, work.source.head
    if name == "draft" and work.head:
        return work.head, sum(p.numel() for p in work.head.parameters()) - work.head.embed_tokens.weight.numel()
    model = checkpoints.load(source.draft if name == "draft" and source.draft else source.target, "eager")
    parameters = model.num_parameters()
    if name == "target" and head:
        work.head = load_head(head, model.get_input_embeddings().weight)
    elif source.vocabulary and name == "draft":
        fit(model, source.vocabulary)
    return model, parameters


def save_tokens(work: BuildState) -> str | None:
    """The tokens of the draft's columns, where they are not their numbers."""
    tokens = tokens_of(work)
    if tokens is None:
        return None
    (work.folder / TOKENS).write_text(json.dumps(tokens) + "\n", encoding="utf-8")
    return TOKENS


def tokens_of(work: BuildState) -> list[int] | None:
    """The target's tokens that the draft's columns are; None where column i is token i."""
    if work.head:
        tokens: list[int] = work.head.tokens.tolist()
        return None if tokens == list(range(work.source.target.vocab_size)) else tokens
    vocabulary = work.source.vocabulary
    return None if vocabulary is None or vocabulary.tokens is None else list(vocabulary.tokens)


def columns_of(work: BuildState, model: str) -> int:
    """Of a model's logits; runtimes on GPUs take a draft's by token."""
    tokens = tokens_of(work) if model == "draft" and work.config.backend not in ON_GPU else None
    return len(tokens) if tokens else work.source.target.vocab_size
