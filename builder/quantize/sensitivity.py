"""Measures what each layer's quantization costs by itself, and implements `auto`, which widens those that need it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specbuild.builder.frontend.reference import Reference, text_logits
from specbuild.measure.divergence import kl
from specbuild.runtime.errors import ExecutionError

from .calibrate import Found
from .linears import Names, groups, no_grad, rows, simulated
from .numbers import Quantized
from .quality import Before, acceptance

Progress = Callable[[str, float], None]
TOKENS = 32  # tokens of the longest held-out text, enough to rank layers
LEAST_ACCEPTANCE = 0.98  # minimum fraction of its acceptance length that a quantized draft keeps


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of quantizing one unit alone: KL in nats per token, and the lowest cosine of its layers' outputs."""

    names: list[str]
    precision: str
    bytes: int
    kl: float
    cosine: float


def units(model: PreTrainedModel, names: Names, wanted: Sequence[str]) -> list[list[str]]:
    """Group weights that must have the same precision: layers that share an input; a tied head and embedding."""
    embedding = [names.embedding] if names.embedding in wanted else []
    found = groups(model, [name for name in wanted if name != names.embedding])
    for unit in found if names.tied else ():
        if names.head in unit:
            unit += embedding
            embedding = []
    return [*found, *([embedding] if embedding else [])]


def stored(found: Mapping[str, Quantized], model: PreTrainedModel, unit: Sequence[str], item: int = 4) -> int:
    """Return the bytes of a unit's weights, with scales, zero points and offsets; a shared tensor counts once.

    Args:
        found: Quantized weights, by name; the others count as not quantized.
        model: The float32 model.
        unit: Names of the weights.
        item: Bytes of a number that is not quantized.
    """
    sizes = dict[tuple[int, int], float]()  # by id too: a tied weight may be quantized in two ways
    for name in unit:
        each, weight = found.get(name), rows(model.get_submodule(name))
        total: float = weight.numel() * item
        if each is not None:
            count, blocks, size = each.codes.shape
            total = count * blocks * (size * each.scheme.bits / 8 + item * (1 + (each.zeros is not None)))
        sizes[weight.data_ptr(), id(each)] = total
    return math.ceil(sum(sizes.values()))


def _item(found: Found) -> int:
    """Return the bytes of a number of the type that the quantized weights compute in."""
    return 4 if any(each.scheme.dtype == "fp32" for each in found.values()) else 2


def costs(
    model: PreTrainedModel, found: Found, split: Sequence[Sequence[str]], before: Before, progress: Progress
) -> list[Cost]:
    """Return the cost of each unit in `split`, in order; a unit that is not quantized costs nothing."""
    measured, item = [], _item(found)
    for number, unit in enumerate(split):
        progress("what each layer costs", number / len(split))
        alone = {name: found[name] for name in unit if name in found}
        moved, cosine, schemes = 0.0, 1.0, ["fp32" if item == 4 else "16 bits"]
        if alone:
            with _cosines(model, alone) as cosines:
                moved = distance(model, before, TOKENS)
            cosine = min((float(np.mean(each)) for each in cosines.values()), default=1.0)
            schemes = list(dict.fromkeys(str(each.scheme) for each in alone.values()))
        measured.append(Cost(list(unit), ", ".join(schemes), stored(found, model, unit, item), moved, cosine))
    return measured


@contextmanager
def _cosines(model: PreTrainedModel, alone: Found) -> Iterator[dict[str, list[float]]]:
    seen = defaultdict[str, list[float]](list)

    def watch(name: str, output: Tensor, exact: Tensor) -> None:
        seen[name].append(torch.cosine_similarity(output.flatten(0, -2), exact.flatten(0, -2), dim=-1).mean().item())

    with no_grad(model), simulated(model, alone, watch):
        yield seen


