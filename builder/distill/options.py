"""What a distillation is asked for, validated once. All its defaults are here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specbuild.runtime.errors import OptionError, OutputError

KINDS = ("chain", "parallel", "eagle3")
DIVERGENCES = ("kl", "reverse-kl", "tv")
INITS = ("target", "random")  # or a folder
DEVICES, DTYPES = ("auto", "cpu", "cuda"), ("auto", "fp32", "bf16")
GENERATE = 800_000  # tokens that the target writes where no text is given
LAYERS = {"chain": 1, "parallel": 2}  # a single one can make little of masks, and runs once a round
MLP = 2 / 3  # of what is in proportion to the width: one wide layer should cost no more than two narrow ones
HEAD_MLP = 1 / 3  # the same for an EAGLE head, beside whose attention its MLP counts for more
OTHERS: dict[str, dict[str, Any]] = {  # where a kind's defaults are others: its steps take longer
    "parallel": {"steps": 1500},
    "eagle3": {"steps": 2000, "batch_size": 4, "sequence_length": 256},
}
LEAST_VOCABULARY = 2048  # of a draft's head, where the target's is larger; else a quarter of the target's
_SHAPE = ("layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
_COUNTS = (
    *_SHAPE,
    *("draft_vocab_size", "depth", "steps", "batch_size", "grad_accum", "sequence_length", "patience"),
    *("eval_every", "save_every", "generate"),
)
_FREE = ("output", "target", "text", "init", "resume", "force", "save_every", "compile")  # may differ when it goes on


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """One distillation. `target`: a folder or a hub id. `output`: the folder to create.

    kind: "chain" drafts token by token; "parallel" by mask tokens in one pass (PARD); "eagle3" from the target's hidden
    states. text: files and folders to learn from. generate: tokens that the target writes; None: GENERATE without text.
    layers … num_kv_heads: the draft's shape, None: LAYERS of the target's width. init: "target", "random", or a draft's
    folder. draft_vocab_size: tokens its head knows. divergence: a name of DIVERGENCES. on_policy: the part of the
    batches that the draft continues itself. depth: tokens of the chains that validate it, and that "parallel" drafts.
    A step sees batch_size · grad_accum texts of sequence_length tokens; OTHERS says what suits other kinds. patience:
    validations without a longer acceptance length before it stops. Raises OptionError and OutputError.
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
        """Where an unfinished training is kept."""
        return self.output.with_name(self.output.name + ".training")

    @property
    def to_generate(self) -> int:
        """Tokens that the target is to write."""
        return self.generate or (0 if self.text else GENERATE)

    @property
    def shape(self) -> dict[str, int]:
        """What was asked for of the draft's shape."""
        return {name: getattr(self, name) for name in _SHAPE if getattr(self, name) is not None}

    def vocabulary(self, target: int) -> int:
        """Tokens of the draft's head, for a target of so many. Raises OptionError."""
        if self.draft_vocab_size and self.draft_vocab_size > target:
            raise OptionError(f"--draft-vocab-size {self.draft_vocab_size} is more than the target's {target} tokens")
        return self.draft_vocab_size or min(target, max(LEAST_VOCABULARY, target // 4))

    def to_dict(self) -> dict[str, Any]:
        """All options, as JSON."""
        return asdict(self) | {"output": str(self.output), "text": [str(path) for path in self.text]}

    def identity(self) -> dict[str, Any]:
        """What must be the same when an interrupted training goes on, but for the contents of files."""
        return {name: value for name, value in self.to_dict().items() if name not in _FREE}


def flag(name: str) -> str:
    """An option's name on the command line."""
    return name.replace("_", "-")
