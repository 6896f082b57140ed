"""Finds, checks, describes and loads Hugging Face checkpoints, in float32.

Weights are read from safetensors only, never from pickle, and code in a checkpoint is never run.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import stat
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specbuild.builder.strict_json import read_object, refusing
from specbuild.runtime.errors import CheckpointError, OptionError, one_line, shown
from specbuild.runtime.requests.tokenizer import check_merges
from specbuild.runtime.sampling.parameters import SamplingParams

from .adapter import Adapter, find_adapter
from .attention_layout import check_decoder, empty
from .gguf import Gguf, describe
from .lazy_weights import Stored, Weight, fill, of_model, of_names, skeleton
from .multimodal import TextModel, take_text, text_config
from .packed import Packed, packing, unpack
from .quiet import quiet
from .weights import (
    Header,
    Stamp,
    check_model,
    check_sizes,
    check_stamps,
    mtp_names,
    read_header,
    sha256_files,
    short,
    stamps_of,
    weight_files,
)

Origin = Gguf | Packed | TextModel
_LOG = logging.getLogger("specbuild")
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")  # with a branch, tag or commit
TOKENIZER_BYTES = 512 << 20  # maximum size of a file that holds no weights
_READ = (".json", ".safetensors", ".jinja", ".model", ".txt")
_OBJECTS: tuple[str, ...] = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
_OBJECTS += ("added_tokens.json", "chat_template.json")
_TRIED = "def f(x):\n    return 'Größe'  # 1 \U0001f600"  # every tokenizer must encode and decode this
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that passed all checks that need no weights to be loaded.

    Attributes:
        source: The folder, hub id or file.
        folder: The folder of its configuration and tokenizer.
        config: Its configuration.
        weights: The files of its weights.
        parameters: How many numbers they hold.
        tensors: Its weights by the model's names, read when they are needed; None if only `transformers` can load them.
        tokenizer: Its tokenizer.
        ends: The tokens that end a text.
        stamps: The weight files' stamps when they were checked.
        sampling: generation_config.json's parameters.
        mtp: The weights of its MTP layers, by their names in the files.
        adapter: What is added to its weights when they are read.
        origin: What the weights come from if that is no plain checkpoint; `folder` is then deleted with this object.
    """

    source: str
    folder: Path
    config: Any  # transformers.PretrainedConfig
    weights: list[Path]
    parameters: int
    tensors: Mapping[str, Weight] | None = field(repr=False)
    tokenizer: PreTrainedTokenizerBase
    ends: tuple[int, ...]
    stamps: list[Stamp]
    sampling: Mapping[str, float] = field(default_factory=dict)
    mtp: Mapping[str, Weight] = field(default_factory=dict, repr=False)
    adapter: Adapter | None = None
    origin: Origin | None = None

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding and of the head."""
        return int(self.config.vocab_size)

    @cached_property
    def token_ids(self) -> list[int]:
        """The rows that are a token's or end a text, ascending; no text has the others."""
        ids = {*self.tokenizer.get_vocab().values(), *self.ends}
        size = self.vocab_size
        return sorted(token for token in ids if token < size)

    @property
    def token_rows(self) -> int:
        """Number of rows up to the last token's."""
        return self.token_ids[-1] + 1

    @property
    def max_positions(self) -> int:
        """Maximum number of positions that the model was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def architecture(self) -> str:
        """The model class that the checkpoint names, or else its configuration's class."""
        named = self.config.architectures
        return str(named[0] if isinstance(named, list) and named else type(self.config).__name__)

    def eos_token_ids(self) -> list[int]:
        """Return the tokens that end a text, from generation_config.json, else config.json, else the tokenizer."""
        return list(self.ends)

    def sha256(self) -> str:
        """Return the sha256 of the weights; raise CheckpointError if they changed since they were checked."""
        own = self.origin.sha256 if self.origin else sha256_files(self.weights, self.stamps)
        return hashlib.sha256(f"{own}{self.adapter.sha256}".encode()).hexdigest() if self.adapter else own


@quiet()
def find(source: str, adapter: str | None = None) -> Checkpoint:
    """Find and check a checkpoint without reading its weights.

    `source` is a folder, a hub id or a GGUF file, `adapter` a LoRA adapter's folder or hub id. Raises CheckpointError.
    """
    added = find_adapter(adapter, locate(adapter)) if adapter else None
    path, settings, text = _file(source), None, None
    if path is None:
        path = locate(source)
        settings, text = packing(path), text_config(path)
        if settings is None and text is None:
            return _look(source, path, f"{source}/config.json", adapter=added)
    folder = Path(tempfile.mkdtemp(prefix="specbuild-checkpoint-"))
    try:
        origin = _origin(source, path, settings, text, folder)
        checkpoint = _look(source, folder, source, origin, added)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(checkpoint, shutil.rmtree, folder, ignore_errors=True)
    return checkpoint


def _origin(
    source: str, path: Path, settings: dict[str, Any] | None, text: dict[str, Any] | None, folder: Path
) -> Origin:
    """Describe files that are no plain checkpoint as one, in `folder`: packed ones, a multimodal one, or a GGUF."""
    if settings:
        return unpack(source, path, settings, folder)
    return take_text(source, path, text, folder) if text else describe(source, path, folder)


