"""A model's quantization as one stage of a build: texts, what it was before, numbers, and what each layer costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedModel

from specbuild.builder.config.quantize_options import AUTO, AUTO_KL, QuantizeOptions, chooses
from specbuild.builder.config.scheme import Scheme
from specbuild.builder.frontend.reference import Reference, text_logits
from specbuild.runtime.bundle.backend import BACKENDS

from .assignment import assign
from .calibrate import Found, Keep, calibrate
from .grids import METHOD as GRID
from .grids import own_grids
from .linears import Names, simulated
from .numbers import Quantized
from .quality import Before, acceptance, moved
from .refusal import GLANCE, GLANCED, check_cost, glance
from .sensitivity import Cost, costs, narrowest, stored, units, within
from .texts import Texts

Progress = Callable[[str, float], None]
RUNGS = {False: ("int4", "int8", "int8:wide"), True: ("int4", "int8")}  # of auto, by whether it is for a GPU
HOPELESS = 1.75  # times what is allowed, beyond which a few texts are enough: many calibrate better, by a third
SIMULATED = 0.9  # of what auto may spend: what will run moves the model a little further than its simulation


# What was asked for by name, the candidates by precision, and what was before: the best, and what the report says.
Comparing = Callable[[Found, Mapping[str, Found], Before], tuple[Found, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Quantization:
    """What came of a model's weights, by `names`. `acceptance`: a draft's acceptance length before and after."""

    names: Names
    found: Found
    before: Before
    costs: list[Cost]
    left: list[str]  # weights that were to be quantized, and have no row that a block divides
    acceptance: list[float] | None = None
    measured: dict[str, Any] = field(default_factory=dict)  # end to end, and the sizes; see `quality.moved`

    def with_measured(self, more: dict[str, Any]) -> Quantization:
        """The same, with something more that was measured."""
        return replace(self, measured=self.measured | more)

    def to_dict(self) -> dict[str, Any]:
        """For report.json."""
        told = {"layers": [asdict(cost) for cost in self.costs], "not_quantized": self.left} | self.measured
        return told | ({"acceptance_length": self.acceptance} if self.acceptance else {})


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of the "target" or "draft": `precision` as it was written, and the build's options and texts.

    `max_kl`: what "auto" and "best" may spend, nats a token.
    """

    model: str
    precision: str
    backend: str
    options: QuantizeOptions
    texts: Texts
    max_kl: float = AUTO_KL
    item: int = 4  # bytes of a number that is not quantized
    comparing: Comparing | None = None  # for "best"


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Where a model's numbers come from. `identity`: of the checkpoint, for what is kept.

    `made`: numbers by weight and scheme, which other activations share, for what is rounded does not depend on those.
    """

    model: PreTrainedModel
    request: Request
    names: Names
    identity: str
    progress: Progress
    made: dict[tuple[str, Scheme], Quantized] = field(default_factory=dict)

    def of(self, schemes: Mapping[str, Scheme], texts: Sequence[list[int]] | None = None) -> Found:
        """By the scheme of each weight; calibrated on the request's texts, or on others, of which nothing is kept."""
        request, names, keep = self.request, self.names, None
        if (folder := request.options.calibration_cache) and texts is None:
            told = {weight: str(scheme) for weight, scheme in schemes.items()}
            keep = Keep(folder, self.identity, version("specbuild-trt"), request.texts.sha256, told)
        found = {weight: each for weight, scheme in schemes.items() if (each := self._again(weight, scheme))}
        rest = {weight: scheme for weight, scheme in schemes.items() if weight not in found}
        found |= own_grids(self.model, rest)
        rest = {weight: scheme for weight, scheme in rest.items() if weight not in found}
        head, embedding = str(names.head), names.embedding
        once = names.tied and head in rest and rest[head] == rest.get(embedding) and not rest[head].calibrated
        if once:
            del rest[embedding]
        given = request.texts.calibration if texts is None else texts
        with simulated(self.model, found if rest else {}):
            found |= calibrate(self.model, rest, given, keep, self.progress)
        if head in found and (once or (names.tied and _shape(found, head) == _shape(found, embedding))):
            found[embedding] = found[head]  # stored once
        self.made.update({(weight, _of_any(schemes[weight])): each for weight, each in found.items() if _alone(each)})
        return found

    def _again(self, weight: str, scheme: Scheme) -> Quantized | None:
        """A weight's numbers, where they were made for other activations."""
        each = self.made.get((weight, _of_any(scheme)))
        return each and replace(each, scheme=replace(each.scheme, activations=scheme.activations))

    def like(self, precision: str) -> Found:
        """With another precision for all weights that are not asked for by name."""
        request = self.request
        return self.of(assign(request.options, request.model, precision, request.backend, self.names))


