"""Assigns a scheme to each weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.quantize_options import QuantizeOptions, chooses, glob_of
from specbuild.builder.config.scheme import Scheme, parse
from specbuild.runtime.bundle.backend import BACKENDS
from specbuild.runtime.errors import OptionError

from .linears import Names

_SHOWN = 3  # names in an error message


def assign(options: QuantizeOptions, model: str, precision: str, backend: str, names: Names) -> dict[str, Scheme]:
    """Return the scheme of each weight, by name; under "auto" and "best", of those given by name only.

    If several patterns match a weight, the last one counts. All schemes compute in the precision's type.

    Args:
        options: The build's options for single weights, the head and the embedding.
        model: "target" or "draft".
        precision: The model's precision, as given on the command line.
        backend: The backend's name.
        names: The model's weights.

    Raises:
        OptionError: A scheme is unknown, or does not fit the weight, the backend or the model's type.
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
    """Parse a scheme for single weights, in the type that the model computes in. Raises OptionError."""
    scheme = parse(text, backend)
    if scheme.dtype != dtype and (not scheme.quantized or "/" in text):
        instead = text.partition("/")[0] if scheme.quantized else dtype
        raise OptionError(f"{text!r}: this model computes in {dtype}: use {instead}, or another --precision")
    return replace(scheme, dtype=dtype)


def _of_head(scheme: Scheme, backend: str, tied: bool) -> Scheme:
    """Return the head's scheme if the other weights have `scheme`.

    INT4 and static activations become INT8. In engines a tied head is not quantized, because it would be stored twice,
    and neither is one of FP8 or with static activations.
    """
    if BACKENDS[backend].compiles and (tied or scheme.kind == "fp8" or scheme.activations == "static"):
        return Scheme(scheme.dtype, scheme.dtype)
    if scheme.kind == "int4" or scheme.activations == "static":
        return replace(parse("int8", backend), dtype=scheme.dtype)
    return replace(scheme, method="rtn") if tied else scheme  # the same as the embedding's, so that it is stored once


def _of_embedding(scheme: Scheme, backend: str, options: QuantizeOptions) -> Scheme:
    """Return the embedding's scheme: rounded to nearest, and not quantized on GPUs. Raises OptionError."""
    if not (scheme.quantized and BACKENDS[backend].on_gpu):
        if scheme.activations == "static":
            raise OptionError("an embedding is looked up, and has no activations: use int8 or int4 for it")
        return replace(scheme, method="rtn") if scheme.quantized else scheme
    if options.token_embedding_type:
        raise OptionError(f"backend {backend} looks up embeddings in 16 bits: drop --token-embedding-type")
    return Scheme(scheme.dtype, scheme.dtype)


def matches(pattern: str, model: str, name: str) -> bool:
    """Return whether a glob matches a whole name, or the part of it after one of its dots.

    A pattern that begins with "target:" or "draft:" matches the weights of that `model` only.
    """
    glob = glob_of(pattern, model)
    return glob is not None and (fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}"))


def experts_scheme(config: BuildConfig, model: str) -> Scheme | None:
    """Return the scheme of the experts of "target" or "draft", a model's own, or INT8; None where they stay."""
    if config.descriptor.on_gpu:  # where no operator takes them
        return None
    scheme = config.scheme_of(model) or parse("int8", config.backend)
    return scheme if scheme.quantized else None


def check_patterns(options: QuantizeOptions, names: Mapping[str, Names], backend: str) -> None:
    """Raise OptionError for a pattern that matches no weight, or only embeddings that the backend cannot quantize.

    Args:
        options: The build's options.
        names: The weights of each model, by the model's name.
        backend: The backend's name.
    """
    for pattern, _ in options.types:
        matched = [(of, name) for model, of in names.items() for name in of.weights if matches(pattern, model, name)]
        if matched and BACKENDS[backend].on_gpu and all(name == of.embedding for of, name in matched):
            raise OptionError(f"backend {backend} looks up embeddings in 16 bits: drop --tensor-type {pattern!r}")
        if not matched:
            weights: Sequence[str] = next(iter(names.values())).weights
            some = ", ".join(weights[:_SHOWN])
            raise OptionError(f"--tensor-type {pattern!r} matches no weight: the target's {len(weights)} are {some}, …")