def _look(
    source: str, folder: Path, where: str, origin: Origin | None = None, adapter: Adapter | None = None
) -> Checkpoint:
    """Check a checkpoint's folder; `where` names its configuration in error messages."""
    raw = _read_files(source, folder)
    if "auto_map" in raw and raw.get("model_type") not in transformers.CONFIG_MAPPING:
        raise CheckpointError(f"{source} needs code of its own to load, which specbuild never runs")
    if origin is None:
        files = weight_files(source, folder)
        stamps, header = stamps_of(files), read_header(files)
        check_sizes(where, raw, header)
    config = _configuration(source, folder)
    if origin is not None:
        files, stamps, tensors = origin.files, origin.stamps, origin.weights(source, config)
        header = Header({name: weight.shape for name, weight in tensors.items()})
        check_sizes(where, raw, header)
    tokenizer = _tokenizer(source, folder)
    _check_fields(where, config, len(tokenizer))
    ends = _ends(source, folder, config, tokenizer)
    further = mtp_names(header.shapes, config.num_hidden_layers)
    mtp = {name: tensors[name] if origin else _of_header(header, name) for name in further}
    model, header = empty(config)[1], header.without(further)
    check_model(source, model, header)
    weights = {name: tensors[name] for name in header.shapes} if origin else _stored(model, header)
    if adapter:
        adapter.check(model)
        weights = adapter.merged(weights) if weights else None
    count, sampling = header.elements, _sampling(source, folder)
    read = (config, files, count, weights, tokenizer, ends, stamps, sampling, mtp)
    return Checkpoint(source, folder, *read, adapter, origin)


def _stored(model: PreTrainedModel, header: Header) -> dict[str, Weight] | None:
    """Return a model's weights by its names; None if the files have others, which `transformers` converts."""
    wanted = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    if header.shapes != wanted:
        return None
    return {name: _of_header(header, name) for name in header.shapes}


def _of_header(header: Header, name: str) -> Weight:
    return Stored(header.files[name], name, header.shapes[name])


def _read_files(source: str, folder: Path) -> dict[str, Any]:
    """Return config.json, and check all files that transformers reads: a pipe, say, would block it forever."""
    try:
        names = sorted(path.name for path in folder.iterdir())
        files = {name: (folder / name).stat() for name in names if name.endswith(_READ)}
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error.strerror}): download it again") from None
    if not names:
        raise CheckpointError(f"{source} is empty: give a folder with config.json, safetensors and a tokenizer")
    for name, about in files.items():
        if not stat.S_ISREG(about.st_mode):
            raise CheckpointError(f"{folder / name} is not a regular file: give a checkpoint of plain files")
        if about.st_size > TOKENIZER_BYTES and not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder / name} is {about.st_size >> 20} MiB, more than {TOKENIZER_BYTES >> 20}: download it again"
            )
    if "config.json" not in files:
        raise CheckpointError(f"{source} has no config.json: it is not a Hugging Face checkpoint")
    return {name: read_object(folder / name) for name in _OBJECTS if name in files}["config.json"]


