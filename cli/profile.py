"""`specbuild profile`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import click

from specbuild.measure.roofline import Products, Roofline, Steps, measure_device
from specbuild.runtime import Bundle, Engine, LoadOptions, RunStats, SamplingParams, TreeSpec
from specbuild.runtime.backends import nvtx
from specbuild.runtime.bundle.manifest import REPORT, Manifest
from specbuild.runtime.bundle.memory_plan import cache_item_bytes
from specbuild.runtime.checked_json import JSON_BYTES, decode
from specbuild.runtime.decoding.loop import Loop
from specbuild.runtime.errors import BundleError, OptionError

PROMPT = "def read_lines(path):\n    "
CONTEXT = 256  # default maximum of cached rows; at most half of the bundle's max_seq_len
Rooflines = dict[tuple[str, int], Roofline]  # by model and nodes


@click.command(name="profile")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", default=PROMPT, help="What the generation begins with; some Python by default.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--tree", metavar="TREE", help="chain:K, topk:W,D or best:N; the bundle's own by default.")
@click.option("-b", "--batch-size", type=int, default=1, show_default=True, help="Sequences that share a step.")
@click.option("-t", "--threads", type=int, help="Threads of the target; all cores by default.")
@click.option(
    "--context", type=click.IntRange(0), help=f"Cached tokens before each step; {CONTEXT} at most by default."
)
@click.option("--repeat", type=click.IntRange(1), default=20, show_default=True, help="Runs of each step.")
@click.option("--nvtx", "ranges", is_flag=True, help="Mark rounds, steps and commits for Nsight.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    bundle: Path,
    prompt: str,
    max_new_tokens: int,
    tree: str | None,
    batch_size: int,
    threads: int | None,
    context: int | None,
    repeat: int,
    ranges: bool,
    as_json: bool,
) -> None:
    """Measure every step against the device's roofline, then where the time of a round goes.

    \b
    specbuild profile pycode.bundle --tree chain:4
    """
    manifest = (opened := Bundle.open(bundle)).manifest
    spec = TreeSpec.parse(tree or manifest.default_tree).check(manifest.buckets[-1])
    rows = min(CONTEXT, manifest.max_seq_len // 2) if context is None else context
    if rows > manifest.max_seq_len:
        raise OptionError(f"--context {rows} is more than the {manifest.max_seq_len} tokens that the bundle takes")
    if ranges:
        nvtx.enable()
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, seed=0, speculation=spec.text)
    options = LoadOptions(batch_size=batch_size, threads=threads, prefix_caching=False, resident=False)
    with Engine.load(bundle, options) as engine:
        prompts, products = [prompt] * batch_size, _products(opened)
        engine.requests(prompts, params, "raise")  # checks them before anything is measured
        with engine.scheduler.exclusive() as loop:
            device, slots = measure_device(loop.target, manifest.precision), loop.target.batch_size
            steps = _measure(loop, manifest, products, spec, rows, repeat, device)
        engine.generate(prompts, params)  # warm-up
        before = engine.stats
        errors = [result.error for result in engine.generate(prompts, params) if result.error]
        if errors:
            raise errors[0]
        run = engine.stats.since(before)
    if as_json:
        asked = {"batch_size": slots, "context": rows, "tree": spec.text}
        table = [{"model": name, "nodes": nodes} | each.to_dict() for (name, nodes), each in steps.items()]
        measured = {"bytes_per_second": device[0], "flops_per_second": device[1]}
        click.echo(json.dumps(asked | {"device": measured, "steps": table, "generation": run.to_dict()}))
    else:
        _show(steps, device, run, f"{slots} × nodes after {rows} cached tokens; {spec.text}")


def _products(bundle: Bundle) -> dict[str, Products]:
    """Return the products that the build counted, by model; raise BundleError if it did not count them."""
    report = decode(bundle.read(REPORT, JSON_BYTES))
    try:
        return {name: Products.of(fields) for name, fields in report["products"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise BundleError(
            f"{bundle.folder} was built by an older specbuild, which counted products differently: build it again"
        ) from error


def _measure(
    loop: Loop,
    manifest: Manifest,
    products: dict[str, Products],
    tree: TreeSpec,
    rows: int,
    repeat: int,
    device: tuple[float, float | None],
) -> Rooflines:
    """Measure the target's steps for every bucket, and the draft's up to the bucket of a tree's level."""
    widest = min(bucket for bucket in manifest.buckets if bucket >= max(tree.expand, min(2, manifest.buckets[-1])))
    names, batch, found = ("target", "draft"), loop.target.batch_size, Rooflines()
    wanted = [(name, nodes) for name in names for nodes in manifest.buckets if name == "target" or nodes <= widest]
    steps = Steps(loop, wanted, rows)
    for _ in range(repeat):
        steps.turn()
    for (name, nodes), seconds in steps.by(median).items():
        record = manifest.models[name]
        moved = products[name].step(record, batch, nodes, rows, cache_item_bytes(manifest, record))
        found[name, nodes] = Roofline(*moved, seconds, *device)
    return found


def _show(steps: Rooflines, device: tuple[float, float | None], run: RunStats, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console, (bandwidth, peak) = Console(), device
    ceiling = f"{peak / 1e9:.0f} GFLOP/s in float32" if peak else "FLOP/s unknown"
    click.echo(f"device, measured: {bandwidth / 1e9:.1f} GB/s, {ceiling}\nsteps: {title}")
    table = Table("", "nodes", "MB", "MFLOP", "FLOP/B", "ms", "least ms", "share", "bound", box=None)
    for column in table.columns[1:8]:
        column.justify = "right"
    for (name, nodes), each in steps.items():
        sizes = f"{each.bytes / 1e6:.2f}", f"{each.flops / 1e6:.1f}", f"{each.intensity:.1f}"
        times = f"{each.seconds * 1e3:.3f}", f"{each.least_seconds * 1e3:.3f}", f"{each.share:.0%}"
        table.add_row(name, str(nodes), *sizes, *times, each.bound)
    console.print(table)
    if any(each.share > 1 and each.bound == "memory" for each in steps.values()):
        click.echo("over 100%: the weights come from a cache, not from memory")
    each_round = ", ".join(
        f"{part} {seconds / run.rounds * 1e3:.3f} ms ({seconds / run.total:.0%})"
        for part, seconds in (("draft", run.draft), ("verify", run.verify), ("loop", run.loop))
    )
    click.echo(f"rounds: {run.rounds}, {run.emitted} tokens, {run.emitted / run.total:.0f} tokens/s")
    click.echo(f"a round: {run.total / run.rounds * 1e3:.3f} ms: {each_round}")
