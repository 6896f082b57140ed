"""Calibration, layer by layer: a layer's inputs are what the quantized layers before it compute of the texts.

Besides the model, memory holds only the texts' hidden states, one layer's statistics and the quantized weights. With a
folder, each layer's quantized weights are saved when they are done, and an interrupted build continues after the last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from specbuild.builder.config.scheme import Scheme
from specbuild.builder.frontend.hidden_state_taps import decoder_layers
from specbuild.builder.frontend.layer_by_layer import run_layer, run_rest
from specbuild.runtime.errors import OptionError, OutputError, one_line

from .linears import groups, no_grad, rows, simulated
from .numbers import SPAN, Inputs, Quantized, fit, quantize

Progress = Callable[[str, float], None]
Found = dict[str, Quantized]


def calibrate(
    model: PreTrainedModel,
    schemes: Mapping[str, Scheme],
    texts: Sequence[Sequence[int]],
    keep: Keep | None = None,
    progress: Progress = lambda phase, share: None,
) -> Found:
    """Quantize every weight whose scheme quantizes, and return them by name, except those that no block size fits.

    Args:
        model: The float32 model; it is unchanged afterwards.
        schemes: The scheme of each weight, by name.
        texts: Token ids; calibrated schemes need at least one text.
        keep: The folder that holds finished layers, if any.
        progress: Called with the phase and the fraction of it that is done.

    Raises:
        OptionError: No text reaches a weight whose scheme is calibrated.
        OutputError: A layer's results cannot be saved.
    """
    schemes = {name: fit(each, rows(model.get_submodule(name)).shape[1]) for name, each in schemes.items()}
    schemes = {name: each for name, each in schemes.items() if each.quantized}
    layers, found = decoder_layers(model), Found()
    parts = [set(layer.modules()) for layer in layers]
    inside = [[name for name in schemes if model.get_submodule(name) in modules] for modules in parts]
    outside = [name for name in schemes if not any(name in names for names in inside)]
    if not any(each.calibrated for each in schemes.values()):
        return _quantized(model, list(schemes), (), schemes, lambda: None)
    readers = groups(model, [name for name in schemes if not isinstance(model.get_submodule(name), nn.Embedding)])
    with no_grad(model):
        hidden: list[Any] = [None] * len(texts)
        for index, names in enumerate(inside):
            progress("layers", index / len(layers))
            kept = keep.load(index, names) if keep else None
            run = partial(run_layer, model, layers, index, texts, hidden)
            of_layer = kept or _quantized(model, names, readers, schemes, run)
            if keep and kept is None:
                keep.save(index, of_layer)
            found |= of_layer
            with simulated(model, of_layer):
                hidden = run_layer(model, layers, index, texts, hidden)
        rest = partial(run_rest, model, layers, texts, hidden)
        found |= _quantized(model, outside, readers, schemes, rest)
    return found


def _quantized(
    model: PreTrainedModel,
    names: Sequence[str],
    readers: Sequence[Sequence[str]],
    schemes: Mapping[str, Scheme],
    run: Callable[[], Any],
) -> Found:
    """Quantize the weights in `names`; `run` runs the texts, and `readers` groups the layers that share an input."""
    found = Found()
    calibrated = [[n for n in group if n in names and schemes[n].calibrated] for group in readers]
    for group, inputs in _watched(model, [group for group in calibrated if group], schemes, run):
        for scheme in {schemes[name] for name in group}:
            weights = {n: rows(model.get_submodule(n)) for n in group if schemes[n] == scheme}
            found |= quantize(weights, scheme, inputs)
    for name in names:
        if name not in found:
            if schemes[name].calibrated:
                raise OptionError(f"no text reaches {name}, so it cannot be calibrated: give it another precision")
            found |= quantize({name: rows(model.get_submodule(name))}, schemes[name])
    return {name: found[name] for name in names}


def _watched(
    model: PreTrainedModel, readers: Sequence[Sequence[str]], schemes: Mapping[str, Scheme], run: Callable[[], Any]
) -> list[tuple[Sequence[str], Inputs]]:
    """Record the inputs of each group of linear layers that share one, while `run` runs the texts."""
    seen: dict[str, Inputs] = {}

    def note(x: Tensor, name: str, wanted: bool) -> None:
        flat = x.reshape(-1, x.shape[-1]).float()
        moments, largest = [part.T @ part for part in torch.split(flat, SPAN, 1)] if wanted else [], flat.abs().amax(0)
        if name in seen:
            largest = torch.maximum(largest, seen[name].largest)
            moments = [a + b for a, b in zip(seen[name].moments, moments, strict=True)]
        seen[name] = Inputs(largest, moments)

    with ExitStack() as undo:
        for group in readers:
            wanted = any(schemes[name].method != "rtn" for name in group)

            def hook(_: nn.Module, inputs: tuple[Any, ...], name: str = group[0], wanted: bool = wanted) -> None:
                note(inputs[0], name, wanted)

            undo.callback(model.get_submodule(group[0]).register_forward_pre_hook(hook).remove)
        if readers:
            run()
    return [(group, seen[group[0]]) for group in readers if group[0] in seen]


class Keep:
    """A folder with the quantized weights of finished layers, for one model, one set of schemes and of texts."""

    def __init__(self, folder: Path, *identity: Any) -> None:
        self.folder = folder / hashlib.sha256(json.dumps(identity, default=str).encode()).hexdigest()[:_DIGITS]

    @staticmethod
    def all_in(folder: Path) -> list[Path]:
        """Return all such folders in `folder`."""
        return [path for path in folder.glob("?" * _DIGITS) if path.is_dir() and not path.is_symlink()]

    def load(self, index: int, names: Sequence[str]) -> Found | None:
        """Return a layer's quantized weights, or None if they are missing, damaged, or not those in `names`."""
        try:
            with safe_open(self._file(index), framework="pt") as file:
                said, sha256 = (file.metadata()[key] for key in ("specbuild", "sha256"))
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, TypeError, KeyError):
            return None
        if _sha256(said, tensors) != sha256 or sorted(described := json.loads(said)) != sorted(names):
            return None
        found = Found()
        for name, (scheme, input_scale) in described.items():
            parts = {f.name: tensors.get(f"{name}/{f.name}") for f in fields(Quantized) if f.name not in _SAID}
            found[name] = Quantized(scheme=Scheme(**scheme), input_scale=input_scale, **parts)  # type: ignore[arg-type]
        return found

    def save(self, index: int, found: Found) -> None:
        """Save a layer's quantized weights atomically. Raises OutputError."""
        tensors = {
            f"{name}/{f.name}": value.clone(memory_format=torch.contiguous_format)  # safetensors refuses shared ones
            for name, each in found.items()
            for f in fields(Quantized)
            if f.name not in _SAID and (value := getattr(each, f.name)) is not None
        }
        said = json.dumps({name: (asdict(each.scheme), each.input_scale) for name, each in found.items()})
        part = self._file(index).with_suffix(".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part, metadata={"specbuild": said, "sha256": _sha256(said, tensors)})
            part.replace(self._file(index))
        except (OSError, SafetensorError) as error:
            reason = f"cannot keep what was calibrated ({one_line(error)})"
            raise OutputError(f"{self.folder.parent}: {reason}: give another --calibration-cache") from None

    def _file(self, index: int) -> Path:
        return self.folder / f"layer{index}.safetensors"


def _sha256(said: str, tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(said.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.view(torch.uint8).numpy().data)
    return found.hexdigest()


_DIGITS = 16  # in the name of such a folder
_SAID = ("scheme", "input_scale")  # fields that are stored as JSON