def _configuration(source: str, folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many unrelated types
        raise CheckpointError(f"{source}/config.json cannot be used: {one_line(error)}") from None
    check_decoder(source, config)
    return config


def _tokenizer(source: str, folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer and try it on a short text."""
    with refusing(f"{source} has no usable tokenizer, add its tokenizer.json"):
        if (file := folder / "tokenizer.json").is_file():
            check_merges(file.read_bytes())
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        len(tokenizer)
    if not tokenizer.is_fast:
        raise CheckpointError(f"{source} has only a slow tokenizer: add a tokenizer.json")
    template = tokenizer.chat_template
    named = template if isinstance(template, dict) else {"default": template}
    if template is not None and not all(isinstance(each, str) for each in named.values()):
        raise CheckpointError(f"{source} has a chat_template that is no text: mend its tokenizer_config.json")
    with refusing(f"{source} has a tokenizer that does not work, download it again"):
        tokenizer.decode(tokenizer(_TRIED)["input_ids"])
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text; raise CheckpointError if the tokenizer fails on one."""
    with refusing("the checkpoint's tokenizer cannot read a text, download it again"):
        tokens: list[list[int]] = tokenizer(list(texts))["input_ids"] if texts else []
        return tokens


def _ends(source: str, folder: Path, config: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    ids = read_object(folder / "generation_config.json").get("eos_token_id", config.eos_token_id)
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    ends = tuple(ids) if isinstance(ids, list) else (ids,)
    if not all(type(token) is int and 0 <= token < config.vocab_size for token in ends):
        raise CheckpointError(f"{source} has an eos_token_id that is no token: {short(ids)}")
    return ends


def _sampling(source: str, folder: Path) -> dict[str, float]:
    """Return the parameters set in generation_config.json, with a warning for each that hubs write in their own way.

    Raises CheckpointError for values no request may have.
    """
    where, fields = f"{source}/generation_config.json", read_object(folder / "generation_config.json")
    fields = {name: fields[name] for name in SamplingParams.OF_CHECKPOINTS if fields.get(name) is not None}
    try:
        params = SamplingParams(**fields | _top_k(fields))
    except OptionError as error:
        raise CheckpointError(f"{where} cannot be used ({error}): mend it") from None
    if "temperature" in fields and fields["temperature"] != params.temperature:
        _LOG.warning(f"{where} has temperature {fields['temperature']}: it is read as 0, greedy")
    if "top_k" in fields and str(fields["top_k"]) != str(params.top_k or "off"):
        _LOG.warning(f"{where} has top_k {fields['top_k']}: it is read as {params.top_k or 'off'}")
    return {name: getattr(params, name) for name in fields}


def _top_k(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `top_k` as a request has it: transformers may write 50.0, and vLLM's −1 is off."""
    top_k = fields.get("top_k")
    if isinstance(top_k, float) and top_k.is_integer():
        top_k = int(top_k)
    if top_k == -1:
        top_k = 0
    return {} if top_k is None else {"top_k": top_k}


def _check_fields(where: str, config: Any, tokens: int) -> None:
    """Raise CheckpointError if a configuration field that a build reads is missing or invalid."""
    for name in ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"):
        value = getattr(config, name, None)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{where} has {name} {shown(value)}: {shown(config.model_type)} models like this are unsupported"
            )
    if not isinstance(config.dtype, torch.dtype | None):
        raise CheckpointError(f"{where} has dtype {short(config.dtype)}: give float32, float16 or bfloat16")
    if tokens > config.vocab_size:
        raise CheckpointError(
            f"{where.removesuffix('/config.json')} has a tokenizer of {tokens} tokens and a vocab_size of "
            f"{config.vocab_size}: they do not belong together"
        )


@quiet()
def read_config(source: str) -> dict[str, Any]:
    """Return a checkpoint's config.json unchanged, or {} if it has none, like a GGUF file; raises CheckpointError."""
    return {} if _file(source) else read_object(locate(source) / "config.json")


def _file(source: str) -> Path | None:
    """Return the path if `source` exists and is not a folder."""
    try:
        path = Path(source).expanduser()
        return path if path.exists() and not path.is_dir() else None
    except (OSError, RuntimeError):  # the name is too long; "~user" does not exist
        return None


def locate(source: str) -> Path:
    """Return the folder of a checkpoint, downloaded first if `source` is a hub id; raises CheckpointError."""
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            return path
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # the name is too long; "~user" does not exist
        raise CheckpointError(f"{short(source)} cannot be read ({one_line(error)}): give another folder") from None
    if exists:
        raise CheckpointError(f"{source} is a file: give the folder of a checkpoint")
    if (hub := _HUB_ID.fullmatch(source)) is None:
        raise CheckpointError(
            f"{source} does not exist: give the folder of a checkpoint, or a hub id like org/name or org/name@revision"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub[1], revision=hub[2], allow_patterns=_WANTED, etag_timeout=5))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{source} is no folder here, and the hub did not give it: {one_line(error)}") from None


def model_of(checkpoint: Checkpoint) -> tuple[PreTrainedModel, dict[str, Weight]]:
    """Return a checkpoint's model and its weights by its names; they stay where they are if they can be read there."""
    if checkpoint.tensors is None:
        model = load(checkpoint, "eager")
        return model, of_model(model)
    model = skeleton(checkpoint.config, "eager")
    return model, of_names(model, checkpoint.tensors)


@quiet()
def load(checkpoint: Checkpoint, attention: str) -> PreTrainedModel:
    """Load the model in float32 and evaluation mode; raise CheckpointError if a weight is missing or not finite.

    `attention` is the name of an attention implementation of `transformers`.
    """
    if checkpoint.origin and checkpoint.tensors is not None:
        model = skeleton(checkpoint.config, attention)
        fill(model, checkpoint.tensors)
    else:
        model = _from_files(checkpoint, attention)
        if checkpoint.adapter:
            checkpoint.adapter.merge_into(model)
    check_stamps(checkpoint.weights, checkpoint.stamps)
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise CheckpointError(f"{checkpoint.source} has NaN or infinite values in {name}: the weights are damaged")
    model.eval()
    return model


def _from_files(checkpoint: Checkpoint, attention: str) -> PreTrainedModel:
    """Let `transformers` load a model from safetensors; raise CheckpointError if they are not its weights."""
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
    except Exception as error:  # transformers raises many unrelated types
        raise CheckpointError(f"{checkpoint.source} does not load: {one_line(error)}") from None
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        keys = {str(key[0] if isinstance(key, tuple) else key) for key in info.get(problem) or ()}
        if keys := keys - mtp_names(keys, checkpoint.config.num_hidden_layers):
            raise CheckpointError(
                f"{checkpoint.source} does not fit its config.json: {problem.replace('_', ' ')}, "
                f"the first is {min(keys)}"
            )
    loaded: PreTrainedModel = model
    return loaded
