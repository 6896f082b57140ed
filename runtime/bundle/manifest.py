"""The manifest: what a bundle says it holds, and its parser, which trusts nothing before it is checked.

Parsing refuses, in this order: data that is no manifest, another schema, a changed manifest, a field that is missing,
unknown, of another type or out of bounds, a path that leaves the folder, a file that is used but not listed. The digest
detects damage but not intent, because anybody can compute it; so every number is bounded before anything is allocated
by it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from msgspec import Meta

from specbuild.runtime.checked_json import Text, checked, decode
from specbuild.runtime.errors import BundleError

from .backend import Backend, find_backend

SCHEMA_VERSION = 5
MANIFEST, REPORT = "manifest.json", "report.json"
GENERATION_CONFIG = "generation_config.json"  # the checkpoint's own sampling parameters, if it has any
# has a mask token, is a head
KINDS = {"model": (False, False), "parallel": (True, False), "eagle3": (False, True), "mtp": (False, True)}
MANIFEST_BYTES = 4 << 20
Count = Annotated[int, Meta(ge=0, le=1 << 50)]  # of bytes, or of a model's parameters
Size = Annotated[int, Meta(ge=1, le=1 << 24)]  # of a sequence or a vocabulary
Dimension = Annotated[int, Meta(ge=1, le=1 << 16)]  # of a model
Nodes = Annotated[int, Meta(ge=1, le=4096)]
Token = Annotated[int, Meta(ge=0, le=1 << 24)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]  # of a file
BatchSize = Annotated[str, Meta(pattern="^[1-9][0-9]{0,3}$")]
Names = Annotated[dict[Text, Text], Meta(max_length=4096)]
Profiles = dict[
    Text, dict[Text, Annotated[list[Annotated[int, Meta(ge=0, le=1 << 31)]], Meta(min_length=3, max_length=3)]]
]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the bundle: its size in bytes and its sha256."""

    bytes: Count
    sha256: Text


