"""Reads a checkpoint of packed integers, in the format of GPTQ, AWQ or compressed-tensors, as a plain one.

A 32-bit word holds `32 / bits` codes, the lowest bits first. Each format is decoded as AutoGPTQ, AutoAWQ and
compressed-tensors write it, a weight at a time when it is needed; `quantize.grids` finds the grid again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specbuild.builder.strict_json import read_object
from specbuild.runtime.errors import CheckpointError, one_line, shown

from .lazy_weights import ALL, Rows, Stored, Weight
from .weights import INDEX, Stamp, check_stamps, read_header, sha256_files, stamps_of, weight_files

CONFIG, SETTINGS = "config.json", "quantization_config"
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position within a word of each of eight columns' codes
Parts = Mapping[str, Tensor]  # one weight's tensors by the last part of their names
Shapes = Mapping[str, tuple[int, ...]]  # their shapes


@dataclass(frozen=True)
class Packed:
    """A packed checkpoint: its files with their stamps, the method, its weights, and how many of them are packed."""

    files: list[Path]
    stamps: list[Stamp]
    method: str
    tensors: dict[str, Weight] = field(repr=False)

    @cached_property
    def sha256(self) -> str:
        """The packed files' sha256; raises CheckpointError if one changed since it was checked."""
        return sha256_files(self.files, self.stamps)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that a report shows."""
        packed = sum(isinstance(weight, PackedWeight) for weight in self.tensors.values())
        return {"packed_quantization": self.method, "packed_weights": packed}

    def weights(self, source: str, config: Any) -> dict[str, Weight]:
        """Return the weights, dequantized when they are read; `config` makes no difference."""
        return self.tensors


@dataclass(frozen=True, slots=True)
class _Format:
    """A packed format: the part that every packed weight has, the parts it may also have, and the dequantizer.

    `shape` returns a weight's shape by those of its parts and the codes of a 32-bit word.
    """

    main: str
    others: tuple[str, ...]
    shape: Callable[[Shapes, int], tuple[int, ...]]
    weight: Callable[[Parts, Mapping[str, Any]], Tensor]


def packing(folder: Path) -> dict[str, Any] | None:
    """Return a checkpoint's quantization_config if it is packed in a known format, else None."""
    settings = read_object(folder / CONFIG).get(SETTINGS)
    return settings if isinstance(settings, dict) and _name(settings) in _FORMATS else None


@dataclass(frozen=True, eq=False)
class PackedWeight(Weight):
    """A weight that is dequantized from its parts, all in safetensors files, when it is read."""

    source: str
    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, Path]
    form: _Format
    settings: Mapping[str, Any]

    def read(self, rows: Rows = ALL) -> Tensor:
        """See Weight; raises CheckpointError if it is packed wrongly."""
        try:
            parts = dict[str, Tensor]()
            for part, path in self.parts.items():
                with safe_open(path, framework="pt") as file:
                    parts[part] = file.get_tensor(f"{self.name}.{part}")
            weight = self.form.weight(parts, self.settings).contiguous()
        except (RuntimeError, KeyError, ValueError, IndexError, TypeError, OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.source} has {shown(self.name)} packed wrongly ({one_line(error)})") from None
        return weight[rows if isinstance(rows, slice) else torch.from_numpy(rows)]


