"""Print the largest model that can be built, and run, in 16, 32, 64 and 128 GB, by the dry run's own estimate.

python scripts/checkpoints/largest_model.py TOKENIZER_FOLDER

Of each model there is a configuration and the headers of its weights in sparse files, which take no room. The tokenizer
is a small one, so logits count for less than with a model's own.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path

from transformers import LlamaConfig, PreTrainedConfig

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.frontend.attention_layout import empty
from specbuild.builder.frontend.quiet import quiet
from specbuild.builder.plan import Cost, Plan

MEMORY = 16, 32, 64, 128  # GB
BUILDS = {"onnxruntime": ("fp32", "int8", "int4"), "onnxruntime-cuda": ("fp16",)}
SHAPES = {  # Llama's: layers, hidden size, intermediate size, heads, KV heads, whether head and embedding are one
    "1B": (16, 2048, 8192, 32, 8, True),
    "3B": (28, 3072, 8192, 24, 8, True),
    "8B": (32, 4096, 14336, 32, 8, False),
    "14B": (48, 5120, 13824, 40, 8, False),
    "32B": (64, 5120, 27648, 40, 8, False),
    "70B": (80, 8192, 28672, 64, 8, False),
}


def shape(name: str) -> LlamaConfig:
    """Return a configuration of SHAPES, with Llama 3's vocabulary, for texts of 4,096 tokens."""
    layers, hidden, intermediate, heads, kv_heads, tied = SHAPES[name]
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
    )


@quiet()
def save_headers(config: PreTrainedConfig, tokenizer: Path, folder: Path) -> None:
    """Write a checkpoint in bfloat16 whose weights are a header and a hole: nothing but headers can be read of it."""
    folder.mkdir(parents=True)
    name, model = empty(config)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for key, weight in model.named_parameters():
        begin, end = end, end + 2 * prod(weight.shape)
        header[key] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}  # type: ignore[dict-item]
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    config.architectures = [name]
    config.save_pretrained(folder)
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / each, folder / each)


def costs(tokenizer: Path) -> Iterator[tuple[str, str, str, Cost]]:
    """Yield a model's name, the backend, the precision, and what it takes."""
    for name in SHAPES:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / name
            save_headers(shape(name), tokenizer, folder)
            for backend, precisions in BUILDS.items():
                plan = Plan.of(BuildConfig(str(folder), Path(scratch) / "b", backend=backend, precision=precisions[0]))
                for precision, cost in plan.costs()["target"].items():
                    if precision in precisions:
                        yield name, backend, precision, cost


def main() -> None:
    """Print the table in Markdown: of each memory the largest that is built in it, and the largest that runs in it."""
    found = list(costs(Path(sys.argv[1])))
    print("| | " + " | ".join(f"{size} GB" for size in MEMORY) + " |")
    print("| --- |" + " --- |" * len(MEMORY))
    for backend, precisions in BUILDS.items():
        for precision in precisions:
            rows = [(name, cost) for name, *kind, cost in found if kind == [backend, precision]]
            cells = []
            for size in MEMORY:
                built = [name for name, cost in rows if cost.build_memory <= size * 10**9]
                run = [name for name, cost in rows if cost.run_memory <= size * 10**9]
                cells.append(f"{(built or ['–'])[-1]}, {(run or ['–'])[-1]}")
            print(f"| `{backend}`, `{precision}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
