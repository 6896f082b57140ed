"""`specbuild pair`."""

from __future__ import annotations

import json
from typing import Any

import click

from specbuild.runtime.requests.prompt_file import read

from .progress import quiet_option, showing, tell_later_turns
from .tune import MAX


@click.command(name="pair")
@click.argument("target")
@click.argument("draft")
@click.option("--prompts", "file", metavar="FILE", help="Prompts like those to come, as for generate; ours by default.")
@click.option("--num-prompts", type=click.IntRange(1), help=f"At most so many; of a file {MAX} by default.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(16), default=64, show_default=True)
@click.option(
    "--temperature",
    "--temp",
    "temperatures",
    type=float,
    multiple=True,
    default=(0.0, 0.8),
    show_default=True,
    help="May be repeated; 0 is greedy.",
)
@click.option("-t", "--threads", type=click.IntRange(1), help="Threads of the target; all cores by default.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    target: str,
    draft: str,
    file: str | None,
    num_prompts: int | None,
    max_new_tokens: int,
    temperatures: tuple[float, ...],
    threads: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Say whether a draft can be used with a target, and what it is worth on this machine.

    TARGET and DRAFT are checkpoints: folders, GGUF files, or hub ids. Both are built in a temporary folder, and
    prompts decoded. The exit status is 0 whatever the verdict. Run it on a machine that does nothing else.

    \b
    specbuild pair engines/pycode/target engines/pycode/draft
    """
    requests = read(file, {})[: num_prompts or MAX] if file is not None else []
    tell_later_turns(requests)
    with showing("pair", quiet) as progress:
        progress.begin("loading torch")
        from specbuild.builder.pair.measure import PairRequest, weigh

        asked = PairRequest(requests, max_new_tokens, temperatures, threads, num_prompts)
        report = weigh(target, draft, asked, progress.tell)
    if as_json:
        click.echo(json.dumps(report))
    else:
        _show(report)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, vocabulary, steps = Console(), report["vocabulary"], report["step_seconds"]
    facts = Table(show_header=False, box=None)
    shared = f"{vocabulary['shared']} of {vocabulary['of']} tokens, {vocabulary['covered']:.1%} of the prompts'"
    facts.add_row("vocabulary", f"{vocabulary['kind']}: {shared}")
    took = f"{steps['target'] * 1e3:.2f} ms of the target, {steps['draft'] * 1e3:.2f} ms of the draft"
    facts.add_row("a step", f"{took}, {report['step_ratio']:.2f} of it")
    console.print(facts)
    depths = range(1, len(report["temperatures"][0]["accepted"]) + 1)
    accepted = Table("temperature", "accepted at depth", *map(str, depths), box=None)
    speeds = Table("temperature", "tree", "accepted", "promised", "auto, measured", "without the draft", box=None)
    for each in report["temperatures"]:
        temperature = f"{each['temperature']:g}"
        accepted.add_row(temperature, "where reached", *(f"{share:.2f}" for share in each["accepted"]))
        accepted.add_row("", "of all", *(f"{share:.2f}" for share in each["accepted_cumulative"]))
        gains = [f"{each[name]:.2f}×" for name in ("speedup", "auto", "lookup")]
        speeds.add_row(temperature, each["tree"], f"{each['accepted_tokens']:.2f}", *gains)
    console.print(accepted)
    console.print(speeds)
    click.echo(report["verdict"])
    for reason in report["reasons"]:
        click.echo(f"  {reason}")
