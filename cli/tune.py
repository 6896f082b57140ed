"""`specbuild tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.prompt_file import read

from .progress import quiet_option, showing, tell_later_turns
from .tuned import in_words

MAX = 16  # default maximum prompts of a file


@click.command(name="tune")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", "file", metavar="FILE", help="Prompts like those to come, as for generate.")
@click.option("--num-prompts", type=click.IntRange(1), help=f"At most so many; of a file {MAX} by default.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(8), default=64, show_default=True)
@click.option("-b", "--batch-sizes", metavar="B,…", help="Batch sizes to measure; by default all that were compiled.")
@click.option("-t", "--threads", type=int, help="Threads of the target; all cores by default.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    bundle: Path,
    file: str | None,
    num_prompts: int | None,
    max_new_tokens: int,
    batch_sizes: str | None,
    threads: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Measure what rounds take on this machine and how often drafts come true, and write it into the bundle.

    From then on `auto` drafts, in each round, what promises the most tokens a second, and nothing where that is plain
    decoding. Tokens stay what they are. Run it on a machine that does nothing else.

    \b
    specbuild tune pycode.bundle --prompts prompts.jsonl
    """
    from specbuild.measure.tuning.measure import Tuning
    from specbuild.measure.tuning.tune import tune

    requests = read(file, {})[: num_prompts or MAX] if file is not None else []
    tell_later_turns(requests)
    sizes = _sizes(batch_sizes) if batch_sizes is not None else ()
    with showing("tune", quiet) as progress:
        asked = Tuning(requests, max_new_tokens, sizes, threads, count=num_prompts)
        report = tune(bundle, asked, progress.tell)
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

    if report["trees"]:
        table = Table("tree", "accepted", "ms a round", "speedup", box=None)
        for column in table.columns[1:]:
            column.justify = "right"
        for tree in report["trees"]:
            numbers = f"{tree['accepted']:.2f}", f"{tree['seconds'] * 1e3:.2f}", f"{tree['speedup']:.2f}×"
            table.add_row(tree["tree"], *numbers)
        Console().print(table)
    for line in in_words(report):
        click.echo(line)
    errors = {name: report[name].get("calibration_error") for name in ("greedy", "sampled")}
    if told := ", ".join(f"{error:.3f} {name}" for name, error in errors.items() if error is not None):
        click.echo(f"calibration error: {told}")
