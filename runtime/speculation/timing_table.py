"""The timing table: how long the parts of a round take on a machine, and how often drafts come true.

`specbuild tune` measures it, and a bundle has it as `timings.json`. Times are seconds; probabilities are those of the
calibration's texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specbuild.runtime.checked_json import Probability, Seconds, Text, checked
from specbuild.runtime.errors import BundleError

FILE = "timings.json"
SCHEMA = 2
UNLIKELY = 0.05  # a token that is accepted less often is not weighed; none is thought to be refused less often
MIN_CHANCE, MAX_CHANCE = 1e-6, 1 - UNLIKELY  # of a drafted token


@dataclass(slots=True)
class _Own:
    """The loop's own times in JSON; the classes below are a batch size, the chances and the whole table in JSON."""

    plain: Seconds
    round: Seconds
    level: Seconds


_Pairs = Annotated[list[tuple[Annotated[int, Meta(ge=1, le=1 << 16)], Seconds]], Meta(max_length=4096)]


@dataclass(slots=True)
class _Batch(_Own):
    verify: Annotated[_Pairs, Meta(min_length=1)]
    draft: _Pairs
    sampled: _Own | None = None
    once: Seconds = 0.0


_Levels = Annotated[list[Annotated[float, Meta(ge=0, le=4096)]], Meta(min_length=1, max_length=4096)]


@dataclass(slots=True)
class _Chances:
    likely: Annotated[list[Annotated[float, Meta(ge=-1e9, le=1e9)]], Meta(min_length=1, max_length=1 << 16)]
    chance: list[Probability]
    step: Probability
    reach: _Levels
    lookup: Annotated[list[Probability], Meta(min_length=1, max_length=4096)]


@dataclass(slots=True)
class _BothChances:
    greedy: _Chances
    sampled: _Chances


@dataclass(slots=True)
class _Table:
    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)]
    machine: Annotated[dict[Text, Text | int], Meta(max_length=64)]
    widest: Text
    times: Annotated[dict[Annotated[str, Meta(pattern="^[1-9][0-9]{0,3}$")], _Batch], Meta(min_length=1, max_length=64)]
    chances: _BothChances
    overlap: bool = False  # of older builds


def seconds_at(seconds: NDArray[np.float64], rows: int) -> float:
    """Return the seconds of a step of so many rows, from `seconds[rows]`; past its end in proportion to rows."""
    last = len(seconds) - 1
    return float(seconds[rows]) if rows <= last else float(seconds[last]) * rows / max(last, 1)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one batch size's steps and rounds.

    `verify[r]`, `draft[r]`: a step with r rows of all sequences together, from r = 0, where it is 0. `draft` is `[0]`
    without a draft model, and zeros if all levels are drafted at once.
    """

    verify: NDArray[np.float64]
    draft: NDArray[np.float64]
    plain: float  # the loop's own part of a round that drafts nothing
    round: float  # the same of a round that verifies a tree
    level: float  # the same of each level that the draft grows
    once: float = 0.0  # the single step of a draft that drafts all levels at once
    batch_size: int = 1

    @classmethod
    def of(
        cls,
        record: Mapping[str, Any],
        nodes: int,
        sampled: bool = False,
        batch_size: int = 1,
        fewer: Times | None = None,
    ) -> Times:
        """Read JSON pairs of nodes and seconds, up to `nodes`; between two pairs cost grows evenly, and it never falls.

        Args:
            record: The times of one batch size.
            nodes: Maximum nodes of each sequence in a step.
            sampled: Whether the loop's own times are those of sampled rounds, if the table has them.
            batch_size: The batch size.
            fewer: Times of the next smaller batch size, for steps with fewer rows; None: there is none.
        """
        own, once = (sampled and record.get("sampled")) or record, float(record.get("once", 0.0))
        verify, draft = (_by_rows(record[name], nodes, batch_size) for name in ("verify", "draft"))
        if once:
            draft = np.zeros(batch_size * nodes + 1)
        for rows, others in ((verify, fewer.verify), (draft, fewer.draft)) if fewer else ():
            size = min(batch_size, len(rows), len(others))
            rows[:size] = np.minimum(others[:size], rows[:size])
        plain, with_tree, level = (float(own[name]) for name in ("plain", "round", "level"))
        return cls(verify, draft, plain, with_tree, level, once, batch_size)

    def rows_within(self, rows: int, times: float) -> int:
        """Return how many rows a step may have to take at most `times` as long as one of `rows`, as far as measured."""
        return int(np.searchsorted(self.verify, times * seconds_at(self.verify, rows), side="right")) - 1

    @property
    def alone(self) -> float:
        """Seconds of a round of plain decoding of a full batch."""
        return seconds_at(self.verify, self.batch_size) + self.plain


@dataclass(frozen=True, slots=True)
class Chances:
    """The chances that drafted tokens come true, greedy or sampled.

    Attributes:
        likely: Log likelihoods of drafted children, ascending.
        chance: `chance[i]`: chance of a child at `likely[i]` if its parent was accepted; linear in between.
        step: Chance that any child of the draft is accepted if its parent was.
        reach: `reach[d]`: accepted tokens in d levels, on average, from 0.
        lookup: `lookup[n]`: chance of a token of the text's continuation after n that matched, from 0.
    """

    likely: NDArray[np.float64]
    chance: NDArray[np.float64]
    step: float
    reach: tuple[float, ...]
    lookup: tuple[float, ...]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Chances:
        """Read JSON; raises ValueError for invalid chances."""
        likely, chance = (np.asarray(record[name], dtype=np.float64) for name in ("likely", "chance"))
        if likely.shape != chance.shape or (np.diff(likely) < 0).any():
            raise ValueError("chances must be one for each likelihood, which ascend")
        lookup = tuple(max(each, MIN_CHANCE) for each in record["lookup"])
        return cls(likely, np.maximum(chance, MIN_CHANCE), float(record["step"]), tuple(record["reach"]), lookup)

    def continuation(self, matched: int, count: int) -> list[float]:
        """Return the chance of each continuation token, if those before it came true: each lengthens the match."""
        last = len(self.lookup) - 1
        return [self.lookup[min(matched + ahead, last)] for ahead in range(count)]

    def levels(self, ratio: float) -> list[float]:
        """Return the tokens that each further level of a tree brings, at `ratio` times the chances; they never grow."""
        gains = [(after - before) * ratio**level for level, (before, after) in enumerate(pairwise(self.reach), 1)]
        return [*accumulate([MAX_CHANCE, *gains], min)][1:]

    def below(self, levels: int) -> list[float]:
        """Return, for each of `levels` levels, the chance of a child at it below a node that came true."""
        come = [1.0, *np.diff(self.reach[: levels + 1]).tolist()]
        return [after / max(before, 1e-9) for before, after in pairwise(come)]

    def log_chances(self, likelihoods: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the logarithms of children's chances, by their log likelihoods; −inf where there is no child."""
        logs: NDArray[np.float64] = np.log(np.interp(likelihoods, self.likely, self.chance))
        return np.where(np.isneginf(likelihoods), -np.inf, logs)


