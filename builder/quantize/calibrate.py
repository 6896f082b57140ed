"""Calibration, layer by layer: a layer's inputs are what the quantized layers before it compute of the texts.

Memory holds the texts' hidden states and one layer: its weights, its statistics and its quantized weights, which are
saved when they are done. An interrupted build continues after the last. What needs no texts is rounded when it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specbuild.builder.config.progress import Progress
from specbuild.builder.config.scheme import Scheme
from specbuild.builder.frontend.layer_by_layer import LayeredModel, States
from specbuild.builder.frontend.lazy_weights import ALL, Rows
from specbuild.runtime.errors import OptionError, OutputError, one_line

from .linears import groups, row_weight, simulated
from .numbers import PARTS, Inputs, Numbers, Quantized, RoundedWeight, fit, quantize

NumbersByName = Mapping[str, Numbers]
SPAN = 2048  # columns whose second moments are computed together; more would cost memory and cubic time


def calibrate(
    model: LayeredModel,
    schemes: Mapping[str, Scheme],
    texts: Sequence[Sequence[int]],
    cache: CalibrationCache | None = None,
    progress: Progress = lambda phase, share: None,
) -> NumbersByName:
    """Quantize every weight whose scheme quantizes, and return them by name, except those that no block size fits.

    Args:
        model: The float32 model.
        schemes: The scheme of each weight, by name.
        texts: Token ids; calibrated schemes need at least one text.
        cache: The folder that holds finished layers; None: memory holds them.
        progress: Called with the phase and the fraction of it that is done.

    Raises:
        OptionError: No text reaches a weight whose scheme is calibrated.
        OutputError: A layer's results cannot be saved.
    """
    schemes = {name: fit(each, row_weight(model, name).shape[1]) for name, each in schemes.items()}
    schemes = {name: each for name, each in schemes.items() if each.quantized}
    rounded = [name for name, each in schemes.items() if not each.calibrated]
    numbers: dict[str, Numbers] = {
        name: RoundedWeight(name, row_weight(model, name), schemes[name]) for name in rounded
    }
    inside, outside = model.of_layers(schemes)
    parts = [[name for name in names if schemes[name].calibrated] for names in (*inside, outside)]
    cached: list[NumbersByName | None] = [
        cache.load(f"layer{index}", names) if cache and names else None for index, names in enumerate(parts)
    ]
    uncached = [index for index, names in enumerate(parts) if names and cached[index] is None]
    hidden: States = [None] * len(texts)
    for index in range(uncached[-1] + 1 if uncached else 0):
        if index < len(inside):
            progress("layers", index / len(inside))
        if index in uncached:
            with model.reading(index, texts):
                layer = _quantize_layer(model, index, parts[index], schemes, texts, hidden)
            cached[index] = cache.save(f"layer{index}", layer) if cache else layer
        numbers |= cached[index] or {}
        if index < uncached[-1]:
            of_layer = {name: numbers[name] for name in inside[index]}
            with simulated(model, of_layer) as changed, changed.reading(index, texts):
                hidden = changed.run(index, texts, hidden)
    for each in cached:
        numbers |= each or {}
    return {name: numbers[name] for name in schemes}


def _quantize_layer(
    model: LayeredModel,
    index: int,
    names: Sequence[str],
    schemes: Mapping[str, Scheme],
    texts: Sequence[Sequence[int]],
    hidden: States,
) -> dict[str, Quantized]:
    """Quantize the calibrated weights of a layer, which has its weights, or of what follows the last."""
    numbers = dict[str, Quantized]()
    run = partial(model.run, index) if index < len(model.layers) else model.run_rest
    inputs_of = _record_inputs(model, groups(model, names), schemes, lambda: run(texts, hidden))
    for group, inputs in inputs_of:
        for scheme in {schemes[name] for name in group}:
            numbers |= quantize({name: _rows(model, name) for name in group if schemes[name] == scheme}, scheme, inputs)
    for name in names:
        if name not in numbers:
            raise OptionError(f"no text reaches {name}, so it cannot be calibrated: give it another precision")
    return numbers


def _rows(model: LayeredModel, name: str) -> Tensor:
    """Return the weight that a linear layer has, or a head's, with a row for each output."""
    module = model.net.get_submodule(name)
    weight: Tensor = row_weight(model, name).read() if module is model.head else module.weight.detach()
    return weight.T if isinstance(module, Conv1D) else weight


