"""PARD (arXiv 2504.18583): a chain draft that also predicts at mask tokens, so that one pass drafts a whole chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specbuild.builder.frontend.checkpoint import Checkpoint
from specbuild.builder.frontend.vocabulary import PARD_TOKEN

from .chain import ChainStudent
from .divergence import Divergence
from .student import Lesson

KEPT = 0.7  # fraction of a depth's anchors that are also trained at the next depth


@dataclass(frozen=True)
class Layout:
    """A text followed by masks. A mask at depth d stands in for the d-th token after its anchor, a token of the text.

    anchors, depths: `int64[L]`, of the text's tokens and then the masks; a text's token is its own anchor, at depth 0.
    """

    anchors: Tensor
    depths: Tensor

    @classmethod
    def of(cls, length: int, anchors: Sequence[Tensor]) -> Layout:
        """Lay out masks behind a text of `length` tokens; those that would lie past its end are dropped.

        anchors: the anchors of the masks at depth 1, 2, …; each must be among the anchors of the depth before.
        """
        kept = [each[each + depth < length] for depth, each in enumerate(anchors, 1)]
        depths = [torch.full_like(each, depth) for depth, each in enumerate(kept, 1)]
        text = torch.arange(length)
        return cls(torch.cat([text, *kept]), torch.cat([torch.zeros_like(text), *depths]))

    @property
    def positions(self) -> Tensor:
        """Position ids `int64[L]`: those that the masks would have directly after their anchor."""
        return self.anchors + self.depths

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return the attention bias `[1, 1, L, L]`: a row sees the text up to its anchor, and the masks in between."""
        anchors, depths = self.anchors, self.depths
        text = (depths == 0) & (anchors <= anchors[:, None])
        own = (depths > 0) & (anchors == anchors[:, None]) & (depths <= depths[:, None])
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype)
        return torch.where(text | own, torch.zeros((), dtype=dtype), hidden)[None, None]


class ParallelStudent(ChainStudent):
    """The student of a PARD draft; see `Student`.

    When it drafts, a text's last token and `depth` − 1 masks behind it predict a chain of `depth` tokens in one pass.
    """

    def __init__(self, net: PreTrainedModel, tokens: Tensor | None, mask: int, depth: int) -> None:
        super().__init__(net, tokens)
        self._mask, self._depth = mask, depth
        setattr(net.config, PARD_TOKEN, mask)

    def loss(self, lesson: Lesson, divergence: Divergence) -> Tensor:
        """See `Student.loss`. Anchors are drawn with torch's global RNG, fewer at larger depths."""
        length = lesson.tokens.shape[1]
        order = torch.randperm(length)
        sizes = [max(1, round(length * KEPT**depth)) for depth in range(1, self._depth)]
        layout = Layout.of(length, [order[:size].sort().values for size in sizes])
        places = layout.positions.to(lesson.tokens.device)
        logits = self.logits(lesson.tokens, layout)
        return self._compared(logits, lesson.ids[:, places], lesson.probs[:, places], divergence).mean()

    def logits(self, tokens: Tensor, layout: Layout) -> Tensor:
        """Return the logits `[B, L, n]` of texts `int64[B, T]` and the masks behind them."""
        masks = tokens.new_full((len(tokens), len(layout.anchors) - tokens.shape[1]), self._mask)
        found: Tensor = self.net(
            input_ids=torch.cat([tokens, masks], 1),
            attention_mask=layout.bias(next(self.net.parameters()).dtype).to(tokens.device),
            position_ids=layout.positions[None].to(tokens.device),
            use_cache=False,
        ).logits
        return found

    def agreement(self, lesson: Lesson, depth: int) -> Tensor:
        """See `Student.agreement`."""
        tokens, length = lesson.tokens, lesson.tokens.shape[1]
        layout = Layout.of(length, [torch.arange(length)] * (depth - 1))
        anchors, depths = layout.anchors.to(tokens.device), layout.depths.to(tokens.device)
        inside = anchors + depths + 1 < length
        choices = self._choices(self.logits(tokens, layout))[:, inside]
        anchors, depths = anchors[inside], depths[inside]
        agrees = torch.zeros(*tokens.shape, depth, dtype=torch.bool, device=tokens.device)
        agrees[:, anchors, depths] = choices == tokens[:, anchors + depths + 1]
        return agrees


def mask_of(target: Checkpoint) -> int:
    """Return an id that no text uses: the target's last embedding row if no token has it, else the next id."""
    last = target.vocab_size - 1
    used = max([*target.tokenizer.get_vocab().values(), *target.eos_token_ids()])
    return last if last > used else last + 1


@torch.no_grad()
def with_mask(net: PreTrainedModel, mask: int) -> None:
    """Make room for the mask token in the embedding; its row is initialised as the mean of the rows before it."""
    known = net.config.vocab_size
    if mask >= known:
        net.resize_token_embeddings(mask + 1, mean_resizing=False)
    rows = net.get_input_embeddings().weight
    rows[mask] = rows[: min(known, mask)].mean(0)
