"""What a bundle takes of a device's memory, planned from the manifest before anything is allocated.

Weights are the bytes of plans, or of graphs and their weight files. Caches are linear, every slot has all its rows; or
pages, by default as many as that, and one that is nobody's.
Activations are the build's estimate of an engine's, until it says how much it wants. Buffers are what steps read and
write: logits, masks, and what is known of every token. Graphs are an allowance: nobody can ask a driver beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from specbuild.runtime.errors import OptionError

from .manifest import Manifest, ModelRecord

_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
GRAPH_BYTES = 1 << 20  # of a captured graph: an allowance


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by what takes them, for `batch_size` texts of `seq_len` tokens at most."""

    batch_size: int
    seq_len: int
    weights: int
    caches: int
    activations: int
    buffers: int
    graphs: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.caches + self.activations + self.buffers + self.graphs

    def to_dict(self) -> dict[str, int]:
        """For report.json."""
        return asdict(self) | {"total": self.total}


def item_bytes(precision: str) -> int:
    """Of a number in a cache: of what a model computes in, which a quantized one's precision ends with, on GPUs."""
    return _ITEM_BYTES.get(precision.rpartition("/")[2], _ITEM_BYTES["fp32"])


def block_size(manifest: Manifest) -> int:
    """Rows of a page of a bundle's caches; 0 where they are linear."""
    return max((engine.block_size for engine in manifest.engines.values()), default=0)


def pages(manifest: Manifest, batch_size: int, tokens: int | None = None) -> int:
    """Pages that texts of `tokens` tokens together have, by default as many as the slots' rows; 0 for linear caches.

    Raises OptionError for tokens that the bundle was not built for.
    """
    rows, capacity = block_size(manifest), manifest.models["target"].capacity
    limit = manifest.max_batch_size * capacity
    if tokens is not None and not rows:
        raise OptionError("the bundle's caches are not paged: drop kv_cache_tokens, or build it with --block-size")
    if tokens is not None and (type(tokens) is not int or not rows <= tokens <= limit):
        raise OptionError(f"kv_cache_tokens must be {rows}…{limit} for this bundle, not {tokens}")
    return (batch_size * capacity if tokens is None else tokens) // rows if rows else 0


def plan(
    manifest: Manifest,
    batch_size: int,
    seq_len: int | None = None,
    models: Iterable[str] = (),
    tokens: int | None = None,
) -> MemoryPlan:
    """The plan of a bundle, for the length it was built for by default, or as it would be built for `seq_len`.

    models: what is loaded of it, everything by default. tokens: in paged caches, of all texts together.
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
        caches=sum(_row_bytes(manifest, record) * cached for record in records),
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
    """The plan where it fits into `free` bytes; raises OptionError with what would fit.

    tokens: as in `plan`. weights: the part of the target's that is on the device, None for all.
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
    """How many tokens paged caches may have for a plan to fit that does not; none are positive where there are none."""
    page = block_size(manifest)
    if not page:
        return 0
    size = plan(manifest, wanted.batch_size, None, models, page).caches // 2  # of a page, and of nobody's
    return ((free - wanted.total + wanted.caches) // size - 1) * page


def _longest(limit: int, fits: Callable[[int], bool]) -> int:
    """The longest text, in steps of 64 tokens up to `limit`, for which a batch would fit; 0: none."""
    low, high = 0, limit // 64
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(64 * middle) else (low, middle - 1)
    return 64 * low


def _weights(manifest: Manifest, records: Iterable[ModelRecord]) -> int:
    """Everything in the folders of the models' graphs, once however many graphs share it."""
    folders = {graph.rpartition("/")[0] + "/" for record in records for graph in record.graphs.values()}
    return sum(file.bytes for name, file in manifest.files.items() if name.startswith(tuple(folders)))


def _plans(manifest: Manifest, record: ModelRecord) -> list[str]:
    return [graph for graph in record.graphs.values() if graph in manifest.engines]


def cache_item_bytes(manifest: Manifest, record: ModelRecord) -> int:
    """Of a number in a model's caches: one where they are FP8."""
    fp8 = any(manifest.engines[name].kv_cache_dtype == "fp8" for name in _plans(manifest, record))
    return 1 if fp8 else item_bytes(record.precision)


def _row_bytes(manifest: Manifest, record: ModelRecord) -> int:
    """Keys and values of one token in all layers, and its hidden states; beside a GPU the host keeps those."""
    values = 2 * record.layers * record.kv_heads * record.head_dim * cache_item_bytes(manifest, record)
    return values + (0 if manifest.descriptor.on_gpu else record.hidden * _ITEM_BYTES["fp32"])


def _buffers(record: ModelRecord, batch_size: int, nodes: int, rows: int, chunk: int) -> int:
    """Logits, masks with room for a prompt's chunk, and what every token of the vocabulary has: history and bias."""
    masks = len(record.windows) * max(batch_size * nodes, chunk) * rows
    hidden = 2 * record.hidden * _ITEM_BYTES["fp32"] * max(batch_size * nodes, chunk)
    return batch_size * record.vocab_size * (4 * nodes + 12) + masks + hidden
