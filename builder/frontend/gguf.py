"""Reads a GGUF file as a checkpoint: its configuration and tokenizer, and its weights when they are needed.

`transformers` reads the configuration and the tokenizer, for the model families that it knows, and says which tensor is
which weight. No weight is copied; later stages read them by `lazy_weights`.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import pre_tokenizers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    TOKENIZER_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from specbuild.builder.strict_json import refusing
from specbuild.runtime.bundle.bundle import sha256_file
from specbuild.runtime.errors import CheckpointError, one_line, shown

from .attention_layout import check_decoder, empty
from .gguf_blocks import FORMATS, Blocks, Format, decode
from .gguf_header import GgufHeader, Tensor, read_header, save_without_tokens
from .lazy_weights import ALL, Rows, Weight
from .weights import Header, Stamp, check_sizes, check_stamps, stamps_of

_SIZES = {  # metadata keys, and their names in config.json
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
}
_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
# These pre-tokenizers split digits before applying GPT-2's rule, as in llama.cpp; transformers applies only the rule.
_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


@dataclass(frozen=True)
class Gguf:
    """A GGUF file: its stamp when it was checked, its header, and the number of tensors and elements of each type."""

    path: Path
    stamp: Stamp
    header: GgufHeader = field(repr=False)
    tensors: dict[str, int]
    numbers: dict[str, int]

    @property
    def files(self) -> list[Path]:
        """The file."""
        return [self.path]

    @property
    def stamps(self) -> list[Stamp]:
        """Its stamp."""
        return [self.stamp]

    @property
    def quantization(self) -> str:
        """The type that most elements have."""
        return max(self.numbers, key=self.numbers.__getitem__)

    @cached_property
    def sha256(self) -> str:
        """The file's sha256; raises CheckpointError if the file changed since it was checked."""
        try:
            check_stamps([self.path], [self.stamp])
            found = sha256_file(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror}): begin again") from None
        check_stamps([self.path], [self.stamp])
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that a report shows."""
        return {"gguf_quantization": self.quantization, "gguf_tensors": self.tensors}

    def weights(self, source: str, config: PreTrainedConfig) -> dict[str, Weight]:
        """Return the weights of the model that `config` describes, by its names; none is read.

        Raises CheckpointError if the file has tensors that `transformers` does not read.
        """
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        own = config.to_dict()
        model, family = empty(config)[1], self.header.metadata["general.architecture"]
        processor = TENSOR_PROCESSORS.get(family, TensorProcessor)(config=own)
        try:
            names = get_gguf_hf_weights_map(_Flat(model, children=True), processor)
        except Exception as error:  # transformers and gguf raise many unrelated types
            raise CheckpointError(f"{source} cannot be read: {one_line(error)}") from None
        parts, left = dict[str, list[Tensor]](), 0
        for tensor in self.header.tensors:
            name = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))
            if name is None:
                left += prod(tensor.shape)
            else:
                parts.setdefault(name, []).append(tensor)
        if left:
            raise CheckpointError(
                f"{source} has {left} numbers that transformers does not read: give its safetensors checkpoint"
            )
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
        process = partial(processor.process, tensor_key_mapping=names)
        return {
            name: GgufWeight(self.path, self.header.data, name, tuple(several), process, shapes.get(name, ()))
            for name, several in parts.items()
        }


@dataclass(frozen=True)
class _Flat:
    """A model as `transformers` looks up its weights' names: with its children, but not theirs, which takes seconds."""

    module: nn.Module
    children: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def named_children(self) -> list[tuple[str, _Flat]]:
        """Return the module's children."""
        return [(name, _Flat(child)) for name, child in self.module.named_children() if self.children]


