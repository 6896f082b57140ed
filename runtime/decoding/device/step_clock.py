"""Measures what a round's steps take on a device, for the live timings."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.decoding.loop import accounted
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.live import LiveTimings
from specbuild.runtime.speculation.timings import seconds_at

from .rounds import Draft


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
        """Report an ordinary round: nodes per slot of its step, 0 if it also prefilled, and how many drafts added."""
        if self.live is None or not nodes:
            return
        (target, draft), lanes = self._seconds, self.target.batch_size
        levels = max(s.policy.now.levels if s.policy and s.shape else 0 for s in sequences)
        if levels and self.draft:
            self.live.step("draft", lanes, draft - self._began[1], levels)
        self.live.step("verify", lanes * nodes, target - self._began[0])
        account.decoded = drafted

    def follow(self, account: accounted, drafts: Seq[tuple[Draft, int]]) -> None:
        """Report a round that followed another on the device: the loop takes what exceeds the models' steps.

        Args:
            account: The round's account.
            drafts: The drafts, each with the nodes of its tree.
        """
        if self.live is None or not self.target.buckets:
            return
        lanes, levels = self.target.batch_size, max(draft.spec.depth if draft.spec else 0 for draft, _ in drafts)
        times = self.live.at(lanes)
        account.decoded = sum(nodes - 1 for draft, nodes in drafts if not draft.continued)  # else it is plain decoding
        account.unseen = times.of_round(lanes * self.target.buckets[0], 0, drafts=False)
        if levels:
            account.unseen += times.once + levels * seconds_at(times.draft_rows, lanes)
            self.live.drafted_unseen(levels)
