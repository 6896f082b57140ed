"""Runs a model over texts a layer at a time, so that memory holds one layer's weights and the texts' hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .hidden_state_taps import decoder_layers
from .lazy_weights import Cast, Weight, of_model, put, reading
from .logits_file import LOWEST, Logits, LogitsFile

ROWS = 1 << 14  # of a head at a time: it may be larger than all layers
LOGITS = 1 << 24  # in memory, of several texts together
BATCH = 16  # states of one text that a layer computes at once: more are no faster
Texts = Sequence[Sequence[int]]
States = list["State | None"]  # each text's, None before the first layer


class _Stop(Exception):  # noqa: N818
    """Ends a forward pass early, after the layer that it was for."""


@dataclass
class State:
    """A text between two layers: the result of the first, and the mappings that all layers share."""

    result: Any = None
    shared: dict[str, dict[Any, Any]] = field(default_factory=dict)

    @property
    def stacks(self) -> bool:
        """Return whether it may be one of a batch: a tensor `[B, T, K]` and nothing else."""
        return isinstance(self.result, Tensor) and self.result.ndim == 3 and not any(self.shared.values())


@dataclass(frozen=True)
class LayeredModel:
    """A causal LM whose layers are given their weights one after the other.

    Attributes:
        net: The model, which may have no weights of its own.
        weights: Its weights by its names.
        tokens: The token of each column of its head; None if column i is token i.
        vocab_size: How many tokens logits are returned for, if `tokens` are given.
    """

    net: PreTrainedModel
    weights: Mapping[str, Weight]
    tokens: Sequence[int] | None = None
    vocab_size: int = 0

    @classmethod
    def of(cls, net: PreTrainedModel) -> LayeredModel:
        """Return a model that holds its own weights."""
        return cls(net, of_model(net))

    @cached_property
    def layers(self) -> list[nn.Module]:
        """The model's layers in order; [] if no module list holds all of them, and all of it runs at once."""
        return decoder_layers(self.net)

    @cached_property
    def names(self) -> dict[nn.Module, str]:
        """The name of each module."""
        return {module: name for name, module in self.net.named_modules()}

    @cached_property
    def embedding(self) -> nn.Module | None:
        """The embedding, if only the rows of a text's tokens need to be read."""
        found = self.net.get_input_embeddings()
        return found if isinstance(found, nn.Embedding) else None

    @cached_property
    def head(self) -> nn.Module | None:
        """The head, if some of its rows can be read at a time."""
        found = self.net.get_output_embeddings()
        return found if isinstance(found, nn.Linear) else None

    @cached_property
    def readers(self) -> list[list[str]]:
        """The linear layers that read one tensor together, in the order in which they run."""
        found: list[tuple[Tensor, list[str]]] = []  # holds the tensors, so that no id is reused
        with ExitStack() as undo, torch.no_grad():
            for module, name in self.names.items():

                def hook(_: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
                    names = next((each for tensor, each in found if tensor is inputs[0]), None)
                    if names is None:
                        found.append((inputs[0], [name]))
                    else:
                        names.append(name)

                if isinstance(module, nn.Linear | Conv1D):
                    undo.callback(module.register_forward_pre_hook(hook).remove)
            self.net(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        return [names for _, names in found]

    @cached_property
    def _outside(self) -> list[nn.Module]:
        """The modules beside the layers whose weights are always read."""
        inside = {module for layer in self.layers for module in layer.modules()}
        return [m for m in self.net.modules() if m not in inside and m not in (self.head, self.embedding)]

    def of_layers(self, names: Iterable[str]) -> tuple[list[list[str]], list[str]]:
        """Split modules' names into those of each layer and those outside."""
        modules = [set(layer.modules()) for layer in self.layers]
        inside = [[name for name in names if self.net.get_submodule(name) in each] for each in modules]
        found = {name for each in inside for name in each}
        return inside, [name for name in names if name not in found]

    def cast(self, dtype: torch.dtype) -> LayeredModel:
        """Return the model with weights of another type."""
        return replace(self, weights={name: Cast(weight, dtype) for name, weight in self.weights.items()})

    @contextmanager
    def reading(self, index: int, texts: Texts) -> Iterator[None]:
        """Give a layer its weights while inside, or what follows the last one all but the head's."""
        with ExitStack() as undo:
            for module in self._outside:
                undo.enter_context(reading(self.net, module, self.weights, deep=False))
            if self.embedding is not None:
                undo.enter_context(self._looked_up(self.embedding, texts))
            if index < len(self.layers):
                undo.enter_context(reading(self.net, self.layers[index], self.weights))
            yield

    @contextmanager
    def holding(self, names: Iterable[str], texts: Texts) -> Iterator[None]:
        """Give single modules their weights while inside, beside those that `reading` gives."""
        with ExitStack() as undo:
            for name in names:
                module, weight = self.net.get_submodule(name), self.weights[f"{name}.weight"]
                if isinstance(module, nn.Embedding):
                    put(module, "weight", weight.read(_tokens(texts)), undo)
                elif module is not self.head:
                    put(module, "weight", weight.read(), undo)
            yield

    def run(self, index: int, texts: Texts, hidden: States) -> States:
        """Run each text's hidden states through one layer, which has its weights, and return its outputs."""
        return [state for state, _ in self._run(index, texts, hidden, lambda _: None)]

    def run_batch(self, index: int, text: Sequence[int], hidden: States) -> States:
        """Run several hidden states of one text through one layer, which has its weights, BATCH of them at once."""
        batches, outputs = _batches(hidden), list[State | None]()
        for state in self.run(index, [text] * len(batches), batches):
            outputs += [State(each) for each in state.result.split(1)] if state and state.stacks else [state]
        return outputs

    def ends_by_rows(self, text: Sequence[int], hidden: States) -> Iterator[tuple[NDArray[np.int64], Logits]]:
        """Yield the logits of several states of one text after the last layer, some of the head's rows at a time.

        Each time with the rows' places among all logits, and as `float32[S, T, rows]`.
        """
        batches = _batches(hidden)
        texts, places = [text] * len(batches), None if self.tokens is None else np.asarray(self.tokens)
        if self.head is None:
            logits = np.stack(self._all_logits([text] * len(hidden), hidden))
            yield np.arange(logits.shape[-1]), logits
            return
        rows = np.arange(self.weights[f"{self.names[self.head]}.weight"].shape[0])
        step = min(ROWS, max(1, LOGITS // (len(hidden) * len(text))))
        with self.reading(len(self.layers), [text]):
            for some in (rows[first : first + step] for first in range(0, len(rows), step)):
                with self._rows_of_head(self.head, some):
                    logits = np.concatenate(self.run_rest(texts, batches, lambda output: output.logits.float().numpy()))
                yield some if places is None else places[some], logits

    def run_rest(self, texts: Texts, hidden: States, take: Callable[[Any], Any] | None = None) -> list[Any]:
        """Run what follows the last layer, and return what `take` takes of each text's output; None: up to the head."""

        def stop(_: nn.Module, __: tuple[Any, ...]) -> None:
            raise _Stop

        with ExitStack() as undo:
            if take is None and self.head is not None:
                undo.callback(self.head.register_forward_pre_hook(stop).remove)
            found = self._run(len(self.layers), texts, hidden, take or (lambda output: None))
            return [result for _, result in found]

    def logits(self, texts: Texts) -> LogitsFile:
        """Return the logits after each token of texts: `float32[T, V]` each, LOWEST where no column is a token's."""
        hidden: States = [None] * len(texts)
        for index in range(len(self.layers)):
            with self.reading(index, texts):
                hidden = self.run(index, texts, hidden)
        return self.ends(texts, hidden)

    def ends(self, texts: Texts, hidden: States) -> LogitsFile:
        """Return the logits of hidden states after the last layer, as `logits` does, some columns at a time."""
        if self.head is None:
            return LogitsFile(self._all_logits(texts, hidden))
        width = self.vocab_size if self.tokens else self.weights[f"{self.names[self.head]}.weight"].shape[0]
        places = np.asarray(self.tokens or range(width))
        groups = _groups([width * len(text) for text in texts], LOGITS)
        each = (self._logits_of(self.head, texts[some], hidden[some], places, width) for some in groups)
        return LogitsFile(chain.from_iterable(each))

    def _all_logits(self, texts: Texts, hidden: States) -> list[Logits]:
        with self.reading(len(self.layers), texts):
            return self.run_rest(texts, hidden, _logits)

    def _logits_of(
        self, head: nn.Module, texts: Texts, hidden: States, places: NDArray[np.int64], width: int
    ) -> list[Logits]:
        """Return logits by the rows of the head, at these places of `width`."""
        found = [np.full((len(text), width), LOWEST, np.float32) for text in texts]
        with self.reading(len(self.layers), texts):
            for first in range(0, len(places), ROWS):
                with self._rows_of_head(head, np.arange(first, min(first + ROWS, len(places)))):
                    some = self.run_rest(texts, hidden, _logits)
                for logits, part in zip(found, some, strict=True):
                    logits[:, places[first : first + ROWS]] = part
        return found

    def _run(self, index: int, texts: Texts, hidden: States, take: Callable[[Any], Any]) -> list[tuple[State, Any]]:
        """Return each text's state after a layer, and what `take` takes of the model's output if it comes to that."""
        found = []
        for text, before in zip(texts, hidden, strict=True):
            result, tokens = None, torch.tensor([list(text)])
            if before is not None and before.stacks:
                tokens = tokens.expand(len(before.result), -1)
            with torch.no_grad(), suppress(_Stop), _alone(self.layers, index, before or State()) as after:
                result = take(self.net(input_ids=tokens, use_cache=False))
            found.append((after, result))
        return found

    @contextmanager
    def _looked_up(self, embedding: nn.Module, texts: Texts) -> Iterator[None]:
        """Give an embedding the rows of the texts' tokens alone."""
        tokens = _tokens(texts)

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (torch.from_numpy(np.searchsorted(tokens, inputs[0].numpy())), *inputs[1:])

        with ExitStack() as undo:
            put(embedding, "weight", self.weights[f"{self.names[embedding]}.weight"].read(tokens), undo)
            undo.callback(setattr, embedding, "padding_idx", embedding.padding_idx)
            embedding.padding_idx = None  # type: ignore[assignment]
            undo.callback(embedding.register_forward_pre_hook(before).remove)
            yield

    @contextmanager
    def _rows_of_head(self, head: nn.Module, rows: NDArray[np.int64]) -> Iterator[None]:
        """Give a head some of its rows alone."""
        with ExitStack() as undo:
            for key, weight in list(head._parameters.items()):
                if weight is not None:
                    put(head, key, self.weights[f"{self.names[head]}.{key}"].read(rows), undo)
            yield


def _batches(hidden: States) -> States:
    """Join states of one text, BATCH at a time; return them as they are if one of them does not stack."""
    results = [state.result for state in hidden if state and state.stacks]
    if len(results) < len(hidden):
        return hidden
    return [State(torch.cat(results[first : first + BATCH])) for first in range(0, len(results), BATCH)]


def _logits(output: Any) -> Logits:
    logits: Logits = output.logits[0].float().numpy()
    return logits


def _groups(sizes: Sequence[int], largest: int) -> Iterator[slice]:
    """Yield slices of neighbours whose sizes add up to `largest` at most, or that are one alone."""
    first, total = 0, 0
    for place, size in enumerate(sizes):
        if first < place and total + size > largest:
            yield slice(first, place)
            first, total = place, 0
        total += size
    yield slice(first, len(sizes))


def _tokens(texts: Texts) -> NDArray[np.int64]:
    """Return the tokens of texts, each once, ascending."""
    return np.unique(np.concatenate([np.asarray(text, dtype=np.int64) for text in texts]))


@contextmanager
def _alone(layers: Sequence[nn.Module], index: int, before: State) -> Iterator[State]:
    """Make all layers but one return what the last one gave; that layer ends the forward pass, and fills the state."""
    after = State()
    with ExitStack() as undo:
        for number, layer in enumerate(layers):
            run, forward = number == index, layer.forward

            def replaced(*args: Any, run: bool = run, forward: Any = forward, **kwargs: Any) -> Any:
                if not run:
                    return before.result
                mappings = {name: each for name, each in kwargs.items() if isinstance(each, MutableMapping)}
                for name, each in mappings.items():
                    each.update(before.shared.get(name, {}))
                after.result = forward(*args, **kwargs)
                after.shared = {name: dict(each) for name, each in mappings.items()}
                raise _Stop

            layer.forward = replaced
            undo.callback(layer.__dict__.pop, "forward", None)
        yield after
