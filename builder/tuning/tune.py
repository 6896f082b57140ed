"""Tuning: measure on this machine and on real texts, choose the tree, and write the cost table into the bundle."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...runtime import Bundle, Engine, Prompt, SamplingParams
from ...runtime.bundle import MANIFEST, REPORT, file_record
from ...runtime.costs import FILE, SCHEMA, Times, machine
from ...runtime.engine import cores
from ...runtime.errors import OptionError
from ...runtime.loop import Loop
from ...runtime.metrics import RunStats
from ...runtime.sequence import Sequence as Request
from ...runtime.tree import BEST_DEPTH, BEST_EXPAND
from ..output import staging
from .chances import Record, RecordingDrafter, lookup_chances
from .sequoia import best_tree
from .times import host_times, step_times

SIZES = (1, 2, 4, 8, 16, 32)  # trees that are held against each other
LEAST, WIDEST = 8, 32  # nodes of a tree that the policy may grow: twice the best size's, which costs little more
CONTEXT = 256  # cached rows of measured steps, where the bundle's texts may be twice as long
TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}  # of calibration


@dataclass(frozen=True)
class Tuning:
    """What is asked for: prompts to calibrate with, tokens after each, and the sizes of batches to measure."""

    prompts: Sequence[Prompt]
    new_tokens: int
    batch_sizes: Sequence[int]
    threads: int | None = None

    def params(self, temperature: float = 0.0) -> SamplingParams:
        """Of every text."""
        return SamplingParams(max_new_tokens=self.new_tokens, temperature=temperature, seed=0, ignore_eos=True)


def tune(folder: Path, asked: Tuning, progress: Callable[[str], None] = lambda stage: None) -> dict[str, Any]:
    """Measure a bundle that runs on this CPU, write its cost table into it, and return what was found.

    Raises OptionError for a bundle that cannot be tuned, and whatever loading it raises; the bundle is then as it was.
    """
    bundle = Bundle.open(folder)
    if bundle.manifest.backend != "onnxruntime":
        raise OptionError(
            f"{folder} runs on {bundle.manifest.backend}: only bundles that run on a CPU can be tuned yet"
        )
    largest, rows = bundle.manifest.buckets[-1] - 1, min(CONTEXT, bundle.manifest.max_seq_len // 2)
    times = dict[str, Any]()
    for batch in sorted({1, *asked.batch_sizes}, reverse=True):
        with Engine.load(folder, batch_size=batch, threads=asked.threads, prefix_caching=False) as engine:
            engine.requests(list(asked.prompts), asked.params(), "raise")  # what is wrong is said before measuring
            progress(f"steps of batch {batch}")
            with engine.scheduler.exclusive() as loop:
                times = {str(batch): step_times(loop, largest, rows)} | times
            if batch == 1:
                texts = {name: _read(engine, asked, name, largest, progress) for name in TEMPERATURES}
                host = _host(engine, asked, texts["greedy"], largest)
    _settle(times, host)
    records = {name: each.record for name, each in texts.items()}
    chances = {name: each.chances() for name, each in texts.items()}
    costs = {"schema": SCHEMA, "machine": machine(asked.threads or cores()), "times": times, "chances": chances}
    sizes = _sizes(costs, records["greedy"], largest) if "draft" in bundle.manifest.models else []
    best = max(sizes, key=lambda size: size["speedup"], default=None)
    costs["widest"] = f"best:{min(largest, max(2 * best['nodes'], LEAST) if best else WIDEST)}"
    progress("writing")
    report = {
        "machine": costs["machine"],
        "prompts": len(asked.prompts),
        "new_tokens": asked.new_tokens,
        "trees": sizes,
    }
    report |= {name: _calibration(record, chances[name]) for name, record in records.items()}
    if best:
        report["tree"], report["speedup"] = best["tree"], best["speedup"]
    _write(bundle, costs, report)
    return report


@dataclass(frozen=True)
class _Texts:
    """What came of the prompts at one temperature: the texts, what came true of drafts, where the time went."""

    plain: list[Request]
    record: Record
    stats: dict[str, RunStats]  # of plain decoding, and of the widest trees

    def chances(self) -> dict[str, Any]:
        """As the cost table has them."""
        likely, chance = self.record.calibration() if self.record.likelihoods else ([0.0], [0.0])
        texts = [(request.history, request.metrics.num_prompt_tokens) for request in self.plain]
        return {
            "likely": likely,
            "chance": chance,
            "step": self.record.step(),
            "reach": self.record.reach(),
            "lookup": lookup_chances(texts),
        }


def _read(engine: Engine, asked: Tuning, name: str, largest: int, progress: Callable[[str], None]) -> _Texts:
    """Decode the prompts, plainly and with the widest trees."""
    progress(f"{name} texts")
    params, record = asked.params(TEMPERATURES[name]), Record()
    plain, stats = _decode(engine, asked.prompts, replace(params, speculation="off"))
    wide = stats
    if "draft" in engine.manifest.models:
        widest = replace(params, speculation=f"best:{min(largest, WIDEST)}")
        _, wide = _decode(engine, asked.prompts, widest, record)
    return _Texts(plain, record, {"plain": stats, "wide": wide})


def _host(engine: Engine, asked: Tuning, texts: _Texts, largest: int) -> dict[str, float]:
    """The loop's own times, by the texts and by trees of one level."""
    plain, wide = texts.stats["plain"], texts.stats["wide"]
    if "draft" not in engine.manifest.models:
        return host_times(plain, plain, plain, 1)
    _, short = _decode(engine, asked.prompts, replace(asked.params(), speculation="chain:1"))
    return host_times(plain, short, wide, min(BEST_DEPTH, largest))


