"""A Hugging Face checkpoint: found, checked, loaded in float32, described.

Only safetensors and JSON are read, never pickle, and no code that a checkpoint brings.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specbuild.runtime.bundle.bundle import sha256_file
from specbuild.runtime.errors import CheckpointError, one_line

from .attention_layout import check_interface
from .quiet import quiet

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that passed the checks cheap enough to make before anything is loaded."""

    source: str
    folder: Path
    config: Any  # transformers.PretrainedConfig
    weights: list[Path]
    tokenizer: PreTrainedTokenizerBase

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding and of the head."""
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int:
        """Positions the model was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def architecture(self) -> str:
        """The model class the checkpoint names."""
        return str((self.config.architectures or [type(self.config).__name__])[0])

    def eos_token_ids(self) -> list[int]:
        """The tokens that end a text: generation_config.json's, else config.json's."""
        ids = read_json(self.folder / "generation_config.json").get("eos_token_id", self.config.eos_token_id)
        if ids is None:
            ids = self.tokenizer.eos_token_id
        return [] if ids is None else list(ids) if isinstance(ids, list) else [ids]

    def sha256(self) -> str:
        """Identity of the weights."""
        return sha256_files(self.weights)


def sha256_files(paths: list[Path]) -> str:
    """sha256 over the files' own, in name order."""
    return hashlib.sha256("".join(sha256_file(path) for path in paths).encode()).hexdigest()


@quiet()
def find(source: str) -> Checkpoint:
    """Look at a checkpoint without loading it; raises CheckpointError."""
    folder = locate(source)
    if not any(folder.iterdir()):
        raise CheckpointError(f"{source} is empty: give a folder with config.json, safetensors and a tokenizer")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{source} has no config.json: it is not a Hugging Face checkpoint")
    raw = read_json(folder / "config.json")
    if "auto_map" in raw and raw.get("model_type") not in transformers.CONFIG_MAPPING:
        raise CheckpointError(f"{source} needs code of its own to load, which specbuild never runs")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever a field makes it stumble over
        raise CheckpointError(f"{source}/config.json cannot be used: {one_line(error)}") from None
    if config.is_encoder_decoder or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(
            f"{source} is a {config.model_type!r} model: specbuild takes decoder-only language models"
        )
    check_interface(config)
    if config.get_text_config() is not config:
        raise CheckpointError(
            f"{source} is a {config.model_type!r} model, of more than text: give its language model alone"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(f"{source} has no usable tokenizer, add its tokenizer.json: {one_line(error)}") from None
    if not tokenizer.is_fast:
        raise CheckpointError(f"{source} has only a slow tokenizer: add a tokenizer.json")
    checkpoint = Checkpoint(source, folder, config, weight_files(source, folder), tokenizer)
    _check_fields(checkpoint)
    return checkpoint


def _check_fields(checkpoint: Checkpoint) -> None:
    """What a build reads of the configuration must be there and make sense."""
    config, where = checkpoint.config, f"{checkpoint.source}/config.json"
    for name in ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"):
        value = getattr(config, name, None)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{where} has {name} {value!r}: {config.model_type!r} models like this are unsupported"
            )
    if len(checkpoint.tokenizer) > checkpoint.vocab_size:
        raise CheckpointError(
            f"{checkpoint.source} has a tokenizer of {len(checkpoint.tokenizer)} tokens and a vocab_size of "
            f"{checkpoint.vocab_size}: they do not belong together"
        )
    if not all(isinstance(token, int) and 0 <= token < checkpoint.vocab_size for token in checkpoint.eos_token_ids()):
        raise CheckpointError(f"{checkpoint.source} has an eos_token_id that is no token: {checkpoint.eos_token_ids()}")


@quiet()
def read_config(source: str) -> dict[str, Any]:
    """A checkpoint's config.json as it is, empty where there is none; raises CheckpointError."""
    return read_json(locate(source) / "config.json")


def locate(source: str) -> Path:
    """The folder of a checkpoint, fetched from the hub where it is an id; raises CheckpointError."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{source} is a file: give the folder of a checkpoint")
    if not _HUB_ID.fullmatch(source):
        raise CheckpointError(f"{source} does not exist: give the folder of a checkpoint, or a hub id like org/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=_WANTED, etag_timeout=5))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{source} is no folder here, and the hub did not give it: {one_line(error)}") from None


def weight_files(source: str, folder: Path) -> list[Path]:
    """The safetensors files, all there and whole."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map of file names: download it again")
        names = sorted(set(weight_map.values()))
        if any("/" in name or "\\" in name for name in names):
            raise CheckpointError(f"{index} names a file outside the checkpoint: do not use it")
    else:
        names = ["model.safetensors"]
    files = [folder / name for name in names]
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        raise CheckpointError(f"{source} lacks {', '.join(missing) or 'weights'}: specbuild reads safetensors only")
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged ({one_line(error)}): download it again") from None
    return files


@quiet()
def load(checkpoint: Checkpoint, attention: str) -> PreTrainedModel:
    """The model in float32, evaluation mode, every weight present and finite; raises CheckpointError."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            config=checkpoint.config,
            dtype=torch.float32,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are reported below, by name
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises whatever it stumbles over
        raise CheckpointError(f"{checkpoint.source} does not load: {one_line(error)}") from None
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if info.get(problem):
            first = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info[problem])[0]
            raise CheckpointError(
                f"{checkpoint.source} does not fit its config.json: {problem.replace('_', ' ')}, the first is {first}"
            )
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise CheckpointError(f"{checkpoint.source} has NaN or infinite values in {name}: the weights are damaged")
    model.eval()
    return model


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: download it again")
    return content
