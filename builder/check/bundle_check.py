"""The check at the end of a build: the bundle against Hugging Face and against its own plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.builder.config.build_config import CHECK_SLOTS
from specbuild.builder.config.quantize_options import MAX_KL
from specbuild.builder.config.scheme import KEEP
from specbuild.builder.frontend.checkpoint import encode
from specbuild.builder.frontend.logits_file import LOWEST, LogitsFile
from specbuild.measure.divergence import divergences
from specbuild.measure.exactness import Case, Divergence, compare, plain
from specbuild.runtime import Bundle, Engine, Manifest, SamplingParams
from specbuild.runtime.backends.gpu.cuda import Cuda
from specbuild.runtime.backends.kernels.cubins import best_architecture
from specbuild.runtime.backends.kernels.library import find_library
from specbuild.runtime.backends.tensorrt.plan import Plan, check_architecture
from specbuild.runtime.errors import ExecutionError, SpecbuildError

Logits = Sequence[NDArray[np.float32]]  # one array for each text
Texts = Sequence[Sequence[int]]
NEW_TOKENS = 32
MAX_DIVERGENCE = MAX_KL  # nats per token, in any precision: beyond it the model is a different one
FP8_CACHE = "an FP8 cache"
INSTEAD = {"fp16": "bf16 or fp32", FP8_CACHE: "--kv-cache-dtype auto"}  # wider types to suggest, fp32 for all others
# Relative to the largest logit: in float32 rounding stays two orders of magnitude below; `keep` rounds inputs.
LOGIT_TOLERANCE = {"fp32": 1e-3, KEEP: 1e-2}
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and then",
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 日本語も",
    "\n",
    "1, 2, 3, 4, 5, 6, 7, 8, ",
)


def tokenize(tokenizer: Any, max_seq_len: int) -> tuple[list[list[int]], int]:
    """Return the check's prompts as token ids, cut to `max_seq_len`, and how many output tokens fit after them."""
    room = max(1, max_seq_len - NEW_TOKENS)
    prompts = [ids[:room] for ids in encode(tokenizer, PROMPTS) if ids]
    return prompts, min(NEW_TOKENS, max_seq_len - max(map(len, prompts)))


def check_texts(tokenizer: Any, max_seq_len: int) -> list[list[int]]:
    """Return texts for a graph that may not run here: each prompt, continued by the others as far as outputs would."""
    prompts, more = tokenize(tokenizer, max_seq_len)
    turns = [list(chain(*prompts[at:], *prompts[:at])) for at in range(len(prompts))]
    return [turn[: len(prompt) + more] for prompt, turn in zip(prompts, turns, strict=True)]


def unrunnable(manifest: Manifest) -> str | None:
    """Return why a bundle for GPUs cannot run on this machine, None if it should run."""
    try:
        with closing(Cuda()) as device:
            for record in manifest.engines.values():
                check_architecture(manifest.descriptor, record, device.capability)
            compiled = [record.architecture for record in manifest.kernels.values()]
            if not best_architecture(compiled, device.capability) and not find_library():
                return f"it has no kernels for compute capability {device.capability}, which is here: see --cuda-arch"
    except SpecbuildError as error:
        return str(error)
    return None


