"""A distillation's options and all their defaults, validated once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specbuild.runtime.errors import OptionError, OutputError

KINDS = ("chain", "parallel", "eagle3")
DIVERGENCES = ("kl", "reverse-kl", "tv")
INITS = ("target", "random")  # or a draft's folder
DEVICES, DTYPES = ("auto", "cpu", "cuda"), ("auto", "fp32", "bf16")
GENERATE = 800_000  # tokens that the target generates if no text is given
LAYERS = {"chain": 1, "parallel": 2}  # a single layer learns little from masks; "parallel" runs once a round
MLP = 2 / 3  # times the size in proportion to the width, so that one wide layer costs no more than two narrow ones
HEAD_MLP = 1 / 3  # the same for an EAGLE head, whose MLP costs more relative to its attention
OTHERS: dict[str, dict[str, Any]] = {  # defaults that differ by kind, because its steps take longer
    "parallel": {"steps": 1500},
    "eagle3": {"steps": 2000, "batch_size": 4, "sequence_length": 256},
}
LEAST_VOCABULARY = 2048  # a head's default is the larger of this and a quarter of the target's, at most the target's
_SHAPE = ("layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
_COUNTS = (
    *_SHAPE,
    *("draft_vocab_size", "depth", "steps", "batch_size", "grad_accum", "sequence_length", "patience"),
    *("eval_every", "save_every", "generate"),
)
_FREE = ("output", "target", "text", "init", "resume", "force", "save_every", "compile")  # may differ on --resume


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """One distillation's options.

    Attributes:
        target: The target's folder or hub id.
        output: The folder to create.
        kind: "chain" drafts token by token, "parallel" by mask tokens in one pass (PARD), and "eagle3" from the
            target's hidden states. OTHERS has the options that suit a kind better than the defaults below.
        text: Files and folders to learn from.
        generate: Number of tokens that the target generates; None for GENERATE, or for none if `text` is given.
        layers: Number of the draft's layers; None for LAYERS.
        hidden_size: The draft's width; None for the target's.
        intermediate_size: Width of the draft's MLPs; None for one in proportion to the draft's width, times MLP if
            `layers` is None too; an EAGLE head's is HEAD_MLP of the target's.
        num_heads: Number of query heads; None for one in proportion to the width.
        num_kv_heads: Number of key-value heads; None for one in proportion to the query heads.
        init: "target", "random", or the folder of a draft whose training continues.
        draft_vocab_size: Number of tokens that the draft's head knows; see `vocabulary`.
        divergence: The training loss, a name in DIVERGENCES.
        on_policy: Fraction of the steps whose texts the draft continues itself.
        depth: Length of the chains in validation, and in the training of "parallel" and "eagle3".
        steps: Maximum number of optimizer steps.
        batch_size: Texts in a batch.
        grad_accum: Batches in a step.
        sequence_length: Tokens in a text.
        learning_rate: AdamW's highest learning rate.
        seed: Seed of all random choices.
        patience: Number of validations without a longer acceptance length after which training stops.
        eval_every: Steps between validations.
        save_every: Steps between saved states.
        device: One of DEVICES.
        dtype: One of DTYPES; the type that target and draft compute in.
        compile: Whether to run the draft through torch.compile.
        resume: Whether to continue the unfinished training in `work`.
        force: Whether to replace an existing output or unfinished training.

    Raises:
        OptionError: An option is unknown or out of range, or contradicts another.
        OutputError: `output` cannot name a folder.
    """

    target: str
    output: Path
    kind: str = "chain"
    text: tuple[Path, ...] = ()
    generate: int | None = None
    layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    init: str = "target"
    draft_vocab_size: int | None = None
    divergence: str = "kl"
    on_policy: float = 0.0
    depth: int = 4
    steps: int = 3600
    batch_size: int = 8
    grad_accum: int = 1
    sequence_length: int = 384
    learning_rate: float = 3e-3
    seed: int = 0
    patience: int = 10
    eval_every: int = 300
    save_every: int = 300
    device: str = "auto"
    dtype: str = "auto"
    compile: bool = False
    resume: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        choices = {"kind": KINDS, "divergence": DIVERGENCES, "device": DEVICES, "dtype": DTYPES}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise OptionError(f"unknown --{name} {getattr(self, name)!r}: use {', '.join(known)}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"--{flag(name)} must be at least 1, not {value}")
        if self.depth > 16:
            raise OptionError(f"--depth must be at most 16, not {self.depth}")
        if self.sequence_length < 4 * (self.depth + 2):
            raise OptionError(f"--sequence-length must be at least {4 * (self.depth + 2)}, not {self.sequence_length}")
        if not 0 <= self.on_policy <= 1:
            raise OptionError(f"--on-policy is a part of the batches, 0…1, not {self.on_policy}")
        if self.on_policy and self.kind == "eagle3":
            raise OptionError("an EAGLE head cannot write by itself: drop --on-policy")
        fixed = [name for name in self.shape if name != "intermediate_size"]
        if self.kind == "eagle3" and (fixed or self.init != "target"):
            what = flag(fixed[0]) if fixed else "init"
            raise OptionError(f"an EAGLE head is one layer of the target's width, begun with it: drop --{what}")
        if not 0 < self.learning_rate < 1:
            raise OptionError(f"--learning-rate must be between 0 and 1, not {self.learning_rate}")
        if not 0 <= self.seed < 1 << 63:
            raise OptionError(f"--seed must be 0…2^63 − 1, not {self.seed}")
        if self.output.name in ("", ".", ".."):
            raise OutputError(f"{self.output} cannot be a draft's name: give a folder to create")

    @property
    def work(self) -> Path:
        """The folder that holds an unfinished training."""
        return self.output.with_name(self.output.name + ".training")

    @property
    def to_generate(self) -> int:
        """Number of tokens that the target generates."""
        return self.generate or (0 if self.text else GENERATE)

    @property
    def shape(self) -> dict[str, int]:
        """The draft's sizes that were given, by field name."""
        return {name: getattr(self, name) for name in _SHAPE if getattr(self, name) is not None}

    def vocabulary(self, target: int) -> int:
        """Return the head's number of tokens, for a target of `target` tokens. Raises OptionError if too many."""
        if self.draft_vocab_size and self.draft_vocab_size > target:
            raise OptionError(f"--draft-vocab-size {self.draft_vocab_size} is more than the target's {target} tokens")
        return self.draft_vocab_size or min(target, max(LEAST_VOCABULARY, target // 4))

    def to_dict(self) -> dict[str, Any]:
        """Return all options as JSON values."""
        return asdict(self) | {"output": str(self.output), "text": [str(path) for path in self.text]}

    def identity(self) -> dict[str, Any]:
        """Return the options that must not change when a training resumes; file contents are compared separately."""
        return {name: value for name, value in self.to_dict().items() if name not in _FREE}


def flag(name: str) -> str:
    """Return a field's option name on the command line, without the leading dashes."""
    return name.replace("_", "-")