def distance(model: PreTrainedModel, before: Before, tokens: int | None = None, found: Found | None = None) -> float:
    """Return the divergence from `before` in nats per token, on all texts or on `tokens` tokens of the longest.

    With `found` it is that of the model with these quantized weights.
    """
    pairs = list(zip(before.texts, before.logits, strict=True))
    if tokens is not None:
        text, logits = max(pairs, key=lambda pair: len(pair[0]))
        pairs = [(text[:tokens], logits[:tokens])]
    with no_grad(model), simulated(model, found or {}):
        moved = [kl(exact, text_logits(model, text)) for text, exact in pairs]
    return float(np.concatenate(moved).mean())


def least_alike(model: PreTrainedModel, found: Found, before: Before) -> list[tuple[str, float]]:
    """Return each linear layer's cosine between its quantized and float32 outputs for the same input, lowest first."""
    with _cosines(model, found) as cosines:
        distance(model, before, TOKENS)
    return sorted(((name, float(np.mean(each))) for name, each in cosines.items()), key=lambda pair: pair[1])


def within(
    model: PreTrainedModel,
    rungs: Sequence[Found],
    split: Sequence[Sequence[str]],
    before: Before,
    bound: float,
    progress: Progress = lambda phase, share: None,
) -> Found:
    """Return the narrowest quantized weights whose divergence is at most `bound`: the search behind `auto`.

    Units are widened where a byte lowers the divergence most, until the whole model is within the bound.

    Args:
        model: The float32 model.
        rungs: The whole model's quantized weights, each entry wider than the last; a missing weight is not quantized.
        split: The units that may be widened.
        before: The float32 model's results.
        bound: Maximum divergence in nats per token.
        progress: Called with the phase and the fraction of it that is done.

    Raises:
        ExecutionError: The weights outside `split` alone exceed the bound.
    """
    if distance(model, before, found=rungs[0]) <= bound:
        return rungs[0]
    rungs = [*rungs, {name: each for name, each in rungs[-1].items() if not any(name in unit for unit in split)}]
    split = [unit for unit in split if any(name in rungs[0] for name in unit)]
    kls, sizes = [], []
    for found in rungs:
        each = {tuple(c.names): c.kl for c in costs(model, found, split, before, progress)} if split else {}
        kls.append([each.get(tuple(names), 0.0) for names in split])
        sizes.append([stored(found, model, names, _item(rungs[0])) for names in split])
    at, budget = [0] * len(split), bound
    while True:
        while sum(kls[rung][unit] for unit, rung in enumerate(at)) > budget:
            gains = {}
            for unit, rung in enumerate(at):
                for wider in range(rung + 1, len(rungs)):
                    more = max(1, sizes[wider][unit] - sizes[rung][unit])
                    gains[unit, wider] = (kls[rung][unit] - kls[wider][unit]) / more
            best = max(gains, key=lambda key: gains[key], default=None)
            if best is None or gains[best] <= 0:
                break
            at[best[0]] = best[1]
        chosen = dict(rungs[-1])
        for names, rung in zip(split, at, strict=True):
            chosen |= {name: rungs[rung][name] for name in names if name in rungs[rung]}
        moved = distance(model, before, found=chosen)
        if moved <= bound:
            return chosen
        if all(rung == len(rungs) - 1 for rung in at):
            raise ExecutionError(
                f"auto cannot stay below {bound:g} nats a token: what --tensor-type asks for costs {moved:.2g}, "
                "ask for less, or raise --max-kl"
            )
        budget *= min(0.9, 0.9 * bound / moved)
        if not sum(kls[rung][unit] for unit, rung in enumerate(at)) > 0:  # no measured cost is left to choose a unit by
            at = [len(rungs) - 1] * len(split)


def narrowest(model: PreTrainedModel, rungs: Sequence[Found], texts: Sequence[Reference]) -> Found:
    """Return a draft's narrowest quantized weights that keep LEAST_ACCEPTANCE of its acceptance length, or {}."""
    for found in rungs:
        before, after = acceptance(model, found, texts)
        if after >= LEAST_ACCEPTANCE * before:
            return found
    return {}
