"""What can be built for: architectures and head sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specbuild.runtime.errors import OptionError

ARCHITECTURES = ("80", "86", "87", "89", "90", "100", "110", "120", "121")
HEAD_DIMS = (64, 80, 96, 128, 256)  # that the kernels have


def split_names(wanted: Iterable[str], known: Sequence[str], lacking: str) -> list[str]:
    """`["90,89", "sm_80"]` → the names one by one, without their prefix.

    known: the last one stands for all. lacking: what is said of a name that is not known. Raises OptionError.
    """
    names = [part.strip().removeprefix("sm_") for text in wanted for part in text.split(",")]
    for name in names:
        if name not in known:
            asked = lacking.format(name) if name else "an architecture is empty"
            raise OptionError(f"{asked}: use {', '.join(known[:-1])}, or {known[-1]}")
    return names


def architectures(wanted: Iterable[str]) -> tuple[str, ...]:
    """What kernels are compiled for, each once: `["90,89", "sm_80"]` or `["all"]`. Raises OptionError.

    Without "90a" and the like: no kernel has an instruction of one GPU's alone, and those cubins run on no other.
    """
    names = split_names(wanted, (*ARCHITECTURES, "all"), "sm_{} is not supported")
    return ARCHITECTURES if "all" in names else tuple(dict.fromkeys(names))
