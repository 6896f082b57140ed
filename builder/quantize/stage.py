"""The build stage that quantizes one model, and measures what the model was before and what each layer costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

from specbuild.builder.config.progress import Progress
from specbuild.builder.config.quantize_options import AUTO, AUTO_KL, QuantizeOptions, chooses
from specbuild.builder.config.scheme import KEEP, Scheme
from specbuild.builder.frontend.layer_by_layer import LayeredModel

from .assignment import assign
from .calibrate import CalibrationCache, NumbersByName, calibrate
from .grids import METHOD as GRID
from .grids import own_grids
from .linears import Names, simulated
from .numbers import Numbers
from .quality import Before, acceptance, moved
from .refusal import check_cost
from .sensitivity import Cost, costs, narrowest, stored, units, within
from .texts import Texts

RUNGS = ("int4", "int8")  # auto's precisions
SIMULATED = 0.9  # fraction of max_kl that auto spends: the final graph diverges a little more than the simulation


# (weights quantized by name, the candidates by precision, float32 results) → the best weights, the report's entry
Comparing = Callable[[NumbersByName, Mapping[str, NumbersByName], Before], tuple[NumbersByName, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Quantization:
    """The result of quantizing a model.

    Attributes:
        names: The model's weights.
        numbers: The quantized weights, by name.
        before: What the float32 model computes.
        costs: The cost of each unit by itself.
        remainder: Weights that should be quantized, but that no block size fits.
        acceptance: A draft's acceptance length before and after.
        measured: Sizes, and how far the whole model moved, as `quality.moved` returns it.
    """

    names: Names
    numbers: NumbersByName
    before: Before
    costs: list[Cost]
    remainder: list[str]
    acceptance: list[float] | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    def with_measured(self, more: dict[str, Any]) -> Quantization:
        """Return a copy with more measurements."""
        return replace(self, measured=self.measured | more)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as report.json has it."""
        report = {"layers": [asdict(cost) for cost in self.costs], "not_quantized": self.remainder} | self.measured
        return report | ({"acceptance_length": self.acceptance} if self.acceptance else {})


@dataclass(frozen=True, slots=True)
class Request:
    """A request to quantize a model.

    Attributes:
        model: "target" or "draft".
        precision: The precision, as given on the command line.
        backend: The backend's name.
        options: The build's options.
        texts: Calibration and held-out texts.
        max_kl: Maximum divergence of the target in nats per token.
        item: Bytes of a number that is not quantized.
        comparing: Chooses the weights under "best".
    """

    model: str
    precision: str
    backend: str
    options: QuantizeOptions
    texts: Texts
    max_kl: float = AUTO_KL
    item: int = 4
    comparing: Comparing | None = None


@dataclass(frozen=True, slots=True)
class _Quantizer:
    """Quantizes a model in several precisions.

    `identity` is the checkpoint's sha256, for the calibration cache.
    """

    model: LayeredModel
    request: Request
    names: Names
    identity: str
    progress: Progress

    def of(self, schemes: Mapping[str, Scheme]) -> NumbersByName:
        """Quantize weights by their schemes, calibrated on the request's texts."""
        request, names, cache = self.request, self.names, None
        if folder := request.options.calibration_cache:
            labels = {weight: str(scheme) for weight, scheme in schemes.items()}
            cache = CalibrationCache(folder, self.identity, version("specbuild-trt"), request.texts.sha256, labels)
        numbers = dict(own_grids(self.model, names, schemes, cache))
        rest = {weight: scheme for weight, scheme in schemes.items() if weight not in numbers}
        head, embedding = str(names.head), names.embedding
        once = names.tied and head in rest and rest[head] == rest.get(embedding) and not rest[head].calibrated
        if once:
            del rest[embedding]
        with simulated(self.model, numbers) as changed:
            numbers |= calibrate(changed, rest, request.texts.calibration, cache, self.progress)
        if head in numbers and (once or (names.tied and _shape(numbers, head) == _shape(numbers, embedding))):
            numbers[embedding] = numbers[head]  # stored once
        return numbers

    def like(self, precision: str) -> NumbersByName:
        """Quantize in another precision all weights whose scheme is not given by name."""
        request = self.request
        return self.of(assign(request.options, request.model, precision, request.backend, self.names))


def quantize_model(
    model: LayeredModel,
    request: Request,
    names: Names,
    schemes: Mapping[str, Scheme],
    before: Before,
    target: Before,
    identity: str,
    progress: Progress,
) -> Quantization:
    """Quantize a model and measure what it costs.

    Args:
        model: The float32 model; it is unchanged afterwards.
        request: The model's name, precision, options and texts.
        names: The model's weights.
        schemes: The scheme of each weight; under "auto" and "best", of those given by name only.
        before: What the float32 model computes.
        target: What the float32 target computes, by which a draft's acceptance length is measured.
        identity: The checkpoint's sha256, for the calibration cache.
        progress: Called with the phase and the fraction of it that is done.

    Raises:
        OptionError: No text reaches a weight whose scheme is calibrated.
        OutputError: The calibration cache cannot be written.
        ExecutionError: The target diverges by more than `request.max_kl`.
    """
    quantizer, split = _Quantizer(model, request, names, identity, progress), units(model, names, names.weights)
    compared: dict[str, Any] = {}
    if chooses(request.precision):
        rungs = [quantizer.like(kind) for kind in RUNGS]
        free = [unit for unit in split if not any(each in schemes for each in unit)]
        if request.model == "target" and request.precision != AUTO:
            assert request.comparing is not None
            numbers, compared = request.comparing(quantizer.of(schemes), dict(zip(RUNGS, rungs, strict=True)), before)
        elif request.model == "target":
            numbers = within(model, rungs, free, before, SIMULATED * request.max_kl, progress)
        else:
            numbers = narrowest(model, rungs, before, target) or quantizer.of(schemes)
    else:
        numbers = quantizer.of(schemes)
        if request.model == "target" and numbers:
            check_cost(model, numbers, before, request.precision, request.max_kl, quantizer.like)
    wanted = [weight for weight, scheme in schemes.items() if scheme.quantized]
    if chooses(request.precision) and numbers:  # a weight that no block size fits is missing in every precision
        wanted += [weight for weight in rungs[0].keys() ^ set(names.weights) if weight not in wanted]
    measured: dict[str, Any] = {"weight_bytes": stored(numbers, model, names.weights, request.item)}
    measured["weight_bytes_before"] = stored({}, model, names.weights)
    measured |= {"compared": compared} if compared else {}
    measured["own_grids"] = sum(each.scheme.method in (GRID, KEEP) for each in numbers.values())
    lengths = None
    if request.model == "draft":  # the target's is measured with the final graph
        with simulated(model, numbers) as changed:
            after = changed.logits(before.texts)
        measured |= moved(before, after)
        lengths = [acceptance(target, each) for each in (before.logits, after)]
    remainder = [weight for weight in wanted if weight not in numbers]
    each = costs(model, numbers, split, before, progress) if numbers else []
    return Quantization(names, numbers, before, each, remainder, lengths, measured)


def _alone(each: Numbers) -> bool:
    """Return whether a quantized weight depends on the weight alone, not on its inputs."""
    return not each.scheme.calibrated or each.scheme.method in (GRID, KEEP)


def _shape(numbers: NumbersByName, name: str) -> Any:
    """Return a key that is equal for a tied head and embedding if their quantized weights are equal."""
    each = numbers.get(name)
    if each is None or not _alone(each) or "offsets" in each.parts:
        return name  # unequal to any other key
    return each.scheme.kind, each.shape, each.scheme.symmetric
