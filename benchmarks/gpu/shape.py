"""Measure a bundle of made-up weights on a GPU: steps by nodes, batch and context, prefill, and recorded rounds.

python -m benchmarks.gpu.shape BUNDLE [--batches 1,4,16,64] [--contexts 1024,8192,32768] [--seconds N] [--out FOLDER]

`scripts/gpu/make_shape.py` and `make_weights.py` make the bundle; its weights foretell every token, and `foretold` says
whether plain decoding and all rounds gave those. `steps_ms`: a step of so many nodes in every slot, alone, with so many
cached tokens in each; contexts that the card's memory does not hold are left out. `bandwidth_share`: of a step of one
node, weights and caches over the bandwidth of a copy in the same run. `ways`: decoding plainly, led by the
host or resident, and with the trees of `rounds.json` (rounds.py recorded them): as many nodes, of which as many are
right, in a chain. Drafting them costs nothing here, so a draft's own steps are to be added. A round drafts 15 nodes at
most, so all steps have 16. `glue_and_host_share`: a round beyond its step.

Each part is written when it is done; a part that would begin after `--seconds` is left out, and named in `left`.
--smoke: the smallest cases, for a toy.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import machine, parser
from benchmarks.common import save as write
from benchmarks.gpu.engines import Save, Way
from benchmarks.gpu.rounds import ROUNDS
from benchmarks.gpu.steps import step_ms
from specbuild.runtime import Engine, SamplingParams, SpecbuildError
from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.backends.gpu.cuda import Cuda
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.onnx_graph import GraphFile
from specbuild.runtime.backends.onnxruntime_cuda.parts_file import TYPES, PartsFile
from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import MANIFEST, Manifest
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.draft_limits import Limits
from specbuild.runtime.speculation.proposal import Proposal
from specbuild.runtime.speculation.tree import Tree

ROOM = 192  # tokens of a text beyond its context: what is decoded, and a step's nodes
PROMPTS = 1 << 14  # tokens of all prompts together, which every way reads in every turn
DRAFTED = 15  # nodes that a round drafts at most: with the root 16, which is a step's size
SHARE = 0.9  # of the card's free memory that a plan may take: graphs and ONNX Runtime's own are not in it


@dataclass(frozen=True)
class Scale:
    """The size of the benchmark."""

    batches: tuple[int, ...] = (1, 4, 16, 64)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    new_tokens: int = 96
    repeats: int = 3
    copied: int = 1 << 30  # bytes of the copies by which the bandwidth is measured


SMOKE = Scale((1, 2), (32, 64), 24, 1, 1 << 20)


class Replay:
    """Stands in for a loop's proposals: every sequence drafts what a recorded run's next round drafted.

    `step`: how far a token's number is from the one that it follows, which the weights foretell.
    """

    def __init__(self, proposals: Any, rounds: Seq[tuple[int, int]], step: int, vocabulary: int) -> None:
        self._planner, self._rounds = proposals.planner, itertools.cycle(rounds)
        self._step, self._vocabulary, self.on_host = step, vocabulary, proposals.on_host

    def plan(self, _: Any, sequences: Seq[Sequence]) -> list[tuple[Sequence, Proposal]]:
        """See `Proposals.plan`."""
        drafting = {sequence.slot for sequence in self._planner.drafting(sequences)}
        return [(each, Proposal(self._tree(each, each.slot in drafting))) for each in sequences]

    def _tree(self, sequence: Sequence, drafts: bool) -> Tree:
        root = sequence.tokens[-1]
        if not (drafts and sequence.budget):
            return Tree([root])
        nodes, accepted = (min(each, sequence.budget.nodes) for each in next(self._rounds))
        tokens = [root + self._step * at for at in range(accepted + 1)] + [root + 2 + accepted] * (nodes - accepted)
        return Tree.chain([token % self._vocabulary for token in tokens])


def shortened(bundle: Path, length: int, place: Path) -> Path:
    """Return the bundle as if it had been built for texts of `length` tokens: its files linked, its caches smaller."""
    manifest = Bundle.open(bundle).manifest
    for name in manifest.files:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(bundle / name, place / name)
    models = {n: replace(each, capacity=length + manifest.buckets[-1]) for n, each in manifest.models.items()}
    (place / MANIFEST).write_text(replace(manifest, max_seq_len=length, models=models).to_json(), encoding="utf-8")
    return place


def bytes_read(bundle: Bundle) -> int:
    """Return the bytes of weights that every step reads: all but tables in which rows are looked up."""
    (graph,) = bundle.manifest.models["target"].graphs.values()
    file = PartsFile.read(GraphFile.of(bundle, graph))
    looked_up = {each.cos for each in file.attentions} | {each.sin for each in file.attentions}
    tables = [name for name in file.weights if name.startswith(("model.embed_tokens.weight", "lm_head.weight"))]
    if len(tables) > 1:  # a head of its own
        looked_up.add(max(name for name in tables if "_panels" not in name and not name.endswith(".T")))
    read = [each for name, each in file.weights.items() if name not in looked_up]
    return sum(math.prod(each.shape) * TYPES[each.dtype].itemsize for each in read)


def fitting(manifest: Manifest, batch: int, contexts: Seq[int]) -> list[int]:
    """Return the contexts for which a batch fits the bundle and the card's free memory."""
    device = Cuda()
    free = device.memory[0] * SHARE
    device.close()
    return [
        context
        for context in contexts
        if context + ROOM <= manifest.max_seq_len
        and memory_plan.plan(manifest, batch, context + ROOM).total <= free
        and batch <= manifest.max_batch_size
    ]


