"""Tuning's measurements: step times, acceptance rates, and the resulting speedups."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.measure.bench.measure import prepare
from specbuild.measure.roofline import Steps
from specbuild.runtime import Bundle, Engine, LoadOptions, Manifest, SamplingParams
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.prompt_file import Request, read
from specbuild.runtime.speculation.controller import Controller
from specbuild.runtime.speculation.cost_model import CostModel
from specbuild.runtime.speculation.timing_table import SCHEMA, Times, TimingTable
from specbuild.runtime.speculation.tree import BEST_DEPTH

from . import times, trees
from .chances import Record, begun
from .decode import AUTO, OFF, Decoded, Decoder

# Nodes of the widest tree that `auto` may grow: twice the best size, at least LEAST; WIDEST without a draft model.
LEAST, WIDEST = 8, 32
TEMPERATURE = 0.8  # of the sampled texts
ROOM = 2 * BEST_DEPTH  # tokens that must fit after a prompt
SHORTEST = 2 * ROOM  # minimum max_seq_len of a bundle that can be tuned
FEWEST = 2  # prompts that run whatever time they take
TURNS = 2  # turns of each batch size's steps; those of batch 1 get one more for each prompt
PROMPTS = Path(__file__).with_name("prompts.jsonl")  # the built-in prompts
Progress = Callable[[str, int, int], None]  # activity, items done, items in all (0: not counted)
Found = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class Tuning:
    """Options of tuning: prompts (default: built-in ones), tokens after each, and batch sizes (default: all).

    `count`: at most so many built-in prompts. `seconds`: time after which no further prompt is begun, but FEWEST run
    in any case.
    """

    prompts: Sequence[Request] = ()
    new_tokens: int = 64
    batch_sizes: Sequence[int] = ()
    threads: int | None = None
    seconds: float = math.inf
    count: int | None = None


@dataclass(frozen=True)
class Measurements:
    """The texts of the prompts, and what would have been drafted in them; an entry for each prompt in each list."""

    probes: list[dict[str, Decoded]] = field(default_factory=list)  # greedy: plain, and with the PROBES trees
    sampled: list[dict[str, Decoded]] = field(default_factory=list)  # like the probes, at TEMPERATURE
    records: list[list[Record]] = field(default_factory=list)  # largest probe tree at every token of the greedy text
    sampled_records: list[list[Record]] = field(default_factory=list)  # the same tree at rounds of the sampled text


def unseen(what: str, done: int, total: int) -> None:
    """Ignore progress."""


def measure(folder: Path, options: Tuning, progress: Progress = unseen) -> Found:
    """Measure a bundle; return its timing table and the report on it, for JSON.

    Args:
        folder: The bundle.
        options: Its options.
        progress: Told of every step of progress.

    Raises:
        OptionError: The bundle cannot be tuned, or a prompt leaves no room.
        PromptError: A prompt cannot run.
    """
    manifest = Bundle.open(folder).manifest
    if reason := untunable(manifest):
        raise OptionError(f"{folder} {reason}")
    largest, steps_by_batch = manifest.buckets[-1] - 1, dict[int, Any]()
    drafts, kind = "draft" in manifest.models, manifest.models["draft"].kind if "draft" in manifest.models else None
    for batch in sorted({1, *(options.batch_sizes or map(int, manifest.models["target"].graphs))}, reverse=True):
        load = LoadOptions(batch_size=batch, threads=options.threads, prefix_caching=False)
        engine = Engine.load(folder, load, resident=False)
        with engine, engine.scheduler.exclusive() as loop:
            prompts, decoder = _prompts(engine, options), Decoder(engine, loop, options.new_tokens)
            progress(what := f"steps of batch {batch}", 0, TURNS)
            steps = times.steps_of(loop, largest + 1, manifest.max_seq_len)
            for turn in range(TURNS):
                progress(what, turn, TURNS)
                steps.turn()
            if batch == 1:
                numbered = _in_time(prompts, options.seconds, "texts", progress)
                texts = _look(decoder, numbered, largest if drafts else 0, steps)
            steps_by_batch[batch] = times.pairs(steps)
            if batch == 1:
                table, report = _conclude(steps_by_batch, texts, largest, loop.target.identity, kind == "parallel")
                turns = _in_time(prompts, options.seconds / 3, AUTO, progress)
                controller = Controller(CostModel(TimingTable.of(table, largest + 1)), drafts)
                auto = [_take_turns(decoder, each, number, controller) for number, each in turns]
    report |= {"new_tokens": options.new_tokens, AUTO: trees.overall(auto, AUTO)}
    return table, report


def _conclude(steps: dict[int, Any], texts: Measurements, largest: int, here: dict[str, Any], together: bool) -> Found:
    """Return the timing table, and the part of the report that follows from it and from the texts."""
    nodes = min(trees.SIZES[-1], largest)
    greedy = Record.sum(record for each in texts.records for record in begun(each, nodes))
    sampled = Record.sum(record for each in texts.sampled_records for record in each)
    times_table = times.times_of(steps, texts.probes, texts.sampled, float(np.mean(greedy.depths or 1)), together)
    chances = {"greedy": greedy.chances(each[OFF].text for each in texts.probes)}
    chances["sampled"] = sampled.chances(each[OFF].text for each in texts.sampled)
    report: dict[str, Any] = {"machine": here, "prompts": len(texts.probes), "trees": []}
    report |= {"greedy": greedy.trust(), "sampled": sampled.trust()}
    widest = WIDEST
    if texts.records:
        times_alone = Times.of(times_table["1"], largest + 1)
        report["trees"] = trees.promises(texts.probes, texts.records, times_alone, largest)
        best = max(report["trees"], key=lambda tree: tree["speedup"])
        report |= {name: best[name] for name in ("tree", "speedup")}
        widest = max(2 * best["nodes"], LEAST)
    table = {"schema": SCHEMA, "machine": here, "widest": f"best:{min(widest, largest)}"}
    return table | {"times": times_table, "chances": chances}, report


def untunable(manifest: Manifest) -> str | None:
    """Return why a bundle cannot be tuned, as the end of a sentence; None if it can."""
    if manifest.max_seq_len < SHORTEST:
        return f"has texts of {manifest.max_seq_len} tokens at most: too short to tune it by them"
    return None


def _prompts(engine: Engine, options: Tuning) -> list[list[int]]:
    """Return the prompts' token ids; built-in ones are cut to half of max_seq_len.

    Raises PromptError or OptionError for a given prompt that cannot run or leaves no room.
    """
    longest = engine.manifest.max_seq_len
    if not options.prompts:
        ours = read(str(PROMPTS), {})[: options.count]
        return [engine.tokenizer.encode(each.prompt)[: longest // 2] for each in ours]
    cases = prepare(engine, [replace(each, params=SamplingParams()) for each in options.prompts])
    for request, case in zip(options.prompts, cases, strict=True):
        if longest - len(case.tokens) < ROOM:
            raise OptionError(f"{request.where}: leaves no room for {ROOM} tokens in {longest}: give a shorter one")
    return [case.tokens for case in cases]


def _look(decoder: Decoder, prompts: Iterable[tuple[int, list[int]]], largest: int, steps: Steps) -> Measurements:
    """Decode the prompts in every way that tuning needs, with a turn of the steps after each.

    `largest`: nodes of the largest tree; 0 without a draft model.
    """
    texts = Measurements()
    probes = trees.names(trees.PROBES, largest) if largest else []
    for _, prompt in prompts:
        texts.probes.append({name: decoder.decode(prompt, name) for name in (OFF, *probes)})
        texts.sampled.append({name: decoder.decode(prompt, name, TEMPERATURE) for name in (OFF, *probes)})
        for tree in probes[-1:]:  # every token of the greedy text: records of all tree sizes' rounds follow from it
            texts.records.append(decoder.replay(texts.probes[-1][OFF], tree, every=True))
            texts.sampled_records.append(decoder.replay(texts.sampled[-1][OFF], tree, every=False))
        steps.turn()
    return texts


def _take_turns(decoder: Decoder, prompt: list[int], number: int, controller: Controller) -> dict[str, Decoded]:
    """Decode a prompt plainly and by `auto`; every other prompt begins with `auto`."""
    order = (OFF, AUTO) if number % 2 == 0 else (AUTO, OFF)
    return {name: decoder.decode(prompt, name, controller=controller if name == AUTO else None) for name in order}


def _in_time(
    prompts: Sequence[list[int]], seconds: float, what: str, progress: Progress
) -> Iterator[tuple[int, list[int]]]:
    """Yield the numbered prompts until the time is up, but at least FEWEST of them."""
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        if number < FEWEST or time.perf_counter() - started < seconds:
            progress(what, number, len(prompts))
            yield number, prompt
