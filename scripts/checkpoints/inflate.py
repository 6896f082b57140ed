"""Inflate a Llama checkpoint to a larger shape: it computes the same function at the cost of the larger model.

python scripts/checkpoints/inflate.py SRC OUT --like llama-3-8b|llama-3.2-1b|qwen3-0.6b|KEY=N,… [--dtype float32]

Keys: hidden, layers, intermediate, heads, kv_heads, head_dim, vocab; unnamed ones keep the source's values. The result
is always a Llama, whatever the shape's name (so without Qwen3's q/k norms), with the source's tokenizer and positions;
the embedding is untied if the shape's is. Acceptance is the source pair's, the cost of a step the new shape's.

`inflation.py` explains how each size grows. 16 bits hold the source's weights exactly if hidden is the source's times
1, 4, 8, 16, … and head_dim times 1, 4, 16, …; otherwise a factor is rounded, and the check says how much the logits
differ. Tokens past the source's vocabulary never win greedily: their logit is the mean of the source's, and 1,000 lower
at the median norm of the last hidden states, so that sampling does not draw them either. That takes two free channels:
if hidden is the source's, they are average tokens, and sampling needs a top_k or top_p.

The same arguments give the same bytes. Exit status 2: refused, nothing written; 1: the check failed, nothing written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from inflation import Inflation, Refused, Shape
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

LIKE = {
    "llama-3-8b": Shape(4096, 32, 14336, 32, 8, 128, 128256, tied=False),
    "llama-3.2-1b": Shape(2048, 16, 8192, 32, 8, 64, 128256, tied=True),
    "qwen3-0.6b": Shape(1024, 28, 3072, 16, 8, 128, 151936, tied=True),
}
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
ROPES = ("default", "linear", "llama3")  # they rescale each frequency independently of head_dim
SHARD, SPARE = 1 << 30, 64 << 20
TOLERANCE = 1e-3  # maximum difference of logits in float32
PROMPT = "def parse_arguments(argv):\n    parser = argparse.ArgumentParser()\n"


def shape_of(config: Any) -> Shape:
    """Return the shape in a Llama's configuration."""
    heads = config.num_attention_heads
    return Shape(
        config.hidden_size,
        config.num_hidden_layers,
        config.intermediate_size,
        heads,
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        config.vocab_size,
        config.tie_word_embeddings,
    )


def read_config(source: Path) -> Any:
    """Return the configuration of a Llama that can be inflated; raise Refused for others."""
    if not (source / "config.json").is_file():
        raise Refused(f"{source} has no config.json: give the folder of a checkpoint")
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
    except Exception as error:  # transformers raises many kinds of errors for bad fields
        raise Refused(f"{source}/config.json cannot be used: {' '.join(str(error).split())}") from None
    if config.model_type != "llama":
        raise Refused(f"{source} is a {config.model_type!r} model: only Llamas are inflated")
    if config.attention_bias or config.mlp_bias:
        raise Refused(f"{source} has biases: only Llamas without are inflated")
    return config


def target_shape(like: str, source: Shape) -> Shape:
    """Return the shape that --like names; raise Refused for a bad one."""
    if like in LIKE:
        return replace(LIKE[like], tied=source.tied and LIKE[like].tied)
    sizes: dict[str, int] = {}
    for part in like.split(","):
        key, _, value = part.partition("=")
        if key not in asdict(source) or key == "tied" or not value.isdecimal():
            raise Refused(f"--like {part!r}: use {', '.join(LIKE)}, or KEY=N of {', '.join([*asdict(source)][:-1])}")
        sizes[key] = int(value)
    return Shape(**asdict(source) | sizes)


def write(out: Path, inflation: Inflation, dtype: torch.dtype, quiet: bool) -> float:
    """Write shards of at most 1 GiB (more for one larger tensor) and their index.

    Return the share of the weights that are zero.
    """
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in inflation.shapes().items():
        size = shape.numel() * dtype.itemsize
        if shards[-1] and used + size > SHARD:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else ["model.safetensors"]
    zeros, total, console = 0, 0, Console(stderr=True, quiet=quiet)
    for file, names in zip(files, track(shards, "writing", console=console), strict=True):
        tensors = {name: inflation.tensor(name) for name in names}
        zeros += sum(tensor.numel() - int(tensor.count_nonzero()) for tensor in tensors.values())
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, out / file, {"format": "pt"})
        (out / file).chmod(0o644)
    if len(files) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return zeros / inflation.shape.parameters()