@dataclass(frozen=True, slots=True)
class CacheShape:
    """A layer's cache: its KV heads, the sizes of their keys and values, and how many numbers a text's state has."""

    heads: Dimension
    key: Dimension
    value: Dimension
    state: Count = 0


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A compiled model: where it came from, its shapes, and its graphs by batch size.

    `source_sha256`: the hash of the checkpoint's weight files, in name order. `head_dim`: the cache's. `windows`: how
    many positions a node sees, 0 for all; the distinct values among the layers. `inputs`, `outputs`: the names of the
    graph's inputs and outputs by role; `{layer}`, `{slot}` and `{window}` stand for numbers.

    Fields that only some models have: `kind`, how a draft drafts ("model", token by token; "parallel", all levels in
    one pass, after `mask_token`; "eagle3" and "mtp", from the target's hidden states); `hidden`, the width of the
    hidden states that a target writes and a head reads; `tokens`, the JSON file with the token id of each column of the
    logits, None if the column's number is the id; `caches`, each layer's cache, if they are not all of `kv_heads` and
    `head_dim`.
    """

    source: Text
    source_sha256: Text
    architecture: Text
    parameters: Count
    precision: Text
    layers: Dimension
    kv_heads: Dimension
    head_dim: Dimension
    windows: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 31)]], Meta(min_length=1, max_length=64)]
    vocab_size: Size
    capacity: Size
    max_positions: Annotated[int, Meta(ge=1, le=1 << 31)]
    graphs: Annotated[dict[BatchSize, Name], Meta(min_length=1, max_length=64)]
    inputs: Names
    outputs: Names
    kind: Text = "model"
    hidden: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    mask_token: Token | None = None
    tokens: Name | None = None
    caches: Annotated[list[CacheShape], Meta(max_length=1 << 12)] = field(default_factory=list)

    @property
    def is_head(self) -> bool:
        """Return whether the draft reads the target's hidden states."""
        return KINDS[self.kind][1]

    @property
    def shapes(self) -> tuple[CacheShape, ...]:
        """The cache of each layer."""
        return tuple(self.caches) or (CacheShape(self.kv_heads, self.head_dim, self.head_dim),) * self.layers

    @property
    def row_values(self) -> int:
        """How many numbers a token has in all layers' caches."""
        return sum(each.heads * (each.key + each.value) for each in self.shapes)

    @property
    def state_values(self) -> int:
        """How many numbers the states of a text have in all layers."""
        return sum(each.state for each in self.shapes)


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """A cubin: the architecture it was compiled for ("90"), and the names of its kernels."""

    architecture: Text
    kernels: Annotated[list[Text], Meta(max_length=4096)]


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """A compiled plan: its TensorRT version, its architectures ([]: portable), its attention and its profiles.

    `attention`: "native" for standard operators, "plugin" for TreeAttention of version `plugin`. `profiles`: by name,
    in the plan's order, the minimum, optimum and maximum of each dynamic dimension. `activations`: an estimate in
    bytes. `kv_cache_dtype`: "fp8" (E4M3, with the plugin) or "auto", the model's own. `block_size`: rows of a cache
    page (with the plugin), 0 for linear caches.
    """

    version: Text
    architectures: list[Text]
    attention: Text
    plugin: Text | None
    version_compatible: bool
    hardware_compatible: Text | None
    activations: Count
    profiles: Profiles
    kv_cache_dtype: Text = "auto"
    block_size: Annotated[int, Meta(ge=0, le=4096)] = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a bundle; files are named by their paths relative to its folder.

    Its JSON, and that of its records, leaves out fields that are at their defaults.

    Attributes:
        schema_version: Version of the manifest's format, `SCHEMA_VERSION`.
        specbuild_version: Version of specbuild that built the bundle.
        libraries: Version of each library that took part in the build, by name.
        backend: Name of the backend that runs the bundle.
        precision: Precision of the target's weights.
        exactness_bound: The gap, in logits, below which rounding may turn a choice that was computed elsewhere.
        max_seq_len: Maximum tokens of a text, prompt and output together.
        max_batch_size: Maximum sequences in a step.
        buckets: Node counts of steps, root included, ascending; the largest bounds trees and chunks.
        default_tree: The largest tree that "auto" drafts without a timing table, as a `TreeSpec` writes it.
        eos_token_ids: Token ids that end a text.
        special_tokens: Texts of special tokens by the names that chat templates use, such as "bos_token".
        tokenizer: File of the tokenizer.
        chat_template: File of the chat template; None if there is none.
        models: The compiled models, "target" and perhaps "draft".
        files: Size and sha256 of every file of the bundle but the manifest and its signature.
        kernels: The cubins by file.
        engines: The compiled plans by file.
    """

    schema_version: int
    specbuild_version: Text
    libraries: Names
    backend: Text
    precision: Text
    exactness_bound: Annotated[float, Meta(ge=0, le=1e9)]
    max_seq_len: Size
    max_batch_size: Nodes
    buckets: Annotated[list[Nodes], Meta(min_length=1, max_length=64)]
    default_tree: Text
    eos_token_ids: Annotated[list[Token], Meta(max_length=1024)]
    special_tokens: Names
    tokenizer: Name
    chat_template: Name | None
    models: Annotated[dict[Text, ModelRecord], Meta(max_length=2)]
    files: Annotated[dict[Name, FileRecord], Meta(max_length=1 << 16)]
    kernels: Annotated[dict[Name, KernelRecord], Meta(max_length=1 << 12)] = field(default_factory=dict)
    engines: Annotated[dict[Name, EngineRecord], Meta(max_length=64)] = field(default_factory=dict)

    @property
    def descriptor(self) -> Backend:
        """The backend's descriptor; raises BundleError if this version does not have the backend."""
        return find_backend(self.backend)

    @property
    def digest(self) -> str:
        """The sha256 of the manifest's contents, as in its file; bundles of other files have other digests."""
        return _digest(_written(self))

    def to_json(self) -> str:
        """Return the text of the manifest's file, digest included."""
        body = _written(self)
        return json.dumps(body | {"digest": _digest(body)}, indent=2, ensure_ascii=False) + "\n"


def _written(value: Any) -> Any:
    """Return a record as JSON data, without the fields that are at their defaults."""
    if isinstance(value, Mapping):
        return {name: _written(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_written(each) for each in value]
    if not is_dataclass(value):
        return value
    written = {}
    for each in fields(value):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if (found := getattr(value, each.name)) != default:
            written[each.name] = _written(found)
    return written


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def parse(root: Path, data: bytes) -> Manifest:
    """Parse a folder's manifest.

    Args:
        root: The bundle's folder.
        data: The bytes of its manifest's file.

    Raises:
        BundleError: If no build can have written them there.
    """
    where = root / MANIFEST
    try:
        body = decode(data)
    except ValueError as error:
        raise BundleError(f"{where} cannot be read as JSON ({error}): copy or build the bundle again") from None
    version = body.get("schema_version") if isinstance(body, dict) else None
    if not isinstance(version, int):
        raise BundleError(f"{where} has no schema_version: it is not a specbuild manifest")
    if version > SCHEMA_VERSION:
        raise BundleError(
            f"{root} has schema_version {version}, this specbuild reads up to {SCHEMA_VERSION}: "
            "update specbuild, or build the bundle again"
        )
    if version < SCHEMA_VERSION:
        raise BundleError(f"{root} was built by an older specbuild: build the bundle again")
    if body.pop("digest", None) != _digest(body):
        raise BundleError(f"{where} was changed after the build: copy or build the bundle again")
    try:
        manifest = checked(body, Manifest)
        _check_sizes(manifest)
        for name, model in manifest.models.items():
            _check_model(manifest, name, model)
    except ValueError as error:
        raise BundleError(f"{where} is malformed ({str(error)[:300]}): copy or build the bundle again") from None
    backend, used = manifest.descriptor, _used(manifest)
    for name in (*manifest.files, *used):
        _check_inside(root, name)
    for name in (graph for model in manifest.models.values() for graph in model.graphs.values()):
        if backend.compiles and name not in manifest.engines:
            raise BundleError(f"{where} has no record of the engine {name}: build the bundle again")
    for name in used:
        if name not in manifest.files:
            raise BundleError(f"{where} uses {name!r} but does not list its hash: build the bundle again")
    return manifest


def _check_sizes(manifest: Manifest) -> None:
    """Raise ValueError for numbers that are within their bounds but that no build writes."""
    profiles = [size for e in manifest.engines.values() for p in e.profiles.values() for size in p.values()]
    if manifest.buckets != sorted({*manifest.buckets}):
        raise ValueError(f"buckets are {manifest.buckets}")
    if any(size != sorted(size) for size in profiles):
        raise ValueError("a profile's sizes are not least, usual, largest")
    if "target" not in manifest.models or manifest.models.keys() - {"target", "draft"}:
        raise ValueError("its models are not a target and at most a draft")
    if manifest.engines and not manifest.descriptor.compiles:
        raise ValueError(f"backend {manifest.backend} has engines")
    if max(manifest.eos_token_ids, default=0) >= manifest.models["target"].vocab_size:
        raise ValueError("an end-of-text token is not in the vocabulary")


def _check_model(manifest: Manifest, name: str, model: ModelRecord) -> None:
    """Raise ValueError for a model that cannot be part of this bundle."""
    if KINDS.get(model.kind) != (model.mask_token is not None, model.hidden > 0 and name == "draft"):
        raise ValueError(f"the {name} is of kind {model.kind[:80]}")
    if model.caches and (len(model.caches) != model.layers or manifest.descriptor.on_gpu):
        raise ValueError(f"the {name} has {len(model.caches)} caches of its own for {model.layers} layers")
    longest = manifest.max_seq_len + manifest.buckets[-1]
    if not manifest.max_seq_len <= model.max_positions or not longest <= model.capacity < longest + 1024:
        raise ValueError(
            f"the {name} has a capacity of {model.capacity} and {model.max_positions} positions for texts of "
            f"{manifest.max_seq_len} tokens"
        )
    if manifest.max_batch_size > max(map(int, model.graphs)):
        raise ValueError(f"the {name} has no graph for a batch of {manifest.max_batch_size}")


def _used(manifest: Manifest) -> list[str]:
    """Return every file that a manifest names outside its list of files."""
    graphs = [graph for model in manifest.models.values() for graph in model.graphs.values()]
    others = [manifest.chat_template, *(model.tokens for model in manifest.models.values())]
    return [*graphs, *manifest.kernels, *manifest.engines, manifest.tokenizer, *filter(None, others)]


def _check_inside(root: Path, name: str) -> None:
    """Raise BundleError for a path that leaves the folder, by itself or by a symlink; links within it are allowed."""
    pure = PurePosixPath(name)
    try:
        inside = (root / name).resolve().is_relative_to(root.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a name too long, a link to itself
        raise BundleError(f"{root / MANIFEST} names {name!r}, which is no path ({error}): build it again") from None
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or not inside:
        raise BundleError(f"{root / MANIFEST} names {name!r}, which leaves the bundle: do not use this bundle")
