"""Reads the headers of a checkpoint's safetensors, and checks that its config.json asks for the same sizes.

Creating a model takes as much time and memory as its configuration asks for, so a configuration is checked against the
weights before anything is created from it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, PreTrainedModel

from specbuild.builder.strict_json import read_object
from specbuild.runtime.bundle.bundle import sha256_file
from specbuild.runtime.errors import CheckpointError, one_line

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Stamp = tuple[int, int, int]  # a file's inode, size, and modification time in ns
MAX_POSITIONS = 1 << 31
_LAYERS = "num_hidden_layers"
_POSITIONS = "max_position_embeddings"
_SIZES = (
    _LAYERS,
    "hidden_size",
    "vocab_size",
    "intermediate_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    _POSITIONS,
)
_COUNT = re.compile(r"(?:^|_)(?:n|num|depth|layers?|experts?|heads?)(?:_|$)")  # fields that size a list
_FREE = re.compile(r"positions|ctx|tokens")  # fields that size none


@dataclass(frozen=True)
class Header:
    """The shape of every tensor, by its name in the files, and the file that each is in, where there are several."""

    shapes: Mapping[str, tuple[int, ...]]
    files: Mapping[str, Path] = field(default_factory=dict, repr=False)

    @cached_property
    def layers(self) -> int:
        """Number of layers, by the first number in the tensors' names."""
        found = (re.search(r"(?:^|\.)(\d{1,9})\.", name) for name in self.shapes)
        return max((int(number[1]) + 1 for number in found if number), default=0)

    @cached_property
    def largest(self) -> int:
        """The largest dimension of any tensor."""
        return max(itertools.chain.from_iterable(self.shapes.values()), default=0)

    @property
    def elements(self) -> int:
        """Number of elements of all tensors together."""
        return sum(map(prod, self.shapes.values()))

    def without(self, names: Set[str]) -> Header:
        """Return the header without some tensors."""
        return Header({name: shape for name, shape in self.shapes.items() if name not in names}, self.files)

    def layer(self, number: int) -> str:
        """Return the prefix of the names of a layer's tensors."""
        first = next((name for name in self.shapes if re.search(r"(?:^|\.)0\.", name)), "0.")
        return re.sub(r"(^|\.)0\..*", rf"\g<1>{number}.", first)


def mtp_names(names: Iterable[str], layers: int) -> set[str]:
    """Return which weights are of MTP layers: those under `mtp.`, and layers past the last one that have an `eh_proj`.

    `layers` is the number of the target's own layers.
    """
    own = {f"model.layers.{number}." for number in range(layers)}
    every = set(names)
    prefixes = {name.removesuffix("eh_proj.weight") for name in every if name.endswith(".eh_proj.weight")} - own
    return {name for name in every if name.startswith(("mtp.", "model.mtp.", *prefixes))}


def has_mtp(names: Iterable[str]) -> bool:
    """Return whether weights are of an MTP layer, in Qwen's or DeepSeek's form."""
    return any(name.endswith((".eh_proj.weight", "mtp.fc.weight")) for name in names)


def weight_files(source: str, folder: Path) -> list[Path]:
    """Return a checkpoint's safetensors files; raise CheckpointError if one is missing."""
    names = [SINGLE]
    if (index := folder / INDEX).exists():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map of file names: download it again")
        names = sorted(set(weight_map.values()))
        if any("/" in name or "\\" in name or "\0" in name or name in (".", "..") for name in names):
            raise CheckpointError(f"{index} names a file outside the checkpoint: do not use it")
    files = [folder / name for name in names]
    missing = [path.name[:80] for path in files if not os.path.isfile(path)]  # noqa: PTH113  # never raises
    if missing or not files:
        more = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
        lacks = ", ".join(missing[:3]) + more or "weights"
        raise CheckpointError(f"{source} lacks {lacks}: specbuild reads safetensors only")
    return files


