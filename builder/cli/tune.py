"""`specbuild tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ...runtime import Prompt
from ...runtime.errors import OptionError
from .prompts import read

PROMPTS = (
    "def main(argv):\n    parser = argparse.ArgumentParser()\n",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "The quick brown fox jumps over the lazy dog, and then",
    "for line in lines:\n    key, _, value = line.partition('=')\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n",
)


@click.command(name="tune")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", "file", metavar="FILE", help="Prompts like those to come, as for generate.")
@click.option("--num-prompts", type=click.IntRange(1), default=16, show_default=True, help="Of the file, at most.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(8), default=64, show_default=True)
@click.option("-b", "--batch-sizes", default="1", show_default=True, metavar="B,…", help="Batch sizes to measure.")
@click.option("-t", "--threads", type=int, help="Threads of the target; all cores by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    bundle: Path,
    file: str | None,
    num_prompts: int,
    max_new_tokens: int,
    batch_sizes: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure what rounds cost on this machine and how often drafts come true, and write it into the bundle.

    From then on `auto` drafts, in each round, what promises the most tokens a second, and nothing where that is plain
    decoding. Tokens stay what they are. Run it on a machine that does nothing else.

    \b
    specbuild tune pycode.bundle --prompts prompts.jsonl
    """
    from ..tuning.tune import Tuning, tune

    prompts: list[Prompt] = [request.prompt for request in read(file, {})[:num_prompts]] if file else list(PROMPTS)
    asked = Tuning(prompts, max_new_tokens, _sizes(batch_sizes), threads)
    report = tune(bundle, asked, lambda stage: None if as_json else click.echo(stage, err=True))
    if as_json:
        click.echo(json.dumps(report))
    else:
        _show(report)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"--batch-sizes {text!r}: give whole numbers with commas, like 1,2,4") from None
    if min(sizes) < 1:
        raise OptionError(f"--batch-sizes {text!r}: every size is at least 1")
    return sizes


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not report["trees"]:
        click.echo("the bundle has no draft: lookup alone is tuned")
        return
    table = Table("tree", "accepted", "of a fixed one", "ms a round", "speedup", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for tree in report["trees"]:
        numbers = f"{tree['accepted']:.2f}", f"{tree['sequoia']['accepted']:.2f}", f"{tree['seconds'] * 1e3:.2f}"
        table.add_row(tree["tree"], *numbers, f"{tree['speedup']:.2f}×")
    Console().print(table)
    if report["speedup"] < 1:
        click.echo(f"the draft model loses here: {report['tree']} promises {report['speedup']:.2f}× plain decoding")
    error = report["greedy"].get("calibration_error", 0.0)
    click.echo(f"calibration error: {error:.3f} greedy, {report['sampled'].get('calibration_error', 0.0):.3f} sampled")
