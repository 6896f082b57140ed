"""Measures what a round's steps take on a device, for the live timings."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.decoding.loop import accounted
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.live import LiveTimings


@dataclass(slots=True)
class StepClock:
    """The target's and the draft's seconds since a round began; the executors count them when they wait."""

    live: LiveTimings | None
    target: Executor
    draft: Executor | None
    _began: tuple[float, float] = field(default=(0.0, 0.0))

    def begin(self) -> None:
        """Note that a round begins."""
        self._began = self._seconds

    @property
    def _seconds(self) -> tuple[float, float]:
        return self.target.seconds, self.draft.seconds if self.draft else 0.0

    def tell(self, account: accounted, sequences: Seq[Sequence], nodes: int, drafted: int) -> None:
        """Report an ordinary round: nodes per slot of its step, 0 if it also prefilled, and how many were drafted."""
        if self.live is None or not nodes:
            return
        (target, draft), lanes = self._seconds, self.target.batch_size
        levels = max(s.policy.now.levels if s.policy and s.shape else 0 for s in sequences)
        if levels and self.draft:
            self.live.step("draft", lanes, draft - self._began[1], levels)
        self.live.step("verify", lanes * nodes, target - self._began[0])
        account.decoded = drafted

    def follow(self, account: accounted) -> None:
        """Report a plain round that followed another on the device: the loop takes what exceeds the target's step."""
        if self.live and self.target.buckets:
            lanes = self.target.batch_size
            account.decoded = 0
            account.unseen = self.live.at(lanes).of_round(lanes * self.target.buckets[0], 0, drafts=False)
