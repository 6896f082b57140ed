"""The options of `specbuild build` for quantization."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from specbuild.runtime.errors import OptionError

AUTO = "auto"
BEST_SIZE, BEST_SPEED, BEST_KL = "best:size", "best:speed", "best:kl"
MTP, NO_DRAFT = "mtp", "none"  # drafts: the target's own MTP layer, and none even if it has one
SELF = "self:"  # prefix of a draft that is the target's own weights in another precision
AUTO_KL, MAX_KL = 0.01, 0.05  # default limits in nats per token: with auto and best, and with other precisions


def chooses(precision: str) -> bool:
    """Return whether a precision lets the build choose: "auto" or "best:…"."""
    return precision in (AUTO, BEST_SIZE, BEST_SPEED, BEST_KL)


def glob_of(pattern: str, model: str) -> str | None:
    """Return a pattern's glob of names, or None if it begins with "target:" or "draft:" and `model` is the other."""
    only, separator, glob = pattern.partition(":")
    if separator and only in ("target", "draft"):
        return glob if only == model else None
    return pattern


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Options for quantizing weights, beside the models' precisions. Raises OptionError for an invalid value.

    Attributes:
        tensor_type: "PATTERN=SCHEME" for weights whose name `quantize.assignment.matches`; the last match counts.
        output_tensor_type: Scheme of the head.
        token_embedding_type: Scheme of the embedding.
        calibration: A file of JSON lines; None: specbuild's own texts.
        calib_size: How many texts are used.
        calib_seed: The seed by which they are drawn.
        calibration_cache: A folder for the results of each layer.
        max_kl: The build fails if the target diverges by more, in nats per token; None: AUTO_KL or MAX_KL.
    """

    tensor_type: tuple[str, ...] = ()
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    calibration: Path | None = None
    calib_size: int = 32
    calib_seed: int = 0
    calibration_cache: Path | None = None
    max_kl: float | None = None

    def __post_init__(self) -> None:
        for each in self.tensor_type:
            pattern, separator, scheme = each.rpartition("=")
            if not (pattern and separator and scheme):
                raise OptionError(f"--tensor-type {each!r}: give PATTERN=PRECISION, like 'down_proj=int8'")
        if not 2 <= self.calib_size <= 4096:
            raise OptionError(f"calib-size must be 2…4096 texts, not {self.calib_size}")
        if not 0 <= self.calib_seed < 1 << 32:
            raise OptionError(f"calib-seed must be 0…{(1 << 32) - 1}, not {self.calib_seed}")
        if self.max_kl is not None and not 0 < self.max_kl < float("inf"):
            raise OptionError(f"max-kl must be above 0 nats a token, not {self.max_kl}")

    @property
    def types(self) -> list[tuple[str, str]]:
        """The pairs of pattern and scheme in `tensor_type`, in the order given."""
        return [(pattern, scheme) for pattern, _, scheme in (each.rpartition("=") for each in self.tensor_type)]

    @property
    def all_types(self) -> list[str]:
        """All schemes that these options give."""
        return self.types_of("target", "draft")

    def types_of(self, *models: str) -> list[str]:
        """Return the schemes that these options give to weights of such models."""
        asked = [
            scheme for pattern, scheme in self.types if any(glob_of(pattern, model) is not None for model in models)
        ]
        return [scheme for scheme in (*asked, self.output_tensor_type, self.token_embedding_type) if scheme]

    def check(self, quantizes: bool, target: bool = True) -> None:
        """Raise OptionError for options that would be ignored.

        Args:
            quantizes: Whether any weight of any model is quantized.
            target: Whether any weight of the target may be quantized.
        """
        if self.max_kl and quantizes and not target:
            raise OptionError("--max-kl is of the target, which is not quantized: drop it, or give --precision int8")
        given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if given and not quantizes:
            raise OptionError(f"nothing is quantized: drop --{given[0].replace('_', '-')}, or give --precision int8")
