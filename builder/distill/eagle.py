"""Training of an EAGLE-3 head by training-time test (arXiv 2503.01840): each step reads the previous step's output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, repeat_kv

from specbuild.builder.frontend.eagle3_head import EagleHead, head_config, save_head

from .divergence import Divergence, log_probabilities
from .student import Lesson

ATTENTION = "specbuild_unrolled"
DECAY = 0.8  # weight of a step's loss relative to the step before
_SHARED = (  # fields copied from the target's configuration
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size rms_norm_eps "
    "max_position_embeddings rope_parameters"
).split()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float,
    rows: list[tuple[Tensor, Tensor]],
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend from each anchor as drafting does: to the first step's rows up to it, and to its own rows of later steps.

    query: `[B, heads, n, D]`. rows: the keys and values of the steps before; this step's are appended.
    """
    groups: int = module.num_key_value_groups  # type: ignore[assignment]
    rows.append((repeat_kv(key, groups), repeat_kv(value, groups)))
    keys, values = rows[0]
    own = rows[1:]
    n, total = query.shape[2], keys.shape[2]
    later = torch.ones(n, total, dtype=torch.bool, device=query.device).triu(1)
    scores = [(query @ keys.transpose(2, 3)).masked_fill(later, -torch.inf)]
    scores += [(query * key[:, :, :n]).sum(-1, keepdim=True) for key, _ in own]
    weights = (torch.cat(scores, -1).float() * scaling).softmax(-1).to(query.dtype)
    out = weights[..., :total] @ values
    for step, (_, drafted) in enumerate(own, total):
        out = out + weights[..., step, None] * drafted[:, :, :n]
    return out.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


class EagleStudent:
    """The student of an EAGLE-3 head that learns to draft `depth` tokens from its own hidden states; see `Student`.

    Training begins with one step and reaches all `depth` steps halfway: fewer steps cost less, and a later step has
    something worth learning from only once the earlier steps predict well.
    """

    def __init__(self, head: EagleHead, depth: int) -> None:
        head.set_attn_implementation(ATTENTION)
        head.embed_tokens.requires_grad_(False)
        self.net, self.depth, self._steps, self.tokens = head, depth, depth, head.tokens
        self.taps: tuple[int, ...] = tuple(head.config.taps)
        self._places = torch.full((head.config.vocab_size,), -1)  # a token's column in the head, or −1
        self._places[head.tokens] = torch.arange(len(head.tokens))

    @classmethod
    def start(
        cls,
        model: PreTrainedModel,
        tokens: Tensor,
        *,
        depth: int,
        intermediate_size: int | None = None,
        seed: int = 0,
    ) -> EagleStudent:
        """Create a head for a target, initialised with those of the target's weights that fit.

        Args:
            model: The target.
            tokens: `int64[draft_vocab]`, the target's tokens that the head can draft.
            depth: Number of tokens that the head learns to draft.
            intermediate_size: Width of the head's MLP; None for the target's.
            seed: Seed of the weights that are not the target's.
        """
        config = model.config.get_text_config()
        raw = {name: getattr(config, name) for name in _SHARED if getattr(config, name, None) is not None}
        raw |= {"draft_vocab_size": len(tokens)}
        raw |= {"intermediate_size": intermediate_size} if intermediate_size else {}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = EagleHead(head_config(raw, config)).float()
        tokens = tokens.sort().values
        head.d2t.copy_(tokens - torch.arange(len(tokens)))
        head.t2d[tokens] = True
        _begin(head, model, tokens)
        return cls(head, depth)

    def to(self, device: torch.device) -> None:
        """See `Student.to`."""
        self.net.to(device)
        self.tokens, self._places = self.tokens.to(device), self._places.to(device)

    def progress(self, done: float) -> None:
        """See `Student.progress`; all steps are trained from half of the training on."""
        self._steps = min(self.depth, 1 + int(2 * done * (self.depth - 1)))

    def loss(self, lesson: Lesson, divergence: Divergence) -> Tensor:
        """See `Student.loss`; step j has the weight DECAYʲ."""
        losses, weights = [], []
        for step, logits in enumerate(self._unrolled(lesson, self._steps), 1):
            places = self._places[lesson.ids[:, step:]]
            log_q = log_probabilities(logits, places.clamp(min=0))
            losses.append(divergence(log_q, lesson.probs[:, step:], (places >= 0).float()).mean())
            weights.append(DECAY**step)
        return torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum() / sum(weights)

    @torch.no_grad()
    def agreement(self, lesson: Lesson, depth: int) -> Tensor:
        """See `Student.agreement`; False at the first token, as the head needs the hidden state of the one before."""
        tokens = lesson.tokens
        agrees = torch.zeros(*tokens.shape, depth, dtype=torch.bool, device=tokens.device)
        for step, logits in enumerate(self._unrolled(lesson, depth), 1):
            chosen = self.tokens[logits[:, :-1].argmax(-1)]
            agrees[:, 1 : 1 + chosen.shape[1], step - 1] = chosen == tokens[:, step + 1 :]
        return agrees

    def _unrolled(self, lesson: Lesson, depth: int) -> Iterator[Tensor]:
        """Yield each step's logits `[B, T − step, draft_vocab]`; row i, the anchor, predicts token i + 1 + step."""
        assert lesson.taps is not None, "an EAGLE-3 head reads the target's layers"
        rows: list[tuple[Tensor, Tensor]] = []
        length = lesson.tokens.shape[1]
        hidden = self.net.fuse(lesson.taps[:, : length - 1])
        for step in range(1, min(depth, length - 1) + 1):
            ids = lesson.tokens[:, step:]
            positions = torch.arange(step - 1, length - 1, device=ids.device).expand(len(ids), -1)
            logits, hidden = self.net(ids, hidden[:, : length - step], positions, rows=rows)
            yield logits

    def save(self, folder: Path) -> None:
        """See `Student.save`; writes SafeAILab's layout."""
        save_head(folder, self.net)


