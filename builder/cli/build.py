"""`specbuild build`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..config import DEFAULT_TREE, BuildConfig
from ..kernels import ARCHITECTURES
from ..lower import BACKENDS


@click.command(name="build")
@click.option("--target", required=True, metavar="DIR", help="The model whose output counts: a folder, or a hub id.")
@click.option("--draft", metavar="DIR", help="A small model with the same tokenizer; without it, n-gram lookup drafts.")
@click.option(
    "-o", "--output", required=True, metavar="BUNDLE", type=click.Path(path_type=Path), help="Folder to create."
)
@click.option("--backend", default="onnxruntime", show_default=True, help=f"One of: {', '.join(BACKENDS)}.")
@click.option("--precision", default="fp32", show_default=True, help="fp32, or int8 for the weights.")
@click.option("--draft-precision", metavar="PRECISION", help="The draft's; the target's by default.")
@click.option("--max-seq-len", type=int, metavar="N", help="Most tokens of a text, prompt included.")
@click.option("--max-batch-size", type=int, default=4, show_default=True, metavar="B", help="Most sequences in a step.")
@click.option("--tree", default=DEFAULT_TREE, show_default=True, help="The tree that speculation uses by default.")
@click.option(
    "--cuda-arch",
    multiple=True,
    metavar="ARCH",
    help=f"Compile the CUDA kernels for it into the bundle: {', '.join(ARCHITECTURES)}, or all; may be repeated.",
)
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(output: Path, as_json: bool, **options: Any) -> None:
    """Compile a target and a draft into one bundle.

    \b
    specbuild build --target engines/pycode/target --draft engines/pycode/draft -o pycode.bundle
    """
    config = BuildConfig(output=output, **options)
    report = _build(config)
    if as_json:
        click.echo(json.dumps({"bundle": str(output)} | report))
    else:
        _summarize(output, report)


def _build(config: BuildConfig) -> dict[str, Any]:
    """Run the build behind a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading torch", total=None)
        from ..pipeline import build, stages

        bar.update(task, total=stages(config), completed=-1)

        def advance(stage: str) -> None:
            bar.update(task, description=stage, advance=1)

        return build(config, advance)


def _summarize(output: Path, report: dict[str, Any]) -> None:
    memory, exactness = report["memory"], report["exactness"]
    click.echo(f"{output}: built in {sum(report['seconds'].values()):.0f} s")
    click.echo(
        f"  memory when it runs: {memory['weights'] / 1e6:.1f} MB of weights, "
        f"{memory['caches_per_sequence'] / 1e6:.1f} MB of caches per sequence"
    )
    if report["kernels"]:
        for name, table in report["kernels"]["architectures"].items():
            click.echo(f"  kernels: {len(table)} for {name}, by {report['kernels']['compiler']}")
    for case in exactness["cases"]:
        ties = len(case["divergences"])
        note = f", {ties} near-tie{'s' if ties > 1 else ''} below {exactness['bound']:g}" if ties else ""
        click.echo(f"  {case['name']}: {case['tokens']} tokens equal{note}")
    click.echo(
        f"  to Hugging Face: largest logit difference {exactness['largest_logit_difference']:.1e}, "
        f"divergence {exactness['kl_nats_per_token']:.1e} nats a token"
    )
