"""Load an ONNX graph so that ONNX Runtime opens no file: it gets the graph's bytes and arrays over mapped files.

The few protobuf fields that refer to other files are parsed here, so that every one of them is known before ONNX
Runtime sees the graph. External tensors are refused anywhere but among the graph's own initializers; only large models
of other exporters have them elsewhere.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import onnxruntime

from specbuild.runtime.bundle.bundle import Bundle, open_regular
from specbuild.runtime.errors import BundleError, one_line

# ONNX Runtime reads this when it makes a session. Its flash attention adds up in tiles that depend on the processor's
# cache and on a step's rows, so a row's bits would too; for steps of up to 256 rows it is no faster.
os.environ["ORT_GQA_DISABLE_FLASH_ATTENTION"] = "1"
_FOLDER = "session.model_external_initializers_file_folder_path"
_MAX_BYTES = 1 << 31  # protobuf's own limit
_MAX_DEPTH = 32
_EXTERNAL = 1  # TensorProto.data_location
# The fields of onnx.proto that lead to tensors: by kind of message and field number, the kind of the inner message.
_MODEL = {7: "graph", 20: "training", 25: "function"}
_FIELDS: dict[str, dict[int, str]] = {
    "model": _MODEL,
    "training": {1: "subgraph", 2: "subgraph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "initializer", 15: "sparse"},
    "subgraph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "subgraph", 10: "tensor", 11: "subgraph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
_DTYPES: dict[int, Any] = {  # by TensorProto.data_type; types that NumPy lacks are held as integers of their size
    **{1: np.float32, 2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64, 9: np.bool_},
    **{10: np.float16, 11: np.float64, 12: np.uint32, 13: np.uint64, 16: np.uint16},
    **dict.fromkeys((17, 18, 19, 20), np.uint8),
}
_AS_NUMBER = (16, 17, 18, 19, 20)  # bfloat16, float8: NumPy lacks them, so ONNX Runtime gets the type's number


@dataclass(slots=True)
class External:
    """An initializer stored in another file: its location, type and shape."""

    name: str
    file: str
    offset: int
    length: int | None
    data_type: int
    shape: tuple[int, ...]


class GraphFile(NamedTuple):
    """A graph's bytes, and a function `beside` that maps a file in the graph's folder by its name."""

    path: Path
    data: bytes
    beside: Callable[[str], mmap.mmap]

    @classmethod
    def at(cls, path: Path) -> GraphFile:
        """Open a graph that this program wrote itself, outside any bundle; no hash is checked."""

        def beside(name: str) -> mmap.mmap:
            with open_regular(path.parent / name) as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

        with open_regular(path) as file:
            return cls(path, file.read(), beside)

    @classmethod
    def of(cls, bundle: Bundle, name: str) -> GraphFile:
        """Open a bundle's graph; every file is checked against its hash in the manifest."""
        folder = PurePosixPath(name).parent
        return cls(bundle.path(name), bundle.read(name, _MAX_BYTES), lambda each: bundle.map(str(folder / each)))


def open_session(graph: GraphFile | Path, options: Any, providers: list[Any]) -> Any:
    """Return an ONNX Runtime session that has opened no file itself.

    Args:
        graph: The graph, or the path of one that this program wrote itself.
        options: ONNX Runtime's SessionOptions, to which the external initializers are added; on a CPU they are not
            copied.
        providers: ONNX Runtime's execution providers, in order of preference.

    Raises:
        BundleError: If the graph does not load, or a file or tensor that it refers to is missing.
    """
    graph = GraphFile.at(graph) if isinstance(graph, Path) else graph
    maps = dict[str, mmap.mmap]()
    try:
        names, values = list[str](), list[Any]()
        for each in external_tensors(graph.data):
            if each.file not in maps:
                maps[each.file] = graph.beside(each.file)
            names.append(each.name)
            values.append(_value(each, maps[each.file]))
        shares = providers == ["CPUExecutionProvider"]
        options.add_session_config_entry("session.load_model_format", "ONNX")
        with _with_initializers(options, names, values, maps, shares):
            session = onnxruntime.InferenceSession(graph.data, options, providers=providers)
        for each in (*session.get_inputs(), *session.get_outputs()):
            _ = each.name, each.shape  # reading a name raises if it is not UTF-8
    except BundleError:
        raise
    except Exception as error:  # ONNX Runtime raises many unrelated types
        version = onnxruntime.__version__
        raise BundleError(f"{graph.path} does not load in ONNX Runtime {version}: {one_line(error)}") from error
    if shares:
        session.values = values  # held as long as the session
    elif hasattr(mmap, "MADV_DONTNEED"):
        for mapping in maps.values():  # ONNX Runtime has packed most weights; it pages in again what it still reads
            mapping.madvise(mmap.MADV_DONTNEED)
    return session


