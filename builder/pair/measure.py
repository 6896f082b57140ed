"""Builds a target and a draft into a temporary bundle, and measures it as `specbuild tune` does."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.quantize_options import MTP
from specbuild.builder.frontend import checkpoint as checkpoints
from specbuild.builder.frontend.eagle3_head import is_eagle
from specbuild.builder.frontend.vocabulary import Vocabulary, reconcile
from specbuild.builder.pipeline import build
from specbuild.measure.tuning import measure as tuning
from specbuild.measure.tuning import trees
from specbuild.measure.tuning.chances import Record
from specbuild.measure.tuning.decode import AUTO, OFF, Decoded, Decoder
from specbuild.measure.tuning.tune import OF_A_BUILD
from specbuild.runtime import Engine, Manifest, SamplingParams
from specbuild.runtime.requests.prompt_file import Request, read
from specbuild.runtime.speculation.controller import Controller
from specbuild.runtime.speculation.cost_model import CostModel
from specbuild.runtime.speculation.timing_table import Times, TimingTable
from specbuild.runtime.speculation.tree import BEST_DEPTH

from .verdict import judge, needed

CHAIN = f"chain:{BEST_DEPTH}"  # the draft's first choices, on which acceptance is measured


@dataclass(frozen=True)
class PairRequest:
    """Options of the measurements of `specbuild pair`. Raises OptionError for a bad temperature.

    Attributes:
        prompts: The prompts; specbuild's own if empty.
        new_tokens: Tokens that are decoded after each prompt.
        temperatures: The temperatures to measure.
        threads: Threads of the target, None for all.
        count: Use at most so many of specbuild's own prompts.
    """

    prompts: Sequence[Request] = ()
    new_tokens: int = 64
    temperatures: Sequence[float] = (0.0, tuning.TEMPERATURE)
    threads: int | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # raises OptionError


def weigh(target: str, draft: str, asked: PairRequest, progress: tuning.Progress = tuning.unseen) -> dict[str, Any]:
    """Return the JSON report of `specbuild pair` on two checkpoints; leave no files behind.

    Args:
        target: The target's folder, GGUF file or hub id.
        draft: The draft's, an EAGLE-3 head's, or "mtp".
        asked: What to measure with.
        progress: Called with what is being done, how much of it is done, and of how much (0 if unknown).

    Raises:
        CheckpointError: The draft cannot be used.
        SpecbuildError: Building or tuning failed.
    """
    progress("vocabularies", 0, 0)
    own = checkpoints.find(target)
    head = draft == MTP or is_eagle(checkpoints.read_config(draft))
    vocabulary = None if head else reconcile(own, checkpoints.find(draft))
    with tempfile.TemporaryDirectory(prefix="specbuild-pair-") as folder:
        bundle = Path(folder) / "pair.bundle"
        config = BuildConfig(target=target, draft=draft, output=bundle, max_batch_size=1, tune=False)
        build(config, lambda stage: progress(stage, 0, 0))
        wanted = tuning.Tuning(asked.prompts, asked.new_tokens, (1,), asked.threads, OF_A_BUILD.seconds, asked.count)
        table, report = tuning.measure(bundle, wanted, progress)
        with Engine.load(bundle, batch_size=1, threads=asked.threads, prefix_caching=False) as engine:
            vocabulary = vocabulary or _of_head(bundle, engine.manifest)
            longest = engine.manifest.max_seq_len - tuning.ROOM
            requests = asked.prompts or read(str(tuning.PROMPTS), {})[: asked.count]
            prompts = [engine.tokenizer.encode(each.prompt)[:longest] for each in requests]
            with engine.scheduler.exclusive() as loop:
                decoder = Decoder(engine, loop, asked.new_tokens)
                found = list[dict[str, Any]]()
                for temperature in asked.temperatures:
                    counted = _with_progress(f"temperature {temperature:g}", prompts, progress)
                    found.append(_at(temperature, decoder, counted, table, engine.manifest.buckets[-1] - 1))
    times = table["times"]["1"]
    steps = {name: times[part][0][1] for name, part in (("target", "verify"), ("draft", "draft"))}
    text = [token for prompt in prompts for token in prompt]
    result = {
        "target": target,
        "draft": draft,
        "machine": report["machine"],
        "vocabulary": vocabulary.to_dict() | {"of": len(own.tokenizer), "covered": vocabulary.covered(text)},
        "prompts": len(prompts),
        "new_tokens": asked.new_tokens,
        "step_seconds": steps,
        "step_ratio": steps["draft"] / steps["target"],
        "needed": needed(Times.of(times, BEST_DEPTH + 1)),
        "temperatures": found,
    }
    return result | judge(result)


def _of_head(bundle: Path, manifest: Manifest) -> Vocabulary:
    """Return the vocabulary of a head, whose tokens are the target's."""
    model, size = manifest.models["draft"], manifest.models["target"].vocab_size
    tokens = json.loads((bundle / model.tokens).read_text(encoding="utf-8")) if model.tokens else None
    return Vocabulary("identical", size, model.vocab_size, tokens and tuple(tokens), model.vocab_size)


def _with_progress(what: str, prompts: Sequence[list[int]], progress: tuning.Progress) -> Iterator[list[int]]:
    """Yield the prompts, reporting progress before each."""
    for number, prompt in enumerate(prompts):
        progress(what, number, len(prompts))
        yield prompt


def _at(
    temperature: float, decoder: Decoder, prompts: Iterable[list[int]], table: dict[str, Any], largest: int
) -> dict[str, Any]:
    """Return acceptance by depth, the most promising tree, and the speedup of `auto` with and without the draft."""
    sampled, probes, timings = temperature > 0, trees.names(trees.PROBES, largest), TimingTable.of(table, largest + 1)
    controllers = {
        name: Controller(CostModel(timings), has_model) for name, has_model in (("auto", True), ("lookup", False))
    }
    texts, records, chain = [], [], list[Record]()
    auto: dict[str, list[dict[str, Decoded]]] = {name: [] for name in controllers}
    for prompt in prompts:
        texts.append({name: decoder.decode(prompt, name, temperature) for name in (OFF, *probes)})
        plain = texts[-1][OFF]
        for name, controller in controllers.items():
            auto[name].append({OFF: plain, AUTO: decoder.decode(prompt, AUTO, temperature, controller)})
        records.append(decoder.replay(plain, probes[-1], every=True))
        chain += decoder.replay(plain, CHAIN, every=True)
    times = Times.of(table["times"]["1"], largest + 1, sampled)
    best = max(trees.promises(texts, records, times, largest), key=lambda tree: tree["speedup"])
    cumulative = np.diff(Record.sum(chain).reach()).tolist()
    pairs = zip(cumulative, [1.0, *cumulative], strict=False)
    return {
        "temperature": temperature,
        "accepted": [reached / before if before else 0.0 for reached, before in pairs],
        "accepted_cumulative": cumulative,
        "tree": best["tree"],
        "accepted_tokens": best["accepted"],
        "speedup": best["speedup"],
    } | {name: trees.overall(each, AUTO) for name, each in auto.items()}