def _decode(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, record: Record | None = None
) -> tuple[list[Request], RunStats]:
    """Texts one by one with the draft model alone, and where the time of rounds went that read no prompt."""
    requests, _ = engine.requests(list(prompts), params, "raise")
    parts = list[RunStats]()
    with engine.scheduler.exclusive() as whole:
        executor = whole.draft_executor
        drafter = RecordingDrafter(executor, whole.chunk, record or Record()) if executor else None
        loop = Loop(whole.target, drafter, whole.chunk, whole.eos)
        loop.reuses = False
        for request in requests:
            request.slot = 0
            while not request.output:
                loop.round([request])
            before = replace(loop.stats)
            while not request.finish_reason:
                loop.round([request])
            parts.append(loop.stats.since(before))
            loop.release(0)
            if request.error:
                raise request.error
    return requests, RunStats.sum(parts)


def _settle(times: dict[str, Any], host: dict[str, float]) -> None:
    """Every batch size has the loop's own times, which grow with it."""
    for batch, each in times.items():
        each.update({name: seconds * int(batch) for name, seconds in host.items()})


def _sizes(costs: dict[str, Any], record: Record, largest: int) -> list[dict[str, Any]]:
    """What trees of each size promise over plain decoding: best:N as drafted, and Sequoia's, whose shape is fixed."""
    times, found = Times.of(costs["times"]["1"], largest + 1), []
    for nodes in (size for size in SIZES if size <= largest):
        levels, wide = min(nodes, BEST_DEPTH), min(nodes, BEST_EXPAND)
        draft = float(times.draft[1]) + (levels - 1) * float(times.draft[wide]) + levels * times.level
        seconds = draft + float(times.verify[nodes + 1]) + times.round
        accepted, (fixed, parents) = record.accepted_of(nodes), best_tree(record.by_rank(), nodes)
        found.append(
            {
                "tree": f"best:{nodes}",
                "nodes": nodes,
                "accepted": accepted,
                "seconds": seconds,
                "speedup": (1 + accepted) * times.alone / seconds,
                "sequoia": {"accepted": fixed, "parents": parents},
            }
        )
    return found


def _calibration(record: Record, chances: dict[str, Any]) -> dict[str, Any]:
    """How good the draft's own word is, for the report."""
    if not record.likelihoods:
        return {}
    return {
        "trials": len(record.likelihoods),
        "calibration_error": record.error(chances["likely"], chances["chance"]),
        "accepted_by_depth_and_rank": record.by_rank(),
    }


def _write(bundle: Bundle, costs: dict[str, Any], report: dict[str, Any]) -> None:
    """The bundle with the cost table and the report in it, in place of what it was; other files are not copied."""
    build = json.loads(bundle.path(REPORT).read_text(encoding="utf-8"))
    contents = {FILE: costs, REPORT: build | {"tuning": report}}
    texts = {name: json.dumps(content, indent=2) + "\n" for name, content in contents.items()}
    folder = bundle.folder.resolve()
    with staging(folder, sum(map(len, texts.values()))) as new:
        for name in bundle.manifest.files.keys() - texts.keys():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            _link(bundle.path(name), new / name)
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
        records = {name: file_record(new / name) for name in texts}
        manifest = replace(bundle.manifest, files=dict(sorted((bundle.manifest.files | records).items())))
        (new / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def _link(file: Path, to: Path) -> None:
    """The same file under another name, or a copy where the file system has no such names."""
    try:
        os.link(file, to)
    except OSError:
        shutil.copy2(file, to)
