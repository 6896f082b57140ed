"""Compare a build's peak memory with the announced one, on Gemma 3's shape or any checkpoint.

python -m benchmarks.cpu.build_memory [CHECKPOINT] [--layers N] [--precisions LIST] [--out FILE]

Without CHECKPOINT the model has random weights of Gemma 3 270M's widths (a vocabulary of 262,144, hidden states of 640)
and N layers, with the reference pair's tokenizer. Each build runs in its own process, so this takes minutes. Beside the
peak it reports the size of the weights file, and that of each weight stored once. The exit status is 1 if a peak is
more than 15 % off.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from benchmarks.common import COMMAND, OUT, PAIR, machine, parser, save

PRECISIONS = "fp32,int8,int4,auto"
ALLOWED = 0.15


def gemma(folder: Path, layers: int) -> Path:
    """Return the checkpoint's folder; make it if it does not exist."""
    if not folder.is_dir():
        torch.manual_seed(0)
        config = Gemma3TextConfig(
            vocab_size=262_144,
            hidden_size=640,
            intermediate_size=2048,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            query_pre_attn_scalar=256,
            sliding_window=512,
            max_position_embeddings=1024,
            eos_token_id=0,
            bos_token_id=0,
            pad_token_id=0,
        )
        Gemma3ForCausalLM(config).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(PAIR / "target" / name, folder)
    return folder


def measure(checkpoint: Path, precision: str, bundle: Path) -> dict[str, Any]:
    """Build once; return its memory in MB, the size of the weights file, and that of each weight stored once."""
    options = ["--max-seq-len", "512", "--force", "--json", "--quiet", "--no-tune"]
    if precision not in ("fp32", "auto"):
        options += ["--max-kl", "9"]
    command = [COMMAND, "build", "--target", checkpoint, "--precision", precision, "-o", bundle, *options]
    report = json.loads(subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE).stdout)
    peak, expected = report["peak_memory_bytes"], report["expected_memory_bytes"]
    row = {
        "announced_mb": round(expected / 1e6),
        "peak_mb": round(peak / 1e6),
        "ratio": peak / expected,
        "seconds": round(sum(report["seconds"].values())),
        "weights_file_mb": round((bundle / "target" / "weights.bin").stat().st_size / 1e6),
    }
    if report["quality"]:
        row["each_once_mb"] = round(report["quality"]["models"]["target"]["weight_bytes"] / 1e6)
    return row


def main() -> int:
    """Measure each precision and write its row; return 1 if a peak is too far off."""
    options = parser(__doc__, OUT / "build-memory.json")
    options.add_argument("checkpoint", nargs="?", type=Path)
    options.add_argument("--layers", type=int, default=18)
    options.add_argument("--precisions", default=PRECISIONS)
    given = options.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    checkpoint = given.checkpoint or gemma(OUT / f"gemma3-{given.layers}", given.layers)
    rows = dict[str, dict[str, Any]]()
    for name in given.precisions.split(","):
        rows[name] = measure(checkpoint, name, OUT / "memory.bundle")
        print(save(given.out, {"machine": machine(), "checkpoint": checkpoint.name, "builds": rows}))
    return int(any(abs(row["ratio"] - 1) > ALLOWED for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
