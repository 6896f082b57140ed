"""The plan of a build in words: what `specbuild build --dry-run` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from specbuild.builder.units import in_bytes
from specbuild.runtime.bundle.backend import BACKENDS

from .progress import in_words

_SHOWN = ("kv_cache_dtype", "block_size", "buckets", "engine_architectures", "kernel_architectures")


def show(plan: Mapping[str, Any]) -> None:
    """Print a plan as `Plan.to_dict` returns it."""
    for name, model in plan["models"].items():
        source = {key: value for key, value in model.items() if key not in ("parameters", "layers", "architecture")}
        about = f"{model['architecture']}, {model['parameters'] / 1e6:,.0f}M parameters, {model['layers']} layers"
        _row(name, f"{about}, {', '.join(f'{key} {_text(value)}' for key, value in source.items())}")
    _costs(plan)
    _row("the bundle", f"{in_bytes(plan['bundle_bytes_at_most'])} at most")
    machine, scratch = plan["machine"], plan["build_scratch_bytes"]
    disk = f"{in_bytes(scratch)} in TMPDIR, {in_bytes(plan['build_disk_bytes'])} where the bundle goes"
    memory = f"about {in_bytes(plan['build_memory_bytes'])} of memory"
    _row("to build it", f"{memory}, {disk}, time {_time(plan['build_seconds'])}, without tuning")
    if plan["build_memory_bytes"] > machine["memory"]:
        required = in_bytes(plan["build_memory_required_bytes"])
        _row("", f"{required} of memory must be there: the mapped bundle is read from disk where it does not fit")
    for use, size in _peak(plan).items():
        _row("", f"{in_bytes(size)}: {use}")
    room = f"{in_bytes(machine['scratch'])} free in TMPDIR, {in_bytes(machine['disk'])} free for the bundle"
    _row("this machine", f"{in_bytes(machine['memory'])} of memory, {room}")
    for what in ("lacks_to_build", "lacks_to_run"):
        for line in plan[what] or ["nothing"]:
            _row(what.replace("_", " "), line)
    _row("max_seq_len", plan["max_seq_len"])
    _row("max_batch_size", plan["max_batch_size"])
    for name in _SHOWN:
        _row(name, _text(plan[name]))
    for profile, sizes in plan["profiles"].items():
        _row(f"profile {profile}", ", ".join(f"{dimension} {size}" for dimension, size in sizes.items()))


def _costs(plan: Mapping[str, Any]) -> None:
    """Print a line for each model and precision, the one that was asked for with a star."""
    from rich.console import Console
    from rich.table import Table

    device = "VRAM" if BACKENDS[plan["backend"]].on_gpu else "memory"
    table = Table("", "precision", "in the bundle", "memory to build", "time to build", f"{device} to run", box=None)
    for name, costs in plan["costs"].items():
        for precision, cost in costs.items():
            mark = " *" if precision == plan["models"][name]["precision"] else ""
            bundle, build, run = (in_bytes(cost[key]) for key in ("bundle", "build_memory", "run_memory"))
            table.add_row(name, precision + mark, bundle, build, _time(cost["build_seconds"]), run)
    Console().print(table)
    sequences, tokens = plan["max_batch_size"], plan["max_seq_len"]
    click.echo(f"  * as asked; to run is for a batch of {sequences} and {tokens:,} tokens each")


def _peak(plan: Mapping[str, Any]) -> dict[str, int]:
    """Return what the memory of the model that takes most is used for."""
    costs = [plan["costs"][name][model["precision"]] for name, model in plan["models"].items()]
    uses: dict[str, int] = max(costs, key=lambda cost: cost["build_memory"])["build_memory_by_use"]
    return uses


def _time(seconds: float | None) -> str:
    return "not known" if seconds is None else f"about {in_words(seconds)}"


def _row(name: str, value: Any) -> None:
    click.echo(f"{name:22}{value}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {kind}" for kind, count in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
