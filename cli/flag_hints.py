"""Hints for flags of other engines: which flag of specbuild does the same."""

from __future__ import annotations

import click

_HERE = {  # flags of vLLM, llama.cpp and trtllm-build, without the dashes
    "speculative-config": "speculation is built in: specbuild build --draft, then --tree or --drafter",
    "speculative-model": "specbuild build --draft",
    "num-speculative-tokens": "--max-draft-tokens, or --tree chain:N",
    "spec-draft-n-max": "--max-draft-tokens",
    "draft-min": "auto drafts as little as pays, down to nothing",
    "model-draft": "specbuild build --draft",
    "md": "specbuild build --draft",
    "quantization": "specbuild build --precision",
    "dtype": "specbuild build --precision",
    "kv-cache-type": "specbuild build --kv-cache-dtype",
    "cache-type-k": "specbuild build --kv-cache-dtype",
    "ctx-size": "specbuild build --max-seq-len",
    "max-input-len": "specbuild build --max-seq-len",
    "parallel": "--max-num-seqs of serve, --batch-size of generate",
    "max-batch-size": "specbuild build --max-batch-size; --max-num-seqs of serve",
    "gpu-memory-utilization": "--kv-cache-tokens",
    "n-gpu-layers": "a bundle runs where it was built for: specbuild build --backend",
    "ngl": "a bundle runs where it was built for: specbuild build --backend",
    "device": "a bundle runs where it was built for: specbuild build --backend",
    "tensor-parallel-size": "not needed: a bundle runs on one device",
    "tp-size": "not needed: a bundle runs on one device",
    "enforce-eager": "not needed: bundles are compiled ahead of time",
    "trust-remote-code": "not needed: no code of a checkpoint is run",
    "jinja": "not needed: chat templates are always used where a bundle has one",
}


def hinted(error: click.NoSuchOption) -> str:
    """The line that tells of an unknown flag, with the flag that was meant.

    Args:
        error: Click's error, which knows the flags of its own command that look alike.
    """
    here = _HERE.get(error.option_name.lstrip("-").replace("_", "-"))
    return error.format_message() if here is None else f"there is no {error.option_name}; here it is {here}"