def _begin(head: EagleHead, model: PreTrainedModel, tokens: Tensor) -> None:
    """Initialise a head with those of its target's weights that fit.

    The attention's embedding half starts as the target's first layer, its hidden-state half as the last. Agreement at
    the first depth on the reference target after 250 steps: 0.66; with embedding, head and final norm alone, 0.63.
    """
    layers, width = model.config.get_text_config().num_hidden_layers, head.config.hidden_size
    middle = head.midlayer
    with torch.no_grad():
        head.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
        head.lm_head.weight.copy_(model.get_output_embeddings().weight[tokens])
        _copy_norm(head.norm, getattr(model.base_model, "norm", None))
        for norm, place, name in (
            (middle.input_layernorm, 0, "input_layernorm"),
            (middle.hidden_norm, layers - 1, "input_layernorm"),
            (middle.post_attention_layernorm, 0, "post_attention_layernorm"),
        ):
            _copy_norm(norm, _find(model, place, name))
        for name in ("q_proj", "k_proj", "v_proj"):
            weight: Tensor = middle.self_attn.get_parameter(f"{name}.weight")
            _copy(weight[:, :width], _find(model, 0, f"self_attn.{name}"))
            _copy(weight[:, width:], _find(model, layers - 1, f"self_attn.{name}"))
        _copy(middle.self_attn.o_proj.weight, _find(model, layers - 1, "self_attn.o_proj"))
        _copy_mlp(middle.mlp, [_find(model, 0, f"mlp.{name}_proj") for name in ("gate", "up", "down")])


def _find(model: PreTrainedModel, layer: int, name: str) -> nn.Module | None:
    return next((part for path, part in model.named_modules() if path.endswith(f"layers.{layer}.{name}")), None)


def _copy(weight: Tensor, source: nn.Module | None) -> None:
    theirs = getattr(source, "weight", None)
    if theirs is not None and theirs.shape == weight.shape:
        weight.copy_(theirs)


def _copy_norm(norm: nn.Module, source: nn.Module | None) -> None:
    """Copy the factors that a norm multiplies by, which are not always its weight: Gemma's are 1 + weight."""
    if source is not None and type(source).__name__.endswith("RMSNorm"):
        weight: Tensor = norm.weight  # type: ignore[assignment]
        weight.copy_(source(torch.ones_like(weight, device=next(source.parameters()).device)))


def _copy_mlp(mlp: LlamaMLP, sources: list[nn.Module | None]) -> None:
    """Copy as many of the target's MLP neurons as fit, those with the largest weights first."""
    theirs: list[Tensor] = [source.weight.float() for source in sources if isinstance(source, nn.Linear)]
    if len(theirs) < len(sources):
        return
    gate, up, down = theirs
    best = (down.norm(dim=0) * up.norm(dim=1)).argsort(descending=True)[: mlp.up_proj.out_features]
    mlp.gate_proj.weight[: len(best)].copy_(gate[best])
    mlp.up_proj.weight[: len(best)].copy_(up[best])
    mlp.down_proj.weight[:, : len(best)].copy_(down[:, best])
