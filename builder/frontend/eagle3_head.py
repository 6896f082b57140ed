"""EAGLE-3 heads (arXiv 2503.01840): the module, and checkpoints as SafeAILab, SGLang and speculators publish them.

A head has one layer. Its row i combines a hidden state of token i with the embedding of token i + 1, has position i,
and predicts token i + 2. The hidden state is fused from the target's taps; a drafted token's is the head's own output
of the row before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # a global: portable_rotary.swap sets it

from specbuild.runtime.bundle.atomic_output import write
from specbuild.runtime.errors import CheckpointError, one_line

from .attention_layout import Layout
from .checkpoint import Checkpoint, locate, read_config
from .hidden_state_taps import TAPS, Taps, read_taps
from .weights import Stamp, check_stamps, read_header, sha256_files, stamps_of, weight_files


class EagleAttention(nn.Module):
    """Llama's attention over rows of twice the width: embedding and hidden state, concatenated."""

    is_causal = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, self.layer_idx = config, 0
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        width, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=bias)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None, **options: Any
    ) -> Tensor:
        """Map `x [B, N, 2H]` to `[B, N, H]`; `options` go to the attention function."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (project(x).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *rotation)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, llama.eager_attention_forward)
        out, _ = attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **options)
        return self.o_proj(out.reshape(*x.shape[:-1], -1))  # type: ignore[no-any-return]


class EagleLayer(nn.Module):
    """The head's only layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm_before_residual = bool(config.norm_before_residual)
        self.input_layernorm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = EagleAttention(config)
        self.post_attention_layernorm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = llama.LlamaMLP(config)

    def forward(self, embedded: Tensor, hidden: Tensor, *attention: Any, **options: Any) -> Tensor:
        """Map embeddings and hidden states `[B, N, H]` to the next row's hidden states `[B, N, H]`."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = torch.cat((self.input_layernorm(embedded), normed), -1)
        residual = residual + self.self_attn(x, *attention, **options)
        return residual + self.mlp(self.post_attention_layernorm(residual))  # type: ignore[no-any-return]


class EagleHead(llama.LlamaPreTrainedModel):  # type: ignore[misc]
    """An EAGLE-3 head; `head_config` makes its configuration."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, config.hidden_size, bias=config.fc_bias)
        self.midlayer = EagleLayer(config)
        self.norm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = llama.LlamaRotaryEmbedding(config)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.post_init()

    def _apply(self, *args: Any, **options: Any) -> EagleHead:
        """Apply as usual, but keep rotary frequencies in float32: 16 bits would move far positions."""
        super()._apply(*args, **options)
        if isinstance(self.rotary_emb, llama.LlamaRotaryEmbedding):
            self.rotary_emb = llama.LlamaRotaryEmbedding(self.config).to(self.norm.weight.device)
        return self

    @property
    def tokens(self) -> Tensor:
        """The target's token of each column of the head's logits: `int64[draft_vocab]`."""
        places: Tensor = self.d2t
        return torch.arange(len(places), device=places.device) + places

    @property
    def taps(self) -> Taps:
        """The hidden states that it reads from the target."""
        return Taps(tuple(self.config.taps), self.fc)

    def fuse(self, taps: Tensor) -> Tensor:
        """Fuse the concatenated hidden states of n target layers `[B, N, n · target H]` into one `[B, N, H]`."""
        return self.fc(taps)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: Tensor,
        hidden: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return logits over the draft's vocabulary `[B, kept nodes, draft_vocab]`, and hidden states `[B, N, H]`.

        Row i of `input_ids` `int64[B, N]` is token i + 1, row i of `hidden` `[B, N, H]` belongs to token i. An
        attention_mask of 4 axes is used unchanged. `options` go to the attention function.
        """
        mask = create_causal_mask(self.config, hidden, attention_mask, past_key_values, position_ids)
        attention = self.rotary_emb(hidden, position_ids), mask, past_key_values
        hidden = self.midlayer(self.embed_tokens(input_ids), hidden, *attention, **options)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return self.lm_head(self.norm(hidden[:, kept])), hidden


@dataclass(frozen=True)
class EagleCheckpoint:
    """A head that was checked against its target; its weights are not loaded yet."""

    source: str
    folder: Path
    config: LlamaConfig
    weights: list[Path]
    parameters: int
    stamps: list[Stamp]

    architecture = "EagleHead"

    @property
    def max_positions(self) -> int:
        """Maximum number of positions that the head was made for."""
        return int(self.config.max_position_embeddings)

    def sha256(self) -> str:
        """Return the sha256 of the weights; raise CheckpointError if they changed since they were checked."""
        return sha256_files(self.weights, self.stamps)

    def layout(self, positions: int) -> Layout:
        """Return the head's attention layout, which is the same for texts of any number of `positions`."""
        return Layout.alike(self.config.num_key_value_heads, self.config.head_dim, (0,))

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose inputs the head reads; the number of layers stands for the last one's output."""
        return tuple(self.config.taps)


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is an EAGLE-3 head's."""
    names = str([config.get("speculators_model_type"), config.get("architectures")])
    return "eagle3" in names.lower() or bool({"draft_vocab_size", "eagle_config"} & set(config))


