"""Measure the kernels on a GPU: time, bytes, and share of the copy bandwidth measured in the same run.

python -m benchmarks.gpu.kernels [--out DIR] [--library FILE] [--quick] [--smoke]

TreeAttention is measured over a grid of batch, nodes, context, heads and types, against torch's
scaled_dot_product_attention with the same mask, FlexAttention, and FlashInfer if it is installed; then the kernels
around it. Times are medians of replayed CUDA graphs whose launches alternate between enough sets of inputs that none
stays in the L2 cache. Every case of TreeAttention is compared with float64 on fresh random inputs, with its output
filled with NaN before. "verify" is one step of an 8B-shaped model: its matrix products and its attention, measured.

--smoke runs a small grid with the kernels executed on the host, for CI; its times mean nothing.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.common import machine, parser, rounded, save
from benchmarks.gpu.around import others
from benchmarks.gpu.attention import Case, Shape
from benchmarks.gpu.device import Device, copy_bandwidth, load
from specbuild.runtime.backends.kernels.abi import KernelLibrary

COLD = 256 << 20  # bytes of all sets of inputs, several times the largest L2 cache
ROOM = 16 << 30  # maximum bytes of all sets' caches, for cases whose slots are mostly empty


def grid(quick: bool) -> list[Shape]:
    """Return the cases, the most important first; the largest cache has 8 GiB."""
    contexts = (1024, 8192, 32768) if quick else (1024, 8192, 32768, 131072)
    shapes = [
        Shape(b, n, c) for b, n, c in itertools.product((1, 8), (1, 4, 8, 16, 32, 64), contexts) if b * c <= 2**18
    ]
    others = [
        *(Shape(1, n, 8192, 16, 16, 64) for n in (1, 16)),
        *(Shape(1, n, 8192, 8, 1, 256) for n in (1, 16)),
        *(Shape(1, n, 8192, 24, 8, 96) for n in (1, 16)),
        *(Shape(1, n, 8192, 32, 32, 80, "float16", "float16") for n in (1, 16)),
        *(Shape(1, n, c, cache="float8_e4m3fn") for n in (1, 16) for c in (8192, 32768)),
        *(Shape(1, n, 1024, capacity=rows) for n in (1, 16) for rows in (32768, 131072)),  # most splits are empty
    ]
    return sorted(shapes + others, key=lambda s: (s.batch > 1, s.nodes > 16, s.context not in (8192, 32768)))


def peers_of(device: Device, shape: Shape) -> list[str]:
    """Return the peers of a case; FlexAttention, which compiles for every shape, only for a few cases."""
    names = ["sdpa"]
    if device.name == "cuda" and shape.cache == shape.dtype and shape.size == 128 and shape.context == 8192:
        names += ["flex"] if shape.nodes in (1, 8, 64) else []
        names += ["flashinfer"] if shape.batch == 1 and importlib.util.find_spec("flashinfer") else []
    return names


def measure(device: Device, library: KernelLibrary, shape: Shape, bandwidth: float) -> dict[str, Any]:
    """Measure one case; return its row of the table."""
    case = Case(device, library, shape)
    row: dict[str, Any] = shape.label() | {"splits": case.params.splits, "bytes": shape.bytes, "error": case.error()}
    more = 0 if device.name == "cpu" else min(COLD // shape.bytes, ROOM // shape.held)
    sets = [case, *(Case(device, library, shape) for _ in range(more))]
    row["us"] = device.microseconds([each.run for each in sets])
    row["share"] = shape.bytes / row["us"] / 1e3 / bandwidth
    for name in peers_of(device, shape):
        torch._dynamo.reset()  # torch compiles a function for at most eight shapes, then runs it uncompiled
        try:
            row[f"{name}_us"] = device.microseconds([each.peer(name) for each in sets])
        except Exception as error:  # a peer's failure is a result too
            row[f"{name}_error"] = f"{type(error).__name__}: {str(error)[:200]}"
    return row


def show(rows: list[dict[str, Any]], around: dict[str, Any], bandwidth: float) -> None:
    """Print the table."""
    console = Console(width=140)
    table = Table(title=f"TreeAttention; copy bandwidth {bandwidth:,.0f} GB/s")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(rounded(row.get(name, ""))) for name in names))
    console.print(table)
    console.print_json(json.dumps(around))


def main() -> int:
    """Measure, print, save; exit status 2 without a GPU."""
    found = parser(__doc__)
    found.add_argument("--library", type=Path, help="the kernels, compiled; by default what is installed, or nvcc")
    found.add_argument("--quick", action="store_true", help="without the longest contexts")
    found.add_argument("--seconds", type=float, default=3600, help="after which no case of TreeAttention begins")
    found.add_argument("--attention", action="store_true", help="TreeAttention alone, without the kernels around it")
    found.add_argument("--smoke", action="store_true", help="a small grid on the host: that this script runs")
    options = found.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        print("no GPU that torch can use: run this on one, or --smoke to see that it runs", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(int(time.time()))  # fresh inputs every time
    device, library = Device(options.smoke), load(options.library, options.smoke, options.out)
    bandwidth = copy_bandwidth(device)
    smoke = [
        Shape(2, 3, 100, 4, 2, 64),
        Shape(1, 2, 60, cache="float8_e4m3fn"),
        Shape(1, 3, 60, 4, 1, 64, capacity=900),
    ]
    shapes = smoke if options.smoke else grid(options.quick)
    result: dict[str, Any] = {"machine": machine(), "copy_gb_s": bandwidth, "tree_attention": [], "others": {}}
    started, result["cases_left"], out = time.perf_counter(), 0, options.out / "kernels.json"
    for shape in track(shapes, console=Console(stderr=True)):
        if time.perf_counter() - started > options.seconds:
            result["cases_left"] += 1
            continue
        result["tree_attention"].append(measure(device, library, shape, bandwidth))
        save(out, result)  # after every row, so that an interrupted run leaves its results
    if not options.attention:
        result["others"] = others(device, library, bandwidth, options.smoke)
    save(out, result)
    show(result["tree_attention"], result["others"], bandwidth)
    return 0


if __name__ == "__main__":
    sys.exit(main())
