"""The weights of an inflated Llama, one tensor at a time; `inflate_checkpoint.py` writes them.

How each size grows:

- hidden: the source's channels come first (each twice if that makes the scale a power of two), then free ones, which
  stay zero. The mean of squares shrinks by the share of filled channels, so norms and eps are scaled by it.
- layers: added layers, spread evenly, write zeros, because their value and up projections give 0.
- intermediate: added units are silu(random) · 0.
- heads: a source group keeps its KV head, or gets copies of it if the new groups are smaller; other heads read values
  of 0.
- head_dim: a multiple of the source's. Rotary pair i goes to pair i · multiple, which has the same frequency; keys are
  0 in the other pairs.
- vocabulary: an added row of the head is the mean of all source rows, lowered by two constant channels. Their squares
  are subtracted from eps, layers do not read them, and the final norm gives them opposite signs, so that they cancel in
  a source row, which has equal weights for both.

All other weights are random and dense. These must be zero, because the residual's filled channels are never 0:

- the embedding's free channels, and the weights by which non-zero heads and units write to free channels;
- in added rows, the value and up weights that read filled channels; also the key weights in added dimensions of a
  source head;
- in the output projection, the columns of added heads that share a source KV head, in the source's dimensions.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

ROWS = 4096  # rows of a matrix drawn at a time
BELOW, LARGEST = 1000.0, 4096.0  # by how much an added token's logit is lowered; maximum weight of a norm
PREFIX = "model.layers."


class Refused(Exception):  # noqa: N818
    """Raised for a checkpoint or shape that cannot be inflated; the message is one line."""


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
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    def layer(self) -> dict[str, torch.Size]:
        """Return the names and sizes of one layer's tensors."""
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
        """Return the number of parameters of the whole model."""
        of_layers = self.layers * sum(size.numel() for size in self.layer().values())
        return of_layers + self.hidden + self.hidden * self.vocab * (1 if self.tied else 2)

    def copies(self, source: Shape) -> int:
        """Return how many KV heads of this shape one KV head of the source takes."""
        return -(-source.group // self.group)

    def check(self, source: Shape) -> None:
        """Raise Refused if a checkpoint of shape `source` cannot be inflated to this shape."""
        for key, size in asdict(source).items():
            if key != "tied" and getattr(self, key) < size:
                raise Refused(f"{key} {getattr(self, key)} is below the source's {size}")
        if self.heads % self.kv_heads:
            raise Refused(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.hidden % self.heads:  # transformers requires it of a Llama
            raise Refused(f"hidden {self.hidden} is no multiple of heads {self.heads}")
        if self.head_dim % source.head_dim:
            raise Refused(f"head_dim {self.head_dim} is no multiple of the source's {source.head_dim}")
        if (needed := source.kv_heads * self.copies(source)) > self.kv_heads:
            raise Refused(
                f"kv_heads {self.kv_heads} cannot hold the source's {source.kv_heads} groups of {source.group} heads "
                f"in groups of {self.group}: it takes {needed}"
            )


class Inflation:
    """The tensors of a checkpoint of `shape`, made from a source model in float32.

    `ids`: token ids on which the norm of the last hidden states is measured, to lower added tokens' logits.
    """

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
        """Choose the constant channels' value, whose squares take half of eps, and the weights that read them.

        The weights are those of the final norm and of added rows of the head.
        """
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
        """Compute the rows of the query, key and value projections that the source's heads take.

        Also the columns of the output projection that read non-zero values.
        """
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
        """Return the name and shape of every tensor of the checkpoint, in the order in which they are written."""
        matrix = torch.Size([self.shape.vocab, self.shape.hidden])
        found = {"model.embed_tokens.weight": matrix}
        for layer in range(self.shape.layers):
            found |= {f"{PREFIX}{layer}.{name}": size for name, size in self.shape.layer().items()}
        found["model.norm.weight"] = matrix[1:]
        return found if self.shape.tied else found | {"lm_head.weight": matrix}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of `shapes()`, in the checkpoint's dtype."""
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
        """Place the source's matrix in a layer's, and zero the weights that would change the residual."""
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
        """Place `source [len(rows), hidden]`, whose product reads the residual, in these rows."""
        new[rows[:, None], self._channels] = (source / self._copies).repeat(1, self._copies).to(self._dtype)

    def _write(self, new: Tensor, columns: Tensor, source: Tensor) -> None:
        """Place `source [hidden, len(columns)]`, whose product writes to the residual, in these columns."""
        new[self._channels[:, None], columns] = source.repeat(self._copies, 1).to(self._dtype)

    def _random(self, name: str, source: Tensor, shape: torch.Size | None = None) -> Tensor:
        """Return uniform noise with the source's deviation; it has no outliers, which would coarsen quantized rows."""
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
        """Return the source's rows and added ones, which are the head's if it is tied, and otherwise never read."""
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
        """Set the rows of added tokens in a head."""
        new[self.source.vocab :, self._channels] = source.mean(0).repeat(self._copies).to(self._dtype)
        if len(self._constant):
            new[self.source.vocab :, self._constant] = torch.tensor([-self._sink, self._sink]).to(self._dtype)

    def _lift_pair(self) -> tuple[float, float]:
        return (self._lift, -self._lift) if len(self._constant) else (0.0, 0.0)


def _rows(heads: Tensor, head_dim: int, dims: Tensor) -> Tensor:
    """Return the indices of the rows of `heads` in their dimensions `dims`, `[len(heads) · len(dims)]`."""
    return (heads[:, None] * head_dim + dims).flatten()
