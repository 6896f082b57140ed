"""`specbuild generate`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from specbuild.runtime import Chunk, Engine, Limits, Result, SamplingParams, SpeculationStats, StructuredOutputs
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.prompt_file import Request, read
from specbuild.runtime.requests.validation import Errors
from specbuild.runtime.sampling.parameters import renamed

from .help_groups import GENERATE, grouped
from .progress import tell_later_turns
from .token_colours import coloured, legend


@click.command(name="generate", cls=grouped(GENERATE))
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", "texts", multiple=True, metavar="TEXT", help="A prompt; may be given again.")
@click.option("--prompts", "file", metavar="FILE.jsonl", help="Prompts, one JSON object per line; - for stdin.")
@click.option("-n", "--max-new-tokens", "--n-predict", type=int, show_default="128")
@click.option("--max-tokens", type=int, help="Another name for --max-new-tokens.")
@click.option("--temperature", "--temp", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Keep the k best tokens; 0 is off.")
@click.option("--top-p", type=float, default=1.0, help="Keep the smallest set of this probability; 1 is off.")
@click.option("--min-p", type=float, default=0.0, help="Keep tokens this likely relative to the best; 0 is off.")
@click.option(
    "--repetition-penalty",
    "--repeat-penalty",
    type=float,
    default=1.0,
    help="Over 1 discourages tokens of prompt and output.",
)
@click.option("--frequency-penalty", type=float, default=0.0, help="Subtracted per occurrence in the output.")
@click.option("--presence-penalty", type=float, default=0.0, help="Subtracted once for tokens in the output.")
@click.option("-s", "--seed", type=int, help="Makes sampling repeatable; fresh entropy, reported, without it.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given again.")
@click.option("--n", "n", type=int, default=1, show_default=True, help="Samples of each prompt: seed, seed + 1, …")
@click.option("-jf", "--json-schema", "--json-schema-file", metavar="FILE", help="The text is JSON of this schema.")
@click.option("--regex", metavar="REGEX", help="The text matches this, as a whole.")
@click.option("--grammar", "--grammar-file", metavar="FILE", help="The text is of this grammar, in Lark or GBNF.")
@click.option("--choice", multiple=True, metavar="TEXT", help="The text is this one, or another that is given.")
@click.option("--logprobs", type=int, help="Report log-probabilities with --json: the tokens' own, and the N best.")
@click.option("--deadline", type=float, help="End a prompt after so many seconds, with what it has.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token.")
@click.option("--no-speculation", is_flag=True, help="Plain decoding.")
@click.option(
    "--drafter",
    type=click.Choice(["model", "ngram"]),
    help="Who drafts; by default lookup where the text repeats itself, else the model.",
)
@click.option("--prediction", metavar="FILE", help="What the text will be, about; drafted from, wherever it fits.")
@click.option("--tree", metavar="TREE", help="chain:K, topk:W,D or best:N; the bundle's own by default.")
@click.option(
    "--max-draft-tokens", "--draft-max", type=int, metavar="N", help="Nodes of a tree at most; 0 is plain decoding."
)
@click.option(
    "--min-expected-speedup", type=float, default=1.0, help="Draft only where as much over plain decoding is expected."
)
@click.option(
    "--num-speculative-tokens-per-batch-size",
    "schedule",
    metavar="JSON",
    help='Nodes of a tree by how many sequences share a round: {"1-4": 8, "5-16": 2}.',
)
@click.option(
    "-b",
    "-np",
    "--batch-size",
    "--parallel",
    type=int,
    default=1,
    show_default=True,
    help="Sequences that share a step.",
)
@click.option("-t", "--threads", type=int, help="Threads of the target; all cores by default.")
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    "prefix_caching",
    default=True,
    help="Whether a prompt that begins as a text in a cache does is read from there on; by default it is.",
)
@click.option("--kv-cache-tokens", type=int, metavar="N", help="In paged caches: tokens of all texts together.")
@click.option(
    "--resident/--no-resident",
    default=None,
    help="On a GPU: whether rounds follow each other without the host; by default they do.",
)
@click.option(
    "--gpu-weights-percent", type=float, help="0 … 1 of the target's weights stay on the GPU, or all of them."
)
@click.option("--show", is_flag=True, help="Colour drafted tokens that were accepted, in a terminal.")
@click.option("--stats", is_flag=True, help="Print what speculation did, and where the time went, on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt, in order.")
def command(
    bundle: Path,
    texts: tuple[str, ...],
    file: str | None,
    no_speculation: bool,
    drafter: Any,
    prediction: str | None,
    tree: str | None,
    max_draft_tokens: int | None,
    min_expected_speedup: float,
    schedule: str | None,
    batch_size: int,
    threads: int | None,
    prefix_caching: bool,
    kv_cache_tokens: int | None,
    resident: bool | None,
    gpu_weights_percent: float | None,
    show: bool,
    stats: bool,
    as_json: bool,
    json_schema: str | None,
    regex: str | None,
    grammar: str | None,
    choice: tuple[str, ...],
    **sampling: Any,
) -> None:
    """Generate text, with speculation unless told otherwise; the tokens are those of plain decoding.

    \b
    specbuild generate pycode.bundle -p 'def main(' --stats
    """
    if bool(texts) == bool(file):
        raise OptionError("give prompts either with -p TEXT or with --prompts FILE")
    _check_output(as_json, show, sampling.get("logprobs"))
    if tree and min_expected_speedup > 1:
        raise OptionError("--tree drafts whatever is expected of it: drop --min-expected-speedup, or --tree")
    _check_drafts(no_speculation, {"--tree": tree, "--drafter": drafter, "--prediction": prediction})
    sampling = renamed({name: value for name, value in sampling.items() if value is not None})
    limits = Limits(max_draft_tokens, min_expected_speedup, schedule or ())
    structured = {"regex": regex, "choice": list(choice) or None, "json": _content(json_schema)}
    structured = {
        name: value for name, value in (structured | {"grammar": _content(grammar)}).items() if value is not None
    }
    if structured:
        sampling["structured_outputs"] = StructuredOutputs.of(structured)
    sampling |= {"stop": list(sampling["stop"]), "prediction": _content(prediction)}
    sampling["speculation"] = "off" if no_speculation else tree or "auto"
    defaults = SamplingParams(**sampling)
    requests = read(file, sampling) if file else [Request(text, defaults) for text in texts]
    tell_later_turns(requests)
    with Engine.load(
        bundle,
        drafter=drafter,
        batch_size=batch_size,
        threads=threads,
        resident=resident,
        gpu_weights_percent=gpu_weights_percent,
        prefix_caching=prefix_caching,
        kv_cache_tokens=kv_cache_tokens,
        limits=limits,
    ) as engine:
        if texts and engine.manifest.chat_template and not as_json:
            click.echo(f"specbuild: -p is raw text, without the chat template: specbuild chat {bundle} chats", err=True)
        errors: Errors = "return" if file else "raise"
        results = _print(engine, requests, errors, as_json, show)
        if show:
            click.echo(f"specbuild: {legend(list(results.values()))}", err=True)
        if stats:
            _print_stats(engine, list(results.values()))
    failed = {number: result.error for (number, _), result in results.items() if result.error}
    for number, error in failed.items():
        click.echo(f"specbuild: prompt {number + 1}: {error}", err=True)
    if failed:
        raise click.exceptions.Exit(1)


def _check_drafts(no_speculation: bool, options: Mapping[str, str | None]) -> None:
    """Raise OptionError for options about drafts that contradict each other."""
    given = [name for name, value in options.items() if value]
    if no_speculation and given:
        raise OptionError(f"--no-speculation leaves nothing for {' and '.join(given)} to do: drop one")
    if options["--drafter"] == "model" and options["--prediction"]:
        raise OptionError("--drafter model drafts from no --prediction: drop one")


def _check_output(as_json: bool, show: bool, logprobs: int | None) -> None:
    """Raise OptionError for what text or JSON cannot show."""
    if logprobs is not None and not as_json:
        raise OptionError("--logprobs reports in JSON: add --json")
    if show and as_json:
        raise OptionError("--show colours text, which --json does not print: drop one")


def _content(name: str | None) -> str | None:
    """Return the text of a file, None for no file; raise OptionError if it cannot be read."""
    if name is None:
        return None
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OptionError(f"{name} cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _print(
    engine: Engine, requests: list[Request], errors: Errors, as_json: bool, show: bool
) -> dict[tuple[int, int], Result]:
    """Generate and print: one text is streamed, several are printed whole and in order.

    Return the results by prompt and sample.
    """

    def shown(piece: Chunk | Result) -> str:
        return coloured(piece.text, piece.token_ids, piece.drafted, engine.tokenizer) if show else piece.text

    order = [(index, sample) for index, request in enumerate(requests) for sample in range(request.params.n)]
    streaming = len(order) == 1 and not as_json
    results: dict[tuple[int, int], Result] = {}
    printed = 0
    for chunk in engine.stream([r.prompt for r in requests], [r.params for r in requests], errors=errors):
        if streaming:
            click.echo(shown(chunk), nl=False)
        if chunk.result:
            results[chunk.index, chunk.sample] = chunk.result
        while not streaming and printed < len(order) and order[printed] in results:
            (index, sample), result = order[printed], results[order[printed]]
            row = {"index": index, "sample": sample} | result.to_dict()
            title = f"{index + 1}.{sample + 1}" if requests[index].params.n > 1 else f"{index + 1}"
            click.echo(json.dumps(row, ensure_ascii=False) if as_json else f"=== {title} ===\n{shown(result)}")
            printed += 1
    if streaming:
        click.echo()
    return results


def _print_stats(engine: Engine, results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    total, metrics = SpeculationStats(), [result.metrics for result in results if result.metrics]
    for each in metrics:
        total.merge(each.speculative_decoding)
    tokens, run = sum(len(result.token_ids) for result in results), engine.stats
    if not run.rounds:
        return  # nothing ran
    prompts, cached = sum(each.num_prompt_tokens for each in metrics), sum(each.num_cached_tokens for each in metrics)
    ttft = sum(max(each.ttft - each.queue_time, 0) for each in metrics) / len(metrics)
    fixed = "a fixed tree" if total.num_spec_steps else "nothing: plain decoding"
    rows = {
        "tokens": f"{tokens} in {run.total:.3f} s, {tokens / run.total:.0f} tokens/s",
        "time to first token": f"{ttft * 1e3:.1f} ms, mean, without the time in the queue",
        "prompts": f"{prompts} tokens, of which {cached} were in a cache",
        "rounds": f"{run.rounds}, of which {total.num_spec_steps} sequence rounds drafted",
        "drafted": f"{total.num_draft_tokens}, accepted {total.num_accepted_draft_tokens} "
        f"({total.draft_acceptance_rate:.0%})",
        "mean acceptance length": f"{total.mean_acceptance_length:.2f}",
        "accepted per round": " ".join(f"{k}:{n}" for k, n in enumerate(total.acceptance_histogram)),
        "decided": " ".join(f"{kind}:{n}" for kind, n in sorted(total.decisions.items())) or fixed,
        "time": f"draft {run.draft / run.total:.0%}, verify {run.verify / run.total:.0%}, loop {run.loop_share:.0%}",
    }
    if predicted := total.num_prediction_tokens:
        rows["predicted"] = f"{total.num_accepted_prediction_tokens} of {predicted} tokens came true"
    rows |= {f"note {number}": note for number, note in enumerate(dict.fromkeys(engine.notes), 1)}
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(stderr=True).print(table)