def fill(executor: StandardExecutor, before: int, context: int) -> float:
    """Read a slot's tokens from row `before` to `context`, copy them to all slots; return the tokens read a second."""
    started, chunk = time.perf_counter(), executor.model.chunk
    for first in range(before, context, chunk):
        rows = range(first, min(first + chunk, context))
        executor.step([StepInput(0, first, first, [row % 1000 for row in rows], rows, None, 1)])
    seconds = time.perf_counter() - started
    for slot in range(1, executor.batch_size):
        executor.copy(slot, 0, context)
    return (context - before) / seconds


def steps(executor: StandardExecutor, context: int) -> dict[str, float]:
    """Return the milliseconds of a step of each bucket, with so many cached tokens in every slot."""
    found = {}
    for nodes in executor.model.buckets:
        rows = range(context, context + nodes)
        slots = range(executor.batch_size)
        executor.step(
            [StepInput(slot, context, context, [row % 1000 for row in rows], rows, None, 1) for slot in slots]
        )
        found[str(nodes)] = step_ms(executor, nodes)
    return found


def foretold(engine: Engine, texts: list[list[int]], params: SamplingParams, step: int) -> bool:
    """Return whether every token is the one that the weights foretell; raise what failed."""
    for text, result in zip(texts, engine.generate(texts, params), strict=True):
        if result.error:
            raise result.error
        tokens = [text[-1] + step * at for at in range(1, len(result.token_ids) + 1)]
        if list(result.token_ids) != [token % engine.manifest.models["target"].vocab_size for token in tokens]:
            return False
    return True