def _record_inputs(
    model: LayeredModel, readers: Sequence[Sequence[str]], schemes: Mapping[str, Scheme], run: Callable[[], Any]
) -> list[tuple[Sequence[str], Inputs]]:
    """Record the inputs of each group of linear layers that share one, while `run` runs the texts."""
    inputs_of: dict[str, Inputs] = {}

    def note(x: Tensor, name: str, wanted: bool) -> None:
        flat = x.reshape(-1, x.shape[-1]).float()
        moments, largest = [part.T @ part for part in torch.split(flat, SPAN, 1)] if wanted else [], flat.abs().amax(0)
        if name in inputs_of:
            largest = torch.maximum(largest, inputs_of[name].largest)
            moments = [a + b for a, b in zip(inputs_of[name].moments, moments, strict=True)]
        inputs_of[name] = Inputs(largest, moments)

    with ExitStack() as undo:
        for group in readers:
            wanted = any(schemes[name].method != "rtn" for name in group)

            def hook(_: nn.Module, inputs: tuple[Any, ...], name: str = group[0], wanted: bool = wanted) -> None:
                note(inputs[0], name, wanted)

            undo.callback(model.net.get_submodule(group[0]).register_forward_pre_hook(hook).remove)
        run()
    return [(group, inputs_of[group[0]]) for group in readers if group[0] in inputs_of]


@dataclass(frozen=True, eq=False)
class CachedWeight(Numbers):
    """A quantized weight in a file of finished layers."""

    path: Path
    name: str
    scheme: Scheme
    shape: tuple[int, int, int]
    parts: tuple[str, ...]
    smooth: Tensor | None
    input_scale: float | None

    def whole(self, rows: Rows = ALL) -> Quantized:
        """See Numbers; raises OutputError if the file is gone."""
        try:
            with safe_open(self.path, framework="pt") as file:
                parts = {part: file.get_tensor(f"{self.name}/{part}")[rows] for part in self.parts}
        except (OSError, SafetensorError) as error:
            raise OutputError(f"{self.path} is gone ({one_line(error)}): leave it alone, and begin again") from None
        return Quantized(self.scheme, **parts, smooth=self.smooth, input_scale=self.input_scale)


class CalibrationCache:
    """A folder with the quantized weights of finished layers, for one model, one set of schemes and of texts."""

    def __init__(self, folder: Path, *identity: Any) -> None:
        self.folder = folder / hashlib.sha256(json.dumps(identity, default=str).encode()).hexdigest()[:_DIGITS]

    @staticmethod
    def all_in(folder: Path) -> list[Path]:
        """Return all such folders in `folder`."""
        return [path for path in folder.glob("?" * _DIGITS) if path.is_dir() and not path.is_symlink()]

    def load(self, part: str, names: Sequence[str]) -> dict[str, CachedWeight] | None:
        """Return the quantized weights of a part, or None if they are missing, damaged, or not those in `names`."""
        try:
            with safe_open(self._file(part), framework="pt") as file:
                description, sha256 = (file.metadata()[key] for key in ("specbuild", "sha256"))
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, TypeError, KeyError):
            return None
        if _sha256(description, tensors) != sha256 or sorted(records := json.loads(description)) != sorted(names):
            return None
        of_file = partial(CachedWeight, self._file(part))
        return {
            name: of_file(name, Scheme(**scheme), tuple(shape), tuple(parts), tensors.get(f"{name}/smooth"), scale)
            for name, (scheme, shape, parts, scale) in records.items()
        }

    def save(self, part: str, numbers: Mapping[str, Quantized]) -> dict[str, CachedWeight]:
        """Save the quantized weights of a part atomically, and return them as they lie there. Raises OutputError."""
        tensors = {
            f"{name}/{field}": value.clone(memory_format=torch.contiguous_format)  # safetensors refuses shared ones
            for name, each in numbers.items()
            for field in (*PARTS, "smooth")
            if (value := getattr(each, field)) is not None
        }
        records = {name: (asdict(e.scheme), e.shape, e.parts, e.input_scale) for name, e in numbers.items()}
        description = json.dumps(records)
        unfinished = self._file(part).with_suffix(".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, unfinished, metadata={"specbuild": description, "sha256": _sha256(description, tensors)})
            unfinished.replace(self._file(part))
        except (OSError, SafetensorError) as error:
            reason = f"cannot keep what was calibrated ({one_line(error)})"
            raise OutputError(f"{self.folder.parent}: {reason}: give another --calibration-cache") from None
        return {
            name: CachedWeight(self._file(part), name, e.scheme, e.shape, e.parts, e.smooth, e.input_scale)
            for name, e in numbers.items()
        }

    def _file(self, part: str) -> Path:
        return self.folder / f"{part}.safetensors"


def _sha256(description: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(description.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


_DIGITS = 16  # in the name of such a folder
