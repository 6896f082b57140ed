"""LoRA adapters as PEFT saves them, which are merged into the weights of a model when these are read.

A weight of shape `[N, K]` becomes `W + scale · B · A`, A `[r, K]` and B `[N, r]`; an embedding's are stored turned.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specbuild.builder.strict_json import read_object
from specbuild.runtime.errors import CheckpointError, shown

from .lazy_weights import ALL, Rows, Stored, Weight
from .weights import Stamp, read_header, sha256_files, stamps_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = {  # of a weight's name: whether it is A, and whether it is turned
    ".lora_A.weight": (True, False),
    ".lora_B.weight": (False, False),
    ".lora_embedding_A": (True, True),
    ".lora_embedding_B": (False, True),
}
# Fields that change more than two factors can say; what each may be.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "modules_to_save": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the weights themselves
}


@dataclass(frozen=True, eq=False)
class Factors:
    """The two factors of the matrix `scale · B · A`, or its transpose, that an adapter adds to a weight."""

    a: Weight
    b: Weight
    scale: float
    turned: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's."""
        shape = (self.b.shape[0], self.a.shape[1])
        return shape[::-1] if self.turned else shape

    def read(self, rows: Rows = ALL) -> Tensor:
        """Return the sum's second term, or some of its rows, in float32."""
        a, b = self.a.read(), self.b.read()
        left, right = (a.T, b.T) if self.turned else (b, a)
        return self.scale * (left[rows if isinstance(rows, slice) else torch.from_numpy(rows)] @ right)


@dataclass(frozen=True, eq=False)
class Adapted(Weight):
    """A weight to which an adapter adds something."""

    whole: Weight
    factors: Factors

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The whole's."""
        return self.whole.shape

    def read(self, rows: Rows = ALL) -> Tensor:
        """See Weight."""
        return self.whole.read(rows) + self.factors.read(rows)


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder or hub id, its weights' file with its stamp, and what it adds to each weight, by name."""

    source: str
    path: Path
    stamps: list[Stamp]
    factors: Mapping[str, Factors] = field(repr=False)

    @cached_property
    def sha256(self) -> str:
        """The file's sha256; raises CheckpointError if it changed since it was found."""
        return sha256_files([self.path], self.stamps)

    def check(self, model: PreTrainedModel) -> None:
        """Raise CheckpointError if a model, which may be without weights, lacks a weight that is to be changed."""
        named = dict(model.named_parameters(remove_duplicate=False))
        uses = Counter(map(id, named.values()))
        for name, factors in self.factors.items():
            module = name.removesuffix(".weight")
            if name not in named:
                raise CheckpointError(
                    f"{self.source} adapts {shown(module)}, which the model lacks: give its own model"
                )
            if uses[id(named[name])] > 1:
                raise CheckpointError(f"{self.source} adapts {module}, which is embedding and head in one: unsupported")
            if tuple(named[name].shape) != factors.shape:
                raise CheckpointError(
                    f"{self.source} adapts {module} as {list(factors.shape)}, the model's is "
                    f"{list(named[name].shape)}: give its own model"
                )

    def merged(self, tensors: Mapping[str, Weight]) -> dict[str, Weight]:
        """Return weights by name with what the adapter adds."""
        every = dict(tensors)
        return every | {name: Adapted(every[name], factors) for name, factors in self.factors.items()}

    def merge_into(self, model: nn.Module) -> None:
        """Add to the weights that a model holds."""
        with torch.no_grad():
            for name, factors in self.factors.items():
                model.get_parameter(name).add_(factors.read())


def find_adapter(source: str, folder: Path) -> Adapter:
    """Read an adapter's configuration and the header of its weights; `source` names it in error messages.

    Raises CheckpointError if it is not of LoRA alone.
    """
    config = read_object(folder / CONFIG)
    if not config:
        raise CheckpointError(f"{source} has no {CONFIG}: give the folder of a LoRA adapter, as PEFT saves it")
    for name, plain in _PLAIN.items():
        if (value := config.get(name)) is not None and value not in plain:
            raise CheckpointError(f"{source} has {name} {shown(value)}, which is not supported: merge it with PEFT")
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{source} lacks {WEIGHTS}: weights are read from safetensors only")
    stamps, header = stamps_of([path]), read_header([path])
    pairs = dict[tuple[str, bool], dict[bool, Weight]]()
    for name, shape in header.shapes.items():
        part = next((part for part in _PARTS if name.endswith(part)), None)
        if part is None or not name.startswith(_PREFIX) or len(shape) != 2:
            raise CheckpointError(f"{source} has {shown(name)}, which is no factor of LoRA: merge it with PEFT")
        first, turned = _PARTS[part]
        module = name.removeprefix(_PREFIX).removesuffix(part)
        pairs.setdefault((module, turned), {})[first] = Stored(path, name, shape)
    factors = {
        f"{module}.weight": _factors(source, config, module, turned, pair) for (module, turned), pair in pairs.items()
    }
    if not factors:
        raise CheckpointError(f"{source} has no weights: download it again")
    return Adapter(source, path, stamps, factors)


def _factors(source: str, config: Mapping[str, Any], module: str, embeds: bool, pair: Mapping[bool, Weight]) -> Factors:
    """Return both factors of a module; raise CheckpointError if one is missing or they do not fit."""
    ranks = {pair[True].shape[0], pair[False].shape[1]} if len(pair) == 2 else {0}
    rank = max(ranks)
    if len(ranks) > 1 or not rank:
        raise CheckpointError(f"{source} has no A and B of one rank for {module}: download it again")
    scale = _alpha(source, config, module) / (rank**0.5 if config.get("use_rslora") else rank)
    return Factors(pair[True], pair[False], scale, embeds or bool(config.get("fan_in_fan_out")))


def _alpha(source: str, config: Mapping[str, Any], module: str) -> float:
    """Return a module's alpha: that of the first pattern that is its name or the end of it, else the adapter's."""
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or any(not re.fullmatch(r"[\w.]+", name) for name in patterns):
        raise CheckpointError(f"{source} has alpha_pattern {shown(patterns)}: names of modules are supported alone")
    every = (value for name, value in patterns.items() if f".{module}".endswith(f".{name}"))
    alpha = next(every, config.get("lora_alpha", 8))
    if type(alpha) not in (int, float):
        raise CheckpointError(f"{source} has lora_alpha {shown(alpha)}: it must be a number")
    return float(alpha)
