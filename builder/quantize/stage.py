"""A model's quantization as one stage of a build: texts, what it was before, numbers, and what each layer costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedModel

from specbuild.builder.config.quantize_options import AUTO, AUTO_KL, QuantizeOptions
from specbuild.builder.config.scheme import Scheme
from specbuild.builder.frontend.reference import Reference, text_logits

from .assignment import assign
from .calibrate import Found, Keep, calibrate
from .linears import Names, simulated
from .quality import Before, acceptance, moved
from .sensitivity import Cost, costs, narrowest, stored, units, within
from .texts import Texts

Progress = Callable[[str, float], None]
RUNGS = ("int4", "int8")  # of auto, the narrowest first; beyond them nothing is quantized


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

    `max_kl`: what "auto" may spend, nats a token.
    """

    model: str
    precision: str
    backend: str
    options: QuantizeOptions
    texts: Texts
    max_kl: float = AUTO_KL
    item: int = 4  # bytes of a number that is not quantized


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
    identity: of the checkpoint, for what is kept. Raises OptionError and ExecutionError.
    """
    options = request.options

    def numbers(schemes: Mapping[str, Scheme]) -> Found:
        told = {weight: str(scheme) for weight, scheme in schemes.items()}
        folder = options.calibration_cache
        keep = Keep(folder, identity, version("specbuild-trt"), request.texts.sha256, told) if folder else None
        found = calibrate(model, schemes, request.texts.calibration, keep, progress)
        if names.tied and names.head and _shape(found, names.head) == _shape(found, names.embedding):
            found[names.embedding] = found[names.head]  # stored once
        return found

    split = units(model, names, names.weights)
    if request.precision == AUTO:
        rungs = [numbers(assign(options, request.model, kind, request.backend, names)) for kind in RUNGS]
        free = [unit for unit in split if not any(each in asked for each in unit)]
        if request.model == "target":
            found = within(model, rungs, free, before, request.max_kl, progress)
        else:
            found = narrowest(model, rungs, judged_by) or numbers(asked)
    else:
        found = numbers(asked)
    wanted = [weight for weight, scheme in asked.items() if scheme.quantized]
    if request.precision == AUTO and found:  # a weight that no block divides is not found however wide
        wanted += [weight for weight in rungs[0].keys() ^ set(names.weights) if weight not in wanted]
    measured: dict[str, Any] = {"weight_bytes": stored(found, model, names.weights, request.item)}
    measured["weight_bytes_before"] = stored({}, model, names.weights)
    if request.model == "draft":  # the target's comes from what will run
        with simulated(model, found):
            measured |= moved(before, lambda text: text_logits(model, text))
    left = [weight for weight in wanted if weight not in found]
    each = costs(model, found, split, before, progress) if found else []
    lengths = acceptance(model, found, judged_by) if request.model == "draft" else None
    return Quantization(names, found, before, each, left, lengths, measured)


def _shape(found: Found, name: str) -> Any:
    """What would make two weights' numbers differ, where their weights are one."""
    each = found.get(name)
    if each is None or each.smooth is not None or each.scheme.method != "rtn" or each.input_scale is not None:
        return name  # equal to nothing else
    return each.scheme.kind, each.codes.shape, each.scheme.symmetric
