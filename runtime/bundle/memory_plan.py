"""The device memory that a bundle takes, planned from the manifest before anything is allocated.

Weights are the bytes of plans, or of graphs and their weight files. Caches are linear, so that every slot has all its
rows, or paged: by default as many rows in pages, and page 0, which belongs to no slot. Activations are the build's
estimate for an engine, used until the engine says how much it needs. Buffers are what steps read and write: logits,
masks, and a history and a bias for every token id. Graphs are an allowance, because a driver cannot be asked
beforehand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from specbuild.runtime.errors import OptionError

from .manifest import Manifest, ModelRecord

_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
GRAPH_BYTES = 1 << 20  # allowance for a captured graph


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use, for `batch_size` sequences of at most `seq_len` tokens."""

    batch_size: int
    seq_len: int
    weights: int
    caches: int
    activations: int
    buffers: int
    graphs: int

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.weights + self.caches + self.activations + self.buffers + self.graphs

    def to_dict(self) -> dict[str, int]:
        """Return the bytes by name, with their total, for report.json."""
        return asdict(self) | {"total": self.total}


def item_bytes(precision: str) -> int:
    """Return the bytes of a cache element: of the compute dtype, the last part of precisions such as "int8/fp16"."""
    return _ITEM_BYTES.get(precision.rpartition("/")[2], _ITEM_BYTES["fp32"])


def block_size(manifest: Manifest) -> int:
    """Return the rows of a page of a bundle's caches; 0 if they are linear."""
    return max((engine.block_size for engine in manifest.engines.values()), default=0)


def pages(manifest: Manifest, batch_size: int, tokens: int | None = None) -> int:
    """Return the number of pages in a bundle's caches, without page 0; 0 for linear caches.

    Args:
        manifest: The bundle's manifest.
        batch_size: The number of sequences.
        tokens: Tokens of all sequences together; None: as many as the slots have rows.

    Raises:
        OptionError: If the bundle was not built for so many tokens, or its caches are not paged.
    """
    rows, capacity = block_size(manifest), manifest.models["target"].capacity
    limit = manifest.max_batch_size * capacity
    if tokens is not None and not rows:
        raise OptionError("the bundle's caches are not paged: drop kv_cache_tokens, or build it with --block-size")
    if tokens is not None and (type(tokens) is not int or not rows <= tokens <= limit):
        raise OptionError(f"kv_cache_tokens must be {rows}…{limit} for this bundle, not {tokens}")
    if not rows:
        return 0
    held = batch_size * capacity if tokens is None else tokens
    return held // rows


