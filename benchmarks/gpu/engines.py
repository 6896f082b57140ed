"""Measure a bundle end to end on a GPU: its tokens against the CPU bundle's, and where the time of a round goes.

python -m benchmarks.gpu.engines BUNDLE [--cpu-bundle BUNDLE] [--out FOLDER] [--cudnn-attention] [--smoke]

Tokens: plain decoding and every tree, greedy and at temperature 0.8 with seeds, are compared with plain decoding of the
CPU's bundle and of this one; a difference is a near-tie if its margin is below the bundle's bound. Times: medians over
repeats in which all ways of decoding take turns; the cost of the same prompts with one new token is subtracted. Only
the model drafts, except in "default", which also uses lookup. "enqueue" runs without CUDA graphs. `models_ms`: the
round's steps of both models, measured alone, as graphs if possible; `glue_and_host_share`: the rest of a round. Each
part is written when it is done, so an interrupted run leaves results.

--cudnn-attention: ONNX Runtime's attention by cuDNN, written to another file, to be compared with the one without.
--smoke: fewer prompts and repeats; also on a CPU bundle, which has no graphs and no separately timed steps.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import machine, parser, prompts
from benchmarks.common import save as write
from benchmarks.gpu.steps import executors, steps
from specbuild.measure.exactness import Case, compare, plain
from specbuild.runtime import Engine, SamplingParams, SpecbuildError
from specbuild.runtime.decoding.device.loop import DeviceLoop

TREES = ("chain:4", "topk:2,3", "best:8", "best:16")
SAMPLED = 0.8
LONG = 512  # tokens of the prompt for the time to the first token
CUDNN = "ORT_ENABLE_CUDNN_FLASH_ATTENTION"  # a variable that ONNX Runtime reads when a session is created
Save = Callable[[], Any]


@dataclass(frozen=True)
class Scale:
    """The size of the benchmark."""

    prompts: int = 8
    new_tokens: int = 64
    repeats: int = 5
    batches: tuple[int, ...] = (1, 2, 4)
    trees: tuple[str, ...] = TREES


SMOKE = Scale(2, 8, 1, (1, 2), TREES[1:2])


@dataclass
class Way:
    """One way of decoding, and its measurements in each repeat."""

    engine: Engine
    params: SamplingParams
    rows: list[dict[str, float]]

    def turn(self, texts: list[list[int]]) -> None:
        """Decode all prompts, and once more for their first tokens only; record the difference."""
        whole, first = (self._run(texts, count) for count in (self.params.max_new_tokens, 1))
        self.rows.append({key: value - first[key] for key, value in whole.items()})

    def _run(self, texts: list[list[int]], count: int) -> dict[str, float]:
        before, started = self.engine.stats.to_dict(), time.perf_counter()
        results = self.engine.generate(texts, replace(self.params, max_new_tokens=count))
        seconds = time.perf_counter() - started
        for result in results:
            if result.error:
                raise result.error
        took = {key: value - before[key] for key, value in self.engine.stats.to_dict().items() if key != "loop_share"}
        return took | {"tokens": sum(len(result.token_ids) for result in results), "seconds": seconds}

    def medians(self) -> dict[str, Any]:
        """Return the medians of the rates, and of a round's parts in milliseconds."""

        def median(value: Callable[[dict[str, float]], float]) -> float:
            return statistics.median(value(row) for row in self.rows)

        def round_ms(key: str) -> float:
            return median(lambda row: row[key] / row["rounds"] * 1e3)

        return {
            "decode_tokens_per_s": median(lambda row: row["tokens"] / row["seconds"]),
            "tokens_per_round": median(lambda row: row["emitted"] / row["rounds"]),
            **{f"{part}_ms": round_ms(f"{part}_s") for part in ("draft", "verify", "host")},
            "round_ms": round_ms("total_s"),
            "host_share": median(lambda row: row["host_s"] / row["total_s"]),
        }


def row_of(cases: list[Case]) -> dict[str, Any]:
    """Return a row for comparisons: how many and of how many tokens, those that differ, and the widest margin."""
    divergences = [each for case in cases for each in case.divergences]
    return {
        "cases": len(cases),
        "tokens": sum(case.tokens for case in cases),
        "differing": len(divergences),
        "widest_margin": max((each.margin for each in divergences), default=0.0),
        "exact": all(case.exact for case in cases),
        "acceptance_length": max(case.mean_acceptance_length for case in cases),
    }


