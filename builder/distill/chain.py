"""A chain draft: a smaller model of the target's architecture, whose head may be trimmed to frequent tokens."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specbuild.builder.frontend.vocabulary import DRAFT_TOKENS

from .divergence import Divergence, log_probabilities
from .generate import go_on, sample
from .student import Lesson


class ChainStudent:
    """The student of a chain draft; see `Student`.

    net: a causal LM whose head has one row for each of `tokens` `int64[n]`; None for a head with all tokens.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, net: PreTrainedModel, tokens: Tensor | None) -> None:
        size = net.config.vocab_size
        self.net, self.tokens = net, torch.arange(size) if tokens is None else tokens
        self._trimmed = tokens is not None
        self._places = torch.full((size,), -1)
        self._places[self.tokens] = torch.arange(len(self.tokens))

    def to(self, device: torch.device) -> None:
        """See `Student.to`."""
        self.net.to(device)
        self.tokens, self._places = self.tokens.to(device), self._places.to(device)

    def loss(self, lesson: Lesson, divergence: Divergence) -> Tensor:
        """See `Student.loss`."""
        logits = self.net(input_ids=lesson.tokens, use_cache=False).logits
        return self._compared(logits, lesson.ids, lesson.probs, divergence).mean()

    def _compared(self, logits: Tensor, ids: Tensor, probs: Tensor, divergence: Divergence) -> Tensor:
        """Return the divergence `[B, N]` of logits `[B, N, n]` from the target's `ids` and `probs` `[B, N, k]`."""
        places = self._places[ids]
        log_q = log_probabilities(logits, places.clamp(min=0))
        return divergence(log_q, probs, (places >= 0).float())

    def agreement(self, lesson: Lesson, depth: int) -> Tensor:
        """See `Student.agreement`; one pass over the text gives the draft's choice after every token."""
        logits = self.net(input_ids=lesson.tokens, use_cache=False).logits
        right = self._choices(logits)[:, :-1] == lesson.tokens[:, 1:]
        return nn.functional.pad(right, (0, depth)).unfold(1, depth, 1)

    def _choices(self, logits: Tensor) -> Tensor:
        return self.tokens[logits.argmax(-1)]

    def write(self, tokens: Tensor, length: int) -> Tensor:
        """Continue texts `int64[B, T]` to `length` tokens by sampling with torch's global RNG."""
        return go_on(self.net, tokens, torch.ones_like(tokens), length, lambda _, scores: self.tokens[sample(scores)])

    def progress(self, done: float) -> None:
        """See `Student.progress`; does nothing, because the whole model is trained from the first step."""

    def save(self, folder: Path) -> None:
        """See `Student.save`; a trimmed head is written at full size, with zero rows for the tokens it lacks."""
        net = copy.deepcopy(self.net).cpu().to(self.net.config.dtype)
        if self._trimmed:
            own, tokens = net.get_output_embeddings(), self.tokens.cpu()
            head = _linear(own.in_features, net.config.vocab_size, own)
            for ours, full in zip(own.parameters(), head.parameters(), strict=True):
                full.data.zero_()[tokens] = ours.data
            net.set_output_embeddings(head)
            setattr(net.config, DRAFT_TOKENS, tokens.tolist())
        net.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):
            path.chmod(0o644)


def untied(net: PreTrainedModel) -> PreTrainedModel:
    """Return the model with a head that is not tied to its embedding."""
    if not net.config.tie_word_embeddings:
        return net
    config = copy.deepcopy(net.config)
    config.tie_word_embeddings = False
    other = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    other.load_state_dict(net.state_dict())
    return other


def trim(net: PreTrainedModel, tokens: Tensor) -> PreTrainedModel:
    """Return the model with an untied head that has rows for `tokens` `int64[n]` only."""
    net = untied(net)
    own = net.get_output_embeddings()
    head = _linear(own.in_features, len(tokens), own)
    for ours, small in zip(own.parameters(), head.parameters(), strict=True):
        small.data.copy_(ours.data[tokens])
    net.set_output_embeddings(head)
    return net


def _linear(width: int, rows: int, like: nn.Linear) -> nn.Linear:
    return nn.Linear(width, rows, bias=like.bias is not None, dtype=like.weight.dtype)
