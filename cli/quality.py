"""The quality lost by quantization: in words for `build`, in tables for `inspect --quality`."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from specbuild.runtime.errors import OptionError


def in_words(found: Mapping[str, Any] | None) -> list[str]:
    """Describe the quality of each model in a line; no lines if nothing was quantized."""
    lines = []
    for name, model in (found or {"models": {}})["models"].items():
        size = model["weight_bytes"] / model["weight_bytes_before"]
        line = f"{name}: {size:.2f}× the weights"
        if "kl_nats_per_token" in model:
            line += f", {model['kl_nats_per_token']:.1e} nats a token from float32 on {model['tokens']} held-out tokens"
            line += f", top-1 {model['top1_agreement']:.1%}"
        if kept := model.get("own_grids"):
            line += f", {kept} weights on the grid that they had"
        if both := model.get("acceptance_length"):
            line += f", acceptance length {both[0]:.2f} → {both[1]:.2f}"
        lines.append(line)
    return lines


def show(found: Mapping[str, Any] | None) -> None:
    """Print the whole quality report; raise OptionError if nothing was quantized."""
    from rich.console import Console
    from rich.table import Table

    if not found:
        raise OptionError("nothing is quantized in this bundle: there is no quality to report")
    console, texts = Console(), found["texts"]
    tokens = texts["tokens"]
    console.print(
        f"texts: {texts['source']}, calibrated on {tokens['calibration']} tokens, {tokens['held_out']} held out"
    )
    for name, model in found["models"].items():
        table = Table(title=name, title_justify="left", show_header=False, box=None)
        for row in _rows(model):
            table.add_row(*row)
        console.print(table)
        if compared := model.get("compared"):
            console.print(f"{compared['by']} chose {compared['chosen']} of")
            console.print(_compared(compared["precisions"]))
        layers = Table("layer", "precision", "KB", "cosine", "KL alone", box=None)
        layers.columns[0].overflow = "fold"
        for layer in model["layers"]:
            each = f"{layer['bytes'] / 1e3:,.0f}", f"{layer['cosine']:.5f}", f"{layer['kl']:.1e}"
            layers.add_row(_joined(layer["names"]), layer["precision"], *each)
        console.print(layers)


def _compared(rows: list[Any]) -> Any:
    """Return a table that compares precisions, a row each."""
    from rich.table import Table

    kinds, steps = list(rows[0]["kl"]), list(rows[0]["steps"])
    heads = [*(f"KL, {kind}" for kind in kinds), *(f"top-1, {kind}" for kind in kinds)]
    table = Table("precision", "MB", *heads, "perplexity", *(f"ms of {n}" for n in steps), box=None)
    for row in rows:
        quality = [*(f"{row['kl'][kind]:.1e}" for kind in kinds), *(f"{row['top1'][kind]:.1%}" for kind in kinds)]
        perplexity = "–" if row["perplexity"] is None else f"{row['perplexity']:.2f}"
        times = [f"{row['steps'][nodes]:.2f}" for nodes in steps]
        table.add_row(row["precision"], f"{row['bytes'] / 1e6:.1f}", *quality, perplexity, *times)
    return table


def _rows(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    before, after = model["weight_bytes_before"], model["weight_bytes"]
    rows = [("weights", f"{after / 1e6:.2f} MB, {after / before:.3f}× float32's")]
    if "kl_nats_per_token" in model:
        error, largest = model["kl_standard_error"], model["kl_largest"]
        rows += [
            ("KL to float32", f"{model['kl_nats_per_token']:.2e} ± {error:.0e} nats a token, {largest:.1e} at most"),
            ("cosine of logits", f"{model['logit_cosine']:.5f}"),
            ("perplexity", " → ".join("–" if each is None else f"{each:.3f}" for each in model["perplexity"])),
            ("same first choice", f"{model['top1_agreement']:.2%} of tokens"),
        ]
    if texts := model.get("first_divergence"):
        parted = [at for at in texts if at is not None]
        greedy = f"{len(parted)} of {len(texts)} texts of {max(model['greedy_tokens'])} tokens part"
        rows.append(("greedy texts", greedy + (f", half of those before token {median(parted):.0f}" if parted else "")))
    if both := model.get("acceptance_length"):
        rows.append(("acceptance length", f"{both[0]:.3f} → {both[1]:.3f}, chains of 4 on held-out texts"))
    if kept := model.get("own_grids"):
        rows.append(("own grid", f"{kept} weights lie on one already, as a GGUF's do, and keep it"))
    if model["not_quantized"]:
        rows.append(("not quantized", f"{', '.join(model['not_quantized'])}: no block divides their rows"))
    return rows


def _joined(names: list[str]) -> str:
    """Join layer names without repeating their prefix, such as `layers.0.q_proj, k_proj, v_proj`."""
    first, *others = names
    return ", ".join([first, *(name.rpartition(".")[2] for name in others)])
