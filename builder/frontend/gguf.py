"""Converts a GGUF file to a checkpoint's folder: weights dequantized to float32, a configuration and a tokenizer.

`transformers` reads the file, for the model families that it knows; later stages treat the folder as any checkpoint's.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections import Counter
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig

from specbuild.builder.strict_json import refusing
from specbuild.runtime.bundle.bundle import sha256_file
from specbuild.runtime.errors import CheckpointError, one_line, shown

from .attention_layout import check_decoder, empty
from .gguf_header import GgufHeader, read_header
from .weights import SINGLE, Header, Stamp, check_room, check_sizes, check_stamps, stamps_of

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
    """A converted GGUF file: its stamp when it was checked, and the number of tensors and elements of each type."""

    path: Path
    stamp: Stamp
    tensors: dict[str, int]
    numbers: dict[str, int]

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


def convert(source: str, path: Path, folder: Path) -> Gguf:
    """Convert a GGUF file to a checkpoint in an existing folder.

    Args:
        source: The file's name in error messages.
        path: The GGUF file.
        folder: The folder to write to.

    Raises:
        CheckpointError: The file is damaged or unsupported, or there is no room for its weights.
    """
    (stamp,) = stamps_of([path])
    header = read_header(path)
    kinds = _check_tensors(source, header)
    shapes = Header({tensor.name: tensor.shape for tensor in header.tensors})
    own = _check_metadata(source, header.metadata, shapes)
    check_room(source, folder, 4 * shapes.elements)
    with tempfile.TemporaryDirectory(dir=folder) as alone:  # transformers also reads files beside a GGUF
        link = Path(alone) / "model.gguf"
        link.symlink_to(path.resolve())
        config = _configuration(source, link, own.get("attention.key_length"))
        _save_tokenizer(source, link, folder, str(header.metadata.get("tokenizer.ggml.pre")))
        _save_weights(source, link, folder, config, shapes)
    config.save_pretrained(folder)
    ends = [header.metadata[name] for name in _ENDS if name in header.metadata]
    if ends:
        told = json.dumps({"eos_token_id": list(dict.fromkeys(ends))})
        (folder / "generation_config.json").write_text(told + "\n", encoding="utf-8")
    check_stamps([path], [stamp])
    numbers = Counter[str]()
    for kind, tensor in zip(kinds, header.tensors, strict=True):
        numbers[kind] += prod(tensor.shape)
    return Gguf(path, stamp, dict(Counter(kinds).most_common()), dict(numbers))


def _check_tensors(source: str, header: GgufHeader) -> list[str]:
    """Return each tensor's type name; raise CheckpointError if one is unknown, duplicate or truncated."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len({tensor.name for tensor in header.tensors}) < len(header.tensors):
        raise CheckpointError(f"{source} has two tensors of one name: it is damaged, download it again")
    kinds = list[str]()
    for tensor in header.tensors:
        try:
            kind = GGMLQuantizationType(tensor.kind)
            block, size = GGML_QUANT_SIZES[kind]
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
        kinds.append(kind.name)
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


def _configuration(source: str, path: Path, head_dim: int | None) -> PreTrainedConfig:
    """Return the model's configuration; `head_dim` is the file's, which transformers drops for some families."""
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # transformers raises many unrelated types
        raise CheckpointError(f"{source} cannot be used: {one_line(error)}") from None
    check_decoder(source, config)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.dtype = torch.float32
    if head_dim is not None:
        config.head_dim = head_dim
    for name in ("quantization_config", "_model_name_or_path"):
        config.__dict__.pop(name, None)
    return config


def _save_tokenizer(source: str, path: Path, folder: Path, rule: str) -> None:
    with refusing(f"{source} has no usable tokenizer, give its safetensors checkpoint"):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        if rule in _DIGITS:
            cut = [pre_tokenizers.Digits(individual_digits=True), tokenizer.backend_tokenizer.pre_tokenizer]
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
        tokenizer.save_pretrained(folder)


def _save_weights(source: str, path: Path, folder: Path, config: PreTrainedConfig, shapes: Header) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    named = empty(config)[1]
    try:
        with redirect_stderr(io.StringIO()):  # hides a progress bar that has no switch
            read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=named, torch_dtype=torch.float32)
    except Exception as error:  # transformers and gguf raise many unrelated types
        raise CheckpointError(f"{source} cannot be read: {one_line(error)}") from None
    weights = {name: weight.contiguous() for name, weight in read["tensors"].items()}
    left = shapes.elements - sum(weight.numel() for weight in weights.values())
    if left:
        raise CheckpointError(
            f"{source} has {abs(left)} numbers that transformers does not read: give its safetensors checkpoint"
        )
    try:
        save_file(weights, folder / SINGLE, metadata={"format": "pt"})
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be written ({one_line(error)}): set TMPDIR to another disk") from None
