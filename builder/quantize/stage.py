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
    """Where a model's numbers come from. `identity`: of the checkpoint, for what is kept."""

    model: PreTrainedModel
    request: Request
    names: Names
    identity: str
    progress: Progress

    def of(self, schemes: Mapping[str, Scheme], texts: Sequence[list[int]] | None = None) -> Found:
        """By the scheme of each weight; calibrated on the request's texts, or on others, of which nothing is kept."""
        request, names, keep = self.request, self.names, None
        if (folder := request.options.calibration_cache) and texts is None:
            told = {weight: str(scheme) for weight, scheme in schemes.items()}
            keep = Keep(folder, self.identity, version("specbuild-trt"), request.texts.sha256, told)
        found: Found = own_grids(self.model, schemes)
        rest = {weight: scheme for weight, scheme in schemes.items() if weight not in found}
        given = request.texts.calibration if texts is None else texts
        with simulated(self.model, found):
            found |= calibrate(self.model, rest, given, keep, self.progress)
        if names.tied and names.head and _shape(found, names.head) == _shape(found, names.embedding):
            found[names.embedding] = found[names.head]  # stored once
        return found

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


def _shape(found: Found, name: str) -> Any:
    """What would make two weights' numbers differ, where their weights are one."""
    each = found.get(name)
    if each is None or each.scheme.method not in ("rtn", GRID):
        return name  # equal to nothing else
    if any(part is not None for part in (each.smooth, each.offsets, each.input_scale)):
        return name
    return each.scheme.kind, each.codes.shape, each.scheme.symmetric