@dataclass(frozen=True, slots=True)
class TimingTable:
    """A bundle's timing table."""

    machine: Mapping[str, Any]
    widest: str  # the largest tree that a round may grow
    times: Mapping[bool, Mapping[int, Times]]  # by whether tokens are sampled, and by batch size
    chances: Mapping[bool, Chances]  # by whether tokens are sampled

    @classmethod
    def of(cls, record: Mapping[str, Any], nodes: int) -> TimingTable:
        """Read a bundle's table, up to `nodes` nodes; raises BundleError if it is invalid."""
        try:
            table = checked(record, _Table)
            times: dict[bool, dict[int, Times]] = {False: {}, True: {}}
            for size, each in sorted((int(size), each) for size, each in record["times"].items()):
                for sampled, sizes in times.items():
                    fewer = next(reversed(sizes.values()), None)
                    sizes[size] = Times.of(each, nodes, sampled, size, fewer)
            chances = {name == "sampled": Chances.of(each) for name, each in record["chances"].items()}
            return cls(table.machine, table.widest, times, chances)
        except ValueError as error:
            reason = f"{FILE} is no timing table of schema {SCHEMA} ({str(error)[:300]})"
            raise BundleError(f"{reason}: run specbuild tune") from None

    def at(self, batch: int, sampled: bool = False) -> Times:
        """Return the times of the smallest measured batch size that holds `batch` sequences, else of the largest."""
        times = self.times[sampled]
        return next((each for size, each in times.items() if size >= batch), [*times.values()][-1])


def _by_rows(pairs: Sequence[Sequence[float]], nodes: int, batch_size: int) -> NDArray[np.float64]:
    """Return seconds by rows of all sequences together, 0 at none, from pairs of nodes of each and seconds.

    It never falls, is constant below `batch_size`, and goes on past the last pair with the average slope.
    """
    if not pairs:
        return np.zeros(1)
    sizes, seconds = (np.asarray(each, dtype=np.float64) for each in zip(*pairs, strict=True))
    if sizes[0] != 1 or (np.diff(sizes) <= 0).any() or not (seconds > 0).all():
        raise ValueError("sizes must ascend from 1, seconds be positive")
    seconds = np.maximum.accumulate(seconds)
    slope = (seconds[-1] - seconds[0]) / max(sizes[-1] - sizes[0], 1)
    each = np.arange(batch_size * nodes + 1) / batch_size
    rows: NDArray[np.float64] = np.interp(each, sizes, seconds) + np.maximum(each - sizes[-1], 0) * slope
    rows[0] = 0.0
    return rows
