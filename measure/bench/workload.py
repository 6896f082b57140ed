"""A benchmark's prompts, contenders and concurrencies, all checked before anything runs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbuild.runtime import Manifest, TreeSpec
from specbuild.runtime.errors import OptionError, PromptError
from specbuild.runtime.requests.prompt_file import Request, read

from .measure import BASELINE

PYCODE = Path(__file__).with_name("pycode.jsonl")  # standard library code that the reference pair was not trained on
SPEC_BENCH = "Spec-Bench is not part of specbuild: fetch its question.jsonl from github.com/hemingkx/Spec-Bench"


def load(
    prompts: str, dataset_path: str | None, count: int | None, seed: int, defaults: dict[str, Any]
) -> list[Request]:
    """Return the requests of a benchmark. Request i samples with `seed + i` unless its line has a seed.

    A line's parameters override `defaults`, except `n`, `logprobs` and deadlines, which would change what is measured
    and are reset.

    Args:
        prompts: "pycode", "spec_bench" or a file.
        dataset_path: Spec-Bench's question.jsonl, for "spec_bench" only.
        count: How many requests, spread evenly over the prompts; None for all.
        seed: The first request's seed.
        defaults: Default sampling parameters.

    Raises:
        PromptError: A prompt cannot be read, or is not a question of Spec-Bench.
        OptionError: There are fewer than `count` prompts, or `dataset_path` is missing or misplaced.
    """
    if dataset_path is not None and prompts != "spec_bench":
        raise OptionError(
            "--dataset-path says where Spec-Bench is: use it with --prompts spec_bench, or --prompts FILE"
        )
    if prompts == "spec_bench":
        if dataset_path is None:
            raise OptionError(f"{SPEC_BENCH} and name it with --dataset-path")
        requests = read(dataset_path, defaults)
        for request in requests:
            if request.category is None:
                raise PromptError(f"{request.where}: not a question of Spec-Bench: give its turns and its category")
    else:
        requests = read(str(PYCODE) if prompts == "pycode" else prompts, defaults)
    total = len(requests)
    if count is not None and count > total:
        raise OptionError(f"--num-prompts {count} is more than the {total} prompts of {dataset_path or prompts}")
    chosen = [requests[i * total // count] for i in range(count)] if count else requests
    return [
        replace(
            request, params=replace(request.params, seed=_seed(request, seed + i), n=1, logprobs=None, deadline=None)
        )
        for i, request in enumerate(chosen)
    ]


def _seed(request: Request, seed: int) -> int:
    return seed % 2**64 if request.params.seed is None else request.params.seed


def concurrencies(text: str, manifest: Manifest) -> list[int]:
    """Parse a list such as `1,2,4` into ascending concurrencies; raise OptionError if one is invalid or too large."""
    words = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,6}", word) and int(word) for word in words):
        raise OptionError(f"--concurrency {text!r} is not a list of whole numbers of at least 1, as in 1,2,4")
    sizes = sorted(set(map(int, words)))
    if sizes[-1] > manifest.max_batch_size:
        raise OptionError(
            f"concurrency {sizes[-1]} is more than the {manifest.max_batch_size} sequences this bundle was built for: "
            "build it with --max-batch-size"
        )
    return sizes


def contenders(trees: str | None, manifest: Manifest) -> list[str]:
    """Return values of `speculation`: plain decoding, "auto", and each tree once; raise OptionError for a bad tree.

    A tree begins with a letter, so a comma before a letter separates trees, and any other comma belongs to a tree.
    """
    asked = [] if trees is None else re.split(r"[,;\s]+(?=[a-z])", trees.strip())
    for tree in asked:
        TreeSpec.parse(tree).check(manifest.buckets[-1])
    return list(dict.fromkeys([BASELINE, "auto", *asked]))
