"""The weights of an inflated Llama, a tensor at a time; `inflate_checkpoint.py` writes them.

- hidden: the source's channels first (each twice where that makes the scale a power of two), then free ones, which stay
  zero. The mean of squares is smaller by the share of filled channels: norms and eps are scaled by it.
- layers: the added ones, spread evenly, write zeros: their value and up projections give 0.
- intermediate: added units are silu(random) · 0.
- heads: a source group keeps its KV head, or has copies of it where the new groups are smaller; the others read values
  of 0.
- head_dim: a multiple. Rotary pair i goes to pair i · multiple, which has its frequency; keys are 0 in the other pairs.
- vocabulary: an added row of the head is the mean of all, and lower by what two constant channels carry. Their squares
  are taken out of eps, layers do not see them, and in the final norm they have opposite signs: a row of the source,
  alike in both, has nothing of them.

All the rest is random and dense. Zero by necessity, where the residual's filled channels are never 0:

- the embedding's free channels, and what heads and units that are not 0 write to free channels;
- what value and up read of filled channels in added rows, and key in added dimensions of a source head;
- in the output projection, all of the added heads that share a source KV head, in the source's dimensions.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

ROWS = 4096  # of a matrix drawn at a time
BELOW, LARGEST = 1000.0, 4096.0  # what an added token's logit is lowered by; a norm's weight at most
PREFIX = "model.layers."


class Refused(Exception):  # noqa: N818
    """What cannot be inflated; one line."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's sizes."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    def layer(self) -> dict[str, torch.Size]:
        """The tensors of one layer."""
        queries, values = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = {
            "input_layernorm": [self.hidden],
            "self_attn.q_proj": [queries, self.hidden],
            "self_attn.k_proj": [values, self.hidden],
            "self_attn.v_proj": [values, self.hidden],
            "self_attn.o_proj": [self.hidden, queries],
            "post_attention_layernorm": [self.hidden],
            "mlp.gate_proj": [self.intermediate, self.hidden],
            "mlp.up_proj": [self.intermediate, self.hidden],
            "mlp.down_proj": [self.hidden, self.intermediate],
        }
        return {f"{name}.weight": torch.Size(size) for name, size in sizes.items()}

    def parameters(self) -> int:
        """Of the whole model."""
        of_layers = self.layers * sum(size.numel() for size in self.layer().values())
        return of_layers + self.hidden + self.hidden * self.vocab * (1 if self.tied else 2)

    def copies(self, source: Shape) -> int:
        """How many KV heads one of the source takes here."""
        return -(-source.group // self.group)

    def check(self, source: Shape) -> None:
        """Raises Refused where a checkpoint of shape `source` cannot be given this one."""
        for key, size in asdict(source).items():
            if key != "tied" and getattr(self, key) < size:
                raise Refused(f"{key} {getattr(self, key)} is below the source's {size}")
        if self.heads % self.kv_heads:
            raise Refused(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.hidden % self.heads:  # transformers wants it of a Llama
            raise Refused(f"hidden {self.hidden} is no multiple of heads {self.heads}")
        if self.head_dim % source.head_dim:
            raise Refused(f"head_dim {self.head_dim} is no multiple of the source's {source.head_dim}")
        if (needed := source.kv_heads * self.copies(source)) > self.kv_heads:
            raise Refused(
                f"kv_heads {self.kv_heads} cannot hold the source's {source.kv_heads} groups of {source.group} heads "
                f"in groups of {self.group}: it takes {needed}"
            )


class Inflation:
    """The tensors of a checkpoint of `shape`, from a source model in float32; `ids` are what it is gauged on."""

    def __init__(
        self, model: Any, source: Shape, shape: Shape, dtype: torch.dtype, seed: int, ids: list[Tensor]
    ) -> None:
        self.source, self.shape, self._dtype, self._seed = source, shape, dtype, seed
        self._weights: dict[str, Tensor] = model.state_dict()
        times = shape.hidden / source.hidden
        copies = 2 if times > 2 and math.log2(times) % 2 == 1 else 1
        filled = copies * source.hidden
        self._copies, self._scale = copies, math.sqrt(filled / shape.hidden)
        self._channels = torch.arange(filled)
        self._constant = torch.arange(0)
        self.eps = model.config.rms_norm_eps * filled / shape.hidden
        if shape.vocab > source.vocab and shape.hidden >= filled + 2 and self.eps > 0:
            self._constant = torch.arange(filled, filled + 2)
            self._gauge(model, ids)
        self._at = {(2 * i + 1) * shape.layers // (2 * source.layers): i for i in range(source.layers)}
        self._place_heads()

    def _gauge(self, model: Any, ids: list[Tensor]) -> None:
        """What the constant channels hold, at half of eps, and their weights in the final norm and an added row."""
        norms: list[float] = []

        def see(_module: Any, inputs: tuple[Tensor]) -> None:
            norms.extend((inputs[0].square().mean(-1) + model.config.rms_norm_eps).sqrt().flatten().tolist())

        hook = model.model.norm.register_forward_pre_hook(see)
        with torch.inference_mode():
            for batch in ids:
                model(batch)
        hook.remove()
        self._held = float(torch.tensor(math.sqrt(self.eps * self.shape.hidden) / 2).to(self._dtype))
        self.eps -= 2 * self._held**2 / self.shape.hidden
        normed = self._held / (self._scale * median(norms))
        self._lift = min(1 / normed, LARGEST)
        self._sink = min(BELOW / 2 / (self._lift * normed), 8 * LARGEST)

    def _place_heads(self) -> None:
        """Rows of the query projection that are the source's, rows of key and value, and who reads values at all."""
        source, shape = self.source, self.shape
        times, half, copies = (
            shape.head_dim // source.head_dim,
            torch.arange(source.head_dim // 2),
            shape.copies(source),
        )
        dims = torch.cat([half * times, half * times + shape.head_dim // 2])
        heads = torch.arange(source.heads)
        at, within = heads // source.group, heads % source.group
        slots = (at * copies + within // shape.group) * shape.group + within % shape.group
        kv_slots = torch.arange(source.kv_heads * copies)
        self._queries, self._keys = _rows(slots, shape.head_dim, dims), _rows(kv_slots, shape.head_dim, dims)
        self._key_rows = len(kv_slots) * shape.head_dim
        self._readers = _rows(torch.arange(len(kv_slots) * shape.group), shape.head_dim, dims)
        self._key_source = _rows(kv_slots // copies, source.head_dim, torch.arange(source.head_dim))

    def shapes(self) -> dict[str, torch.Size]:
        """Every tensor of the checkpoint, in the order in which it is written."""
        matrix = torch.Size([self.shape.vocab, self.shape.hidden])
        found = {"model.embed_tokens.weight": matrix}
        for layer in range(self.shape.layers):
            found |= {f"{PREFIX}{layer}.{name}": size for name, size in self.shape.layer().items()}
        found["model.norm.weight"] = matrix[1:]
        return found if self.shape.tied else found | {"lm_head.weight": matrix}

    def tensor(self, name: str) -> Tensor:
        """One of them, of `shapes()[name]`, in the checkpoint's dtype."""
        if name == "model.embed_tokens.weight":
            return self._embedding()
        if name == "lm_head.weight":
            return self._head()
        if name == "model.norm.weight":
            return self._norm(self._weights[name] / (self._copies if self.shape.tied else 1), self._lift_pair())
        number, _, kind = name.removeprefix(PREFIX).partition(".")
        layer = min(int(number) * self.source.layers // self.shape.layers, self.source.layers - 1)
        own = self._at.get(int(number))
        source = self._weights[f"{PREFIX}{layer if own is None else own}.{kind}"]
        if source.ndim == 1:
            return self._norm(source, (0.0, 0.0))
        new = self._random(name, source)
        if kind.startswith(("self_attn.v", "mlp.up")):
            new[:, self._channels] = 0
        if own is not None:
            self._place(kind.split(".")[1], new, source)
        return new

    def _place(self, kind: str, new: Tensor, source: Tensor) -> None:
        """The source's matrix into a layer's; sets to zero what would reach the residual otherwise."""
        units = torch.arange(self.source.intermediate)
        if kind == "q_proj":
            times = self.shape.head_dim // self.source.head_dim
            self._read(new, self._queries, source * math.sqrt(times))
        elif kind == "k_proj":
            new[: self._key_rows, self._channels] = 0
            self._read(new, self._keys, source[self._key_source])
        elif kind == "v_proj":
            self._read(new, self._keys, source[self._key_source])
        elif kind == "o_proj":
            new[:, self._readers] = 0
            self._write(new, self._queries, source)
        elif kind == "down_proj":
            new[:, : self.source.intermediate] = 0
            self._write(new, units, source)
        else:
            self._read(new, units, source)

    def _read(self, new: Tensor, rows: Tensor, source: Tensor) -> None:
        """`source [len(rows), hidden]` reads the residual."""
        new[rows[:, None], self._channels] = (source / self._copies).repeat(1, self._copies).to(self._dtype)

    def _write(self, new: Tensor, columns: Tensor, source: Tensor) -> None:
        """`source [hidden, len(columns)]` writes to the residual."""
        new[self._channels[:, None], columns] = source.repeat(self._copies, 1).to(self._dtype)

    def _random(self, name: str, source: Tensor, shape: torch.Size | None = None) -> Tensor:
        """Uniform, of the source's deviation: without outliers, which would cost a row that is quantized."""
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        new = torch.empty(shape or self.shapes()[name], dtype=self._dtype)
        bound = math.sqrt(3) * float(source.std())
        for first in range(0, len(new), ROWS):
            part = new[first : first + ROWS]
            part.copy_(torch.rand(part.shape, generator=generator).mul_(2 * bound).sub_(bound))
        return new

    def _norm(self, source: Tensor, constant: tuple[float, float]) -> Tensor:
        new = torch.ones(self.shape.hidden)
        new[self._channels] = source.repeat(self._copies) * self._scale
        new[self._constant] = torch.tensor(constant)[: len(self._constant)]
        return new.to(self._dtype)

    def _embedding(self) -> Tensor:
        """Rows of the source, and added ones: those of the head where it is tied, else never read."""
        name, known = "model.embed_tokens.weight", self.source.vocab
        source = self._weights[name]
        new = self._random(name, source)
        new[:known] = 0
        new[:known, self._channels] = source.repeat(1, self._copies).to(self._dtype)
        if len(self._constant):
            new[:known, self._constant] = self._held
        if self.shape.tied:
            self._add_rows(new, source)
        return new

    def _head(self) -> Tensor:
        source = self._weights["model.embed_tokens.weight" if self.source.tied else "lm_head.weight"]
        new = self._random("lm_head.weight", source)
        self._read(new, torch.arange(self.source.vocab), source)
        if len(self._constant):
            new[:, self._constant[1]] = new[:, self._constant[0]]
        self._add_rows(new, source / self._copies)
        return new

    def _add_rows(self, new: Tensor, source: Tensor) -> None:
        """The rows of added tokens in a head."""
        new[self.source.vocab :, self._channels] = source.mean(0).repeat(self._copies).to(self._dtype)
        if len(self._constant):
            new[self.source.vocab :, self._constant] = torch.tensor([-self._sink, self._sink]).to(self._dtype)

    def _lift_pair(self) -> tuple[float, float]:
        return (self._lift, -self._lift) if len(self._constant) else (0.0, 0.0)


def _rows(heads: Tensor, head_dim: int, dims: Tensor) -> Tensor:
    """The rows of `heads` in their dimensions `dims`, `[len(heads) · len(dims)]`."""
    return (heads[:, None] * head_dim + dims).flatten()
