"""Measures what each layer's quantization costs by itself, and implements `auto`, which widens those that need it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import torch
from torch import Tensor

from specbuild.builder.config.progress import Progress
from specbuild.builder.frontend.layer_by_layer import LayeredModel, State, States
from specbuild.builder.frontend.logits_file import Logits
from specbuild.measure.divergence import kl
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.sampling.logprobs import log_softmax

from .calibrate import NumbersByName
from .linears import Names, groups, simulated
from .quality import Before, acceptance

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


def units(model: LayeredModel, names: Names, wanted: Sequence[str]) -> list[list[str]]:
    """Group weights that must have the same precision: layers that share an input; a tied head and embedding."""
    embedding = [names.embedding] if names.embedding in wanted else []
    found = groups(model, [name for name in wanted if name != names.embedding])
    for unit in found if names.tied else ():
        if names.head in unit:
            unit += embedding
            embedding = []
    return [*found, *([embedding] if embedding else [])]


def stored(found: NumbersByName, model: LayeredModel, unit: Sequence[str], item: int = 4) -> int:
    """Return the bytes of a unit's weights, with scales, zero points and offsets; a shared tensor counts once.

    Args:
        found: Quantized weights, by name; the others count as not quantized.
        model: The float32 model.
        unit: Names of the weights.
        item: Bytes of a number that is not quantized.
    """
    sizes = dict[tuple[int, int], int]()  # by id too: a tied weight may be quantized in two ways
    for name in unit:
        each, weight = found.get(name), model.weights[f"{name}.weight"]
        total = prod(weight.shape) * item
        if each is not None:
            count, blocks, size = each.shape
            total = count * each.scheme.row_bytes(blocks * size, "offsets" in each.parts)
        sizes[id(weight), id(each)] = total
    return sum(sizes.values())


def _item(found: NumbersByName) -> int:
    """Return the bytes of a number of the type that the quantized weights compute in."""
    return 4 if any(each.scheme.dtype == "fp32" for each in found.values()) else 2


def costs(
    model: LayeredModel, found: NumbersByName, split: Sequence[Sequence[str]], before: Before, progress: Progress
) -> list[Cost]:
    """Return the cost of each unit in `split`, in order; a unit that is not quantized costs nothing."""
    measured, item = list[Cost](), _item(found)
    alone = [{name: found[name] for name in unit if name in found} for unit in split]
    changed = iter(_changes(model, [each for each in alone if each], before, progress))
    for unit, each in zip(split, alone, strict=True):
        moved, cosines, schemes = 0.0, dict[str, float](), ["fp32" if item == 4 else "16 bits"]
        if each:
            moved, cosines = next(changed)
            schemes = list(dict.fromkeys(str(numbers.scheme) for numbers in each.values()))
        lowest = min(cosines.values(), default=1.0)
        measured.append(Cost(list(unit), ", ".join(schemes), stored(found, model, unit, item), moved, lowest))
    return measured


def _changes(
    model: LayeredModel,
    variants: Sequence[NumbersByName],
    before: Before,
    progress: Progress = lambda phase, share: None,
) -> Iterator[tuple[float, dict[str, float]]]:
    """Run TOKENS tokens of the longest held-out text through a model with each of several sets of quantized weights.

    All of them run at once, a layer at a time. Yields the divergence in nats per token of each, and the cosine between
    the quantized and the float32 outputs of each of its linear layers for the same input, by name.
    """
    text, exact = max(zip(before.texts, before.logits, strict=True), key=lambda pair: len(pair[0]))
    text, exact = text[:TOKENS], exact[:TOKENS]
    cosines = [dict[str, float]() for _ in variants]
    states = _states(model, text, variants, cosines, progress)
    columns, head = slice(None) if model.tokens is None else list(model.tokens), model.head and model.names[model.head]
    inner = [number for number, variant in enumerate(variants) if not model.of_layers(variant)[1]]
    kls = dict(zip(inner, _divergences(model, text, exact, [states[number] for number in inner]), strict=True))
    for number, variant in enumerate(variants):
        if number not in kls:
            with simulated(model, variant) as changed:
                (logits,) = changed.ends([text], [states[number]])
            kls[number] = float(kl(exact, logits).mean())
            if head in variant:
                (same,) = model.ends([text], [states[number]])
                _note(cosines[number], str(head), *(torch.from_numpy(each[:, columns]) for each in (logits, same)))
        yield kls[number], cosines[number]


def _divergences(model: LayeredModel, text: Sequence[int], exact: Logits, states: States) -> list[float]:
    """Return how far the logits of states after the last layer diverge from exact ones, in nats per token.

    The head is read once for all states: what the logits' softmax needs is summed by rows of the head.
    """
    if not states:
        return []
    logs = log_softmax(exact)
    chances = np.exp(logs)
    negative_entropy = np.where(chances > 0, chances * logs, 0.0).sum(1)
    shape = len(states), len(text)
    expected, total, largest = np.zeros(shape), np.zeros(shape), np.full(shape, float(np.finfo(np.float32).min))
    for places, pieces in model.ends_by_rows(text, states):
        weights = chances[:, places]
        for number, piece in enumerate(pieces):
            logits = piece.astype(np.float64)
            expected[number] += np.where(weights > 0, weights * logits, 0.0).sum(1)
            before, largest[number] = largest[number].copy(), np.maximum(largest[number], logits.max(1))
            total[number] *= np.exp(before - largest[number])
            total[number] += np.exp(logits - largest[number][:, None]).sum(1)
    found = negative_entropy - expected + largest + np.log(total)
    return [float(each) for each in np.maximum(found.mean(1), 0.0)]


def _states(
    model: LayeredModel,
    text: Sequence[int],
    variants: Sequence[NumbersByName],
    cosines: Sequence[dict[str, float]],
    progress: Progress,
) -> States:
    """Return the hidden state after the last layer by each variant, and note the cosines of its linear layers."""
    plain: State | None = None
    parted = dict[int, State | None]()  # of the variants that are no longer as the plain model
    places = [model.of_layers(each) for each in variants]
    for index in range(len(model.layers)):
        progress("what each layer costs", index / len(model.layers))
        with model.reading(index, [text]):
            for number, (variant, (inside, outside)) in enumerate(zip(variants, places, strict=True)):
                if names := inside[index] + outside:
                    some, watch = {name: variant[name] for name in names}, partial(_note, cosines[number])
                    with simulated(model, some, watch) as changed, changed.holding(names, [text]):
                        (parted[number],) = changed.run(index, [text], [parted.get(number, plain)])
            others = [number for number in parted if not places[number][0][index] + places[number][1]]
            outputs = model.run_batch(index, text, [parted[number] for number in others] + [plain])
            parted |= zip(others, outputs, strict=False)
            plain = outputs[-1]
    return [parted.get(number, plain) for number in range(len(variants))]


def _note(cosines: dict[str, float], name: str, output: Tensor, exact: Tensor) -> None:
    cosines[name] = torch.cosine_similarity(output.flatten(0, -2), exact.flatten(0, -2), dim=-1).mean().item()


def distance(model: LayeredModel, before: Before, found: NumbersByName) -> float:
    """Return the divergence in nats per token of a model with quantized weights."""
    with simulated(model, found) as changed:
        pairs = zip(before.logits, changed.logits(before.texts), strict=True)
        return float(np.concatenate([kl(exact, moved) for exact, moved in pairs]).mean())


def least_alike(model: LayeredModel, found: NumbersByName, before: Before) -> list[str]:
    """Return the linear layers whose quantized and float32 outputs for the same input differ most, those first."""
    ((_, cosines),) = _changes(model, [found], before)
    return sorted(cosines, key=lambda name: cosines[name])


def within(
    model: LayeredModel,
    rungs: Sequence[NumbersByName],
    split: Sequence[Sequence[str]],
    before: Before,
    bound: float,
    progress: Progress = lambda phase, share: None,
) -> NumbersByName:
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
    if distance(model, before, rungs[0]) <= bound:
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
            best, wider = max(gains, key=lambda key: gains[key])  # above 0: the last rung costs nothing
            at[best] = wider
        chosen = dict(rungs[-1])
        for names, rung in zip(split, at, strict=True):
            chosen |= {name: rungs[rung][name] for name in names if name in rungs[rung]}
        moved = distance(model, before, chosen)
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


def narrowest(model: LayeredModel, rungs: Sequence[NumbersByName], before: Before, target: Before) -> NumbersByName:
    """Return a draft's narrowest quantized weights that keep LEAST_ACCEPTANCE of its acceptance length, or {}.

    Args:
        model: The float32 draft.
        rungs: The draft's quantized weights, each entry wider than the last.
        before: What the float32 draft computes of the held-out texts.
        target: What the float32 target computes of them.
    """
    exact = acceptance(target, before.logits)
    for found in rungs:
        with simulated(model, found) as changed:
            if acceptance(target, changed.logits(before.texts)) >= LEAST_ACCEPTANCE * exact:
                return found
    return {}
