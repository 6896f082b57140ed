"""Reference results computed by Hugging Face: the tokens and logits that a bundle is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, PreTrainedModel

from .quiet import quiet

AT_ONCE = 16  # prompts in a batch


@dataclass(frozen=True, slots=True)
class Reference:
    """A prompt and its greedy continuation in float32."""

    prompt: list[int]
    tokens: list[int]

    @property
    def text(self) -> list[int]:
        """Prompt and continuation without the last token, whose successor is not known."""
        return [*self.prompt, *self.tokens[:-1]]


@contextmanager
def without_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Remove the model's generation_config, which fills in what a caller's leaves open; restore it afterwards."""
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@quiet()
def greedy(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos: Sequence[int]
) -> list[Reference]:
    """Generate greedily with `transformers`, ignoring generation_config.json, AT_ONCE prompts at a time."""
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=eos[0] if eos else 0,
    )
    references = list[Reference]()
    with without_defaults(model), torch.no_grad():
        for first in range(0, len(prompts), AT_ONCE):
            some = [list(prompt) for prompt in prompts[first : first + AT_ONCE]]
            width = max(map(len, some))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in some])
            there = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in some])
            output = model.generate(ids, attention_mask=there, generation_config=config)[:, width:].tolist()
            references += [Reference(prompt, _ended(tokens, eos)) for prompt, tokens in zip(some, output, strict=True)]
    return references


def _ended(tokens: list[int], eos: Sequence[int]) -> list[int]:
    """Cut a continuation after its first end token, as what follows it is padding."""
    end = next((at for at, token in enumerate(tokens, 1) if token in eos), len(tokens))
    return tokens[:end]


def text_logits(model: PreTrainedModel, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits after each token of a text: `float32[T, V]`."""
    with torch.no_grad():
        logits: NDArray[np.float32] = model(input_ids=torch.tensor([list(tokens)])).logits[0].float().numpy().copy()
    return logits
