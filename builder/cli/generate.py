"""`specbuild generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ...runtime import Engine, Result, SamplingParams, SpeculationStats
from ...runtime.errors import OptionError
from .prompts import Request, read


@click.command(name="generate")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", "texts", multiple=True, metavar="TEXT", help="A prompt; may be given again.")
@click.option("--prompts", "file", metavar="FILE.jsonl", help="Prompts, one JSON object per line; - for stdin.")
@click.option("-n", "--max-new-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", "--temp", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Keep the k best tokens; 0 is off.")
@click.option("--top-p", type=float, default=1.0, help="Keep the smallest set of this probability; 1 is off.")
@click.option("--min-p", type=float, default=0.0, help="Keep tokens this likely relative to the best; 0 is off.")
@click.option("--repetition-penalty", type=float, default=1.0, help="Over 1 discourages tokens of prompt and output.")
@click.option("--frequency-penalty", type=float, default=0.0, help="Subtracted per occurrence in the output.")
@click.option("--presence-penalty", type=float, default=0.0, help="Subtracted once for tokens in the output.")
@click.option("--seed", type=int, help="Makes sampling repeatable; fresh entropy, reported, without it.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given again.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token.")
@click.option("--no-speculation", is_flag=True, help="Plain decoding.")
@click.option(
    "--drafter",
    type=click.Choice(["model", "ngram"]),
    help="Who drafts; by default lookup where the text repeats itself, else the model.",
)
@click.option("--tree", metavar="TREE", help="chain:K, topk:W,D or best:N; the bundle's own by default.")
@click.option("-b", "--batch-size", type=int, default=1, show_default=True, help="Sequences that share a step.")
@click.option("-t", "--threads", type=int, help="Threads of the target; all cores by default.")
@click.option("--stats", is_flag=True, help="Print what speculation did, and where the time went, on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt, in order.")
def command(
    bundle: Path,
    texts: tuple[str, ...],
    file: str | None,
    no_speculation: bool,
    drafter: Any,
    tree: str | None,
    batch_size: int,
    threads: int | None,
    stats: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Generate text, with speculation unless told otherwise; the tokens are those of plain decoding.

    \b
    specbuild generate pycode.bundle -p 'def main(' --stats
    """
    if bool(texts) == bool(file):
        raise OptionError("give prompts either with -p TEXT or with --prompts FILE")
    if no_speculation and (tree or drafter):
        raise OptionError("--no-speculation leaves nothing for --tree or --drafter to do: drop one")
    sampling |= {"stop": list(sampling["stop"]), "speculation": "off" if no_speculation else tree or "auto"}
    defaults = SamplingParams(**sampling)
    requests = read(file, sampling) if file else [Request(text, defaults) for text in texts]
    later = sum(request.later_turns for request in requests)
    if later:
        click.echo(f"specbuild: only the first of each line's turns is run; {later} later turns are not", err=True)
    with Engine.load(bundle, drafter=drafter, batch_size=batch_size, threads=threads) as engine:
        results = _print(engine, requests, as_json)
        if stats:
            _print_stats(engine, results)


def _print(engine: Engine, requests: list[Request], as_json: bool) -> list[Result]:
    """Print as it comes: one prompt's text streams, several are printed whole and in order."""
    streaming = len(requests) == 1 and not as_json
    results: dict[int, Result] = {}
    printed = 0
    for chunk in engine.stream([r.prompt for r in requests], [r.params for r in requests]):
        if streaming:
            click.echo(chunk.text, nl=False)
        if chunk.result:
            results[chunk.index] = chunk.result
        while printed in results and not streaming:
            result = results[printed]
            click.echo(json.dumps(result.to_dict(), ensure_ascii=False) if as_json else _titled(printed, result))
            printed += 1
    if streaming:
        click.echo()
    return [results[index] for index in sorted(results)]


def _titled(index: int, result: Result) -> str:
    return f"=== {index + 1} ===\n{result.text}"


def _print_stats(engine: Engine, results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    total = SpeculationStats()
    for result in results:
        total.merge(result.metrics.speculative_decoding)
    tokens, run = sum(len(result.token_ids) for result in results), engine.stats
    ttft = sum(result.metrics.ttft for result in results) / len(results)
    rows = {
        "tokens": f"{tokens} in {run.total:.3f} s, {tokens / run.total:.0f} tokens/s",
        "time to first token": f"{ttft * 1e3:.1f} ms, mean",
        "rounds": f"{run.rounds}, of which {total.num_spec_steps} sequence rounds drafted",
        "drafted": f"{total.num_draft_tokens}, accepted {total.num_accepted_draft_tokens} "
        f"({total.draft_acceptance_rate:.0%})",
        "mean acceptance length": f"{total.mean_acceptance_length:.2f}",
        "accepted per round": " ".join(f"{k}:{n}" for k, n in enumerate(total.acceptance_histogram)),
        "time": f"draft {run.draft / run.total:.0%}, verify {run.verify / run.total:.0%}, loop {run.host_share:.0%}",
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(stderr=True).print(table)
