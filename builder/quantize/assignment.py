"""Which weight gets which scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from specbuild.builder.config.quantize_options import QuantizeOptions, chooses
from specbuild.builder.config.scheme import Scheme, parse
from specbuild.runtime.bundle.backend import BACKENDS
from specbuild.runtime.errors import OptionError

from .linears import Names

_SHOWN = 3  # names in a message


def assign(options: QuantizeOptions, model: str, precision: str, backend: str, names: Names) -> dict[str, Scheme]:
    """The scheme of every weight of the "target" or "draft", by name; under "auto" and "best" only of those asked for.

    The last pattern that matches counts. All compute in the precision's type. Raises OptionError.
    """
    schemes, given = dict[str, Scheme](), dict[str, str]()
    dtype = BACKENDS[backend].dtypes[0] if chooses(precision) else parse(precision, backend).dtype
    if not chooses(precision):
        schemes = dict.fromkeys(names.weights, parse(precision, backend))
        if names.head:
            schemes[names.head] = _of_head(schemes[names.head], backend, names.tied)
        schemes[names.embedding] = schemes.get(names.head or "", schemes[names.embedding])
    for name in names.weights:
        asked = [scheme for pattern, scheme in options.types if matches(pattern, model, name)]
        given |= {name: asked[-1]} if asked else {}
    if options.output_tensor_type and names.head:
        given[names.head] = options.output_tensor_type
    if options.token_embedding_type:
        given[names.embedding] = options.token_embedding_type
    schemes |= {name: _parse(scheme, backend, dtype) for name, scheme in given.items()}
    if names.tied and names.head in given and names.embedding not in given:
        schemes[names.embedding] = schemes[str(names.head)]
    if names.embedding in schemes:
        schemes[names.embedding] = _of_embedding(schemes[names.embedding], backend, options)
    return schemes


def _parse(text: str, backend: str, dtype: str) -> Scheme:
    """Some weights' scheme, in the type that the model computes in."""
    scheme = parse(text, backend)
    if scheme.dtype != dtype and (not scheme.quantized or "/" in text):
        instead = text.partition("/")[0] if scheme.quantized else dtype
        raise OptionError(f"{text!r}: this model computes in {dtype}: use {instead}, or another --precision")
    return replace(scheme, dtype=dtype)


def _of_head(scheme: Scheme, backend: str, tied: bool) -> Scheme:
    """The head's, where the rest has this one: INT8 for INT4; on GPUs not rounded where that would store it twice."""
    if BACKENDS[backend].on_gpu and (tied or scheme.kind == "fp8" or scheme.activations == "static"):
        return Scheme(scheme.dtype, scheme.dtype)
    if scheme.kind == "int4" or scheme.activations == "static":
        head = replace(parse("int8", backend), dtype=scheme.dtype)
        return replace(head, activations="wide") if scheme.activations == "wide" else head
    return replace(scheme, method="rtn") if tied else scheme  # as the lookup's, to be stored once


def _of_embedding(scheme: Scheme, backend: str, options: QuantizeOptions) -> Scheme:
    """A lookup's: rounded to the nearest, and for a CPU alone."""
    if not (scheme.quantized and BACKENDS[backend].on_gpu):
        if scheme.activations == "static":
            raise OptionError("an embedding is looked up, and has no activations: use int8 or int4 for it")
        return replace(scheme, method="rtn") if scheme.quantized else scheme
    if options.token_embedding_type:
        raise OptionError(f"backend {backend} looks up embeddings in 16 bits: drop --token-embedding-type")
    return Scheme(scheme.dtype, scheme.dtype)


def matches(pattern: str, model: str, name: str) -> bool:
    """Whether a glob fits all of a name, or all from one of its dots on; after "target:" or "draft:" of its."""
    only, separator, rest = pattern.partition(":")
    if separator and only in ("target", "draft"):
        if only != model:
            return False
        pattern = rest
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def check_patterns(options: QuantizeOptions, names: Mapping[str, Names], backend: str) -> None:
    """Raises OptionError for a pattern that is no weight's, of any model by its name, or one's that stays as it is."""
    for pattern, _ in options.types:
        matched = [(of, name) for model, of in names.items() for name in of.weights if matches(pattern, model, name)]
        if matched and BACKENDS[backend].on_gpu and all(name == of.embedding for of, name in matched):
            raise OptionError(f"backend {backend} looks up embeddings in 16 bits: drop --tensor-type {pattern!r}")
        if not matched:
            weights: Sequence[str] = next(iter(names.values())).weights
            some = ", ".join(weights[:_SHOWN])
            raise OptionError(f"--tensor-type {pattern!r} matches no weight: the target's {len(weights)} are {some}, …")
