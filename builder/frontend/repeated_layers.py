"""Finds the layers of a decoder that compute the same with other weights, and leaves them out of a trace.

torch traces every layer anew, which takes most of an export. A decoder's layers are alike, but for their weights and
caches: so one of each kind is traced, and `layer_copies` puts the others into the graph. That a layer is of another's
kind is not guessed: both have the same modules and settings, and with the one's weights and the same inputs the other
gave the very same hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_OWN = "layer_idx"  # the setting in which layers of a kind differ
_FEW = 3  # layers that are traced at once anyway


@dataclass(frozen=True)
class Repeated:
    """A decoder whose layers repeat.

    Attributes:
        path: The name of its list of layers in the exported module.
        layers: The layers, in order.
        like: For each layer that need not be traced, the layer that it is a copy of.
    """

    path: str
    layers: nn.ModuleList
    like: Mapping[int, int]

    @property
    def traced(self) -> list[int]:
        """Layers that are traced, in order; the first always is, and is copied for no other."""
        return [place for place in range(len(self.layers)) if place not in self.like]

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """While inside, the model passes hidden states by all layers but those that are traced."""
        whole = list(self.layers)
        form: list[bool] = []  # whether a layer returns a tuple
        handle = whole[0].register_forward_hook(lambda _module, _inputs, output: form.append(isinstance(output, tuple)))
        try:
            for place in self.like:
                self.layers[place] = _Passing(whole[place], form)
            yield
        finally:
            handle.remove()
            for place, layer in enumerate(whole):
                self.layers[place] = layer


class _Done(Exception):  # noqa: N818
    """Ends a forward pass after the last layer, before a head that may be large."""


class _Passing(nn.Module):
    """Stands in for a layer: has its settings, and returns the hidden state that it was given."""

    def __init__(self, layer: nn.Module, form: list[bool]) -> None:
        super().__init__()
        self._hidden = [layer]  # in a list: its weights are not this module's
        self._form = form

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_hidden"][0], name)

    def forward(self, hidden_states: Tensor, *_given: Any, **_named: Any) -> Any:
        """The hidden state, in the form that the traced layers return it in."""
        return (hidden_states,) if self._form[-1] else hidden_states


def repeated(module: nn.Module, layers: nn.ModuleList, settings: list[Any], run: Callable[[], Any]) -> Repeated | None:
    """Find the layers that are copies of others; None where copying them would save nothing.

    Args:
        module: What is exported.
        layers: Its decoder's layers.
        settings: What else tells layers apart, one for each.
        run: Runs the module on any input, so that each layer is called once.
    """
    path = next((name for name, each in module.named_modules() if each is layers), None)
    if path is None or len(layers) <= _FEW:
        return None
    kinds = [(_settings(layer), setting) for layer, setting in zip(layers, settings, strict=True)]
    like, models, comparing = dict[int, int](), list[int](), False

    def compare(place: int) -> Any:
        def called(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            nonlocal comparing
            if comparing:  # a layer is run in another's place
                return
            comparing = True
            alike = (each for each in models if kinds[each] == kinds[place])
            found = next((each for each in alike if _same(layers[each], layer, given, named, output)), None)
            comparing = False
            if found is None:
                models.append(place)
            else:
                like[place] = found
            if place == len(layers) - 1:
                raise _Done

        return called

    with ExitStack() as undo, torch.no_grad():
        for place in range(1, len(layers)):
            handle = layers[place].register_forward_hook(compare(place), with_kwargs=True)
            undo.callback(handle.remove)
        with suppress(_Done):
            run()
    return Repeated(path, layers, like) if like else None


def _settings(layer: nn.Module) -> Any:
    """Everything but weights by which a layer may compute otherwise than another."""
    simple = (int, float, str, bool, type(None))
    return [
        (
            name,
            type(each),
            {key: value for key, value in vars(each).items() if key != _OWN and isinstance(value, simple)},
            [(key, value.shape, value.dtype) for key, value in each.named_parameters(recurse=False)],
            [(key, value.shape, value.dtype) for key, value in each.named_buffers(recurse=False)],
        )
        for name, each in layer.named_modules()
    ]


def _same(model: nn.Module, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> bool:
    """Return whether `model`, with the layer's weights, gives the output that the layer gave."""
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    again = torch.func.functional_call(model, tensors, given, named)
    hidden, expected = (each[0] if isinstance(each, tuple) else each for each in (again, output))
    whole = not isinstance(output, tuple) or len(output) == 1
    return whole and isinstance(hidden, Tensor) and torch.equal(hidden, expected)
