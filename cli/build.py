"""`specbuild build`."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from specbuild.builder.codegen import engine_layers
from specbuild.builder.config import recipe
from specbuild.builder.config.build_config import BUCKETS, DEFAULT_TREE, BuildConfig
from specbuild.builder.config.engine_options import ATTENTIONS, HARDWARE, KV_CACHE_DTYPES, EngineOptions
from specbuild.builder.config.quantize_options import AUTO_KL, MAX_KL, QuantizeOptions
from specbuild.builder.targets import ARCHITECTURES
from specbuild.runtime.backends.kernels.cubins import best_architecture
from specbuild.runtime.backends.kernels.library import BLOCK_SIZES
from specbuild.runtime.bundle.backend import BACKENDS, DEFAULT, RTX_ARCHITECTURES
from specbuild.runtime.errors import OptionError, shown

from . import plan_in_words, quality
from .garbage import uncollected
from .help_groups import BUILD, grouped
from .progress import quiet_option, showing
from .standard_streams import tell
from .tuned import in_words

_ARCHITECTURES = f"{', '.join(RTX_ARCHITECTURES)}, or portable, the default"


def _take_recipe(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Make a recipe's values the options' defaults."""
    if path is not None:
        ours = ("recipe", "output", "dry_run", "force", "quiet", "as_json")
        options = {str(p.name): p for p in context.command.params if p.name not in ours}
        lists = {name for name, option in options.items() if option.multiple}
        values = recipe.read(path, options, {*lists, "buckets"})
        # click would iterate over the letters of a string given for a repeatable option.
        context.default_map = {n: [v] if n in lists and isinstance(v, str) else v for n, v in values.items()}


def _numbers(_context: click.Context, _parameter: click.Parameter, text: Any) -> tuple[int, ...]:
    """Parse `1,2,4` or a recipe's list; raise OptionError unless all are whole numbers."""
    parts = text.split(",") if isinstance(text, str) else text
    try:
        return tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        raise OptionError(f"buckets must be whole numbers, not {shown(text)}") from None