def plan(
    manifest: Manifest,
    batch_size: int,
    seq_len: int | None = None,
    models: Iterable[str] = (),
    tokens: int | None = None,
) -> MemoryPlan:
    """Return the memory plan of a bundle.

    Args:
        manifest: The bundle's manifest.
        batch_size: The number of sequences.
        seq_len: Plan as if the bundle were built for this length; None: the length it was built for.
        models: Names of the models that are loaded; empty: all.
        tokens: Tokens of all sequences together, in paged caches; None: as many as the slots have rows.
    """
    records = [record for name, record in manifest.models.items() if name in (tuple(models) or manifest.models)]
    length, nodes = seq_len or manifest.max_seq_len, manifest.buckets[-1]
    page = block_size(manifest)
    unit = max(64, page) if manifest.engines else 1
    rows = -(-(length + nodes) // unit) * unit
    cached = batch_size * rows if tokens is None else tokens
    cached = (cached // page + 1) * page if page else cached
    chunk = max((size["nodes"][2] for e in manifest.engines.values() for size in e.profiles.values()), default=nodes)
    return MemoryPlan(
        batch_size=batch_size,
        seq_len=length,
        weights=_weights(manifest, records),
        caches=sum(_row_bytes(manifest, record) * cached + _state_bytes(record, batch_size) for record in records),
        activations=max((manifest.engines[p].activations for r in records for p in _plans(manifest, r)), default=0),
        buffers=sum(_buffers(record, batch_size, nodes, rows, chunk) for record in records),
        graphs=len(manifest.buckets) * len(records) * GRAPH_BYTES if manifest.engines else 0,
    )


def check(
    manifest: Manifest,
    batch_size: int,
    free: int,
    models: Iterable[str] = (),
    tokens: int | None = None,
    weights: float | None = None,
) -> MemoryPlan:
    """Return the memory plan if it fits into the free memory.

    Args:
        manifest: The bundle's manifest.
        batch_size: The number of sequences.
        free: Free bytes on the device.
        models: Names of the models that are loaded; empty: all.
        tokens: Tokens of all sequences together, in paged caches; None: as many as the slots have rows.
        weights: The share of the target's weights that is on the device; None: all.

    Raises:
        OptionError: If the plan does not fit; it says what would.
    """
    streamed = int(_weights(manifest, [manifest.models["target"]]) * (0 if weights is None else 1 - weights))
    room = free + streamed

    def total(batch: int, length: int | None = None) -> int:
        return plan(manifest, batch, length, models, tokens).total

    wanted = plan(manifest, batch_size, None, models, tokens)
    if wanted.total <= room:
        return wanted
    fitting = max((b for b in range(1, batch_size) if total(b) <= room), default=0)
    length = _longest(manifest.max_seq_len, lambda length: total(batch_size, length) <= room)
    fewer = _fewer(manifest, wanted, room, models)
    ways = [f"load it with kv_cache_tokens={fewer}"] if fewer > 0 else []
    ways += [f"load it with batch_size={fitting}"] if fitting else []
    ways += [f"build it with --max-seq-len {length}"] if length else []
    needs = f"batch {batch_size} of {manifest.max_seq_len} tokens takes {(wanted.total - streamed) >> 20} MiB"
    advice = ", or ".join(ways) or "use a GPU with more memory, or a smaller model"
    raise OptionError(f"{needs}, {free >> 20} MiB are free: {advice}")


def _fewer(manifest: Manifest, wanted: MemoryPlan, free: int, models: Iterable[str]) -> int:
    """Return the largest kv_cache_tokens with which the plan fits, ≤ 0 if none does; 0 for linear caches."""
    page = block_size(manifest)
    if not page:
        return 0
    size = plan(manifest, wanted.batch_size, None, models, page).caches // 2  # of one page: the plan has page 0, too
    return ((free - wanted.total + wanted.caches) // size - 1) * page


def _longest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest sequence length, a multiple of 64 up to `limit`, for which a batch fits; 0 if none does."""
    return 64 * bisect_left(range(limit // 64), True, key=lambda blocks: not fits(64 * (blocks + 1)))


def _weights(manifest: Manifest, records: Iterable[ModelRecord]) -> int:
    """Return the bytes of all files in the folders of the models' graphs; what several graphs share counts once."""
    folders = {graph.rpartition("/")[0] + "/" for record in records for graph in record.graphs.values()}
    return sum(file.bytes for name, file in manifest.files.items() if name.startswith(tuple(folders)))


def _plans(manifest: Manifest, record: ModelRecord) -> list[str]:
    return [graph for graph in record.graphs.values() if graph in manifest.engines]


def cache_item_bytes(manifest: Manifest, record: ModelRecord) -> int:
    """Return the bytes of an element of a model's caches: 1 if they are FP8."""
    fp8 = any(manifest.engines[name].kv_cache_dtype == "fp8" for name in _plans(manifest, record))
    return 1 if fp8 else item_bytes(record.precision)


def _row_bytes(manifest: Manifest, record: ModelRecord) -> int:
    """Return the bytes of a token's keys and values and, on CPUs, hidden states (the host keeps a GPU's)."""
    values = record.row_values * cache_item_bytes(manifest, record)
    return values + (0 if manifest.descriptor.on_gpu else record.hidden * _ITEM_BYTES["fp32"])


def _state_bytes(record: ModelRecord, batch_size: int) -> int:
    """Return the bytes of the states of so many sequences, which CPUs alone have, in float32."""
    return batch_size * record.state_values * _ITEM_BYTES["fp32"]


def _buffers(record: ModelRecord, batch_size: int, nodes: int, rows: int, chunk: int) -> int:
    """Return the bytes of logits, masks and hidden states, with room for a prefill chunk, and of history and bias."""
    masks = len(record.windows) * max(batch_size * nodes, chunk) * rows
    hidden = 2 * record.hidden * _ITEM_BYTES["fp32"] * max(batch_size * nodes, chunk)
    return batch_size * record.vocab_size * (4 * nodes + 12) + masks + hidden
