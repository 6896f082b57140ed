"""`specbuild bench`."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from specbuild.measure.bench import conversation, html, report, workload
from specbuild.measure.bench.measure import Case, Turn, measure
from specbuild.measure.bench.result import build
from specbuild.runtime import Bundle, Engine, SamplingParams
from specbuild.runtime.backends.cpu.cores import cores
from specbuild.runtime.bundle.atomic_output import write
from specbuild.runtime.errors import OptionError

from .progress import quiet_option, showing


@click.command(name="bench")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--prompts",
    default="pycode",
    show_default=True,
    metavar="FILE|spec_bench|pycode",
    help="As for generate, or by name.",
)
@click.option("--dataset-path", metavar="FILE", help="Spec-Bench's question.jsonl, for --prompts spec_bench.")
@click.option("--num-prompts", type=click.IntRange(1), help="So many, evenly spread over the file; all by default.")
@click.option("-n", "--max-new-tokens", type=int, default=128, show_default=True)
@click.option(
    "--concurrency",
    "--max-concurrency",
    default="1",
    show_default=True,
    metavar="N,…",
    help="Requests at a time, one or several.",
)
@click.option("--temperature", "--temp", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--trees", metavar="TREE,…", help="Trees beside the bundle's own, as in chain:4,best:16,topk:2,3.")
@click.option("--drafter", type=click.Choice(["model", "ngram"]), help="Who drafts; both by default.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="The seed of sampling and of the confidence intervals."
)
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token: outputs of one length.")
@click.option("-t", "--threads", type=int, help="Threads of the target; all cores by default.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE.json", help="Write the result there.")
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="FILE.html", help="Write a report with plots.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of tables.")
def command(
    bundle: Path,
    prompts: str,
    dataset_path: str | None,
    num_prompts: int | None,
    max_new_tokens: int,
    concurrency: str,
    temperature: float,
    trees: str | None,
    drafter: Any,
    seed: int,
    ignore_eos: bool,
    threads: int | None,
    output: Path | None,
    page: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Measure plain decoding and speculation on the same prompts, in turns after a warm-up.

    Contenders are plain decoding ("off"), what the bundle drafts by itself ("auto"), and --trees.

    \b
    specbuild bench pycode.bundle --trees chain:4,topk:2,3 --concurrency 1,4 --html report.html
    """
    _check_files(output, page)
    opened = Bundle.open(bundle)
    sizes = workload.concurrencies(concurrency, opened.manifest)
    contenders = workload.contenders(trees, opened.manifest)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "ignore_eos": ignore_eos}
    SamplingParams(**settings, seed=seed)  # checks the flags first, so that their errors do not blame a line
    requests = workload.load(prompts, dataset_path, num_prompts, seed, settings)
    if len(requests) < sizes[-1]:
        raise OptionError(f"{len(requests)} prompts never make a concurrency of {sizes[-1]}: give more, or a lower one")
    measured: dict[int, dict[str, list[Turn]]] = {}
    cases: list[Case] = []
    with showing("bench", quiet) as progress:
        for size in sizes:
            with Engine.load(bundle, drafter=drafter, batch_size=size, threads=threads, prefix_caching=False) as engine:
                if not cases:  # the same for every concurrency
                    progress.begin("answers to earlier turns", conversation.answers_needed(requests), "answers")
                    cases = conversation.converse(engine, requests, progress.update)
                    turns = conversation.in_words(requests, engine)
                done = itertools.count(1)
                total = (-(-len(cases) // size) + 1) * len(contenders)
                progress.begin(f"concurrency {size}", total, "turns")

                def advance(done: Iterator[int] = done) -> None:
                    progress.update(next(done))

                measured[size] = measure(engine, contenders, cases, size, advance)
    settings |= {"prompts": dataset_path or prompts, "num_prompts": len(cases), "seed": seed, "drafter": drafter}
    settings["turns"] = turns
    settings["threads"] = None if opened.manifest.descriptor.on_gpu else threads or cores()
    result = build(opened, shlex.join(["specbuild", *sys.argv[1:]]), settings, measured)
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    drawn = html.render(result) if page else ""
    if output:
        write(output, text.encode())
    if page:
        write(page, drawn.encode())
    if as_json:
        click.echo(text, nl=False)
    else:
        report.show(result)


def _check_files(output: Path | None, page: Path | None) -> None:
    """Raise OutputError or OptionError for output files that would fail after the measurement."""
    for path in filter(None, (output, page)):
        report.check(path)
    if page:
        html.check()
    if output and page and output.absolute() == page.absolute():
        raise OptionError("--output and --html are one file: give each its own")
