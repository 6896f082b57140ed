"""A tiny target and draft, and a bundle of them: what is built in seconds."""

import json
import shutil
from pathlib import Path

from tiny_models import SIZES

REFERENCE = Path(__file__).resolve().parents[3] / "engines" / "pycode" / "target"
FIELDS = SIZES | {"vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.2}
BUILD = ("--max-seq-len", "64", "--max-batch-size", "1", "--buckets", "1,2,4,8", "--no-tune")


def checkpoint(folder, layers=2):
    """A random Llama of the reference pair's vocabulary, in two files of weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(layers)
    model = LlamaForCausalLM(LlamaConfig(**FIELDS | {"num_hidden_layers": layers}))
    model.save_pretrained(folder, max_shard_size="600KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REFERENCE / name, folder / name)


def whole(folder):
    """The same in one file, without an index."""
    from safetensors.torch import load_file, save_file

    checkpoint(folder)
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values())
    tensors = {name: each for file in names for name, each in load_file(folder / file).items()}
    for file in names:
        (folder / file).unlink()
    index.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