@dataclass(frozen=True, eq=False)
class GgufWeight(Weight):
    """A weight made of a GGUF file's tensors, most often of one: `process` does what `transformers` does with each."""

    path: Path
    data: int
    name: str
    tensors: tuple[Tensor, ...]
    process: Callable[..., Any] = field(repr=False)
    expected: tuple[int, ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Its shape: the file's, or where `transformers` makes another of as many numbers, that."""
        own = self.tensors[0].shape[::-1]
        same = prod(self.expected) == sum(prod(tensor.shape) for tensor in self.tensors)
        return self.expected if same else own

    @cached_property
    def order(self) -> NDArray[np.int64] | None:
        """The file's row of each of the weight's rows; None if the weight is made of the file's otherwise."""
        if len(self.tensors) > 1 or len(self.shape) != 2 or self.tensors[0].shape[::-1] != self.shape:
            return None
        rows = np.arange(self.shape[0], dtype=np.float32)[:, None]
        try:
            found = self.process(weights=rows, name=self.tensors[0].name, parsed_parameters={"tensors": {}}).weights
        except (ValueError, TypeError):
            return None
        same = found.shape == rows.shape and np.array_equal(np.sort(found, axis=0), rows)
        return found[:, 0].astype(np.int64) if same else None

    @property
    def format(self) -> Format | None:  # type: ignore[override]
        """How its rows are quantized; None if they are not, or not in a type of FORMATS."""
        return None if self.order is None else FORMATS.get(_kind(self.tensors[0]))

    def read(self, rows: Rows = ALL) -> torch.Tensor:
        """See Weight."""
        if self.order is not None:
            return torch.from_numpy(_floats(self.tensors[0], self._raw(self.tensors[0], self.order[rows])))
        made: dict[str, Any] = {"tensors": {}}
        for tensor in self.tensors:
            numbers = _floats(tensor, self._raw(tensor)).reshape(tensor.shape[::-1])
            result = self.process(weights=numbers, name=tensor.name, parsed_parameters=made)
            if result.name is not None:
                made["tensors"][self.name] = torch.from_numpy(np.ascontiguousarray(result.weights))
        whole: torch.Tensor = made["tensors"][self.name].float()
        return whole[rows if isinstance(rows, slice) else torch.from_numpy(rows)]

    def blocks(self, rows: Rows = ALL) -> Blocks:
        """See Weight."""
        assert self.order is not None
        return decode(_kind(self.tensors[0]), self._raw(self.tensors[0], self.order[rows]))

    def _raw(self, tensor: Tensor, rows: NDArray[np.int64] | None = None) -> NDArray[np.uint8]:
        """Return a tensor's bytes `[rows, bytes]`."""
        block, size = _sizes(tensor)
        shape = prod(tensor.shape[1:]), tensor.shape[0] // block * size
        try:
            whole = np.memmap(self.path, np.uint8, "r", self.data + tensor.offset, shape)
            return np.array(whole) if rows is None else np.asarray(whole[rows])
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} cannot be read ({one_line(error)}): begin again") from None


def _kind(tensor: Tensor) -> str:
    """Return the name of a tensor's type, which was checked."""
    from gguf import GGMLQuantizationType

    return str(GGMLQuantizationType(tensor.kind).name)


