"""Rotate a Llama checkpoint's hidden states at random: the same function, with weights that lie on no grid.

python scripts/rotate_checkpoint.py CHECKPOINT OUT [--seed N]

Each norm's weights are folded into the products that read it. Then every product that writes hidden states is rotated,
and every one that reads them is rotated back (QuaRot, Ashkboos et al., arXiv 2404.00456). RMSNorm is invariant under
rotation. A tied head becomes a tensor of its own. Weights that lie on a grid, such as a dequantized GGUF's, cannot test
quantization methods that must find a grid; rotated weights can. Exit status 2: refused, nothing written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from specbuild.builder.frontend import checkpoint
from specbuild.builder.frontend.quiet import quiet
from specbuild.runtime.bundle.atomic_output import check_output, staging
from specbuild.runtime.errors import CheckpointError, SpecbuildError

READERS = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}
WRITERS = ("o_proj", "down_proj")


def rotation(size: int, seed: int) -> torch.Tensor:
    """Return a random orthogonal matrix, float64 `[size, size]`: the Q of a Gaussian matrix times the signs of R."""
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    turned: torch.Tensor = q * r.diagonal().sign()
    return turned


@torch.no_grad()
def rotate(model: LlamaForCausalLM, seed: int) -> None:
    """Rotate a model's hidden states in place; its logits change only by rounding."""
    turn = rotation(model.config.hidden_size, seed)
    base, embedding = model.model, model.get_input_embeddings().weight
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # untied from the embedding
    _reads(model.lm_head.weight, base.norm.weight, turn)
    embedding.copy_(embedding.double() @ turn)
    for layer in base.layers:
        products = {name.split(".")[-1]: module for name, module in layer.named_modules()}
        for norm, names in READERS.items():
            for name in names:
                _reads(products[name].weight, products[norm].weight, turn)
            products[norm].weight.fill_(1.0)
        for name in WRITERS:
            products[name].weight.copy_(turn.T @ products[name].weight.double())
    base.norm.weight.fill_(1.0)


def _reads(weight: torch.Tensor, norm: torch.Tensor, turn: torch.Tensor) -> None:
    """Fold a norm's weight into the weight `[N, K]` of a product that reads its output, and rotate that back."""
    weight.copy_((weight.double() * norm.double()) @ turn)


@quiet()
def make(source: str, output: Path, seed: int) -> None:
    """Write the rotated checkpoint to a temporary folder and rename that; raise SpecbuildError if it is refused."""

    def check() -> None:
        check_output(output, False, "config.json", "checkpoint")

    check()
    found = checkpoint.find(source)
    model = checkpoint.load(found, "eager")
    if not isinstance(model, LlamaForCausalLM) or model.config.attention_bias or model.config.mlp_bias:
        raise CheckpointError(f"{source} is no Llama without biases: only those are turned")
    rotate(model, seed)
    with staging(output, 2 * sum(file.stat().st_size for file in found.weights), check) as folder:
        model.save_pretrained(folder)
        found.tokenizer.save_pretrained(folder)


def main(arguments: list[str] | None = None) -> int:
    """Rotate the checkpoint that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="folder or GGUF file of a Llama")
    parser.add_argument("output", type=Path, help="folder to create")
    parser.add_argument("--seed", type=int, default=0, help="of the rotation")
    asked = parser.parse_args(arguments)
    try:
        make(asked.checkpoint, asked.output, asked.seed)
    except SpecbuildError as error:
        print(f"rotate_checkpoint.py: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
