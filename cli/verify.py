"""`specbuild verify`."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from specbuild.measure.bench.measure import prepare
from specbuild.measure.exactness import Case, compare, plain
from specbuild.runtime import Bundle, Engine, SamplingParams
from specbuild.runtime.requests.prompt_file import Request, read

from .progress import quiet_option, showing

TREES = ("auto", "chain:4", "topk:2,3", "topk:4,4", "best:16")
PROMPTS = ("def main(argv):\n    ", "import os\n", "The weather today is", "\n", "日本語のテキスト")


@click.command(name="verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", "file", metavar="FILE", help="Prompts as for generate; a few built-in ones without it.")
@click.option("--hf", metavar="DIR", help="The target's checkpoint: compare with transformers' greedy generation too.")
@click.option(
    "--signature",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A public key: check who signed the bundle, and its files, first.",
)
@click.option("-n", "--max-new-tokens", type=click.IntRange(1), default=48, show_default=True)
@click.option("-b", "--batch-size", type=int, default=1, show_default=True)
@click.option("-t", "--threads", type=int, help="Threads of the target; all cores by default.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per case.")
def command(
    bundle: Path,
    file: str | None,
    hf: str | None,
    signature: Path | None,
    max_new_tokens: int,
    batch_size: int,
    threads: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Check a bundle's tokens: trees and drafters against plain decoding, plain decoding against Hugging Face.

    Any difference makes the exit status 1; on a machine where steps have no exactness class one whose deciding gap is
    below the bundle's bound is a near-tie, and does not.
    In a precision other than fp32, Hugging Face's distributions are compared instead of its tokens. A line's n,
    logprobs and deadline do not change tokens, and are left out.

    \b
    specbuild verify pycode.bundle -n 32
    """
    if signature is not None:
        from specbuild.runtime.bundle.signature import check

        check(bundle, signature)
        if not as_json:
            click.echo(f"signed by the owner of {signature}, and every file as it was built")
    manifest = Bundle.open(bundle).manifest
    defaults = {"max_new_tokens": max_new_tokens, "seed": 0}
    own = SamplingParams(max_new_tokens=max_new_tokens, seed=0)
    requests = read(file, defaults) if file is not None else [Request(text, own) for text in PROMPTS]
    drafters: tuple[Any, ...] = (None, "model", "ngram") if "draft" in manifest.models else ("ngram",)
    parameters, real, done = _parameters(requests, own), False, itertools.count(1)
    with showing("verify", quiet) as progress:
        progress.begin("cases", len(drafters) * len(parameters) * (1 + len(TREES)) + (hf is not None))
        for drafter in drafters:
            with Engine.load(
                bundle, drafter=drafter, batch_size=batch_size, threads=threads, prefix_caching=False
            ) as engine:
                prompts = _tokenize(engine, requests)
                if hf is not None:
                    real |= _hugging_face(engine, hf, prompts, max_new_tokens, as_json)
                    hf = None
                    progress.update(next(done))
                if not as_json and drafter is drafters[0]:
                    _tell_exactness(engine)
                for name, params in parameters:
                    expected = plain(engine, prompts, params)
                    progress.update(next(done))
                    for tree in TREES:
                        title = f"{name}, {tree}, {drafter or 'both drafters'}"
                        drafted = [replace(each, speculation=tree) for each in params]
                        real |= _report(engine, compare(engine, title, prompts, drafted, expected), as_json)
                        progress.update(next(done))
    if real:
        raise click.exceptions.Exit(1)


def _tell_exactness(engine: Engine) -> None:
    """Print how strictly tokens are compared."""
    bound = engine.manifest.exactness_bound
    click.echo(
        "a token's logits do not depend on what is drafted or runs beside it: every token must be equal"
        if engine.exact
        else f"steps have no exactness class here: choices closer than {bound:.2g} may be others, as near-ties"
    )


def _parameters(requests: list[Request], own: SamplingParams) -> list[tuple[str, list[SamplingParams]]]:
    """Return named parameters for all requests: greedy, temperature 1, and the lines' own if any differ from `own`."""
    each = [replace(request.params, n=1, logprobs=None, deadline=None) for request in requests]
    greedy, sampled = [own] * len(each), [replace(own, temperature=1.0)] * len(each)
    listed = [("greedy", greedy), ("temperature 1", sampled)]
    return [*listed, ("the file's parameters", each)] if any(params != own for params in each) else listed


def _tokenize(engine: Engine, requests: list[Request]) -> list[list[int]]:
    alone = [replace(each, params=replace(each.params, n=1, logprobs=None, deadline=None)) for each in requests]
    return [case.tokens for case in prepare(engine, alone)]


def _hugging_face(engine: Engine, folder: str, prompts: list[list[int]], max_new_tokens: int, as_json: bool) -> bool:
    """Compare with Hugging Face: tokens in fp32, else distributions; return whether a divergence is real."""
    from specbuild.builder.frontend import checkpoint
    from specbuild.builder.frontend.reference import greedy, text_logits
    from specbuild.builder.frontend.vocabulary import by_token, trim
    from specbuild.measure.divergence import kl

    found = checkpoint.find(folder)
    model = checkpoint.load(found, "eager")
    own = trim(model, found)
    with by_token(model, own.tokens, own.rows):
        references = greedy(model, prompts, max_new_tokens, engine.manifest.eos_token_ids)
    longest = engine.manifest.max_seq_len
    if engine.manifest.precision == "fp32":
        params = [SamplingParams(max_new_tokens=max_new_tokens, seed=0, speculation="off")] * len(prompts)
        expected = [r.tokens[: longest - len(r.prompt)] for r in references]
        return _report(
            engine, compare(engine, "plain decoding against Hugging Face", prompts, params, expected, True), as_json
        )
    texts = [reference.text[: longest - 1] for reference in references]
    with by_token(model, own.tokens, own.rows):
        rows = [kl(text_logits(model, text), engine.text_logits(text)) for text in texts]
    tokens, mean = sum(map(len, rows)), sum(float(row.sum()) for row in rows) / sum(map(len, rows))
    name = "divergence from Hugging Face"
    click.echo(
        json.dumps({"name": name, "tokens": tokens, "kl_nats_per_token": mean})
        if as_json
        else f"{mean:<15.1e}nats a token, {tokens} tokens of {len(prompts)} prompts: {name}"
    )
    return False


def _report(engine: Engine, case: Case, as_json: bool) -> bool:
    """Print a case; return whether a divergence is real."""
    if as_json:
        click.echo(json.dumps(case.to_dict()))
        return not case.exact
    verdict = "near-ties only" if case.divergences else "equal"
    verdict = verdict if case.exact else "DIFFERENT"
    click.echo(
        f"{verdict:15}{case.tokens} tokens of {case.prompts} prompts, acceptance length "
        f"{case.mean_acceptance_length:.2f}: {case.name}"
    )
    for d in case.divergences:
        click.echo(
            f"{'':15}prompt {d.prompt + 1}, token {d.position}: {d.got} instead of {d.expected}, margin "
            f"{d.margin:.2g} ({'real' if d.real else 'below'} {engine.manifest.exactness_bound:g})"
        )
    return not case.exact