def unpack(source: str, folder: Path, settings: Mapping[str, Any], to: Path) -> Packed:
    """Describe a packed checkpoint as a plain one: copy its other files, and find its weights, of which none is read.

    Args:
        source: The checkpoint's name in error messages.
        folder: The packed checkpoint.
        settings: Its quantization_config, from `packing`.
        to: An existing folder to write to.

    Raises:
        CheckpointError: The checkpoint is damaged or unsupported.
    """
    form, files = _FORMATS[_name(settings)], weight_files(source, folder)
    stamps, header = stamps_of(files), read_header(files)
    prefixes = {name.removesuffix(f".{form.main}") for name in header.shapes if name.endswith(f".{form.main}")}
    if not prefixes:
        raise CheckpointError(
            f"{source} says that it is packed by {_name(settings)}, and has no {form.main}: download it"
        )
    belongs = {f"{prefix}.{part}" for prefix in prefixes for part in (form.main, *form.others)}
    bits, weights = _bits(source, settings), dict[str, Weight]()
    for name in header.shapes.keys() - belongs:
        weights[name] = Stored(header.files[name], name, header.shapes[name])
    for prefix in sorted(prefixes):
        names = {part: f"{prefix}.{part}" for part in (form.main, *form.others)}
        parts = {part: header.files[name] for part, name in names.items() if name in header.files}
        shapes = {part: header.shapes[names[part]] for part in parts}
        shape = form.shape(shapes, 32 // bits)
        if "weight_shape" in parts:  # the last word of a row may hold fewer codes
            stated = Stored(parts["weight_shape"], names["weight_shape"], (2,)).read()
            shape = tuple(map(int, stated.tolist()))
        weights[f"{prefix}.weight"] = PackedWeight(source, prefix, shape, parts, form, settings)
    plain = {name: value for name, value in read_object(folder / CONFIG).items() if name != SETTINGS}
    save_texts(source, folder, plain, to)
    check_stamps(files, stamps)
    return Packed(files, stamps, _name(settings), weights)


def save_texts(source: str, folder: Path, config: Mapping[str, Any], to: Path) -> None:
    """Copy a checkpoint's files that are no weights, with another config.json; raises CheckpointError."""
    try:
        for path in folder.iterdir():
            if path.suffix in (".json", ".jinja", ".model", ".txt") and path.name != INDEX and path.is_file():
                shutil.copyfile(path, to / path.name)
        (to / CONFIG).write_text(json.dumps(dict(config)), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"{source} cannot be copied to {to.parent} ({one_line(error)}): set TMPDIR to another disk"
        ) from None


def _name(settings: Mapping[str, Any]) -> str:
    """Return a format's name: the quantization method, and for compressed-tensors also its `format` field."""
    method, kind = settings.get("quant_method"), settings.get("format")
    return f"{method} {kind}" if method == "compressed-tensors" else str(method)


def _bits(source: str, settings: Mapping[str, Any]) -> int:
    groups = settings.get("config_groups")
    several = [each.get("weights") for each in groups.values()] if isinstance(groups, dict) else [settings]
    bits: set[Any] = {each.get("num_bits", each.get("bits")) for each in several if isinstance(each, dict)}
    if len(bits) != 1 or not bits <= {2, 4, 8}:
        raise CheckpointError(f"{source} is packed in {shown(sorted(map(str, bits)))} bits: 2, 4 or 8 can be read")
    return int(max(bits))


def _codes(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack 32-bit words into their codes, `int64`, along dimension `dim`."""
    if words.dtype != torch.int32 or words.ndim != 2:
        raise ValueError(f"words of {words.dtype}, shape {list(words.shape)}")
    codes = torch.stack([words.long() >> shift & (1 << bits) - 1 for shift in range(0, 32, bits)], dim + 1)
    return codes.flatten(dim, dim + 1)


def _in_groups(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None) -> Tensor:
    """Dequantize codes `[N, K]` with zeros and scales `[N, G]` to `float32[N, K]`.

    `groups[K]` is each column's group; None for equal groups of consecutive columns.
    """
    if zeros.shape != scales.shape or len(scales) != len(codes) or codes.shape[1] % scales.shape[1]:
        raise ValueError(f"codes {list(codes.shape)}, zeros {list(zeros.shape)}, scales {list(scales.shape)}")
    if groups is None:
        groups = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    if groups.shape != codes.shape[1:] or groups.min() < 0:
        raise ValueError("columns of no group")
    return (codes - zeros[:, groups.long()]).float() * scales.float()[:, groups.long()]


def _gptq(parts: Parts, settings: Mapping[str, Any]) -> Tensor:
    bits, zero = settings["bits"], 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    zeros = _codes(parts["qzeros"], bits, 1) + zero  # version 1 stores zero points minus 1
    return _in_groups(_codes(parts["qweight"], bits, 0).T, zeros.T, parts["scales"].T, parts.get("g_idx"))


def _awq(parts: Parts, settings: Mapping[str, Any]) -> Tensor:
    if settings["bits"] != 4 or str(settings.get("version", "gemm")).lower() != "gemm":
        raise ValueError(
            f"{settings['bits']} bits, version {settings.get('version')}: 4 bits in GEMM's layout can be read"
        )
    codes, zeros = (
        _codes(parts[name], 4, 1).reshape(len(parts[name]), -1, 8)[..., _AWQ_ORDER].flatten(1)
        for name in ("qweight", "qzeros")
    )
    return _in_groups(codes.T, zeros.T, parts["scales"].T, None)


def _compressed(parts: Parts, settings: Mapping[str, Any]) -> Tensor:
    (bits,) = {each["weights"]["num_bits"] for each in settings["config_groups"].values()}
    rows, columns = parts["weight_shape"].tolist()
    codes = _codes(parts["weight_packed"], bits, 1)[:, :columns] - (1 << bits - 1)
    if codes.shape != (rows, columns):
        raise ValueError(f"codes {list(codes.shape)} of a weight {[rows, columns]}")
    scales, zeros = parts["weight_scale"], parts.get("weight_zero_point")
    zeros = torch.zeros_like(scales) if zeros is None else _codes(zeros, bits, 0)[:rows] - (1 << bits - 1)
    return _in_groups(codes, zeros, scales, parts.get("weight_g_idx"))


def _whole(parts: Parts, settings: Mapping[str, Any]) -> Tensor:
    codes, scales = parts["weight"].long(), parts["weight_scale"]
    return _in_groups(codes, parts.get("weight_zero_point", torch.zeros_like(scales)).long(), scales, None)


def _turned(shapes: Shapes, inner: int, columns: int) -> tuple[int, ...]:
    """Return the shape `[N, K]` of words `[K / inner, N / columns]`."""
    rows, words = shapes["qweight"] if len(shapes["qweight"]) == 2 else (0, 0)
    return words * columns, rows * inner


_BESIDE = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale", "input_zero_point")
_FORMATS = {
    "gptq": _Format("qweight", ("qzeros", "scales", "g_idx"), lambda s, n: _turned(s, n, 1), _gptq),
    "awq": _Format("qweight", ("qzeros", "scales"), lambda s, n: _turned(s, 1, n), _awq),
    "compressed-tensors pack-quantized": _Format(
        "weight_packed", _BESIDE, lambda s, n: s["weight_packed"], _compressed
    ),
    "compressed-tensors int-quantized": _Format(
        "weight_scale", ("weight", *_BESIDE), lambda s, n: s.get("weight", ()), _whole
    ),
}
