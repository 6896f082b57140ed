"""MTP heads: the layer that a checkpoint brings to predict the token after the next one, as a draft.

DeepSeek-V3 (arXiv 2412.19437), GLM 4.5 and Qwen 3.5 were trained with one. Row i combines the target's last hidden
state of token i with the embedding of token i + 1 and predicts token i + 2, as an EAGLE-3 head does. Embedding and LM
head are the target's own. `transformers` has the module; weights are read by the names under which they are published.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig

from specbuild.runtime.errors import CheckpointError, one_line

from .attention_layout import Layout, empty, probe_head
from .checkpoint import Checkpoint
from .hidden_state_taps import OUTPUT, Taps
from .lazy_weights import Weight, check_finite
from .quiet import quiet
from .weights import has_mtp

_FURTHER = re.compile(r"^(?:model\.)?mtp\.layers\.0*[1-9]\d*\.")
_SHARED = re.compile(r"\.(?:embed_tokens|shared_head\.head)\.weight$")  # copies of the target's own


class MtpHead(MtpModel):  # type: ignore[misc]
    """The first MTP layer of a target, whose embedding and LM head it shares."""

    def __init__(self, target: PreTrainedModel) -> None:
        _complete(target.config)
        super().__init__(target, 1)

    @property
    def modeling(self) -> ModuleType:
        """The modeling file of the layer's family."""
        return sys.modules[type(self.layers[0].mtp_block).__module__]

    @property
    def taps(self) -> Taps:
        """The hidden state that it reads from the target: the last one, after the norm."""
        return Taps((OUTPUT,), nn.Identity())

    def get_output_embeddings(self) -> nn.Module:
        """Return the target's LM head."""
        return self.shared_head  # type: ignore[no-any-return]

    def create_masks_for_mtp_layer(self, layer_idx: int, inputs_embeds: Tensor, mtp_cache: Any, _: Any) -> Any:
        """Return the layer's mask by the order of its rows: positions may have no values."""
        return super().create_masks_for_mtp_layer(layer_idx, inputs_embeds, mtp_cache, None)

    def forward(
        self, input_ids: Tensor, hidden: Tensor, position_ids: Tensor, logits_to_keep: int | Tensor = 0
    ) -> tuple[Tensor, Tensor]:
        """Return logits `[B, kept nodes, vocab]` and hidden states `[B, N, H]`, as `EagleHead.forward` does."""
        hidden = self.forward_layer(0, hidden, position_ids, None, input_ids=input_ids)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return self._project_to_logits(hidden[:, kept]), hidden


# `transformers` looks up by a class's name how weights are named in files.
register_checkpoint_conversion_mapping("MtpHead", get_checkpoint_conversion_mapping("MtpModel"), overwrite=True)


@dataclass(frozen=True)
class MtpCheckpoint:
    """The MTP layer in a target's checkpoint; its weights, by their names in the files, are not read yet."""

    target: Checkpoint
    tensors: Mapping[str, Weight] = field(repr=False)

    architecture = "MtpHead"

    @property
    def source(self) -> str:
        """The target's."""
        return self.target.source

    @property
    def config(self) -> Any:
        """The target's."""
        return self.target.config

    @property
    def parameters(self) -> int:
        """How many numbers the layer has beside the target's own."""
        return sum(prod(weight.shape) for weight in self.tensors.values())

    @property
    def max_positions(self) -> int:
        """The target's."""
        return self.target.max_positions

    def sha256(self) -> str:
        """Return the target's sha256; raise CheckpointError if its weights changed since they were checked."""
        return self.target.sha256()

    def layout(self, positions: int) -> Layout:
        """Return the layer's attention layout, for texts of so many tokens; raise CheckpointError if it has none."""
        with _explained(self.source):
            target = empty(self.config)[1]
            with torch.device("meta"):
                head = MtpHead(target)
            return probe_head(head, positions)


def find_mtp(target: Checkpoint) -> MtpCheckpoint:
    """Find a checkpoint's first MTP layer; raise CheckpointError if it has none."""
    if not has_mtp(target.mtp):
        raise CheckpointError(f"{target.source} has no MTP layer, mtp.fc or eh_proj: give another --draft")
    numbered = [int(name.split(".")[2]) for name in target.mtp if name.startswith("model.layers.")]
    first = f"model.layers.{min(numbered)}." if numbered else ""
    return MtpCheckpoint(
        target,
        {
            name: weight
            for name, weight in target.mtp.items()
            if name.startswith(first) and not _FURTHER.match(name) and not _SHARED.search(name)
        },
    )


@contextmanager
def _explained(source: str) -> Iterator[None]:
    """Raise any error as one that says what to do without the layer."""
    try:
        yield
    except Exception as error:  # transformers raises many unrelated types
        raise CheckpointError(
            f"{source} has an MTP layer that cannot be used ({one_line(error)}): give --draft none"
        ) from None


def _complete(config: Any) -> None:
    """Set what `transformers` has to know of an MTP layer and some families' configurations do not say."""
    config.num_mtp_layers = 1
    for name in ("layer_types", "mlp_layer_types"):
        kinds, own = getattr(config, name, None), getattr(config, f"mtp_{name}", None)
        if kinds and not own:
            attending = sorted(set(kinds) - {"linear_attention"}) if name == "layer_types" else kinds[-1:]
            if len(attending) != 1:
                raise CheckpointError(f"its config.json does not say which of {attending} its MTP layer is")
            own = attending
        if own:
            setattr(config, f"mtp_{name}", own[:1])


@quiet()
def load_mtp(found: MtpCheckpoint, target: PreTrainedModel) -> MtpHead:
    """Load an MTP layer in float32 and evaluation mode; embedding and LM head are the modules of `target`, the model.

    Raises CheckpointError if a weight is missing, of another shape, unknown, or not finite.
    """
    with _explained(found.source):
        with torch.device("meta"):
            head = MtpHead(target)
        tensors = {name: weight.read() for name, weight in found.tensors.items()}
        names = head.get_weight_conversions(target)
        options = LoadStateDictConfig(weight_mapping=names, dtype=torch.float32, ignore_mismatched_sizes=True)
        info, _ = convert_and_load_state_dict_in_model(model=head, state_dict=tensors, load_config=options)
        head._adjust_missing_and_unexpected_keys(info)
        for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            if keys := getattr(info, problem):
                first = min(str(key[0] if isinstance(key, tuple) else key) for key in keys)
                raise CheckpointError(f"{problem.replace('_', ' ')}, the first is {first}")
        for name, weight in head.layers.named_parameters():
            check_finite(f"layers.{name}", weight)
    head.tie_with_main_model(target)
    head.eval()
    return head
