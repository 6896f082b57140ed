"""The manifest: what a bundle says it holds, and the reading of it, which believes nothing before it is checked.

Reading refuses, in this order: what is no manifest, a newer schema, a path that leaves the folder, a changed manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from specbuild.runtime.errors import BundleError

from .backend import Backend, find_backend

SCHEMA_VERSION = 3
OLDEST_READABLE = 2  # whose timing table has another name
MANIFEST, REPORT = "manifest.json", "report.json"
_LINEAR = {"kv_cache_dtype": "auto", "block_size": 0}  # what an engine's JSON does not say
_PLAIN = {"kind": "model", "hidden": 0, "mask_token": None, "tokens": None}  # nor a model's
KINDS = {"model": (False, False), "parallel": (True, False), "eagle3": (False, True)}  # whether masked, a head
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the bundle: its size in bytes and its sha256."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A compiled model: where it came from, its shapes, and its graphs by batch size.

    `source_sha256`: of the checkpoint's weight files, in name order. `head_dim`: of the cache. `windows`: how many
    positions a node sees, 0 for all, each number once for all the layers that have it. `inputs`: the names of the
    graph's inputs by role; `{layer}`, `{slot}` and `{window}` stand for numbers.

    What only some have, and the JSON of the others does not: `kind`, how a draft drafts ("model", token by token;
    "parallel", all levels in one pass, after `mask_token`; "eagle3", from the target's hidden states); `hidden`, the
    width of the rows of hidden states that a target writes and a head reads; `tokens`, the JSON file with the token
    of each column of the logits, None where that is its number.
    """

    source: str
    source_sha256: str
    architecture: str
    parameters: int
    precision: str
    layers: int
    kv_heads: int
    head_dim: int
    windows: list[int]
    vocab_size: int
    capacity: int
    max_positions: int
    graphs: dict[str, str]
    inputs: dict[str, str]
    outputs: dict[str, str]
    kind: str = "model"
    hidden: int = 0
    mask_token: int | None = None
    tokens: str | None = None


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """A cubin: the architecture it was compiled for ("90"), and the names of the kernels in it."""

    architecture: str
    kernels: list[str]


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """A compiled plan: by which TensorRT, for which architectures ([]: portable), its inputs and its profiles.

    `attention`: "native", standard operators, or "plugin", TreeAttention, of version `plugin`. `profiles`: by name, in
    the plan's order, each dynamic dimension's least, usual and largest size. `activations`: bytes, an estimate.
    `kv_cache_dtype`: "fp8", E4M3 of a plugin, or "auto", the model's own; `block_size`: rows of a page of a plugin's
    caches, 0 where they are linear. Neither is in the JSON where nothing was asked for.
    """

    version: str
    architectures: list[str]
    attention: str
    plugin: str | None
    version_compatible: bool
    hardware_compatible: str | None
    activations: int
    profiles: dict[str, dict[str, list[int]]]
    kv_cache_dtype: str = "auto"
    block_size: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle holds. `buckets`: node counts, root included, ascending; the largest bounds trees and chunks.

    `kernels`, `engines`: by file, and not in the JSON where there are none, so that every schema 2 reads such a bundle.
    """

    schema_version: int
    specbuild_version: str
    libraries: dict[str, str]
    backend: str
    precision: str
    exactness_bound: float
    max_seq_len: int
    max_batch_size: int
    buckets: list[int]
    default_tree: str
    eos_token_ids: list[int]
    special_tokens: dict[str, str]
    tokenizer: str
    chat_template: str | None
    models: dict[str, ModelRecord]
    files: dict[str, FileRecord]
    kernels: dict[str, KernelRecord] = field(default_factory=dict)
    engines: dict[str, EngineRecord] = field(default_factory=dict)

    @property
    def descriptor(self) -> Backend:
        """The backend's; raises BundleError where this version has none of that name."""
        return find_backend(self.backend)

    def to_json(self) -> str:
        """The file's text, digest included."""
        body = asdict(self)
        for name in ("kernels", "engines"):
            if not body[name]:
                del body[name]
        for part, defaults in (("engines", _LINEAR), ("models", _PLAIN)):
            for name, record in body.get(part, {}).items():
                body[part][name] = dict(item for item in record.items() if item not in defaults.items())
        return json.dumps(body | {"digest": _digest(body)}, indent=2, ensure_ascii=False) + "\n"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _record(kind: type[T], content: Any) -> T:
    """A record of this kind; raises TypeError for a field that is not of its type."""
    made = kind(**content)
    for name, hint in get_type_hints(kind).items():
        if not _fits(getattr(made, name), hint):
            raise TypeError(f"{name} is {getattr(made, name)!r}"[:80])
    return made


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of a type: int, float, str, bool, None, lists and dicts of them, or a record."""
    inner, origin = get_args(hint), get_origin(hint)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, inner[1]) for each in value.values())
    if inner:  # a union
        return any(_fits(value, each) for each in inner)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)


def parse(root: Path) -> Manifest:
    """The manifest in a folder; raises BundleError for one that no build wrote there."""
    try:
        body = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(
            f"{root / MANIFEST} cannot be read as JSON ({error}): copy or build the bundle again"
        ) from None
    if not isinstance(body, dict) or not isinstance(body.get("schema_version"), int):
        raise BundleError(f"{root / MANIFEST} has no schema_version: it is not a specbuild manifest")
    if body["schema_version"] > SCHEMA_VERSION:
        raise BundleError(
            f"{root} has schema_version {body['schema_version']}, this specbuild reads up to {SCHEMA_VERSION}: "
            "update specbuild, or build the bundle again"
        )
    if body["schema_version"] < OLDEST_READABLE:
        raise BundleError(f"{root} was built by an older specbuild: build the bundle again")
    try:
        for name in _paths(body):
            _check_inside(root, name)
        digest = body.pop("digest", None)
        if digest != _digest(body):
            raise BundleError(f"{root / MANIFEST} was changed after the build: copy or build the bundle again")
        known = {f.name for f in fields(Manifest) if f.name in body or f.default_factory is MISSING}
        if set(body) != known:
            raise BundleError(f"{root / MANIFEST} lacks or adds fields: {', '.join(sorted(set(body) ^ known))}")
        kinds = {"models": ModelRecord, "files": FileRecord, "kernels": KernelRecord, "engines": EngineRecord}
        records: dict[str, Any] = {
            part: {name: _record(kind, each) for name, each in body.get(part, {}).items()}
            for part, kind in kinds.items()
        }
        manifest = _record(Manifest, body | records)
        _check_sizes(manifest)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, OSError) as error:
        raise BundleError(f"{root / MANIFEST} is malformed ({error}): copy or build the bundle again") from None
    if manifest.descriptor.compiles:
        for name in (graph for model in manifest.models.values() for graph in model.graphs.values()):
            if name not in manifest.engines:
                raise BundleError(f"{root / MANIFEST} has no record of the engine {name}: build the bundle again")
    for name in _used(manifest):
        if name not in manifest.files:
            raise BundleError(f"{root / MANIFEST} uses {name!r} but does not list its hash: build the bundle again")
    return manifest


def _check_sizes(manifest: Manifest) -> None:
    """Raises ValueError for numbers that no build writes."""
    profiles = [size for e in manifest.engines.values() for p in e.profiles.values() for size in p.values()]
    if not manifest.buckets or manifest.buckets != sorted({*manifest.buckets}) or manifest.buckets[0] < 1:
        raise ValueError(f"buckets are {manifest.buckets}")
    if any(len(size) != 3 or size[0] < 0 or size != sorted(size) for size in profiles):
        raise ValueError("a profile's sizes are not least, usual, largest")
    if "target" not in manifest.models or not all(model.graphs for model in manifest.models.values()):
        raise ValueError("a model is missing, or has no graph")
    for name, model in manifest.models.items():
        traits = model.mask_token is not None, model.hidden > 0 and name == "draft"
        if KINDS.get(model.kind) != traits:
            raise ValueError(f"the {name} is of kind {model.kind}")
    if manifest.engines and not manifest.descriptor.compiles:
        raise ValueError(f"backend {manifest.backend} has engines")


def _used(manifest: Manifest) -> list[str]:
    graphs = [graph for model in manifest.models.values() for graph in model.graphs.values()]
    template = [manifest.chat_template] if manifest.chat_template else []
    template += [model.tokens for model in manifest.models.values() if model.tokens]
    return [*graphs, *manifest.kernels, *manifest.engines, manifest.tokenizer, *template]


def _paths(body: Mapping[str, Any]) -> list[Any]:
    """Every path a manifest names, before anything else in it is believed."""
    graphs = [graph for model in body["models"].values() for graph in model["graphs"].values()]
    template = [body["chat_template"]] if body["chat_template"] else []
    template += [model["tokens"] for model in body["models"].values() if model.get("tokens")]
    return [*body["files"], *graphs, *body.get("kernels", {}), *body.get("engines", {}), body["tokenizer"], *template]


def _check_inside(root: Path, name: Any) -> None:
    pure = PurePosixPath(name)
    inside = (root / name).resolve().is_relative_to(root.resolve())
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or not inside:
        raise BundleError(f"{root / MANIFEST} names {name!r}, which leaves the bundle: do not use this bundle")