def _sizes(tensor: Tensor) -> tuple[int, int]:
    """Return how many numbers and bytes a block of a tensor's type has."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    return block, size


def _floats(tensor: Tensor, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the numbers of rows `[rows, bytes]` in float32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if (kind := _kind(tensor)) in FORMATS:
        found = decode(kind, raw)
        numbers = found.codes.astype(np.float32)
        numbers -= found.zero
        numbers *= found.scales.floats[..., None]
        if found.offsets is not None:
            numbers += found.offsets.floats[..., None]
        return numbers.reshape(len(raw), -1)
    plain = {"F32": np.float32, "F16": np.float16}.get(kind)
    whole = raw.view(plain) if plain else dequantize(raw, GGMLQuantizationType(tensor.kind))
    return np.asarray(whole, dtype=np.float32)


def describe(source: str, path: Path, folder: Path) -> Gguf:
    """Check a GGUF file by its header, and write its configuration and tokenizer to an existing folder.

    Args:
        source: The file's name in error messages.
        path: The GGUF file.
        folder: The folder to write to.

    Raises:
        CheckpointError: The file is damaged or unsupported.
    """
    (stamp,) = stamps_of([path])
    header = read_header(path)
    kinds = _check_tensors(source, header)
    own = _check_metadata(source, header.metadata, Header({tensor.name: tensor.shape for tensor in header.tensors}))
    with tempfile.TemporaryDirectory(dir=folder) as alone:  # transformers also reads files beside a GGUF
        link = Path(alone) / "model.gguf"
        save_without_tokens(path, header, link)
        config = _configuration(source, link, own, header.metadata.get("tokenizer.ggml.tokens"))
        link.unlink()
        link.symlink_to(path.resolve())
        _save_tokenizer(source, link, folder, config, str(header.metadata.get("tokenizer.ggml.pre")))
    config.save_pretrained(folder)
    ends = [header.metadata[name] for name in _ENDS if name in header.metadata]
    if ends:
        told = json.dumps({"eos_token_id": list(dict.fromkeys(ends))})
        (folder / "generation_config.json").write_text(told + "\n", encoding="utf-8")
    check_stamps([path], [stamp])
    numbers = Counter[str]()
    for kind, tensor in zip(kinds, header.tensors, strict=True):
        numbers[kind] += prod(tensor.shape)
    return Gguf(path, stamp, header, dict(Counter(kinds).most_common()), dict(numbers))


def _check_tensors(source: str, header: GgufHeader) -> list[str]:
    """Return each tensor's type name; raise CheckpointError if one is unknown, duplicate or truncated."""
    if len({tensor.name for tensor in header.tensors}) < len(header.tensors):
        raise CheckpointError(f"{source} has two tensors of one name: it is damaged, download it again")
    kinds = list[str]()
    for tensor in header.tensors:
        try:
            block, size = _sizes(tensor)
        except (ValueError, KeyError):
            raise CheckpointError(
                f"{source} has {shown(tensor.name)} of unknown type {tensor.kind}: not supported"
            ) from None
        if tensor.shape[0] % block:
            raise CheckpointError(
                f"{source} has {shown(tensor.name)} with rows that are no whole blocks: it is damaged"
            )
        if header.data + tensor.offset + prod(tensor.shape) // block * size > header.size:
            raise CheckpointError(f"{source} is cut off within {shown(tensor.name)}: download it again")
        kinds.append(_kind(tensor))
    return kinds


def _check_metadata(source: str, metadata: dict[str, Any], shapes: Header) -> dict[str, Any]:
    """Return the model family's metadata; raise CheckpointError for impossible sizes and for rope scaling."""
    family = metadata.get("general.architecture")
    if not isinstance(family, str):
        raise CheckpointError(f"{source} names no general.architecture: it is no language model's GGUF")
    own = {key.removeprefix(f"{family}."): value for key, value in metadata.items() if key.startswith(f"{family}.")}
    sizes = {_SIZES.get(key, key.replace(".", "_")): value for key, value in own.items()}
    check_sizes(f"{source} (GGUF)", sizes, shapes)
    if own.get("rope.scaling.type", "none") != "none" or any(name.startswith("rope_") for name in shapes.shapes):
        raise CheckpointError(
            f"{source} scales its rotary positions, which is not read from a GGUF: give its safetensors checkpoint"
        )
    return own


def _configuration(source: str, path: Path, own: Mapping[str, Any], tokens: Any) -> PreTrainedConfig:
    """Return the model's configuration, from a file without tokens.

    Some families' head size, which is among the file's `own` sizes, transformers drops.
    """
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # transformers raises many unrelated types
        raise CheckpointError(f"{source} cannot be used: {one_line(error)}") from None
    check_decoder(source, config)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.dtype = torch.float32
    if (head_dim := own.get("attention.key_length")) is not None:
        config.head_dim = head_dim
    if "vocab_size" not in own and tokens is not None:
        config.vocab_size = tokens
    for name in ("quantization_config", "_model_name_or_path"):
        config.__dict__.pop(name, None)
    return config


def _save_tokenizer(source: str, path: Path, folder: Path, config: PreTrainedConfig, rule: str) -> None:
    with refusing(f"{source} has no usable tokenizer, give its safetensors checkpoint"):
        kind = TOKENIZER_MAPPING.get(type(config), PreTrainedTokenizerFast)  # AutoTokenizer reads all tokens twice
        tokenizer = kind.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        if rule in _DIGITS:
            cut = [pre_tokenizers.Digits(individual_digits=True), tokenizer.backend_tokenizer.pre_tokenizer]
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
        tokenizer.save_pretrained(folder)
