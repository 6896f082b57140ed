"""The decode loop on a device: draft, verify, accept and commit there; the host reads one small copy a round.

Prefill uses the executors, as on the host. From its first token on a sequence's state is on the device, and the host
learns after each round what was emitted. The host decides how large a tree the device grows, uploads trees that only it
can grow, and continues texts where the device does not do that by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.kernels.abi import Fault
from specbuild.runtime.backends.kernels.interface import Kernels
from specbuild.runtime.decoding.accounting import account
from specbuild.runtime.decoding.admission import Admission
from specbuild.runtime.decoding.emission import Emission
from specbuild.runtime.decoding.loop import DEFAULTS, LoopOptions, alone, cache_bytes
from specbuild.runtime.decoding.planner import Planner
from specbuild.runtime.decoding.reading import Reader
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.errors import ExecutionError, SpecbuildError
from specbuild.runtime.requests.metrics import RunStats
from specbuild.runtime.requests.sequence import Sequence

from .paged_admission import PagedAdmission
from .proposals import Proposals
from .resident import Flights
from .room import Room
from .rounds import Draft, Entries, Rounds
from .state import ProcessorFlags


class DeviceLoop:
    """A `Loop` whose rounds run where the models are; it owns the device and closes it."""

    def __init__(
        self,
        target: StandardExecutor,
        draft: StandardExecutor | None,
        kernels: Kernels,
        eos: frozenset[int],
        looks_up: bool = True,
        hosted: ModelDrafter | None = None,
        options: LoopOptions = DEFAULTS,
        ahead: int = 0,
    ) -> None:
        """Make a loop over the models of one device.

        Args:
            target: Executor of the target.
            draft: Executor of a draft whose trees the device grows; BundleError if it has no step of two nodes.
            kernels: Kernels of the device.
            eos: Token ids that end a text.
            looks_up: Whether texts are continued from themselves; False leaves drafting to the model.
            hosted: In place of `draft`, a drafter over a model of this device whose trees the host grows.
            options: How the loop decodes.
            ahead: Maximum rounds that follow each other without the host, an x86_64 (else OptionError); 0: none do.
        """
        self.target, self.tally, self.hosted, self.exactness = target, RunStats(), hosted, options.exactness
        self.target.keep_to(self.exactness)
        self.trunk = self.exactness is not None
        self.rounds = Rounds(target, draft, kernels, trunk=bool(self.exactness))
        self.emission, self.planner = Emission(eos), Planner(options.limits, target.buckets[-1])
        self.reader = Reader(target, self.emission, target.model.chunk)
        self.room, pages = Room(target, self.draft_executor), target.model.pages
        drafts = self.rounds.grower or hosted
        keeps = options.prefix_caching, self.exactness is None  # in a class, prefill steps have another shape
        paged = PagedAdmission(target, drafts, pages, self.room.needed, *keeps) if pages else None
        self.admission = admission = paged or Admission(target, drafts, *keeps)
        self.pick, self.cached_tokens, self.page_tokens = admission.pick, admission.cached_tokens, admission.page_tokens
        self.cached_texts = admission.cached_texts
        model = hosted or (self.rounds.grower.hosted() if self.rounds.grower else None)
        proposer = Proposer(model, looks_up)
        self.proposals = Proposals(self.planner, self.room, target.buckets, proposer, hosted is not None)
        self.cost = options.cost
        self.flights = Flights(self.rounds, self.room, ahead, hosted is not None) if ahead else None

    def round(self, sequences: Seq[Sequence]) -> None:
        """See `Loop.round`; of rounds that follow each other, it takes one, or all that are left if they must stop."""
        with account(self, sequences), nvtx.range("round"):
            plan = None
            if self.flights:
                sequences, plan = self._steer(self.flights, sequences)
            if self.flights and self.flights.under_way:
                entries = self.flights.next_entry()
                self._take(entries, sequences)
                if self.flights.read_out:
                    self._land(sequences)
            elif sequences:
                self._run(sequences, plan)

    def _steer(self, flights: Flights, sequences: Seq[Sequence]) -> tuple[Seq[Sequence], Seq[Draft] | None]:
        """Continue the rounds under way, or stop them and start others; return the sequences left and their plan."""
        if flights.under_way:
            plan = self.proposals.plan(sequences) if flights.of(sequences) else None
            if plan and flights.go_on(plan):
                return sequences, plan
            self._land(sequences)
            for ended in (s for s in sequences if s.finish_reason):  # the others' rounds run before it is released
                self.rounds.slots.hold(ended.slot, ended.cached + 1)
            sequences = [s for s in sequences if not s.finish_reason]
        if not sequences or not all(s.output for s in sequences):
            return sequences, None
        plan = self.proposals.plan(sequences)
        flights.launch(plan)
        return sequences, plan

    def _run(self, sequences: Seq[Sequence], plan: Seq[Draft] | None) -> None:
        """Run one ordinary round: sequences without output prefill, others decode."""
        self.admission.enter(sequences)
        reading = [s for s in sequences if not s.output]
        for sequence in reading:
            self.rounds.slots.hold(sequence.slot, len(sequence.tokens))
        decoding = [s for s in sequences if s.output]
        if decoding:
            self._decode(plan or self.proposals.plan(decoding))
        if reading:
            self.reader.run(reading)

    def _decode(self, plan: Seq[Draft]) -> None:
        """Run a round on the device and emit its tokens."""
        before = [executor.seconds for executor in self._executors]
        asked, nodes = ProcessorFlags.of([draft.sequence.params for draft in plan]), self.rounds.bucket(plan)
        self.rounds.draft(plan, nodes, asked)
        self.rounds.verify(nodes, asked)
        for executor in reversed(self._executors):  # all is enqueued: waiting for each only separates their times
            executor.wait()
        self._time(plan, nodes, before)
        if self.hosted and self.target.model.hidden:
            self.rounds.keep_hidden(plan, nodes)
        for draft in (draft for draft in plan if not draft.sequence.error):
            with alone(draft.sequence):
                self._accept(draft, nodes)
        if self.rounds.blocks[nodes].host["fault"].any():
            self.rounds.forget_faults(nodes)

    def _time(self, plan: Seq[Draft], nodes: int, before: Seq[float]) -> None:
        """Record what an ordinary round's steps took."""
        if self.cost is None:
            return
        batch, levels = self.target.batch_size, max(draft.spec.depth if draft.spec else 0 for draft in plan)
        seconds = [executor.seconds - was for executor, was in zip(self._executors, before, strict=True)]
        self.cost.record("verify", batch * nodes, seconds[0])
        if levels:
            self.cost.record("draft", batch, seconds[1], levels)

    def _accept(self, draft: Draft, nodes: int) -> None:
        """Emit what a round's block says of a sequence."""
        sequence, host = draft.sequence, self.rounds.blocks[nodes].host
        slot = sequence.slot
        sequence.sampler.check()
        length, drafted, fault = (int(host[name][slot]) for name in ("length", "counts", "fault"))
        emitted, path = host["emitted"][slot, :length].tolist(), host["path"][slot, :length]
        needs_rows = sequence.params.logprobs is not None or min(emitted, default=0) < 0
        rows = self.target.fetch((slot * nodes + path).tolist()) if needs_rows else None
        taken = self._emit(draft, fault, emitted, rows)
        if draft.proposal.grown:  # trees that the device grows may overwrite drafted rows: keep the root alone
            self.proposals.proposer.commit(sequence, draft.proposal, path[:taken].tolist() if self.hosted else [0])
        self.proposals.record(draft, path[:taken].tolist(), emitted[0], drafted - 1)

    def _emit(self, draft: Draft, fault: int, emitted: Seq[int], rows: NDArray[np.float32] | None = None) -> int:
        """Emit tokens until the sequence ends and return how many; `rows`: their logits. Raises a round's errors."""
        sequence, root = draft.sequence, draft.sequence.cached
        if fault:
            raise ExecutionError(f"a kernel refused the sequence's tree, fault {Fault(fault).name}: report it")
        for at, token in enumerate(emitted):
            if rows is not None:
                self.emission.note(sequence, rows[at], token if token >= 0 else int(rows[at].argmax()))
            if token < 0:
                raise sequence.sampler.dead_end()
            sequence.emit(token, self.emission.eos, begins=at == 0)
            sequence.cached += 1
            if sequence.finish_reason:
                break
        self.target.commit(sequence.slot, (), sequence.cached)
        if self.rounds.grower and draft.spec:  # the draft may have no row of the last accepted node
            self.rounds.grower.commit(sequence, root + max(len(emitted) - 1, 1))
        return sequence.cached - root

    def _take(self, entries: Entries, sequences: Seq[Sequence]) -> None:
        """Emit what a round under way published, for the sequences that still decode: drafts, faults and tokens."""
        still = {id(s) for s in sequences}
        for draft, fault, nodes, emitted in entries:
            sequence = draft.sequence
            if id(sequence) not in still or sequence.finish_reason:
                continue
            drafts = not draft.drafts or sequence.drafts
            with alone(sequence):
                taken = self._emit(draft, fault, emitted)
                if drafts:
                    self.proposals.record(draft, range(taken), emitted[0], nodes - 1)

    def _land(self, sequences: Seq[Sequence]) -> None:
        """Stop the rounds under way and emit what was not read yet."""
        for entries in self.flights.land() if self.flights else ():
            self._take(entries, sequences)
            self.tally.rounds += 1

    @property
    def stats(self) -> RunStats:
        """See `Loop.stats`."""
        return copy(self.tally)

    def check(self, sequence: Sequence) -> None:
        """See `Loop.check`."""
        self.planner.check(sequence)
        self.admission.check(sequence)

    def release(self, slot: int) -> None:
        """See `Loop.release`; stops rounds under way. Later steps write their padding behind the slot's kept rows."""
        if self.flights and self.flights.leave(slot):  # else the next round reads what they did for others
            with suppress(SpecbuildError):  # a device that failed says so in the next round
                self._land(())
        self.admission.release(slot)
        self.rounds.slots.hold(slot, self.admission.kept(slot) + 1)  # a draft step of two nodes begins a row earlier

    def logits(self, tokens: list[int], count: int = 1, nodes: int | None = None) -> NDArray[np.float32]:
        """See `Loop.logits`; several rows come from steps no longer than the largest bucket."""
        size = nodes or self.reader.chunk
        with self.borrowed(len(tokens)):
            return self.reader.logits(tokens, count, size if count == 1 else min(size, self.target.buckets[-1]))

    @contextmanager
    def borrowed(self, tokens: int) -> Iterator[None]:
        """See `Loop.borrowed`."""
        self._land(())
        self.admission.borrow(0, tokens)
        try:
            yield
        finally:
            self.release(0)

    def sibling(self, looks_up: bool = True) -> DeviceLoop:
        """See `Loop.sibling`; it shares memory and graphs."""
        other, proposer = copy(self), Proposer(self.proposals.proposer.model, looks_up)
        other.tally, other.proposals = RunStats(), replace(self.proposals, proposer=proposer)
        return other

    def fresh_drafter(self) -> ModelDrafter | None:
        """See `Loop.fresh_drafter`."""
        alone = ModelDrafter(self.rounds.grower.executor, self.reader.chunk) if self.rounds.grower else None
        return self.hosted.again() if self.hosted else alone

    @property
    def draft_executor(self) -> StandardExecutor | None:
        """See `Loop.draft_executor`."""
        if self.rounds.grower:
            return self.rounds.grower.executor
        return self.hosted.executor if self.hosted else None  # type: ignore[return-value]

    @property
    def _executors(self) -> list[StandardExecutor]:
        return [executor for executor in (self.target, self.draft_executor) if executor]

    @property
    def notes(self) -> list[str]:
        """See `Loop.notes`: which steps could not be captured as graphs, and why."""
        return list(self.rounds.device.uncaptured)

    @property
    def cache_bytes(self) -> int:
        """See `Loop.cache_bytes`."""
        return cache_bytes(self)

    def close(self) -> None:
        """Free the models, then all of the device's memory, once nothing runs any more."""
        if self.flights:
            self.flights.abandon()
        self.rounds.settle()
        with ExitStack() as stack:
            stack.callback(self.rounds.device.close)
            for executor in self._executors:
                stack.callback(executor.close)
