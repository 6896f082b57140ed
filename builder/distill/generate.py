"""Text generation for training: sampled, or greedy after a sampled beginning, because most served text is greedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from specbuild.builder.frontend.reference import without_defaults

NEVER = 1 << 30  # a head longer than any text: the text is sampled throughout


Choice = Callable[[Tensor, Tensor], Tensor]  # (texts `[B, T]`, scores `[B, n]`) → the next tokens `int64[B]`


def sample(scores: Tensor) -> Tensor:
    """Sample one column per row from its softmax, `[B, n]` → `int64[B]`, with one random number per row."""
    totals = scores.float().softmax(-1).cumsum(-1)
    drawn = torch.rand(len(scores), 1, device=scores.device) * totals[:, -1:]
    return torch.searchsorted(totals, drawn, right=True)[:, 0].clamp(max=scores.shape[1] - 1)


class SampledThenGreedy:
    """A `Choice` that samples the beginning of each text, continues it greedily, and starts a new text after EOS.

    Args:
        heads: `int64[B]`; a text of row b is sampled until it has `heads[b]` tokens, its prompt included.
        begins: `int64[B]`, the number of padding tokens before each row's first text.
        ends: The tokens that end a text.
        start: The token that begins a text; after an end token it is chosen unless it is an end token itself.
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
    """A logits processor that leaves only the token that a `Choice` has chosen."""

    def __init__(self, choice: Choice, vocab_size: int) -> None:
        self._choice, self._size = choice, vocab_size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return nn.functional.one_hot(self._choice(input_ids, scores), self._size).float()


def go_on(net: PreTrainedModel, tokens: Tensor, visible: Tensor, length: int, choice: Choice) -> Tensor:
    """Continue texts `int64[B, T]` to `length` tokens; `visible` `int64[B, T]` is 0 at padding, else 1."""
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
    """Continue prompts until the longest has `length` tokens; return them with their continuations.

    Args:
        model: The model that generates.
        prompts: Token ids of each prompt.
        length: Length of the longest prompt with its continuation; a shorter prompt gets the same number of new tokens.
        heads: See `SampledThenGreedy`, as for `ends` and `start`.
        ends: The tokens that end a text.
        start: The token that begins a text.
        seed: Seed of the sampling.
    """
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
