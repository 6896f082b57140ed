"""Texts that a model writes: sampled, or greedy after a sampled beginning, as most that is served will be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

NEVER = 1 << 30  # a head that no text outgrows


class Greedy(LogitsProcessor):  # type: ignore[misc]
    """Leaves only the likeliest token once a text is as long as its head; ends a text, and begins the next.

    heads `int64[B]`: tokens of a row's every text that are sampled. A text begins after padding, or after a token of
    `ends`; `start` is put before it where that is another token.
    """

    def __init__(self, heads: Tensor, begins: Tensor, ends: Sequence[int], start: int) -> None:
        self._heads, self._begins = heads, begins
        self._ends, self._start = torch.tensor(ends, dtype=torch.int64, device=heads.device), start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`[B, T]`, `[B, V]` → `[B, V]`."""
        places = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
        ended = torch.isin(input_ids, self._ends) & (places > self._begins[:, None])
        begins = torch.maximum((ended * places).amax(1), self._begins)
        greedy = input_ids.shape[1] - begins >= self._heads
        forced = torch.where(greedy, scores.argmax(-1), -1)
        if self._start not in self._ends:
            forced = torch.where(ended[:, -1], self._start, forced)
        only = torch.full_like(scores, -torch.inf).scatter(1, forced.clamp(min=0)[:, None], 0.0)
        return torch.where((forced >= 0)[:, None], only, scores)


class Spread(LogitsProcessor):  # type: ignore[misc]
    """The logits of a trimmed head as those of all tokens, the others impossible. tokens: `int64[n]`."""

    def __init__(self, tokens: Tensor, size: int) -> None:
        self._tokens, self._size = tokens, size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`[B, n]` → `[B, size]`."""
        full = scores.new_full((len(scores), self._size), -torch.inf)
        full[:, self._tokens] = scores
        return full


def go_on(net: PreTrainedModel, tokens: Tensor, visible: Tensor, length: int, processor: LogitsProcessor) -> Tensor:
    """Texts `[B, T]` continued by sampling to `length` tokens; random by torch's own state. visible: 0 where padded."""
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_length=length,
        pad_token_id=0,
        cache_implementation="static",
        disable_compile=True,
    )
    own, net.generation_config = net.generation_config, GenerationConfig()  # else its defaults go before ours
    try:
        with torch.no_grad():
            texts: Tensor = net.generate(
                tokens,
                attention_mask=visible,
                generation_config=config,
                logits_processor=LogitsProcessorList([processor]),
            )
    finally:
        net.generation_config = own
    return texts


def write(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    length: int,
    heads: Sequence[int],
    ends: Sequence[int],
    start: int,
    seed: int,
) -> list[list[int]]:
    """Continue prompts until the longest has `length` tokens. See Greedy for heads, ends and start."""
    longest, device = max(map(len, prompts)), model.device
    begins = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    visible = (torch.arange(longest, device=device) >= begins[:, None]).long()
    processor = Greedy(torch.tensor(list(heads), device=device), begins, ends, start)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        texts = go_on(model, padded, visible, length, processor)
    return [text[begin:].tolist() for text, begin in zip(texts, begins.tolist(), strict=True)]