def read_header(files: list[Path]) -> Header:
    """Read the shapes in these files; raise CheckpointError if one is damaged or a tensor is in two of them."""
    shapes, where = dict[str, tuple[int, ...]](), dict[str, Path]()
    for path in files:
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118
                    if name in shapes:
                        raise CheckpointError(f"{path} has {name}, as another of its files: download it again")
                    shapes[name], where[name] = tuple(file.get_slice(name).get_shape()), path
        except (SafetensorError, OSError, OverflowError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged ({one_line(error)}): download it again") from None
    return Header(shapes, where)


def check_sizes(where: str, raw: Mapping[str, Any], header: Header) -> None:
    """Raise CheckpointError if a size in a config.json is beyond its weights, before a configuration is made of it.

    Args:
        where: The config.json's name in error messages.
        raw: Its contents.
        header: The weights' shapes.
    """
    kind = raw.get("model_type")
    names = (
        getattr(CONFIG_MAPPING[kind], "attribute_map", {}) if isinstance(kind, str) and kind in CONFIG_MAPPING else {}
    )
    for canonical in _SIZES:
        for own in {canonical: None, names.get(canonical, canonical): None}:
            if raw.get(own) is not None:
                _check_size(where, canonical, own, raw[own], header)
    largest = max(header.largest, len(header.shapes))
    for name, value in _leaves(raw):
        if isinstance(value, int) and value > largest and _COUNT.search(name) and not _FREE.search(name):
            raise CheckpointError(
                f"{where} says {name} {short(value)}, its weights have {len(header.shapes)} tensors and no dimension "
                f"beyond {header.largest}: they do not belong together"
            )


def _check_size(where: str, meaning: str, name: str, value: Any, header: Header) -> None:
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{where} has {name} {short(value)}: it must be a whole number of at least 1")
    if meaning == _POSITIONS:
        if value > MAX_POSITIONS:
            raise CheckpointError(f"{where} has {name} {short(value)}: no model has more than {MAX_POSITIONS}")
    elif meaning == _LAYERS:
        if value > header.layers:
            raise CheckpointError(
                f"{where} says {name} {short(value)}, its weights have {header.layers} and none of "
                f"{header.layer(header.layers)}: they do not belong together"
            )
    elif value > header.largest:
        raise CheckpointError(
            f"{where} says {name} {short(value)}, no dimension of its weights is beyond {header.largest}: they do not "
            "belong together"
        )


def check_model(source: str, model: PreTrainedModel, header: Header) -> None:
    """Raise CheckpointError if the model of a config.json, on the meta device, has other shapes than the weights.

    Args:
        source: The checkpoint's name in error messages.
        model: The model, without weights.
        header: The weights' shapes.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in sorted(named.keys() & header.shapes.keys()):
        asked, has = tuple(named[name].shape), header.shapes[name]
        if asked != has:
            size = next((a for a, b in zip(asked, has, strict=False) if a != b), 0)
            raise CheckpointError(
                f"{source} does not fit its config.json: {_field(model.config, size)}makes {name} {list(asked)}, the "
                f"weights have {list(has)}: they do not belong together"
            )
    wanted = sum(weight.numel() for weight in model.parameters())
    if wanted > header.elements:
        lacks = min(named.keys() - header.shapes.keys(), default="none by name")
        raise CheckpointError(
            f"{source} does not fit its config.json: that asks for {wanted} parameters, the weights have "
            f"{header.elements}; missing keys, the first is {lacks}"
        )


def _field(config: Any, size: int) -> str:
    """Name the configuration's fields that are `size`, alone or times the width of a head; "" if none is."""
    sizes = {name: value for name in _SIZES if type(value := getattr(config, name, None)) is int}
    width = sizes.get("head_dim") or sizes.get("hidden_size", 0) // max(1, sizes.get("num_attention_heads", 1))
    found = [f"{name} {value} of {width}" for name, value in sizes.items() if "heads" in name and value * width == size]
    found += [f"{name} {value}" for name, value in sizes.items() if value == size and name != _LAYERS]
    return f"{' or '.join(found)} " if found else ""


def _leaves(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the innermost values of JSON with their keys."""
    left: list[tuple[str, Any]] = list(raw.items())
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left.extend(value.items())
        elif isinstance(value, list):
            left.extend((name, inner) for inner in value)
        else:
            yield name, value


def stamps_of(files: list[Path]) -> list[Stamp]:
    """Return each file's stamp, which changes with its content; raises CheckpointError."""
    try:
        return [(about.st_ino, about.st_size, about.st_mtime_ns) for about in (path.stat() for path in files)]
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error.strerror}): download it again") from None


def check_stamps(files: list[Path], stamps: list[Stamp]) -> None:
    """Raise CheckpointError if a file changed since its stamp was taken."""
    for path, before, now in zip(files, stamps, stamps_of(files), strict=True):
        if now != before:
            raise CheckpointError(f"{path} was changed while it was read: leave it alone, and begin again")


def sha256_files(files: list[Path], stamps: list[Stamp]) -> str:
    """Return the sha256 over the files' sha256s, in the given order; raise CheckpointError if a file changed."""
    check_stamps(files, stamps)
    try:
        found = hashlib.sha256("".join(map(sha256_file, files)).encode()).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error.strerror}): download it again") from None
    check_stamps(files, stamps)
    return found


def short(value: Any) -> str:
    """Return a value's repr for an error message, cut to 38 characters if it is longer than 40."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
