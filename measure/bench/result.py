"""A benchmark's result as one JSON object."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

from specbuild.runtime import Bundle, RunStats, TreeSpec
from specbuild.runtime.backends.cpu.cores import cores
from specbuild.runtime.backends.cpu.machine import processor
from specbuild.runtime.bundle.manifest import MANIFEST, Manifest
from specbuild.runtime.speculation.timing_table import FILE

from .measure import BASELINE, Sample, Turn
from .statistics import acceptance, latency, speedup

SCHEMA_VERSION = 2
PARTS = ("draft", "verify", "accept", "commit", "host")  # parts of a round
LATENCIES = ("ttft", "tpot", "itl", "e2el")
POLICY = "policy"  # the tree of a tuned bundle's "auto": the policy decides each round


def build(bundle: Bundle, command: str, settings: dict[str, Any], measured: dict[int, dict[str, list[Turn]]]) -> Any:
    """Return the result object, of JSON types only.

    Args:
        bundle: The bundle.
        command: The command line.
        settings: The benchmark's settings, among them `seed`.
        measured: The turns by concurrency and contender, the baseline first.
    """
    manifest = bundle.manifest
    models = {
        name: {"source": record.source, "parameters": record.parameters, "precision": record.precision}
        for name, record in manifest.models.items()
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "machine": {
            "cpu": processor(),
            "cores": cores(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("specbuild-trt", "onnxruntime", "numpy")},
        },
        "bundle": {
            "path": str(bundle.folder),
            "digest": json.loads((bundle.folder / MANIFEST).read_text(encoding="utf-8"))["digest"],
            "backend": manifest.backend,
            "default_tree": manifest.default_tree,
            "timings": json.loads(bundle.path(FILE).read_text(encoding="utf-8"))["times"]
            if FILE in manifest.files
            else None,
            "models": models,
        },
        "settings": settings,
        "runs": [
            _run(concurrency, name, turns, contenders[BASELINE], _tree(name, manifest), settings["seed"])
            for concurrency, contenders in measured.items()
            for name, turns in contenders.items()
        ],
    }


def _tree(name: str, manifest: Manifest) -> dict[str, Any]:
    """Return a contender's tree and its nodes; "auto" of a tuned bundle has no fixed number of nodes."""
    if name == BASELINE:
        return {"tree": None, "nodes": 0}
    if name == "auto" and FILE in manifest.files:
        return {"tree": POLICY, "nodes": None}
    tree = TreeSpec.parse(manifest.default_tree if name == "auto" else name)
    return {"tree": tree.text, "nodes": tree.nodes}


def _run(
    concurrency: int, name: str, turns: Sequence[Turn], baseline: Sequence[Turn], tree: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Return the results of one contender at one concurrency."""
    samples, plain = ([sample for turn in each for sample in turn.samples] for each in (turns, baseline))
    seconds, tokens = sum(turn.seconds for turn in turns), sum(len(sample.tokens) for sample in samples)
    categories = sorted({sample.category for sample in samples if sample.category is not None})
    return {
        "concurrency": concurrency,
        "speculation": name,
        **tree,
        "completed": len(samples),
        "total_output_tokens": tokens,
        "ended_after_one_token": sum(len(sample.tokens) == 1 for sample in samples),
        "outputs_equal_to_baseline": sum(a.tokens == b.tokens for a, b in zip(samples, plain, strict=True)),
        "duration": seconds,
        "output_throughput": tokens / seconds,
        "wall_speedup": speedup(_wall_costs(baseline), _wall_costs(turns), seed),
        "decode_speedup": speedup(_decode_costs(baseline), _decode_costs(turns), seed),
        **_latencies(samples),
        "speculative_decoding": acceptance([sample.drafting for sample in samples]),
        "round": _round([turn.stats for turn in turns]),
        "categories": {each: _category(each, samples, plain, seed) for each in categories},
    }


def _category(category: str, samples: Sequence[Sample], plain: Sequence[Sample], seed: int) -> dict[str, Any]:
    """Return the results of one category, without wall times: its requests share rounds with those of others."""
    own, theirs = ([sample for sample in each if sample.category == category] for each in (samples, plain))
    before, now = ([sample.decode for sample in each] for each in (theirs, own))
    return {
        "completed": len(own),
        "decode_speedup": speedup(before, now, seed),
        **_latencies(own),
        "speculative_decoding": acceptance([sample.drafting for sample in own]),
    }


def _decode_costs(turns: Iterable[Turn]) -> list[tuple[float, int]]:
    """Return, for each group, its requests' seconds after their first tokens, and the tokens that came in them."""
    return [(sum(s.decode[0] for s in turn.samples), sum(s.decode[1] for s in turn.samples)) for turn in turns]


def _wall_costs(turns: Iterable[Turn]) -> list[tuple[float, int]]:
    """Return, for each group, the seconds from its submission to its last token, and all its tokens."""
    return [(turn.seconds, sum(len(sample.tokens) for sample in turn.samples)) for turn in turns]


def _latencies(samples: Sequence[Sample]) -> dict[str, float | None]:
    return {
        **latency("ttft", [sample.ttft for sample in samples]),
        **latency("tpot", [sample.tpot for sample in samples if len(sample.tokens) > 1]),
        **latency("itl", [seconds for sample in samples for seconds in sample.itl]),
        **latency("e2el", [sample.e2el for sample in samples]),
    }


def _round(parts: Sequence[RunStats]) -> dict[str, Any]:
    """Return the mean round in milliseconds; `total_ms` is the sum of the parts. Prefill rounds are included."""
    total = RunStats.sum(parts)
    each = {f"{name}_ms": getattr(total, name) / total.rounds * 1e3 for name in (*PARTS, "total")}
    return {"rounds": total.rounds, "tokens": total.emitted / total.rounds, **each}