def exactness(
    bundle: Path, cpu: Path | None, texts: list[list[int]], scale: Scale, found: dict[str, Any], save: Save
) -> None:
    """Compare every way's tokens, also resident on a GPU, with plain decoding of the CPU's bundle and of this one.

    Args:
        bundle: The bundle.
        cpu: The CPU's bundle, if there is one.
        texts: Token ids of each prompt.
        scale: The size of the benchmark.
        found: The part of the result to fill in.
        save: Writes the result; called after each comparison.
    """
    greedy = [SamplingParams(max_new_tokens=scale.new_tokens, seed=i, ignore_eos=True) for i in range(len(texts))]
    asked = {"greedy": greedy, f"temperature {SAMPLED}": [replace(each, temperature=SAMPLED) for each in greedy]}
    expected: dict[str, dict[str, list[list[int]]]] = {}
    found |= {"exact": {}, "against": {}}
    if cpu:
        with Engine.load(cpu, prefix_caching=False) as engine:
            expected["the CPU's"] = {name: plain(engine, texts, each) for name, each in asked.items()}
            found["cpu_bundle"] = {
                "precision": engine.manifest.precision,
                "bound": engine.manifest.exactness_bound,
            }
    on_gpu = False
    for batch, resident in itertools.product((scale.batches[0], scale.batches[-1]), (False, True)):
        if resident and not on_gpu:
            continue
        with open_engine(bundle, batch, "model", resident=resident) as engine:
            kind, on_gpu = ", resident" if resident else "", isinstance(engine._loop, DeviceLoop)
            if not resident:
                found["bound"] = engine.manifest.exactness_bound
                found.setdefault("classes", {})[batch] = engine.exact and asdict(engine._loop.exactness)
                expected["its own"] = {name: plain(engine, texts, each) for name, each in asked.items()}
            for whose, tokens in expected.items():
                cases, rows = list[Case](), found["against"].setdefault(whose, {})
                for (name, each), tree in itertools.product(asked.items(), ("off", *scale.trees)):
                    params = [replace(one, speculation=tree) for one in each]
                    cases.append(compare(engine, f"{tree}, {name}", texts, params, tokens[name], whose != "its own"))
                    rows[f"batch {batch}{kind}"] = row_of(cases)
                    found["exact"][whose] = all(row["exact"] for row in rows.values())
                    save()
            found.setdefault("notes", {})[f"batch {batch}{kind}"] = list(engine.notes)


@contextmanager
def open_engine(
    bundle: Path, batch: int, drafter: Any, graphs: bool = True, resident: bool = False
) -> Iterator[Engine]:
    """Yield an engine of the bundle; without `graphs`, every step is enqueued instead of replayed as a CUDA graph."""
    with Engine.load(bundle, batch_size=batch, drafter=drafter, resident=resident, prefix_caching=False) as engine:
        loop: Any = engine._loop
        if not graphs:
            loop.rounds.device.graph = lambda enqueue, stream: enqueue
            for executor in executors(loop):
                executor.model.capturable = False  # ONNX Runtime's steps are graphs by themselves, too
        yield engine