@contextmanager
def _with_initializers(
    options: Any, names: list[str], values: list[Any], files: Iterable[str], shares: bool
) -> Iterator[None]:
    """Add initializers to a session's options: to be copied, or if it `shares` them, to be used where they are mapped.

    ONNX Runtime looks then whether their files are there, and does not open them: it is shown empty ones.
    """
    if not shares:
        if names:
            options.add_external_initializers(names, values)
        yield
        return
    with tempfile.TemporaryDirectory(prefix="specbuild-session-") as folder:
        for file in files:
            if PurePosixPath(file).name != file:
                raise ValueError(f"an initializer is in {file!r}, not beside the graph")
            (Path(folder) / file).touch()
        for name, value in zip(names, values, strict=True):
            options.add_initializer(name, value)
        options.add_session_config_entry(_FOLDER, folder)
        yield


def external_tensors(data: bytes) -> list[External]:
    """Return a model's initializers that are in other files; raise ValueError if the bytes are no valid model."""
    found = list[External]()
    _walk(memoryview(data), "model", found, 0)
    return found


def _walk(data: memoryview, kind: str, found: list[External], depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError(f"graphs are nested more than {_MAX_DEPTH} deep")
    inner = _FIELDS[kind]
    for number, value in _fields(data):
        if number not in inner:
            if (
                kind == "node"
                and number == 4
                and bytes(value if isinstance(value, memoryview) else b"") == b"EPContext"
            ):
                raise ValueError("an EPContext node takes code from a file")
            continue
        if not isinstance(value, memoryview):
            raise ValueError(f"field {number} of a {kind} is no message")
        if inner[number] not in ("initializer", "tensor"):
            _walk(value, inner[number], found, depth + 1)
        elif tensor := _external(value):
            if inner[number] == "tensor":
                raise ValueError(f"tensor {tensor.name!r} is in a file and no initializer of the graph itself")
            found.append(tensor)


def _external(data: memoryview) -> External | None:
    """Return a tensor that is stored in another file; None for one that is not."""
    entries, shape, data_type, name, external = dict[str, str](), list[int](), 0, "", False
    for number, value in _fields(data):
        if number == 1:
            shape += [value] if isinstance(value, int) else _varints(value)
        elif number == 2 and isinstance(value, int):
            data_type = value
        elif number == 8 and isinstance(value, memoryview):
            name = str(value, "utf-8")
        elif number == 13 and isinstance(value, memoryview):
            external = True
            entry = {key: str(text, "utf-8") for key, text in _fields(value) if isinstance(text, memoryview)}
            entries[entry.get(1, "")] = entry.get(2, "")
        elif number == 14:
            external |= value == _EXTERNAL
    if not external:
        return None
    length = int(entries["length"]) if "length" in entries else None
    return External(name, entries.get("location", ""), int(entries.get("offset", "0")), length, data_type, tuple(shape))


def _value(tensor: External, data: mmap.mmap) -> Any:
    """Return a tensor over a file's bytes, copied only if unaligned; raise ValueError if the file does not hold it."""
    if tensor.data_type not in _DTYPES:
        raise ValueError(
            f"initializer {tensor.name!r} is of type {tensor.data_type}, which no build writes into a file"
        )
    dtype = np.dtype(_DTYPES[tensor.data_type])
    size = math.prod(tensor.shape) * dtype.itemsize
    if any(not 0 <= each < 1 << 40 for each in tensor.shape) or tensor.length not in (None, size):
        raise ValueError(f"initializer {tensor.name!r} has {tensor.length} bytes for a shape of {tensor.shape}")
    if not 0 <= tensor.offset <= len(data) - size:
        raise ValueError(f"initializer {tensor.name!r} is not within {tensor.file!r}")
    array: Any = np.frombuffer(data, np.uint8, size, tensor.offset)
    if tensor.offset % dtype.itemsize:
        array = array.copy()
    array = array.view(dtype).reshape(tensor.shape)
    if tensor.data_type in _AS_NUMBER:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, tensor.data_type)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield a protobuf message's fields as number and value (integer or bytes); raise ValueError if it is malformed."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError("it is not an ONNX model")
        if size > end - at:
            raise ValueError("it is cut off")
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("it is cut off")


def _varints(data: memoryview) -> list[int]:
    found, at = list[int](), 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found
