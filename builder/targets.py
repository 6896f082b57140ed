"""The GPU architectures and head sizes that kernels can be compiled for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specbuild.runtime.errors import OptionError

ARCHITECTURES = ("80", "86", "87", "89", "90", "100", "110", "120", "121")
HEAD_DIMS = (64, 80, 96, 128, 256)  # that the kernels support


def split_names(wanted: Iterable[str], known: Sequence[str], lacking: str) -> list[str]:
    """Split architectures: `["90,89", "sm_80"]` becomes `["90", "89", "80"]`.

    Args:
        wanted: Names, with or without the prefix "sm_", separated by commas.
        known: The names that are allowed; the last one is a word such as "all".
        lacking: Message for an unknown name, which is put in place of `{}`.

    Raises:
        OptionError: A name is empty or unknown.
    """
    names = [part.strip().removeprefix("sm_") for text in wanted for part in text.split(",")]
    for name in names:
        if name not in known:
            asked = lacking.format(name) if name else "an architecture is empty"
            raise OptionError(f"{asked}: use {', '.join(known[:-1])}, or {known[-1]}")
    return names


def architectures(wanted: Iterable[str]) -> tuple[str, ...]:
    """Return the architectures in `["90,89", "sm_80"]` or `["all"]`, each once; raise OptionError for an unknown one.

    Variants such as "90a" are not offered: no kernel has instructions of one GPU only, and their cubins run on no
    other GPU.
    """
    names = split_names(wanted, (*ARCHITECTURES, "all"), "sm_{} is not supported")
    return ARCHITECTURES if "all" in names else tuple(dict.fromkeys(names))
