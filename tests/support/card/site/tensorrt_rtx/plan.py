"""A plan: 64 bytes that say what it is and for whom, then what its tensors and profiles are, then the ONNX model."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from .names import EngineInvalidityDiagnostics as Faults

VERSION = importlib.metadata.version("tensorrt_rtx")  # the real package's, so that bundles agree
HEADER, CAPABILITY = 64, "90"  # the stand-in card's
_MAGIC = b"CARD-RTX"


@dataclass(frozen=True)
class Tensor:
    """An input or output; dynamic dimensions by name."""

    name: str
    dtype: str
    dims: tuple[int | str, ...]
    output: bool = False
    alias: str | None = None  # the input whose memory an output has


Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Content:
    """What a plan holds; `profiles`: each input's least, usual and largest shape."""

    tensors: tuple[Tensor, ...]
    profiles: tuple[Mapping[str, Sizes], ...]
    layers: tuple[tuple[str, str], ...]
    streams_weights: bool
    model: bytes


class HostMemory(bytes):
    """What is serialised."""

    @property
    def nbytes(self):
        return len(self)


def pack(content, targets):
    """A plan for compute capabilities."""
    said = {key: value for key, value in asdict(content).items() if key != "model"}
    described = json.dumps(said).encode()
    header = b" ".join([_MAGIC, VERSION.encode(), ",".join(targets).encode(), str(len(described)).encode()])
    assert len(header) < HEADER
    return HostMemory(header.ljust(HEADER) + described + content.model)


def faults(header):
    """What is wrong with a plan, by its header."""
    parts = header[:HEADER].split()
    if len(parts) != 4 or parts[0] != _MAGIC:
        return Faults.MALFORMED_ENGINE
    wrong = Faults(0)
    if parts[1].decode() != VERSION:
        wrong |= Faults.VERSION_MISMATCH
    if CAPABILITY not in parts[2].decode().split(","):
        wrong |= Faults.UNSUPPORTED_CC
    return wrong


def unpack(data):
    """The plan whose header is without fault."""
    size = int(data[:HEADER].split()[3])
    said = json.loads(data[HEADER : HEADER + size])
    tensors = (Tensor(**each | {"dims": tuple(each["dims"])}) for each in said["tensors"])
    profiles = ({name: tuple(map(tuple, sizes)) for name, sizes in each.items()} for each in said["profiles"])
    layers = tuple((name, kind) for name, kind in said["layers"])
    return Content(tuple(tensors), tuple(profiles), layers, said["streams_weights"], data[HEADER + size :])