def decode(
    engine: Engine, context: int, scale: Scale, models_ms: dict[str, float], found: dict[str, Any], save: Save
) -> None:
    """Measure plain decoding and every recorded way of drafting, in turns, with so many tokens before each text.

    Args:
        engine: The engine.
        context: Tokens of each prompt at most; of many they have fewer.
        scale: The size of the benchmark.
        models_ms: The milliseconds of a step by nodes, for so many tokens.
        found: The part of the result to fill in.
        save: Writes the result; called after each turn.
    """
    loop: Any = engine._loop
    batch, executor, proposals, resident = loop.target.batch_size, loop.target, loop.proposals, loop.resident
    found["prompt_tokens"] = length = min(context, PROMPTS // batch)
    texts = [[(97 * slot + at) % 1000 for at in range(length)] for slot in range(batch)]
    plain = SamplingParams(max_new_tokens=scale.new_tokens, seed=0, ignore_eos=True, speculation="off")
    drafted = replace(plain, speculation=f"chain:{min(DRAFTED, executor.buckets[-1] - 1)}")
    first = engine.generate(texts[:1], replace(plain, max_new_tokens=1))[0]
    step = first.token_ids[0] - texts[0][-1] if first.token_ids else -1
    if step not in (0, 1):
        raise ExecutionError(f"the first token is {step} from the last, not 0 or 1: are these made-up weights?")
    recorded = {
        name: [tuple(each) for each in rounds] for name, rounds in json.loads(ROUNDS.read_text())["ways"].items()
    }
    ways = {name: Way(engine, plain, []) for name in ("off", *(["off, resident"] if resident else []))}
    models = dict.fromkeys(ways, models_ms[str(executor.bucket(1))])
    for name, rounds in recorded.items():
        ways[name] = Way(engine, drafted, [])
        models[name] = statistics.mean(models_ms[str(executor.bucket(1 + nodes))] for nodes, _ in rounds)
    for turn in range(scale.repeats + 1):
        for name, way in ways.items():
            loop.resident = resident if name == "off, resident" else None
            if name in recorded:
                loop.proposals = Replay(proposals, recorded[name], step, executor.spec.vocab_size)
            if turn:
                way.turn(texts)
            else:  # warm-up
                found.setdefault("foretold", {})[name] = foretold(engine, texts, way.params, step)
            loop.proposals, loop.resident = proposals, resident
        if turn:
            found["ways"] = {name: way.medians() for name, way in ways.items()}
            for name, row in found["ways"].items():
                row["models_ms"] = models[name]
                if batch == 1:  # more sequences take the largest of their steps
                    row["glue_and_host_share"] = 1 - models[name] / row["round_ms"]
            save()


def measure(bundle: Path, scale: Scale, until: float, result: dict[str, Any], save: Save) -> None:
    """Measure all batches; see the module.

    Args:
        bundle: The bundle.
        scale: The size of the benchmark.
        until: When no part may begin any more, by `time.perf_counter`.
        result: The result to fill in.
        save: Writes the result; called after each part.
    """
    opened, device = Bundle.open(bundle), Cuda()
    manifest, weights, bandwidth = opened.manifest, bytes_read(opened), device.measure_bandwidth(scale.copied)
    device.close()
    record = manifest.models["target"]
    result |= {"source": record.source, "precision": manifest.precision, "weights_bytes": weights}
    result |= {"bandwidth_bytes_per_s": bandwidth, "batches": {}, "left": []}
    for batch in scale.batches:
        contexts, found = fitting(manifest, batch, scale.contexts), result["batches"].setdefault(str(batch), {})
        if not contexts or time.perf_counter() > until:
            result["left"].append(f"batch {batch}: {'no time' if contexts else 'no context fits'}")
            continue
        with tempfile.TemporaryDirectory(dir=bundle.parent) as place:
            started = time.perf_counter()
            short = shortened(bundle, contexts[-1] + ROOM, Path(place) / bundle.name)
            limits = Limits(max_draft_tokens=min(DRAFTED, manifest.buckets[-1] - 1))
            with Engine.load(short, batch_size=batch, limits=limits, prefix_caching=False) as engine:
                found["load_s"] = time.perf_counter() - started
                executor, before = engine._loop.target, 0
                kept = executor.exactness
                executor.keep_to(None)
                for context in contexts:
                    if time.perf_counter() > until:
                        result["left"].append(f"batch {batch}, context {context}: no time")
                        break
                    row = found.setdefault("contexts", {})[str(context)] = {}
                    row["prefill_tokens_per_s"], before = fill(executor, before, context), context
                    row["steps_ms"] = found_steps = steps(executor, context)
                    read = weights + batch * context * record.row_values * memory_plan.item_bytes(record.precision)
                    row["bandwidth_share"] = read / (found_steps["1"] / 1e3) / bandwidth
                    save()
                executor.keep_to(kept)
                for slot in range(batch):
                    executor.commit(slot, (), 0)
                decode(engine, contexts[0], scale, found["contexts"][str(contexts[0])]["steps_ms"], found, save)
                found["notes"] = sorted({*engine.notes, *engine._loop.notes})
    result["after"] = machine()


def main() -> int:
    """Measure one bundle, saving after each part; return 1 if it fails, with the error in the file."""
    options = parser(__doc__)
    options.add_argument("bundle", type=Path)
    options.add_argument("--batches", help="such as 1,16")
    options.add_argument("--contexts", help="such as 1024,32768, ascending")
    options.add_argument("--seconds", type=float, default=600.0, help="after which no part begins")
    options.add_argument("--smoke", action="store_true", help="the smallest cases")
    given = options.parse_args()
    until, scale = time.perf_counter() + given.seconds, SMOKE if given.smoke else Scale()
    for name in ("batches", "contexts"):
        if text := getattr(given, name):
            scale = replace(scale, **{name: tuple(map(int, text.split(",")))})
    result: dict[str, Any] = {"machine": machine(), "bundle": given.bundle.name}
    save = partial(write, given.out / f"{given.bundle.name.removesuffix('.bundle')}.json", result)
    try:
        measure(given.bundle, scale, until, result, save)
    except SpecbuildError as error:
        result["failed"] = str(error)
    print(save())
    return int("failed" in result)


if __name__ == "__main__":
    sys.exit(main())