def inspected(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return TensorRT's own description of each model's engine, {} without engines; needs a GPU to deserialize them."""
    if not manifest.engines:
        return {}
    found = {}
    with closing(Cuda()) as device:
        for name, record in manifest.engines.items():
            with closing(Plan(folder / name, manifest.descriptor, record, device)) as plan:
                found[name.split("/")[0]] = plan.inspect()
    return found


def check(
    folder: Path, prompts: Sequence[list[int]], new_tokens: int, reference: Callable[[Texts], Logits], max_kl: float
) -> dict[str, Any]:
    """Compare the logits with Hugging Face's, and speculative with plain decoding, both greedy and sampled.

    In fp32, and where a file's own blocks are kept, each greedy token must be Hugging Face's choice after those before
    it, except for near ties. Other precisions change these tokens, so there the KL divergence is bounded instead.

    Args:
        folder: The bundle.
        prompts: Token ids.
        new_tokens: How many tokens are decoded after each.
        reference: Returns Hugging Face's logits after each token of texts; called when the bundle is closed.
        max_kl: Largest divergence from Hugging Face's logits, in nats per token.

    Raises:
        ExecutionError: Tokens differ beyond near ties, or logits by more than is allowed.
    """
    greedy = SamplingParams(max_new_tokens=new_tokens, seed=0)
    sampled = replace(greedy, temperature=1.0, top_p=0.95)
    manifest = Bundle.open(folder).manifest
    largest = max(map(int, manifest.models["target"].graphs), default=1)
    slots = largest if manifest.descriptor.on_gpu else min(largest, CHECK_SLOTS)
    cases, decoded = list[Case](), list[list[list[int]]]()
    with Engine.load(folder, batch_size=slots, prefix_caching=False) as engine:
        for name, params in (("greedy", greedy), ("temperature 1, top-p 0.95", sampled)):
            each = [params] * len(prompts)
            expected = plain(engine, prompts, each)
            decoded.append(expected)
            cases.append(compare(engine, f"{name}: default tree against plain decoding", prompts, each, expected))
        texts = [[*prompt, *tokens[:-1]] for prompt, tokens in zip(prompts, decoded[0], strict=True)]
        ours = LogitsFile(engine.text_logits(text) for text in texts)
        manifest, precision = engine.manifest, engine.manifest.precision
    logits = reference(texts)
    gap = max(float(np.abs(a - b).max()) for a, b in zip(ours, logits, strict=True))
    if precision in LOGIT_TOLERANCE:
        bound = manifest.exactness_bound if precision == "fp32" else 2 * gap
        cases.insert(0, _chosen(prompts, decoded[0], logits, bound))
    _raise_real(cases)
    if precision in LOGIT_TOLERANCE:
        raise_far(gap, logits, precision)
    divergence = check_divergence(precision, ours, logits, max_kl)
    return {
        "bound": manifest.exactness_bound,
        "largest_logit_difference": gap,
        "kl_nats_per_token": divergence,
        "cases": [case.to_dict() for case in cases],
    }


def _chosen(prompts: Sequence[list[int]], tokens: Sequence[list[int]], logits: Logits, bound: float) -> Case:
    """Compare each greedy token with the largest of Hugging Face's logits after the tokens before it."""
    found = list[Divergence]()
    for index, (prompt, got, each) in enumerate(zip(prompts, tokens, logits, strict=True)):
        rows = each[len(prompt) - 1 :]
        best = rows.argmax(1)
        for at in np.flatnonzero(best != np.array(got))[:1]:
            margin = float(rows[at, best[at]] - rows[at, got[at]])
            found.append(Divergence(index, int(at), int(best[at]), got[at], margin, margin >= bound))
    return Case("plain decoding against Hugging Face", len(prompts), sum(map(len, tokens)), 1.0, found)


def check_divergence(rounding: str, ours: Logits, logits: Logits, max_kl: float = MAX_DIVERGENCE) -> float:
    """Return the mean KL divergence from Hugging Face's float32 logits, in nats per token.

    Args:
        rounding: What caused it, for the message: a precision, or FP8_CACHE.
        ours: The logits to judge.
        logits: Hugging Face's.
        max_kl: The largest divergence allowed.

    Raises:
        ExecutionError: The divergence is larger.
    """
    divergence = float(divergences(logits, ours).mean())
    if not divergence <= max_kl:  # so that NaN fails, too
        by, wider = f"by {divergence:.2g} nats a token", INSTEAD.get(rounding, "fp32")
        raise ExecutionError(f"{rounding} changes this model too much, {by}: nothing was written, use {wider}")
    return divergence


def raise_far(gap: float, logits: Logits, precision: str = "fp32") -> None:
    """Raise ExecutionError if `gap`, the distance from PyTorch's `logits`, is too large to be rounding."""
    largest = max(1.0, *(float(np.abs(row[row > LOWEST]).max()) for row in logits))  # rows of no token are LOWEST
    if gap > LOGIT_TOLERANCE[precision] * largest:
        raise ExecutionError(f"the bundle's logits differ from Hugging Face's by up to {gap:.2g}: nothing was written")


def _raise_real(cases: Sequence[Case]) -> None:
    for case in cases:
        for divergence in case.divergences:
            if divergence.real:
                raise ExecutionError(
                    f"the bundle is not exact ({case.name}: prompt {divergence.prompt + 1}, token "
                    f"{divergence.position}, {divergence.got} for {divergence.expected}, "
                    f"margin {divergence.margin:.2g}): nothing was written"
                )