def head_config(raw: Mapping[str, Any], target: Any, fc_bias: bool = False) -> LlamaConfig:
    """Convert a head's config.json, in any published layout, to `EagleHead`'s configuration; raises CheckpointError.

    `target` is the target's configuration; `fc_bias` tells whether the weights have a bias for `fc`.
    """
    outer = {name: value for name, value in raw.items() if value is not None}
    inner = dict(outer.get("transformer_layer_config") or outer)
    speculators = "transformer_layer_config" in outer
    eagle = outer.get("eagle_config") or {}
    if (kind := inner.get("model_type", "llama")) != "llama":
        raise CheckpointError(f"it is a {kind!r} head: specbuild takes those of Llama's layers")
    if outer.get("norm_before_fc"):
        raise CheckpointError("norm_before_fc is not supported: give a head without")
    if eagle.get("use_aux_hidden_state") is False:
        raise CheckpointError("it reads the last layer alone, as EAGLE-2 does: give an EAGLE-3 head")
    vocab_size = int(inner.get("vocab_size", target.vocab_size))
    own = {
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
        "draft_vocab_size": int(outer.get("draft_vocab_size", vocab_size)),
        "target_hidden_size": int(outer.get("target_hidden_size", target.hidden_size)),
        "norm_before_residual": bool(outer.get("norm_before_residual", speculators)),
        "taps": read_taps(outer.get(TAPS) or eagle.get(TAPS), int(target.num_hidden_layers)),
        "fc_bias": fc_bias,
        "tie_word_embeddings": False,
    }
    dropped = {"architectures", "transformers_version", "auto_map", "layer_types", "dtype", "torch_dtype"}
    return LlamaConfig(**{name: value for name, value in inner.items() if name not in dropped} | own)


def find_head(source: str, target: Checkpoint) -> EagleCheckpoint:
    """Find a head and check it against its target without loading its weights; raises CheckpointError."""
    folder = locate(source)
    raw = read_config(source)
    if not is_eagle(raw):
        raise CheckpointError(f"{source} is no EAGLE-3 head, its config.json names none: give the folder of one")
    if not list(folder.glob("*.safetensors")) and list(folder.glob("*.bin")):
        raise CheckpointError(f"{source} has pickled weights, which are never read: convert them to model.safetensors")
    stamps = stamps_of(weights := weight_files(source, folder))
    shapes = _shapes(source, weights)
    try:
        config = head_config(raw, target.config, "fc.bias" in shapes)
        with torch.device("meta"):
            wanted = {name: tuple(weight.shape) for name, weight in EagleHead(config).state_dict().items()}
    except CheckpointError as error:
        raise CheckpointError(f"{source}/config.json: {error}") from None
    except Exception as error:  # transformers raises many unrelated types
        raise CheckpointError(f"{source}/config.json cannot be used: {one_line(error)}") from None
    _check_target(source, config, target, "embed_tokens.weight" in shapes)
    _check_shapes(source, shapes, wanted, config)
    return EagleCheckpoint(source, folder, config, weights, sum(map(prod, shapes.values())), stamps)


def _check_target(source: str, config: LlamaConfig, target: Checkpoint, embeds: bool) -> None:
    """Raise CheckpointError if head and target do not belong together."""
    hidden, layers = int(target.config.hidden_size), int(target.config.num_hidden_layers)
    fits = {"vocab_size": target.vocab_size, "target_hidden_size": hidden}
    for what, theirs in (fits if embeds else fits | {"hidden_size": hidden}).items():
        if (ours := getattr(config, what)) != theirs:
            raise CheckpointError(f"{source} is for a target of {what} {ours}, not {theirs}: give its own target")
    if not all(0 <= place <= layers for place in config.taps):
        raise CheckpointError(f"{source} reads layers {config.taps} of a target, not of {layers}: give its own target")


