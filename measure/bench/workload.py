"""What is decoded, by whom, and how many at a time; whatever is wrong with that is said before anything runs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbuild.runtime import Manifest, TreeSpec
from specbuild.runtime.errors import OptionError, PromptError
from specbuild.runtime.requests.prompt_file import Request, read

from .measure import BASELINE

PYCODE = Path(__file__).with_name("pycode.jsonl")  # of the standard library, which the reference pair has not seen
SPEC_BENCH = "Spec-Bench is not part of specbuild: fetch its question.jsonl from github.com/hemingkx/Spec-Bench"


def load(
    prompts: str, dataset_path: str | None, count: int | None, seed: int, defaults: dict[str, Any]
) -> list[Request]:
    """`count` requests (all by default) of "pycode", "spec_bench" or a file; request i samples with `seed + i`.

    A line's own parameters override `defaults`, but for how many samples, log-probabilities and deadlines, which would
    change what is measured. Raises PromptError, and OptionError where there are fewer or no such prompts.
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
    """The concurrencies, ascending; raises OptionError."""
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
    """What `speculation` takes: plain decoding, the default, and each tree once. Raises OptionError.

    A tree begins with a letter, so a comma before one ends the last tree, and any other comma is a tree's own.
    """
    asked = [] if trees is None else re.split(r"[,;\s]+(?=[a-z])", trees.strip())
    for tree in asked:
        TreeSpec.parse(tree).check(manifest.buckets[-1])
    return list(dict.fromkeys([BASELINE, "auto", *asked]))
