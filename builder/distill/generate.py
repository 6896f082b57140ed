"""Texts that a model writes: sampled, or greedy after a sampled beginning, as most that is served will be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from specbuild.builder.frontend.reference import without_defaults

NEVER = 1 << 30  # a head that no text outgrows


Choice = Callable[[Tensor, Tensor], Tensor]  # (texts `[B, T]`, scores `[B, n]`) → the next tokens `int64[B]`


def sample(scores: Tensor) -> Tensor:
    """A column of each row by its softmax: `[B, n]` → `int64[B]`, from one random number a row."""
    totals = scores.float().softmax(-1).cumsum(-1)
    drawn = torch.rand(len(scores), 1, device=scores.device) * totals[:, -1:]
    return torch.searchsorted(totals, drawn, right=True)[:, 0].clamp(max=scores.shape[1] - 1)


class SampledThenGreedy:
    """A `Choice`: greedy once a text is as long as its head; ends a text, and begins the next.

    heads `int64[B]`: tokens of a row's every text that are sampled. A text begins after padding, or after a token of
    `ends`; `start` is put before it where that is another token.
    """

    def __init__(self, heads: Tensor, begins: Tensor, ends: Sequence[int], start: int) -> None:
        self._heads, self._begins = heads, begins
        self._ends, self._start = torch.tensor(ends, dtype=torch.int64, device=heads.device), start

    def __call__(self, texts: Tensor, scores: Tensor) -> Tensor:
        """See `Choice`."""
        places = torch.arange(1, texts.shape[1] + 1, device=texts.device)
        ended = torch.isin(texts, self._ends) & (places > self._begins[:, None])
        begins = torch.maximum((ended * places).amax(1), self._begins)
        greedy = texts.shape[1] - begins >= self._heads
        chosen = torch.where(greedy, scores.argmax(-1), sample(scores))
        return chosen if self._start in self._ends else torch.where(ended[:, -1], self._start, chosen)


class _Chosen(LogitsProcessor):  # type: ignore[misc]
    """Leaves nothing to choose but what a `Choice` has chosen."""

    def __init__(self, choice: Choice, vocab_size: int) -> None:
        self._choice, self._size = choice, vocab_size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return nn.functional.one_hot(self._choice(input_ids, scores), self._size).float()


def go_on(net: PreTrainedModel, tokens: Tensor, visible: Tensor, length: int, choice: Choice) -> Tensor:
    """Texts `[B, T]` continued to `length` tokens; visible: 0 where padded."""
    config = GenerationConfig(
        do_sample=False,
        max_length=length,
        pad_token_id=0,
        cache_implementation="static",
        disable_compile=True,
    )
    processors = LogitsProcessorList([_Chosen(choice, net.config.get_text_config().vocab_size)])
    with without_defaults(net), torch.no_grad():
        return net.generate(  # type: ignore[no-any-return]
            tokens, attention_mask=visible, generation_config=config, logits_processor=processors
        )


def write(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    length: int,
    heads: Sequence[int],
    ends: Sequence[int],
    start: int,
    seed: int,
) -> list[list[int]]:
    """Continue prompts until the longest has `length` tokens. See SampledThenGreedy for heads, ends and start."""
    longest, device = max(map(len, prompts)), model.device
    begins = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    visible = (torch.arange(longest, device=device) >= begins[:, None]).long()
    choice = SampledThenGreedy(torch.tensor(list(heads), device=device), begins, ends, start)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        texts = go_on(model, padded, visible, length, choice)
    return [text[begin:].tolist() for text, begin in zip(texts, begins.tolist(), strict=True)]