def quantize_model(
    model: PreTrainedModel,
    request: Request,
    names: Names,
    asked: Mapping[str, Scheme],
    before: Before,
    judged_by: Sequence[Reference],
    identity: str,
    progress: Progress,
) -> Quantization:
    """Quantize a float32 model as asked; it is as it was afterwards.

    asked: schemes by weight, under "auto" only of those with one. judged_by: what the target writes, for a draft.
    identity: of the checkpoint, for what is kept. Raises OptionError, and ExecutionError where it costs too much.
    """
    numbers, split = _Numbers(model, request, names, identity, progress), units(model, names, names.weights)
    compared: dict[str, Any] = {}
    if chooses(request.precision):
        kinds = RUNGS[BACKENDS[request.backend].on_gpu]
        rungs = [numbers.like(kind) for kind in kinds]
        free = [unit for unit in split if not any(each in asked for each in unit)]
        if request.model == "target" and request.precision != AUTO:
            assert request.comparing is not None
            found, compared = request.comparing(numbers.of(asked), dict(zip(kinds, rungs, strict=True)), before)
        elif request.model == "target":
            found = within(model, rungs, free, before, SIMULATED * request.max_kl, progress)
        else:
            found = narrowest(model, rungs, judged_by) or numbers.of(asked)
    else:
        found = numbers.of(asked)
        if request.model == "target":
            check_cost(model, found, before, request.precision, request.max_kl, numbers.like)
    wanted = [weight for weight, scheme in asked.items() if scheme.quantized]
    if chooses(request.precision) and found:  # a weight that no block divides is not found however wide
        wanted += [weight for weight in rungs[0].keys() ^ set(names.weights) if weight not in wanted]
    measured: dict[str, Any] = {"weight_bytes": stored(found, model, names.weights, request.item)}
    measured["weight_bytes_before"] = stored({}, model, names.weights)
    measured |= {"compared": compared} if compared else {}
    measured["own_grids"] = sum(each.scheme.method == GRID for each in found.values())
    if request.model == "draft":  # the target's comes from what will run
        with simulated(model, found):
            measured |= moved(before, lambda text: text_logits(model, text))
    left = [weight for weight in wanted if weight not in found]
    each = costs(model, found, split, before, progress) if found else []
    lengths = acceptance(model, found, judged_by) if request.model == "draft" else None
    return Quantization(names, found, before, each, left, lengths, measured)


def check_early(model: PreTrainedModel, request: Request, names: Names, asked: Mapping[str, Scheme]) -> None:
    """Raise ExecutionError where calibration is not worth its minutes, as the beginnings of a few texts tell."""
    if chooses(request.precision) or not any(scheme.activations == "static" for scheme in asked.values()):
        return
    numbers, before = _Numbers(model, request, names, "", lambda phase, share: None), glance(model, request.texts)
    found = numbers.of(asked, [text[:GLANCE] for text in request.texts.calibration[:GLANCED]])
    check_cost(model, found, before, request.precision, request.max_kl, numbers.like, HOPELESS)


def _of_any(scheme: Scheme) -> Scheme:
    """A scheme whatever is done to inputs, but for a scale of theirs, which the weight is smoothed for."""
    return scheme if scheme.activations == "static" else replace(scheme, activations="")


def _alone(each: Quantized) -> bool:
    """Whether numbers depend on the weight alone."""
    return each.scheme.method in ("rtn", GRID) and each.smooth is None and each.input_scale is None


def _shape(found: Found, name: str) -> Any:
    """What would make two weights' numbers differ, where their weights are one."""
    each = found.get(name)
    if each is None or not _alone(each) or each.offsets is not None:
        return name  # equal to nothing else
    return each.scheme.kind, each.codes.shape, each.scheme.symmetric