@click.command(name="build", cls=grouped(BUILD))
@click.option(
    "--recipe",
    metavar="FILE.toml",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_take_recipe,
    help="A build written down, like those in engines/; options given here go before it.",
)
@click.option(
    "-m",
    "--target",
    "--model",
    required=True,
    metavar="DIR",
    help="The model whose output counts: a folder, a GGUF file, or a hub id.",
)
@click.option(
    "-md",
    "--draft",
    "--draft-model",
    "--model-draft",
    metavar="DIR",
    help="A small model, an EAGLE-3 head, mtp (the target's own MTP layer, the default on a CPU if it has one), "
    "self:int4 (its own weights), or none: lookup alone drafts.",
)
@click.option("--adapter", metavar="DIR", help="A LoRA adapter (PEFT), merged into the target.")
@click.option("--draft-adapter", metavar="DIR", help="A LoRA adapter, merged into the draft.")
@click.option(
    "-o",
    "--output",
    "--output-dir",
    required=True,
    metavar="BUNDLE",
    type=click.Path(path_type=Path),
    help="Folder to create.",
)
@click.option("--backend", default=DEFAULT, show_default=True, help=f"One of: {', '.join(BACKENDS)}.")
@click.option(
    "--precision",
    help="On a CPU fp32, int8, int4, or keep: a GGUF's own numbers, and its default. On GPUs fp16, bf16, fp32, int8, "
    "int4 or fp8. Else the first; or auto, or best:size, best:speed, best:kl. Options after a colon, as in "
    "int4:64,sym: docs/guides/quantization.md.",
)
@click.option("--draft-precision", metavar="PRECISION", help="The draft's; the target's by default.")
@click.option("--draft-vocab-size", type=int, metavar="N", help="Most frequent tokens a draft can propose  [65536]")
@click.option(
    "--tensor-type",
    multiple=True,
    metavar="PATTERN=PRECISION",
    help="For weights whose name a glob matches, like 'layers.0.*=fp32', 'draft:down_proj=int8'; the last one counts.",
)
@click.option("--output-tensor-type", metavar="PRECISION", help="The LM head's.")
@click.option("--token-embedding-type", metavar="PRECISION", help="The embedding's; a tied one's is the head's.")
@click.option(
    "--calibration",
    metavar="FILE.jsonl",
    type=click.Path(path_type=Path),
    help="Your texts: lines with text, prompt or messages. A quarter is held out, to say what was lost.",
)
@click.option("--calib-size", type=int, default=32, show_default=True, metavar="N", help="Texts of 256 tokens used.")
@click.option("--calib-seed", type=int, default=0, show_default=True, metavar="S", help="Which ones.")
@click.option(
    "--calibration-cache",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Keep each layer's numbers there, and go on after an interruption.",
)
@click.option(
    "--max-kl",
    type=float,
    metavar="NATS",
    help=f"Fail where the target moved further, in nats a token: {MAX_KL} by default, {AUTO_KL} with auto and best.",
)
@click.option(
    "-c",
    "--max-seq-len",
    "--max-model-len",
    "--ctx-size",
    type=int,
    metavar="N",
    help="Tokens of a text at most, prompt included.",
)
@click.option(
    "--max-batch-size", type=int, default=4, show_default=True, metavar="B", help="Sequences of a step at most."
)
@click.option(
    "--buckets",
    type=click.UNPROCESSED,
    default=BUCKETS,
    callback=_numbers,
    metavar="N,N,…",
    help="Node counts that a step may have, the root included; 1,2,4,8,16,32,64 by default.",
)
@click.option("--tree", default=DEFAULT_TREE, show_default=True, help="The tree that speculation uses by default.")
@click.option(
    "--cuda-arch",
    multiple=True,
    metavar="ARCH",
    help=f"Compile the CUDA kernels for it into the bundle: {', '.join(ARCHITECTURES)}, all, or none; may be repeated.",
)
@click.option("--arch", multiple=True, metavar="SM", help=f"TensorRT-RTX's targets: {_ARCHITECTURES}; may be repeated.")
@click.option("--attention", type=click.Choice(ATTENTIONS), help="A GPU's; TreeAttention (plugin) by default.")
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(KV_CACHE_DTYPES),
    default="auto",
    show_default=True,
    help="fp8: TreeAttention's caches in E4M3, half as large; auto: in the model's own 16 bits.",
)
@click.option(
    "--block-size",
    type=int,
    default=0,
    metavar="ROWS",
    help=f"TreeAttention's caches in pages of so many rows: {', '.join(map(str, BLOCK_SIZES))}; linear by default.",
)
@click.option("--prompt-chunk", type=int, metavar="N", help="Prompt tokens in a step of an engine; 512 by default.")
@click.option("--builder-optimization-level", type=int, metavar="0…5", help="How long TensorRT looks for fast kernels.")
@click.option("--workspace", type=int, metavar="MIB", help="TensorRT's scratch memory while it compiles and runs.")
@click.option("--timing-cache", type=click.Path(path_type=Path), metavar="FILE", help="Read before, written after.")
@click.option("--weight-streaming", is_flag=True, help="Weights may stay on the host.")
@click.option("--version-compatible", is_flag=True, help="Engines also run on later minor versions of TensorRT.")
@click.option("--hardware-compatible", type=click.Choice(tuple(HARDWARE)), help="Engines also run on other GPUs.")
@click.option("--tune/--no-tune", default=None, help="Whether it is tuned, as bundles for a CPU are by default.")
@click.option("--dry-run", is_flag=True, help="Check everything that can be checked, say what would be built, stop.")
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(output: Path, dry_run: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """Compile a target and a draft into one bundle.

    \b
    specbuild build --target engines/pycode/target --draft engines/pycode/draft -o pycode.bundle
    """
    engine = EngineOptions(**{f.name: options.pop(f.name) for f in fields(EngineOptions)})
    quantize = QuantizeOptions(**{f.name: options.pop(f.name) for f in fields(QuantizeOptions)})
    if options["tune"] is None:
        backend = BACKENDS.get(options["backend"])
        options["tune"] = bool(backend and not backend.on_gpu)
    config = BuildConfig(output=output, engine=engine, quantize=quantize, **options)
    if dry_run:
        _show_plan(config, as_json)
        return
    report = _build(config, quiet)
    for name, origin in report["sources"].items():
        if "gguf_quantization" in origin:
            counts = ", ".join(f"{count} tensors {kind}" for kind, count in origin["gguf_tensors"].items())
            kept = report["kept"].get(name)
            now = f"kept, {kept['bits_per_weight']:g} bits a weight" if kept else "dequantized to float32"
            tell(f"{name}: gguf quantization: {origin['gguf_quantization']} ({counts}), {now}")
        elif "packed_quantization" in origin:
            tell(f"{name}: {origin['packed_quantization']}, {origin['packed_weights']} weights dequantized to float32")
    if as_json:
        click.echo(json.dumps({"bundle": str(output)} | report))
    else:
        _summarize(output, report)
        bare = [name for name in config.engine.targets if not best_architecture(config.architectures, name)]
        if bare:
            click.echo(f"  no kernels for sm_{', sm_'.join(bare)}: this runtime will not run the engines there")


def _show_plan(config: BuildConfig, as_json: bool) -> None:
    """Print what a build would make and take; then raise the error that it would raise before it begins."""
    with uncollected():
        from specbuild.builder.plan import Plan

        plan = Plan.of(config)
        found = plan.to_dict()
    if as_json:
        click.echo(json.dumps(found))
    else:
        plan_in_words.show(found)
    plan.check()


def _build(config: BuildConfig, quiet: bool) -> dict[str, Any]:
    """Build with progress and return the report."""
    with showing("build", quiet) as progress:
        progress.begin("loading torch")
        from specbuild.builder.pipeline import build, stages
        from specbuild.builder.prepare import with_own_draft

        config = with_own_draft(config)
        total, begun, stage = stages(config), 0, ""

        def advance(name: str) -> None:
            nonlocal begun, stage
            begun, stage = begun + 1, f"{name}, stage {begun + 1} of {total}"
            progress.begin(stage)

        def detail(phase: str, share: float) -> None:  # stages differ: only a phase tells how long it will take
            progress.tell(f"{stage}, {phase}", int(100 * share), 100, unit="%")

        return build(config, advance, detail)


def _summarize(output: Path, report: dict[str, Any]) -> None:
    memory, exactness = report["memory"], report["exactness"]
    took, peak = sum(report["seconds"].values()), report["peak_memory_bytes"]
    click.echo(
        f"{output}: built in {took:.0f} s, with {peak / 1e6:.0f} MB of memory at most "
        f"({report['expected_memory_bytes'] / 1e6:.0f} MB expected)"
    )
    click.echo(
        f"  memory when it runs: {memory['weights'] / 1e6:.1f} MB of weights, "
        f"{memory['caches_per_sequence'] / 1e6:.1f} MB of caches per sequence"
    )
    if report["kernels"]:
        for name, table in report["kernels"]["architectures"].items():
            click.echo(f"  kernels: {len(table)} for {name}, by {report['kernels']['compiler']}")
    for name, engine in report["engines"].items():
        click.echo(f"  {name} engine: {engine_layers.in_words(engine)}")
    for case in exactness["cases"]:
        ties = len(case["divergences"])
        plural = "s" if ties > 1 else ""
        note = f", {ties} near-tie{plural} below {exactness['bound']:g}" if ties else ""
        click.echo(f"  {case['name']}: {case['tokens']} tokens equal{note}")
    if "largest_logit_difference" in exactness:
        click.echo(
            f"  to Hugging Face: largest logit difference {exactness['largest_logit_difference']:.1e}, "
            f"divergence {exactness['kl_nats_per_token']:.1e} nats a token"
        )
    if "graph_logit_difference" in exactness:
        difference = exactness["graph_logit_difference"]
        click.echo(f"  the target's graph in float32 on this CPU, to Hugging Face: largest difference {difference:.1e}")
    if cache := report["fp8_caches"]:
        mean, largest = cache["kl_nats_per_token"], cache["largest_kl_nats"]
        click.echo(f"  FP8 caches alone, in float32: {mean:.1e} nats a token to Hugging Face, {largest:.1e} at most")
    for line in quality.in_words(report["quality"]):
        click.echo(f"  {line}")
    for line in in_words(report["tuning"]):
        click.echo(f"  {line}")
    if "not_run" in exactness:
        click.echo(f"  not run here, and so not checked: {exactness['not_run']}")
