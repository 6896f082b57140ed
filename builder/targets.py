"""The GPU architectures and head sizes that kernels can be compiled for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from specbuild.runtime.backends.gpu.cuda import Cuda
from specbuild.runtime.errors import OptionError

ARCHITECTURES = ("80", "86", "87", "89", "90", "100", "110", "120", "121")
CARDS = {  # by a pattern of their names
    r"t4|rtx20\d\d(super|ti)?": "75",
    r"a100|a30": "80",
    r"a2|a10g?|a16|a40|rtx30\d\d(super|ti)?": "86",
    r"orin": "87",
    r"l4|l40s?|rtx40\d\d(super|ti)?": "89",
    r"h100|h200|gh200": "90",
    r"b200|gb200": "100",
    r"thor": "110",
    r"rtx50\d\d(super|ti)?|rtxpro6000": "120",
    r"gb10|dgxspark": "121",
}
HEAD_DIMS = (64, 80, 96, 128, 256)  # that the kernels support


def split_names(wanted: Iterable[str], known: Sequence[str], lacking: str) -> list[str]:
    """Split architectures: `["90,8.9", "sm_80", "rtx4090"]` becomes `["90", "89", "80", "89"]`.

    Args:
        wanted: Names, with or without the prefix "sm_", compute capabilities, cards, or "native", between commas.
        known: The names that are allowed; the last one is a word such as "all".
        lacking: Message for an unknown name, which is put in place of `{}`.

    Raises:
        OptionError: A name is empty or unknown.
    """
    names = [_number(part.strip().removeprefix("sm_")) for text in wanted for part in text.split(",")]
    for name in names:
        if name not in known:
            asked = lacking.format(name) if name else "an architecture is empty"
            raise OptionError(f"{asked}: use {', '.join(known[:-1])}, or {known[-1]}")
    return names


def _number(name: str) -> str:
    """Return the architecture of a compute capability, a card, or this machine's GPU; any other name as it is."""
    if re.fullmatch(r"\d+\.\d", name):
        return name.replace(".", "")
    if name == "native":
        device = Cuda()
        try:
            return device.capability
        finally:
            device.close()
    card = re.sub(r"[\s_-]|nvidia|geforce", "", name.lower())
    return next((number for cards, number in CARDS.items() if re.fullmatch(cards, card)), name)


def architectures(wanted: Iterable[str]) -> tuple[str, ...]:
    """Return the architectures in `["90,89", "sm_80"]` or `["all"]`, each once; raise OptionError for an unknown one.

    Variants such as "90a" are not offered: no kernel has instructions of one GPU only, and their cubins run on no
    other GPU.
    """
    names = split_names(wanted, (*ARCHITECTURES, "all"), "sm_{} is not supported")
    return ARCHITECTURES if "all" in names else tuple(dict.fromkeys(names))