def _check_shapes(source: str, shapes: dict[str, tuple[int, ...]], wanted: dict[str, Any], config: LlamaConfig) -> None:
    optional = {"embed_tokens.weight", "t2d"} | ({"d2t"} if config.draft_vocab_size == config.vocab_size else set())
    if missing := sorted(set(wanted) - set(shapes) - optional):
        raise CheckpointError(f"{source} lacks {missing[0]}: it is no complete EAGLE-3 head, download it again")
    if unexpected := sorted(set(shapes) - set(wanted)):
        raise CheckpointError(f"{source} has {unexpected[0]}, which is no part of a head of one layer: not supported")
    for name, shape in shapes.items():
        if shape != wanted[name]:
            raise CheckpointError(
                f"{source} has {name} of shape {list(shape)}, by its config.json and its target it is "
                f"{list(wanted[name])}: give a head that was made for this target"
            )


def _shapes(source: str, files: list[Path]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in read_header(files).shapes.items():
        if (own := _own_name(name)) in shapes:
            raise CheckpointError(f"{source} has {own} twice: download it again")
        shapes[own] = shape
    return shapes


def _own_name(name: str) -> str:
    """Map a published weight's name to `EagleHead`'s."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def load_head(found: EagleCheckpoint, target_embedding: Tensor) -> EagleHead:
    """Load a head in float32 and evaluation mode; raise CheckpointError if a weight is invalid or not finite.

    target_embedding: `[vocab, H]`, used if the head has no embedding of its own.
    """
    weights = {"embed_tokens.weight": target_embedding.detach()}
    for path in found.weights:
        with safe_open(path, framework="pt") as file:
            weights |= {_own_name(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    check_stamps(found.weights, found.stamps)
    places = torch.arange(found.config.draft_vocab_size)
    if weights.get("d2t", places).dtype not in (torch.int32, torch.int64):
        raise CheckpointError(f"{found.source} has a d2t of {weights['d2t'].dtype}, not of int64: download it again")
    tokens = places + weights.setdefault("d2t", torch.zeros_like(places))
    if tokens.min() < 0 or tokens.max() >= found.config.vocab_size or len(set(tokens.tolist())) < len(tokens):
        raise CheckpointError(f"{found.source} has a d2t that names no or twice the same token: download it again")
    drafted = torch.zeros(found.config.vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    if not torch.equal(weights.setdefault("t2d", drafted).bool(), drafted):
        raise CheckpointError(f"{found.source} has a t2d that is not its d2t's: download it again")
    for name, weight in weights.items():
        if weight.is_floating_point() and not torch.isfinite(weight).all():
            raise CheckpointError(f"{found.source} has NaN or infinite values in {name}: the weights are damaged")
    head: EagleHead = EagleHead(found.config).float().eval()
    head.load_state_dict(weights)
    return head


def trim_head(head: EagleHead, tokens: Sequence[int]) -> None:
    """Take a target's rows of no token out of its head in place.

    Args:
        head: The head.
        tokens: The rows of the target that are tokens, ascending.
    """
    rows, drafted = tokens[-1] + 1, head.tokens
    columns = torch.isin(drafted, torch.tensor(tokens)).nonzero()[:, 0]
    head.embed_tokens.weight = nn.Parameter(head.embed_tokens.weight[:rows].detach().clone())
    head.lm_head.weight = nn.Parameter(head.lm_head.weight[columns].detach().clone())
    head.d2t, head.t2d = drafted[columns] - torch.arange(len(columns)), head.t2d[:rows].clone()
    head.embed_tokens.num_embeddings = head.config.vocab_size = rows
    head.lm_head.out_features = head.config.draft_vocab_size = len(columns)


def save_head(folder: Path, head: EagleHead) -> None:
    """Write config.json and model.safetensors in SafeAILab's layout, without an embedding. Raises OutputError."""
    weights = {name: weight.contiguous() for name, weight in head.state_dict().items() if name != "embed_tokens.weight"}
    write(folder / "model.safetensors", save(weights, metadata={"format": "pt"}))
    config = head.config.to_diff_dict()
    config.pop(TAPS, None)  # as published; "taps" holds the layers that it means
    eagle = {TAPS: config.pop("taps"), "use_aux_hidden_state": True}
    content = config | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": eagle}
    write(folder / "config.json", (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
