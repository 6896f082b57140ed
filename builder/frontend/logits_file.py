"""Logits of texts in a temporary file: with a large vocabulary those of a few texts would take as much as a model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.errors import OutputError

Logits = NDArray[np.float32]
LOWEST = -(2.0**15)  # lower than any token's logit, and the same number in every type of 16 bits


class LogitsFile(Sequence[Logits]):
    """The logits of texts, `float32[T, V]` each, of which memory holds those that are read."""

    def __init__(self, logits: Iterable[Logits]) -> None:
        """Write each text's logits when it comes; raise OutputError if TMPDIR has no room."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # open for as long as the logits are
        self._shapes, self._starts = list[tuple[int, ...]](), [0]
        for each in logits:
            try:
                self._file.write(np.ascontiguousarray(each).reshape(-1).data)
                self._file.flush()
            except OSError as error:
                raise OutputError(f"{tempfile.gettempdir()} takes no logits ({error.strerror}): set TMPDIR") from None
            self._shapes.append(each.shape)
            self._starts.append(self._starts[-1] + each.nbytes)

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._shapes)

    @overload
    def __getitem__(self, index: int) -> Logits: ...

    @overload
    def __getitem__(self, index: slice) -> list[Logits]: ...

    def __getitem__(self, index: int | slice) -> Logits | list[Logits]:
        """Read a text's logits, or those of several."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        self._file.seek(self._starts[number])
        found = np.empty(self._shapes[number], dtype=np.float32)
        self._file.readinto(found.reshape(-1).view(np.uint8).data)
        return found
