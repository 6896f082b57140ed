"""Measure the gain of the graph passes and of narrow weights: step times as ratios in one run, and the quality lost.

python -m benchmarks.cpu.graphs [--out FILE]

All cores, batch 1, over 256 committed rows. "unfused" is the exported graph, lowered without any pass and run as it is;
"unfused_optimized" adds ONNX Runtime's own optimizations. Times of the passes are medians of steps in turns; those of
precisions are the shortest, in turns. The divergence is KL(float32 ‖ quantized) per token of the prompts' text, which
was not used for calibration. Bundles are kept in benchmarks/out.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import OUT, PAIR, bundles, machine, parser, prompts, save, specbuild
from specbuild.builder import passes
from specbuild.builder.check.step_times import NODES as STEP_NODES
from specbuild.builder.check.step_times import step_times
from specbuild.builder.frontend import checkpoint
from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.export import export
from specbuild.builder.lower.onnxruntime import lower, pack
from specbuild.measure.divergence import kl
from specbuild.runtime import Bundle, Engine, SamplingParams
from specbuild.runtime.backends.cpu import executor as onnxruntime_cpu
from specbuild.runtime.backends.executor import Executor, ModelSpec, StepInput

COMMITTED, CAPACITY, NODES = 256, 512, (1, 2, 6, 12, 16, 64)
TURNS, STEPS, WARM = 15, 20, 5
PRECISIONS = ("int8", "int8:static", "int4")
KL_TOKENS, NEW_TOKENS, TEXTS = 400, 64, 10  # tokens of a prompt for the divergence; tokens and texts for the rates


def medians(executors: dict[str, Executor], share: StepInput) -> dict[str, float]:
    """Return each model's median milliseconds per step, in turns of 20 steps: spinning thread pools would compete."""
    times: dict[str, list[float]] = {name: [] for name in executors}
    for _ in range(TURNS):
        for name, executor in executors.items():
            time.sleep(0.02)
            for step in range(STEPS + WARM):
                before = executor.seconds
                executor.step([share])
                if step >= WARM:
                    times[name].append((executor.seconds - before) * 1e3)
    return {name: float(np.median(values)) for name, values in times.items()}


def fusion() -> dict[str, Any]:
    """Measure steps of the reference target with and without the passes."""
    import onnx_ir as ir
    from onnxruntime import GraphOptimizationLevel  # after specbuild, which turns its telemetry off

    levels = {
        "unfused": GraphOptimizationLevel.ORT_DISABLE_ALL,
        "unfused_optimized": GraphOptimizationLevel.ORT_ENABLE_ALL,
        "fused": onnxruntime_cpu.OPTIMIZATION,
    }
    found = checkpoint.find(str(PAIR / "target"))
    model, layout = checkpoint.load(found, "eager"), probe(found.config, CAPACITY)
    graph = export(model, layout, CAPACITY, CAPACITY)
    spec = ModelSpec("target", **layout.spec, vocab_size=found.vocab_size, capacity=CAPACITY, max_nodes=64)
    with tempfile.TemporaryDirectory() as folder:
        executors, counts = dict[str, Executor](), {}
        for name, level in levels.items():
            if name == "fused":
                passes.run_portable(graph)
            path = Path(folder) / f"{name}.onnx"
            packed = graph.clone()
            pack(packed)
            lowered = lower(packed, CAPACITY)
            counts[name] = sum(passes.census(lowered).values())
            ir.save(lowered, path)
            onnxruntime_cpu.OPTIMIZATION = level
            executors[name] = onnxruntime_cpu.OrtExecutor(path, spec, 1, len(os.sched_getaffinity(0)))
        rows = {}
        for nodes in NODES:
            share = StepInput(0, COMMITTED, COMMITTED, [5] * nodes, range(COMMITTED, COMMITTED + nodes), None, nodes)
            times = medians(executors, share)
            rows[nodes] = {f"{name}_ms": value for name, value in times.items()}
            rows[nodes] |= {f"fused_over_{name}": times["fused"] / times[name] for name in times if name != "fused"}
    return {"operators": counts, "nodes": rows}


def rates(engines: dict[str, Engine], texts: list[str], speculation: str) -> dict[str, float]:
    """Return each engine's tokens per second after the first token, and the second's speed over the first's."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS, seed=0, ignore_eos=True, speculation=speculation)
    seconds = dict.fromkeys(engines, 0.0)
    for text in texts:
        for name, engine in engines.items():
            metrics = engine.generate(text, params)[0].metrics
            assert metrics
            seconds[name] += metrics.e2el - metrics.ttft
    full, quantized = seconds.values()
    return {name: (NEW_TOKENS - 1) * len(texts) / value for name, value in seconds.items()} | {
        "speedup": full / quantized
    }


def steps(found: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Return the shortest milliseconds of the steps of bundles' targets, which take turns."""
    records = {name: Bundle.open(path).manifest.models["target"] for name, path in found.items()}
    graphs = {name: path / next(iter(records[name].graphs.values())) for name, path in found.items()}
    record, largest = next(iter(records.values())), max(STEP_NODES)
    shape = record.layers, record.kv_heads, record.head_dim, record.vocab_size, record.capacity
    return step_times(graphs, ModelSpec("target", *shape, largest, tuple(record.windows)), largest)


def narrow(name: str, target: Path, precision: str) -> dict[str, Any]:
    """Compare a bundle in float32 with one in another precision: size, divergence, step times, decoding rates.

    Args:
        name: The name of the float32 bundle.
        target: The target's checkpoint.
        precision: The other precision.
    """
    large, small = OUT / f"{name}.bundle", OUT / f"{name}-{precision.replace(':', '-')}.bundle"
    if not small.is_dir():
        pair = "--target", target, "--draft", PAIR / "draft"
        specbuild("build", *pair, "-o", small, "--precision", precision, "--no-tune")
    size = {path: sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) for path in (large, small)}
    texts, rows = prompts(), []
    with Engine.load(large, prefix_caching=False) as full, Engine.load(small, prefix_caching=False) as quantized:
        for text in texts:
            tokens = full.tokenizer.encode(text)[:KL_TOKENS]
            rows.append(kl(full.text_logits(tokens), quantized.text_logits(tokens)))
        engines = {"fp32": full, precision: quantized}
        plain, auto = (rates(engines, texts[:TEXTS], speculation) for speculation in ("off", "auto"))
    divergence = np.concatenate(rows)
    return {
        "bytes": {"fp32": size[large], precision: size[small], "ratio": size[small] / size[large]},
        "kl_nats_per_token": float(divergence.mean()),
        "kl_tokens": len(divergence),
        "step_ms": steps({"float32": large, "quantized": small}),
        "decode_tokens_per_s": {"plain": plain, "default": auto},
    }


def main() -> None:
    """Measure, and write and print the rows."""
    given = parser(__doc__, OUT / "graphs.json").parse_args()
    bundles(OUT)
    targets = {"pycode": PAIR / "target", "wide": OUT / "wide"}
    found = {p: {name: narrow(name, target, p) for name, target in targets.items()} for p in PRECISIONS}
    print(save(given.out, {"machine": machine(), "fusion": fusion(), "precisions": found}))


if __name__ == "__main__":
    main()
