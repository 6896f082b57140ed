"""Runs a model over texts a layer at a time, so that memory holds one layer's weights and the texts' hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from .hidden_state_taps import decoder_layers
from .lazy_weights import Weight, put, reading

ROWS = 1 << 14  # of a head at a time: it may be larger than all layers
Texts = Sequence[Sequence[int]]


class _Stop(Exception):  # noqa: N818
    """Ends a forward pass early, after the layer that it was for."""


class _At:
    """A text's hidden states before the layer that runs, and that layer's result."""

    hidden: Any = None
    result: Any = None


def run_layer(model: PreTrainedModel, layers: Sequence[nn.Module], index: int, texts: Texts, hidden: list[Any]) -> Any:
    """Run each text's hidden states through one layer and return its outputs."""
    return _run(model, layers, index, texts, hidden, lambda _: None)


def run_rest(
    model: PreTrainedModel,
    layers: Sequence[nn.Module],
    texts: Texts,
    hidden: list[Any],
    take: Callable[[Any], Any] = lambda output: None,
) -> list[Any]:
    """Run what follows the last layer, and return what `take` takes of each text's output."""
    return _run(model, layers, len(layers), texts, hidden, take)


def _run(
    model: PreTrainedModel,
    layers: Sequence[nn.Module],
    index: int,
    texts: Texts,
    hidden: list[Any],
    take: Callable[[Any], Any],
) -> list[Any]:
    results = []
    with _alone(layers, index) as at:
        for text, each in zip(texts, hidden, strict=True):
            at.hidden, at.result = each, None
            with suppress(_Stop):
                at.result = take(model(input_ids=torch.tensor([list(text)]), use_cache=False))
            results.append(at.result)
    return results


@contextmanager
def _alone(layers: Sequence[nn.Module], index: int) -> Iterator[_At]:
    """Make all layers but one return `hidden`; that layer computes its result and ends the forward pass."""
    at = _At()
    with ExitStack() as undo:
        for number, layer in enumerate(layers):
            run, forward = number == index, layer.forward

            def replaced(*args: Any, run: bool = run, forward: Any = forward, **kwargs: Any) -> Any:
                if not run:
                    return at.hidden
                at.result = forward(*args, **kwargs)
                raise _Stop

            layer.forward = replaced
            undo.callback(layer.__dict__.pop, "forward", None)
        yield at


def text_logits(
    model: PreTrainedModel, weights: Mapping[str, Weight], texts: Texts, columns: NDArray[np.int64]
) -> list[NDArray[np.float32]]:
    """Return the logits of some columns after each token of texts: `float32[T, columns]` each.

    Args:
        model: A causal LM, which may have no weights of its own.
        weights: Its weights, by name.
        texts: Token ids.
        columns: The rows of its head.
    """
    layers, head, embedding = decoder_layers(model), model.get_output_embeddings(), model.get_input_embeddings()
    plain = isinstance(head, nn.Linear) and isinstance(embedding, nn.Embedding)
    with torch.no_grad(), ExitStack() as undo:
        if not layers or not plain:
            undo.enter_context(reading(model, model, weights))
            found = [model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0] for text in texts]
            return [logits[:, torch.from_numpy(columns)].float().numpy() for logits in found]
        names = {module: name for name, module in model.named_modules()}
        inside = {module for layer in layers for module in layer.modules()}
        for module in model.modules():
            if module not in inside and module not in (head, embedding):
                undo.enter_context(reading(model, module, weights, deep=False))
        hidden: list[Any] = [None] * len(texts)
        looked_up = _looked_up(embedding, weights[f"{names[embedding]}.weight"], texts)
        with looked_up, reading(model, layers[0], weights):
            hidden = run_layer(model, layers, 0, texts, hidden)
        for index in range(1, len(layers)):
            with reading(model, layers[index], weights):
                hidden = run_layer(model, layers, index, texts, hidden)
        parts = list[list[Tensor]]()
        for first in range(0, len(columns), ROWS):
            with _rows_of(head, names[head], weights, columns[first : first + ROWS]):
                parts.append(run_rest(model, layers, texts, hidden, lambda output: output.logits[0].float()))
    return [torch.cat(each, -1).numpy() for each in zip(*parts, strict=True)]


@contextmanager
def _looked_up(embedding: nn.Embedding, weight: Weight, texts: Texts) -> Iterator[None]:
    """Give an embedding the rows of the texts' tokens alone."""
    tokens = np.unique(np.concatenate([np.asarray(text, dtype=np.int64) for text in texts]))

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (torch.from_numpy(np.searchsorted(tokens, inputs[0].numpy())), *inputs[1:])

    with ExitStack() as undo:
        put(embedding, "weight", weight.read(tokens), undo)
        undo.callback(setattr, embedding, "padding_idx", embedding.padding_idx)
        embedding.padding_idx = None
        undo.callback(embedding.register_forward_pre_hook(before).remove)
        yield


@contextmanager
def _rows_of(head: nn.Module, name: str, weights: Mapping[str, Weight], rows: NDArray[np.int64]) -> Iterator[None]:
    """Give a head some of its rows alone."""
    with ExitStack() as undo:
        for key, weight in list(head._parameters.items()):
            if weight is not None:
                put(head, key, weights[f"{name}.{key}"].read(rows), undo)
        yield
