"""`specbuild distill`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.decorators import FC

from specbuild.builder.distill import options as defaults
from specbuild.builder.distill.options import DistillConfig
from specbuild.runtime.errors import SpecbuildError

from .progress import quiet_option, showing

_DEFAULTS = {name: getattr(DistillConfig(target="", output=Path("draft")), name) for name in DistillConfig.__slots__}

_UNITS = {"training": "steps", "the target writes": "tokens", "the target reads": "texts"}


def _option(name: str, text: str, **more: Any) -> Callable[[FC], FC]:
    """Return a click option for a field of DistillConfig, with its default."""
    default, others = _DEFAULTS[name], {kind: each[name] for kind, each in defaults.OTHERS.items() if name in each}
    if others:
        told = "".join(f", of {kind} {value}" for kind, value in others.items())
        default, text = None, f"{text} {_DEFAULTS[name]} by default{told}."
    return click.option(f"--{defaults.flag(name)}", name, default=default, show_default=True, help=text, **more)


def _number(name: str, text: str) -> Callable[[FC], FC]:
    return _option(name, text, type=float if isinstance(_DEFAULTS[name], float) else int, metavar="N")


def _choice(name: str, known: tuple[str, ...], text: str) -> Callable[[FC], FC]:
    return _option(name, text, type=click.Choice(known))


@click.command(name="distill")
@click.argument("target")
@click.option(
    "-o", "--output", "--out", required=True, metavar="DRAFT", type=click.Path(path_type=Path), help="Folder to create."
)
@_choice("kind", defaults.KINDS, "chain: token by token; parallel: by mask tokens in one pass (PARD); eagle3: a head.")
@click.option(
    "--text",
    multiple=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="A file or folder to learn from: text, or .jsonl with text, prompt or messages; may be repeated.",
)
@_number(
    "generate",
    f"Tokens that the target writes, of texts' beginnings where there are some; {defaults.GENERATE} without --text.",
)
@_number("layers", f"Of the draft; {defaults.LAYERS['chain']} by default, of parallel {defaults.LAYERS['parallel']}.")
@_number("hidden_size", "The draft's width; the target's by default.")
@_number(
    "intermediate_size",
    "Of its MLPs; in proportion to the width by default, two thirds of that without --layers, a third of a head.",
)
@_number("num_heads", "Of its attention, as wide as the target's; in proportion to the width by default.")
@_number("num_kv_heads", "Of its keys and values.")
@_option("init", "What it begins as: target, the target's weights; random; or a draft's folder.", metavar="HOW")
@_number(
    "draft_vocab_size",
    f"Tokens its head knows, the most frequent; by default {defaults.LEAST_VOCABULARY}, or a quarter.",
)
@_choice("divergence", defaults.DIVERGENCES, "What is minimised between the target's and the draft's probabilities.")
@_number("on_policy", "The part of the batches, 0…1, that the draft continues itself (DistillSpec).")
@_number("depth", "Tokens of the chains it is judged by, and that parallel and eagle3 draft.")
@_number("steps", "Steps of the optimizer, at most.")
@_number("batch_size", "Texts side by side.")
@_number("grad_accum", "Such batches in a step.")
@_number("sequence_length", "Tokens of a text.")
@_number("learning_rate", "The highest; it warms up, and falls along a cosine.")
@_number("seed", "Of all that is random.")
@_number("patience", "Validations without a longer acceptance length before it stops.")
@_number("eval_every", "Steps between validations.")
@_number("save_every", "Steps between checkpoints.")
@_choice("device", defaults.DEVICES, "Where it is trained; auto: on a GPU where there is one.")
@_choice("dtype", defaults.DTYPES, "What is computed in, over weights in float32; auto: bf16 where that is fast.")
@click.option("--compile", is_flag=True, help="Compile the draft with torch.compile.")
@click.option("--resume", is_flag=True, help="Go on with a training that was interrupted.")
@click.option("--force", is_flag=True, help="Replace an existing draft, and begin an unfinished training again.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(quiet: bool, as_json: bool, **options: Any) -> None:
    """Train a draft for TARGET, from texts or from what it writes itself.

    \b
    specbuild distill engines/pycode/target --out draft
    specbuild build --target engines/pycode/target --draft draft -o pycode.bundle
    """
    given = {name: value for name, value in options.items() if value is not None}
    config = DistillConfig(**defaults.OTHERS.get(options["kind"], {}) | given)
    started = time.monotonic()
    try:
        report = _distill(config, quiet)
    except KeyboardInterrupt:
        kept = (
            f"{config.work} keeps what was done, --resume goes on"
            if config.work.is_dir()
            else "nothing half-done was left behind"
        )
        raise SpecbuildError(f"interrupted: {kept}") from None
    took = time.monotonic() - started
    if as_json:
        click.echo(json.dumps(report))
        return
    size, known = report["parameters"] / 1e6, report["draft_vocab_size"]
    click.echo(f"{config.output}: {size:.1f}M parameters, {known} tokens in its head, in {took:.0f} s")
    click.echo(
        f"  acceptance length {report['acceptance_length']:.2f} in chains of {config.depth} on held-out texts, "
        f"{report['curve'][0]['acceptance_length']:.2f} before;"
        f" best after {report['best_step']} of {report['steps']} steps"
    )
    click.echo(f"  trained for {report['seconds']:.0f} s on {report['tokens'] / 1e6:.1f}M tokens")
    click.echo(f"  next: specbuild build --target {config.target} --draft {config.output} -o {config.output}.bundle")


def _distill(config: DistillConfig, quiet: bool) -> dict[str, Any]:
    """Train with progress and return the report."""
    with showing("distill", quiet) as progress:
        progress.begin("loading torch")
        from specbuild.builder.distill.pipeline import distill

        def told(what: str, done: int, total: int, note: str) -> None:
            progress.tell(what, done, total if total > 1 else 0, note, _UNITS.get(what, ""))

        return distill(config, told)
