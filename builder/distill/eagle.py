"""An EAGLE-3 head in training: training-time test (arXiv 2503.01840), each step read from what the one before made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import repeat_kv

from ..eagle import EagleHead, default_taps, head_config, save_head
from .divergence import Divergence
from .student import Lesson

ATTENTION = "specbuild_unrolled"
DECAY = 0.8  # of the weight of each further step


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float,
    rows: list[tuple[Tensor, Tensor]],
    **_: Any,
) -> tuple[Tensor, None]:
    """What drafting sees at each anchor: the first step's rows up to the anchor, and its own rows of the later steps.

    query `[B, heads, n, D]`. `rows` are the keys and values of the steps before; this step's are added.
    """
    groups: int = module.num_key_value_groups  # type: ignore[assignment]
    rows.append((repeat_kv(key, groups), repeat_kv(value, groups)))
    (keys, values), *own = rows
    n, total = query.shape[2], keys.shape[2]
    later = torch.ones(n, total, dtype=torch.bool, device=query.device).triu(1)
    scores = [(query @ keys.transpose(2, 3)).masked_fill(later, -torch.inf)]
    scores += [(query * key[:, :, :n]).sum(-1, keepdim=True) for key, _ in own]
    weights = (torch.cat(scores, -1).float() * scaling).softmax(-1).to(query.dtype)
    out = weights[..., :total] @ values
    for step, (_, value) in enumerate(own):
        out = out + weights[..., total + step, None] * value[:, :, :n]
    return out.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


class EagleStudent:
    """A head that learns to draft `depth` tokens from its own hidden states; see `Student`."""

    def __init__(self, head: EagleHead, depth: int) -> None:
        head.set_attn_implementation(ATTENTION)
        head.embed_tokens.requires_grad_(False)
        self.net, self.depth = head, depth
        self.taps: tuple[int, ...] = tuple(head.config.taps)
        self._places = torch.full((head.config.vocab_size,), -1)  # of the target's tokens in the draft's vocabulary
        self._places[head.tokens] = torch.arange(len(head.tokens))

    @classmethod
    def start(
        cls,
        model: PreTrainedModel,
        tokens: Tensor,
        *,
        depth: int,
        intermediate_size: int | None = None,
        taps: tuple[int, ...] | None = None,
        seed: int = 0,
    ) -> EagleStudent:
        """A new head for a target, its start taken from the target's last layer, final norm and head where they fit.

        tokens: `int64[draft_vocab]`, the target's tokens that are drafted. intermediate_size: None for the target's.
        """
        config = model.config.get_text_config()
        layers = config.num_hidden_layers
        raw = config.to_dict() | {"draft_vocab_size": len(tokens)}
        raw |= {"intermediate_size": intermediate_size} if intermediate_size else {}
        raw |= {"eagle_aux_hidden_state_layer_ids": list(taps or default_taps(layers))}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = EagleHead(head_config(raw, config)).float()
        tokens = tokens.sort().values
        head.d2t.copy_(tokens - torch.arange(len(tokens)))
        head.t2d[tokens] = True
        _start(head, model, tokens)
        return cls(head, depth)

    def loss(self, lesson: Lesson, divergence: Divergence) -> Tensor:
        """See `Student.loss`; step j weighs DECAYʲ."""
        losses, weights = [], []
        for step, logits in enumerate(self._unrolled(lesson, self.depth), 1):
            places = self._places[lesson.ids[:, step:]]
            log_q = logits.float().log_softmax(-1).gather(-1, places.clamp(min=0))
            losses.append(divergence(log_q, lesson.probs[:, step:], (places >= 0).float()).mean())
            weights.append(DECAY**step)
        return torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum() / sum(weights)

    @torch.no_grad()
    def agreement(self, lesson: Lesson, depth: int) -> Tensor:
        """See `Student.agreement`; False at the first token, before which the target has made nothing."""
        tokens = lesson.tokens
        agrees = torch.zeros(*tokens.shape, depth, dtype=torch.bool)
        for step, logits in enumerate(self._unrolled(lesson, depth), 1):
            chosen = self.net.tokens[logits[:, :-1].argmax(-1)]
            agrees[:, 1 : 1 + chosen.shape[1], step - 1] = chosen == tokens[:, step + 1 :]
        return agrees

    def _unrolled(self, lesson: Lesson, depth: int) -> Iterator[Tensor]:
        """Each step's logits `[B, T − step, draft_vocab]`; row i is the anchor at token i, predicting i + 1 + step."""
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
        """See `Student.save`: the published layout."""
        save_head(folder, self.net)


def _start(head: EagleHead, model: PreTrainedModel, tokens: Tensor, how: str = "last") -> None:
    """Copy what the target has of a head's weights: embedding, head, norms, and its last layer."""
    weights = model.state_dict()
    E = model.get_input_embeddings().weight
    own = head.state_dict()
    H = head.config.hidden_size
    last = f"model.layers.{model.config.num_hidden_layers - 1}."
    first = "model.layers.0."
    with torch.no_grad():
        own["embed_tokens.weight"].copy_(E)
        own["lm_head.weight"].copy_(model.get_output_embeddings().weight[tokens])
        own["norm.weight"].copy_(weights["model.norm.weight"])
        n = len(head.config.taps)
        if how == "none":
            return
        fc = own["fc.weight"]
        if "fc" in how:
            fc.mul_(0.1)
            fc[:, -H:] += torch.eye(H)
        for w in "qkv":
            x = own[f"midlayer.self_attn.{w}_proj.weight"]
            if "first" in how:
                x[:, :H].copy_(weights[f"{first}self_attn.{w}_proj.weight"])
            else:
                x[:, :H].mul_(0.5)
            if "hrand" not in how:
                x[:, H:].copy_(weights[f"{last}self_attn.{w}_proj.weight"])
        osrc = first if "ofirst" in how else last
        own["midlayer.self_attn.o_proj.weight"].copy_(weights[f"{osrc}self_attn.o_proj.weight"])
        own["midlayer.hidden_norm.weight"].copy_(weights[f"{last}input_layernorm.weight"])
        own["midlayer.input_layernorm.weight"].copy_(weights[f"{first}input_layernorm.weight"])
        own["midlayer.post_attention_layernorm.weight"].copy_(weights[f"{last}post_attention_layernorm.weight"])
        if "nomlp" in how:
            return
        last = first if "mlpfirst" in how else last
        up, gate, down = (weights[f"{last}mlp.{k}_proj.weight"].float() for k in ("up", "gate", "down"))
        keep = (down.norm(dim=0) * up.norm(dim=1)).argsort(descending=True)[: head.config.intermediate_size]
        own["midlayer.mlp.up_proj.weight"][: len(keep)].copy_(up[keep])
        own["midlayer.mlp.gate_proj.weight"][: len(keep)].copy_(gate[keep])
        own["midlayer.mlp.down_proj.weight"][:, : len(keep)].copy_(down[:, keep])
