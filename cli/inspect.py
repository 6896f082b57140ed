"""`specbuild inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from specbuild.builder.codegen import engine_layers
from specbuild.runtime import Bundle
from specbuild.runtime.bundle.manifest import REPORT
from specbuild.runtime.checked_json import JSON_BYTES, decode
from specbuild.runtime.errors import BundleError, OptionError

from . import quality as of_quality
from .tuned import in_words

KINDS = {
    "model": "token by token",
    "parallel": "all levels in one step",
    "eagle3": "from the target's hidden states",
    "mtp": "from the target's hidden states, by its own MTP layer",
}


@click.command(name="inspect")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--graph", is_flag=True, help="Show the operators of each model before and after the passes.")
@click.option("--quality", is_flag=True, help="Show what quantization cost, layer by layer and end to end.")
@click.option("--device-loop", is_flag=True, help="Show, as JSON, the graph of one round on a device.")
@click.option("--json", "as_json", is_flag=True, help="Print manifest and report as JSON.")
def command(bundle: Path, graph: bool, quality: bool, device_loop: bool, as_json: bool) -> None:
    """Show what a bundle holds, after checking every file's hash.

    \b
    specbuild inspect pycode.bundle --graph
    """
    opened = Bundle.open(bundle)
    opened.verify()
    if device_loop:
        if not opened.manifest.descriptor.on_gpu:
            raise OptionError(f"{bundle} runs on a CPU: its rounds are no graph")
        from specbuild.measure.round_graph import describe_bundle

        click.echo(json.dumps(describe_bundle(opened, 1, opened.manifest.default_tree)))
        return
    manifest = json.loads(opened.manifest.to_json())
    try:
        report = decode(opened.read(REPORT, JSON_BYTES))
        if as_json and quality:
            click.echo(json.dumps(report.get("quality")))
        elif quality:
            of_quality.show(report.get("quality"))
        elif as_json:
            click.echo(json.dumps({"manifest": manifest, "report": report}, ensure_ascii=False))
        elif graph:
            _show_graphs(report)
        else:
            _show(bundle, manifest, report)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise BundleError(f"{opened.path(REPORT)} is no report of a build ({reason}): build the bundle again") from None


def _show(bundle: Path, manifest: dict[str, Any], report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, size = Console(), sum(file["bytes"] for file in manifest["files"].values())
    table = Table(show_header=False, box=None)
    table.add_row("bundle", f"{bundle}: {len(manifest['files'])} files, {size / 1e6:.1f} MB, every hash as built")
    table.add_row("built with", f"specbuild {manifest['specbuild_version']}, schema {manifest['schema_version']}")
    table.add_row("backend", f"{manifest['backend']}, {manifest['precision']}")
    table.add_row("longest text", f"{manifest['max_seq_len']} tokens")
    table.add_row("largest batch", f"{manifest['max_batch_size']} sequences")
    table.add_row("buckets", ", ".join(map(str, manifest["buckets"])))
    table.add_row("default tree", manifest["default_tree"])
    table.add_row("chat template", "yes" if manifest["chat_template"] else "no")
    for name, model in manifest["models"].items():
        table.add_row(
            name,
            f"{model['architecture']}, {model['parameters'] / 1e6:.1f}M parameters, {model['layers']} "
            f"layers, {model['kv_heads']} KV heads of {model['head_dim']}, from {model['source']}",
        )
    if draft := manifest["models"].get("draft"):
        known = manifest["models"]["target"]["vocab_size"]
        table.add_row(
            "drafts", f"{KINDS[draft.get('kind', 'model')]}, {draft['vocab_size']} of the target's {known} tokens"
        )
    for architecture, files in _kernels(manifest).items():
        count = sum(len(manifest["kernels"][name]["kernels"]) for name in files)
        size = sum(manifest["files"][name]["bytes"] for name in files)
        table.add_row("kernels", f"sm_{architecture}: {count} kernels in {len(files)} cubins, {size / 1e6:.1f} MB")
    for name, engine in manifest.get("engines", {}).items():
        targets = ", ".join(f"sm_{each}" for each in engine["architectures"]) or "portable"
        caches = f" over {dtype} caches" if (dtype := engine.get("kv_cache_dtype", "auto")) != "auto" else ""
        pages = f", in pages of {rows} rows" if (rows := engine.get("block_size", 0)) else ""
        attention = f"{engine['attention']} attention{caches}{pages}"
        table.add_row("engine", f"{name}: TensorRT {engine['version']}, {targets}, {attention}")
        table.add_row("", f"profiles {', '.join(engine['profiles'])}")
        table.add_row("", engine_layers.in_words(report["engines"][name.split("/")[0]]))
    memory = report["memory"]
    table.add_row(
        "memory",
        f"{memory['weights'] / 1e6:.1f} MB of weights, {memory['caches_per_sequence'] / 1e6:.1f} MB "
        "of caches per sequence",
    )
    for each in memory["plans"]:
        size = f"{each['batch_size']} × {each['seq_len']} tokens"
        table.add_row("", f"{each['total'] / 1e6:.1f} MB in all for {size}, if built for them")
    for line in of_quality.in_words(report.get("quality")):
        table.add_row("quantized", line)
    for line in in_words(report.get("tuning")):
        table.add_row("tuned", line)
    if "not_run" in report["exactness"]:
        table.add_row("checked", f"not run: {report['exactness']['not_run']}")
    for case in report["exactness"]["cases"]:
        ties = len(case["divergences"])
        table.add_row("checked", f"{case['name']}: {case['tokens']} tokens, {ties} near-ties")
    console.print(table)


def _kernels(manifest: dict[str, Any]) -> dict[str, list[str]]:
    """Return the names of the cubins by architecture."""
    files: dict[str, list[str]] = {}
    for name, record in manifest.get("kernels", {}).items():
        files.setdefault(record["architecture"], []).append(name)
    return files


def _show_graphs(report: dict[str, Any]) -> None:
    """Print, for each model, how often each pass matched, and the number of nodes of each operator by stage."""
    from rich.console import Console
    from rich.table import Table

    for model, stages in report["operators"].items():
        matched = ", ".join(f"{name} {count}" for name, count in report["matched_passes"][model].items())
        click.echo(f"{model}: {matched}")
        table = Table("operator", *stages, box=None)
        for column in table.columns[1:]:
            column.justify = "right"
        for operator in sorted({operator for counts in stages.values() for operator in counts}):
            table.add_row(operator, *(str(counts.get(operator, "")) for counts in stages.values()))
        table.add_row("all", *(str(sum(counts.values())) for counts in stages.values()), style="bold")
        Console().print(table)
