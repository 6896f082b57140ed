"""Creation of the requested student, as it is before its first training step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specbuild.builder.frontend import checkpoint as checkpoints
from specbuild.builder.frontend.checkpoint import Checkpoint
from specbuild.builder.frontend.vocabulary import DRAFT_TOKENS, PARD_TOKEN, reconcile
from specbuild.runtime.errors import CheckpointError, OptionError

from . import shape
from .chain import ChainStudent, trim, untied
from .eagle import EagleStudent
from .options import HEAD_MLP, INITS, DistillConfig, flag
from .parallel import ParallelStudent, mask_of, with_mask
from .student import Student


@dataclass(frozen=True)
class Plan:
    """A plan of what to train, made before any weights are loaded.

    Attributes:
        config: The distillation's options.
        target: The target's checkpoint.
        shape: The draft's configuration; None for an EAGLE head, whose configuration `EagleStudent.start` makes.
        before: The draft whose training `--init` continues, if any.
    """

    config: DistillConfig
    target: Checkpoint
    shape: PreTrainedConfig | None
    before: Checkpoint | None = None

    @classmethod
    def of(cls, config: DistillConfig, target: Checkpoint) -> Plan:
        """Check the options against the target and derive the draft's shape. Raises OptionError and CheckpointError."""
        if config.sequence_length > target.max_positions:
            raise OptionError(
                f"--sequence-length {config.sequence_length} is beyond the target's {target.max_positions} positions"
            )
        config.vocabulary(target.vocab_size)
        if config.kind == "eagle3":
            return cls(config, target, None)
        before = None if config.init in INITS else checkpoints.find(config.init)
        plan = cls(config, target, before.config if before else shape.derive(config, target.config), before)
        if before:
            plan._check_before(before)
        window = getattr(plan.shape, "sliding_window", None)
        if config.kind == "parallel" and isinstance(window, int) and window < config.sequence_length + config.depth:
            raise OptionError(f"mask tokens cannot be trained under a window of {window}: use --kind chain")
        return plan

    def _check_before(self, before: Checkpoint) -> None:
        """Raise OptionError or CheckpointError if the draft to continue does not fit the options or the target."""
        if reconcile(self.target, before).kind not in ("identical", "padded"):
            raise CheckpointError(f"{before.source} has another tokenizer than the target: --init a draft of its own")
        if before.vocab_size < self.target.vocab_size:
            raise CheckpointError(
                f"{before.source} has {before.vocab_size} tokens, not {self.target.vocab_size}: give a draft of its own"
            )
        fields = {
            "layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
        }
        for name, size in self.config.shape.items():
            has = getattr(before.config, fields.get(name, name), None)
            if has != size:
                raise OptionError(f"{before.source} has --{flag(name)} {has}, not {size}: drop it")
        known, asked = self._draft_tokens(before), self.config.draft_vocab_size
        if known is not None and asked and asked != len(known):
            raise OptionError(
                f"the head of {before.source} knows {len(known)} tokens, not {asked}: drop --draft-vocab-size"
            )
        mask = getattr(before.config, PARD_TOKEN, None)
        if mask is not None and (self.config.kind != "parallel" or mask != mask_of(self.target)):
            raise OptionError(
                f"{before.source} drafts with mask token {mask}: go on with --kind parallel, for its target"
            )

    def _draft_tokens(self, before: Checkpoint) -> Tensor | None:
        tokens = getattr(before.config, DRAFT_TOKENS, None)
        return None if tokens is None else torch.tensor(tokens)  # `reconcile` has validated them

    def student(self, model: PreTrainedModel, counts: NDArray[np.int64]) -> tuple[Student, dict[str, int]]:
        """Create the student, and count its parameters by how they were initialised.

        Args:
            model: The target.
            counts: `int64[V]`, how often each token occurs in the texts; a trimmed head keeps the most frequent.

        Returns:
            The student, and the number of parameters by origin: those of `shape.initialise`, or the folder of `--init`;
            empty for an EAGLE head.
        """
        config, size = self.config, self.target.vocab_size
        torch.manual_seed(config.seed)
        named = sorted(set(self.target.tokenizer.get_vocab().values()))  # other embedding rows are padding
        wanted, ends = min(config.vocabulary(size), len(named)), self.target.eos_token_ids()
        if config.kind == "eagle3":
            tokens = frequent(counts, wanted, ends, named)
            own = getattr(model.config.get_text_config(), "intermediate_size", 0)
            inner = config.intermediate_size or round(HEAD_MLP * own) or None
            head = EagleStudent.start(model, tokens, depth=config.depth, intermediate_size=inner, seed=config.seed)
            return head, {}
        assert self.shape is not None
        if self.before:
            net, known = checkpoints.load(self.before, "sdpa"), self._draft_tokens(self.before)
            began = {config.init: len(list(net.parameters()))}
            trimmed = known is not None or bool(config.draft_vocab_size and wanted < size)
        else:
            net, known = AutoModelForCausalLM.from_config(copy.deepcopy(self.shape), dtype=torch.float32), None
            began = shape.initialise(net, model) if config.init == "target" else {"random": len(list(net.parameters()))}
            trimmed = wanted < size
        tokens = known if known is not None else frequent(counts, wanted, ends, named)
        mask = mask_of(self.target)
        if config.kind == "parallel" and getattr(net.config, PARD_TOKEN, None) is None:
            net = untied(net) if trimmed else net
            with_mask(net, mask)
        net = trim(net, tokens) if trimmed else net
        net.config.dtype = self.target.config.dtype or torch.float32
        kept = tokens if trimmed else None
        return (
            ParallelStudent(net, kept, mask, config.depth) if config.kind == "parallel" else ChainStudent(net, kept)
        ), began


def frequent(counts: NDArray[np.int64], size: int, always: Sequence[int], named: Sequence[int]) -> Tensor:
    """Return the `size` most frequent of the `named` tokens, ascending; those in `always` take precedence."""
    found = np.full_like(counts, -1)
    found[list(named)] = counts[list(named)]
    found[list(always[:size])] = counts.max() + 1
    return torch.from_numpy(np.sort(np.argsort(-found, kind="stable")[:size]))


def files_of_tokenizer(target: Checkpoint) -> list[Path]:
    """List a checkpoint's tokenizer files and its generation_config.json."""
    patterns = (
        "tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.*",
        "merges.txt",
        "*.jinja",
        "*.model",
    )
    found = {path for pattern in (*patterns, "generation_config.json") for path in target.folder.glob(pattern)}
    return sorted(path for path in found if path.is_file())
