"""Reads a multimodal checkpoint's text model as a checkpoint of its own, where that is a decoder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from specbuild.builder.strict_json import read_object

from .attention_layout import empty
from .lazy_weights import Stored, Weight
from .packed import CONFIG, save_texts
from .weights import Header, Stamp, check_sizes, mtp_names, read_header, sha256_files, stamps_of, weight_files

AS_TEXT = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"}  # families whose text model is another's, for text alone
_SHARED = "tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype"
_INSIDE = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")


@dataclass(frozen=True)
class TextModel:
    """The text model of a multimodal checkpoint: the files with their stamps, the family, and the header."""

    files: list[Path]
    stamps: list[Stamp]
    family: str
    header: Header = field(repr=False)

    @cached_property
    def sha256(self) -> str:
        """The files' sha256, with what is not text; raises CheckpointError if one changed since it was checked."""
        return sha256_files(self.files, self.stamps)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that a report shows."""
        return {"text_model_of": self.family}

    def weights(self, source: str, config: PreTrainedConfig) -> dict[str, Weight]:
        """Return the weights of the text model that `config` describes and of its MTP layers; others are left out."""
        wanted = {name for name, _ in empty(config)[1].named_parameters()}
        wanted |= mtp_names(map(_name, self.header.shapes), config.num_hidden_layers)
        found = dict[str, Weight]()
        for stored, shape in self.header.shapes.items():
            if (name := _name(stored)) in wanted:
                found[name] = Stored(self.header.files[stored], stored, shape)
        return found


def _name(stored: str) -> str:
    """Return the text model's name of a stored weight: `language_model.` goes, before, within or without `model.`."""
    inner = _INSIDE.sub("", stored)
    if inner == stored or inner.startswith("lm_head."):
        return inner
    return f"model.{inner}"


def text_config(folder: Path) -> dict[str, Any] | None:
    """Return the configuration of a multimodal checkpoint's text model; None if that is no decoder."""
    raw = read_object(folder / CONFIG)
    family, own = raw.get("model_type"), raw.get("text_config")
    if not isinstance(family, str) or not isinstance(raw.get("vision_config"), dict):
        return None
    if not isinstance(own, dict):  # older ones have the text model's fields beside vision_config
        own = {name: value for name, value in raw.items() if not name.endswith("_config")}
    kind = AS_TEXT.get(family, own.get("model_type"))
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    if CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    shared = {name: raw[name] for name in _SHARED if name in raw and (name == _SHARED[0] or own.get(name) is None)}
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]].__name__
    return _of_text(own) | shared | {"model_type": kind, "architectures": [architecture]}


def _of_text(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a text model's fields without sections of rotary positions: a text's are the same in each."""
    plain = dict(own)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := plain.get(key), dict) and "mrope_section" in rope:
            rest = {name: value for name, value in rope.items() if name not in ("mrope_section", "type")}
            plain[key] = rest | {"rope_type": "default"}
    return plain


def take_text(source: str, folder: Path, config: Mapping[str, Any], to: Path) -> TextModel:
    """Describe a text model as a checkpoint: write its configuration, copy the other files, and read no weight.

    Args:
        source: The checkpoint's name in error messages.
        folder: The multimodal checkpoint.
        config: The text model's configuration, from `text_config`.
        to: An existing folder to write to.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    files = weight_files(source, folder)
    stamps, header = stamps_of(files), read_header(files)
    check_sizes(f"{source}/config.json", config, header)
    save_texts(source, folder, config, to)
    family = str(read_object(folder / CONFIG)["model_type"])
    return TextModel(files, stamps, family, header)
