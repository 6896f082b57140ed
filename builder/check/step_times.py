"""Times the steps of a quantized model on this machine, next to those of the same model in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import onnx_ir as ir

from specbuild.builder.lower import onnxruntime
from specbuild.builder.passes.pattern import save
from specbuild.measure.roofline import timed_step
from specbuild.runtime.backends.cpu.cores import cores
from specbuild.runtime.backends.cpu.executor import OrtExecutor
from specbuild.runtime.backends.executor import ModelSpec

PLAIN = "plain.onnx"
NODES = (1, 8, 32)
ROWS = 128  # in the cache before a step, at most
TURNS = 15


def save_plain(graph: ir.Model, capacity: int, folder: Path) -> None:
    """Lower a portable graph for one sequence and save it in `folder` as PLAIN."""
    packed = graph.clone()
    onnxruntime.pack(packed)
    save(onnxruntime.lower(packed, capacity), folder / PLAIN, "weights.bin")


def step_times(
    graphs: Mapping[str, Path], spec: ModelSpec, largest: int, nodes: Sequence[int] = NODES
) -> dict[str, dict[str, float]]:
    """Return the shortest time of a step in milliseconds, by graph and number of nodes.

    The graphs take turns, so that other load on the machine slows all of them.

    Args:
        graphs: ONNX files, by name.
        spec: The model's specification for executors.
        largest: The largest node count of a step; larger ones in `nodes` are skipped.
        nodes: The node counts to time.
    """
    with ExitStack() as close:
        executors = {}
        for name, file in graphs.items():
            executors[name] = OrtExecutor(file, spec, 1, threads=cores())
            close.callback(executors[name].close)
        rows = min(ROWS, spec.capacity - largest)
        sizes = [each for each in nodes if each <= largest]
        steps = {(name, n): timed_step(each, n, rows) for name, each in executors.items() for n in sizes}
        seconds: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
        for _ in range(TURNS):
            for key, step in steps.items():
                step()  # warm up: the other graph has displaced this one from the CPU's caches
                seconds[key].append(step())
    return {name: {str(n): round(1e3 * min(seconds[name, n]), 4) for n in sizes} for name in graphs}