def write_rest(source: Path, out: Path, inflation: Inflation, dtype: str, seed: int) -> None:
    """Write the configuration with the new sizes, and copy all other files except weights."""
    shape, content = inflation.shape, json.loads((source / "config.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256()
    for path in sorted(source.glob("*.safetensors")):
        digest.update(path.read_bytes())
    content.pop("torch_dtype", None)
    content |= {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": inflation.eps,
        "dtype": dtype,
        "specbuild_inflated_from": {
            "name": source.resolve().name,
            "sha256": digest.hexdigest(),
            "seed": seed,
            **asdict(inflation.source),
        },
    }
    (out / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != "config.json" and ".safetensors" not in path.name:
            shutil.copy(path, out / path.name)


def check(model: Any, out: Path, dtype: torch.dtype, ids: list[torch.Tensor]) -> dict[str, float]:
    """Compare the logits of the written weights, computed in float32, with the source model's.

    A weight is float32 only while it is used, so memory holds the model as it is stored and one matrix more.

    Args:
        model: The source model.
        out: The folder with the written weights.
        dtype: The dtype of the written weights.
        ids: Token ids `[1, N]` of each text.
    """
    inflated = AutoModelForCausalLM.from_pretrained(out, dtype=dtype, local_files_only=True).eval()
    for module in inflated.modules():
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(lambda _module, _inputs, output: output.float())
        elif next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(lambda module, _inputs: module.float() and None)
            module.register_forward_hook(lambda module, _inputs, _output: module.to(dtype) and None)
    known, difference, agreed, below = model.config.vocab_size, 0.0, list[torch.Tensor](), float("inf")
    with torch.inference_mode():
        for batch in ids:
            expected, seen = model(batch).logits, inflated(batch).logits
            ours, added = seen[..., :known], seen[..., known:]
            difference = max(difference, float((ours - expected).abs().max()))
            agreed.append(ours.argmax(-1).eq(expected.argmax(-1)).flatten())
            if added.numel():
                below = min(below, float((ours.amax(-1) - added.amax(-1)).min()))
    result = {"largest_difference": difference, "same_greedy": float(torch.cat(agreed).float().mean())}
    return result if below == float("inf") else result | {"added_tokens_below": below}


def samples(source: Path, vocab: int, longest: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield token ids `[1, N]`: random ones, and those of a real prompt."""
    yield torch.randint(vocab, (1, min(64, longest)), generator=torch.Generator().manual_seed(seed))
    yield torch.tensor([AutoTokenizer.from_pretrained(source, local_files_only=True)(PROMPT)["input_ids"][:longest]])


def inflate(options: argparse.Namespace) -> dict[str, Any]:
    """Write the checkpoint and return facts on it; raise Refused, or RuntimeError if the check fails."""
    started, source, out, dtype = time.monotonic(), options.source, options.out, DTYPES[options.dtype]
    config = read_config(source)
    shape = target_shape(options.like, shape_of(config))
    shape.check(shape_of(config))
    rope = config.rope_parameters["rope_type"]
    if shape.head_dim != shape_of(config).head_dim and rope not in ROPES:
        raise Refused(f"head_dim cannot change under {rope!r} RoPE: its frequencies depend on it")
    if out.exists():
        raise Refused(f"{out} exists: remove it, or name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    size, free = shape.parameters() * dtype.itemsize, shutil.disk_usage(out.parent).free
    if size + SPARE > free:
        raise Refused(f"{out} takes {size / 1e6:,.1f} MB and some room, and {free / 1e6:,.1f} MB are free: make room")
    print(f"{shape.parameters() / 1e6:,.1f}M parameters, {size / 1e9:.2f} GB in {options.dtype}", file=sys.stderr)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True).eval()
    ids = list(samples(source, config.vocab_size, config.max_position_embeddings, options.seed))
    inflation = Inflation(model, shape_of(config), shape, dtype, options.seed, ids)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        result = {"parameters": shape.parameters(), "bytes": size, "dtype": options.dtype}
        result |= {"zeros": write(temporary, inflation, dtype, options.json)}
        write_rest(source, temporary, inflation, options.dtype, options.seed)
        if options.check:
            found = check(model, temporary, dtype, ids)
            if dtype == torch.float32 and not found["largest_difference"] <= TOLERANCE:
                raise RuntimeError(f"the logits differ by {found['largest_difference']:.1e}: nothing was written")
            if not found.get("added_tokens_below", 1) > 0:
                raise RuntimeError("an added token wins: nothing was written")
            result |= found
        temporary.chmod(0o755)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return result | {"seconds": round(time.monotonic() - started, 1), "peak_mb": round(peak * 1024 / 1e6)}


def main(arguments: list[str] | None = None) -> int:
    """Inflate the checkpoint that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--like", required=True, metavar="SHAPE")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="compare the logits")
    parser.add_argument("--json", action="store_true", help="the result as JSON, no progress")
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    try:
        result = inflate(options)
    except (Refused, RuntimeError) as error:
        print(f"inflate_checkpoint: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refused) else 1
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            ", ".join(
                f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items()
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