def speeds(bundle: Path, texts: list[list[int]], batch: int, scale: Scale, found: dict[str, Any], save: Save) -> None:
    """Measure all ways of decoding at a batch size; at batch 1 on a GPU also without graphs, and resident.

    Args:
        bundle: The bundle.
        texts: Token ids of each prompt.
        batch: The batch size.
        scale: The size of the benchmark.
        found: The part of the result to fill in.
        save: Writes the result; called after each part.
    """
    greedy = SamplingParams(max_new_tokens=scale.new_tokens, seed=0, ignore_eos=True)
    trees = {tree: replace(greedy, speculation=tree) for tree in ("off", *scale.trees)}
    with ExitStack() as stack:
        model = stack.enter_context(open_engine(bundle, batch, "model"))
        loop, on_gpu = model._loop, isinstance(model._loop, DeviceLoop)
        if batch == 1:
            found[f"ttft_ms of {LONG} tokens"] = first_token(model, long_prompt(texts), scale.repeats)
            save()
        ways = {tree: Way(model, params, []) for tree, params in trees.items()}
        ways["off, sampled"] = Way(model, replace(trees["off"], temperature=SAMPLED), [])
        if batch == 1:
            both = stack.enter_context(open_engine(bundle, 1, None))
            ways["default"] = Way(both, replace(greedy, speculation="auto"), [])
            if on_gpu:
                bare = stack.enter_context(open_engine(bundle, 1, "model", graphs=False))
                ways |= {f"{tree}, enqueue": Way(bare, params, []) for tree, params in trees.items()}
                going = stack.enter_context(open_engine(bundle, 1, "model", resident=True))
                ways |= {f"{tree}, resident": Way(going, params, []) for tree, params in trees.items()}
        for way in ways.values():  # warm-up: compiles kernels, and the second use captures graphs
            for _ in range(2):
                way.turn(texts[: 2 * batch])
            way.rows.clear()
        for _ in range(scale.repeats):
            for way in ways.values():
                way.turn(texts)
            found["ways"] = {name: way.medians() for name, way in ways.items()}
            save()
        if isinstance(loop, DeviceLoop):
            steps(loop, list(trees) if batch == 1 else [], found)
            found["uncaptured"] = sorted(set(loop.notes))
            save()


def long_prompt(texts: list[list[int]]) -> list[int]:
    """Return a prompt of LONG tokens."""
    return [token for text in texts * LONG for token in text][:LONG]


def first_token(engine: Engine, tokens: list[int], repeats: int) -> float | None:
    """Return the median milliseconds from a prompt's admission to its first token; None if it does not fit."""
    if engine.manifest.max_seq_len <= len(tokens):
        return None
    params = SamplingParams(max_new_tokens=1, seed=0, speculation="off")
    metrics = [engine.generate([tokens], params)[0].metrics for _ in range(repeats + 1)][1:]
    return statistics.median((each.ttft - each.queue_time) * 1e3 for each in metrics if each)


def measure(bundle: Path, cpu: Path | None, scale: Scale, result: dict[str, Any], save: Save) -> None:
    """Run all parts and fill in the result, saving after each."""
    seconds = []
    for _ in range(2):  # the second load finds the kernels that the first compiled
        started = time.perf_counter()
        with open_engine(bundle, 1, None) as engine:
            seconds.append(round(time.perf_counter() - started, 2))
            manifest = engine.manifest
            texts = [engine.tokenizer.encode(text) for text in prompts()[: scale.prompts]]
    result |= {"backend": manifest.backend, "precision": manifest.precision, "load_s": seconds, "scale": asdict(scale)}
    result |= {"exactness": {}, "speed": {}}
    exactness(bundle, cpu, texts, scale, result["exactness"], save)
    for batch in scale.batches:
        if batch <= manifest.max_batch_size:
            speeds(bundle, texts, batch, scale, result["speed"].setdefault(f"batch {batch}", {}), save)
            result["after"] = machine()
            save()


def main() -> int:
    """Measure one bundle, saving after each part; return 1 if it fails, with the error in the file."""
    options = parser(__doc__)
    options.add_argument("bundle", type=Path)
    options.add_argument("--cpu-bundle", type=Path, help="whose tokens are expected")
    options.add_argument("--cudnn-attention", action="store_true", help="ONNX Runtime's attention by cuDNN")
    options.add_argument("--smoke", action="store_true", help="fewer, on any bundle")
    given = options.parse_args()
    if given.cudnn_attention:
        os.environ[CUDNN] = "1"
    result: dict[str, Any] = {"machine": machine(), "bundle": given.bundle.name, CUDNN: os.environ.get(CUDNN, "")}
    name = given.bundle.name.removesuffix(".bundle") + ("-cudnn" if given.cudnn_attention else "")
    save = partial(write, given.out / f"engines-{name}.json", result)
    try:
        measure(given.bundle, given.cpu_bundle, SMOKE if given.smoke else Scale(), result, save)
    except SpecbuildError as error:
        result["failed"] = str(error)
    print(save())
    return int("failed" in result)


if __name__ == "__main__":
    sys.exit(main())
