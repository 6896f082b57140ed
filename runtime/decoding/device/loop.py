"""The decode loop on a device: draft, verify, accept and commit there; the host reads one small copy a round.

Prefill uses the executors, as on the host. From its first token on a sequence's state is on the device, and the host
learns after each round what was emitted. The host decides how large a tree the device grows, uploads trees that only it
can grow, and continues texts from themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, suppress
from dataclasses import replace

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.kernels.abi import Fault
from specbuild.runtime.backends.kernels.interface import Kernels
from specbuild.runtime.decoding.accounting import account
from specbuild.runtime.decoding.admission import Admission
from specbuild.runtime.decoding.emission import Emission
from specbuild.runtime.decoding.error_isolation import isolate
from specbuild.runtime.decoding.loop import DEFAULTS, Loop, LoopOptions
from specbuild.runtime.decoding.reading import Reader
from specbuild.runtime.decoding.round_result import RoundResult
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.errors import ExecutionError, SpecbuildError
from specbuild.runtime.requests.sequence import Sequence

from .paged_admission import PagedAdmission
from .proposals import Proposals
from .resident_run import ResidentRun
from .room import Room
from .rounds import Rounds
from .slots import Plan, ProcessorFlags


class DeviceLoop(Loop):
    """A `Loop` whose rounds run where the models are; it owns the device and closes it."""

    target: StandardExecutor

    def __init__(
        self,
        target: StandardExecutor,
        draft: StandardExecutor | None,
        kernels: Kernels,
        eos: frozenset[int],
        looks_up: bool = True,
        drafter: ModelDrafter | None = None,
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
            drafter: In place of `draft`, a drafter over a model of this device whose trees the host grows.
            options: How the loop decodes.
            ahead: Maximum rounds that follow each other without the host, an x86_64 (else OptionError); 0: none do.
        """
        target.keep_to(options.exactness)
        pages, max_nodes = target.model.pages, target.buckets[-1]
        reader = Reader(target, Emission(eos), target.model.chunk, scored=max_nodes)
        self.trunk = options.exactness is not None
        self.rounds = Rounds(target, draft, kernels, self.trunk)
        grower = self.rounds.grower
        model = drafter or (grower.drafter if grower else None)
        room = Room(target, model.executor if model else None)  # type: ignore[arg-type]  # it is on this device
        reuse = options.prefix_caching, not self.trunk  # in a class, prefill steps have another shape
        linear = Admission(target, model, *reuse)
        admission = PagedAdmission(target, model, pages, room.needed, *reuse) if pages else linear
        super().__init__(target, Proposer(model, looks_up), reader, admission, max_nodes, options)
        self.proposals = Proposals(self.planner, room, target.buckets, drafter is not None)
        self.resident = ResidentRun(self.rounds, room, ahead, drafter is not None) if ahead else None

    def round(self, sequences: Seq[Sequence]) -> None:
        """See `Loop.round`; of rounds that follow each other, it emits one, or all that the device did if it stops."""
        with account(self, sequences), nvtx.range("round"):
            plan, resident = None, self.resident
            if (
                resident
                and resident.running
                and not (resident.serves(sequences) and resident.goes_on(self.proposals.plan(self.proposer, sequences)))
            ):
                self._drain(resident)
                for ended in (s for s in sequences if s.finish_reason):  # the others run before it is released
                    self.rounds.slots.hold(ended.slot, ended.cached + 1)
                sequences = [s for s in sequences if not s.finish_reason]
            if resident and not resident.running and sequences and all(s.output for s in sequences):
                plan = self.proposals.plan(self.proposer, sequences)
                resident.launch(plan)
            if resident and resident.running:
                self._emit(resident.next_results())
                if resident.read_out:
                    self._drain(resident)
            elif sequences:
                self._run(sequences, plan)

    def _run(self, sequences: Seq[Sequence], plan: Plan | None) -> None:
        """Run one ordinary round: sequences without output prefill, others decode."""
        self.admission.enter(sequences)
        reading = [s for s in sequences if not s.output]
        for sequence in reading:
            self.rounds.slots.hold(sequence.slot, len(sequence.tokens))
        decoding = [s for s in sequences if s.output]
        if decoding:
            self._decode(plan or self.proposals.plan(self.proposer, decoding))
        if reading:
            self.reader.run(reading)

    def _decode(self, plan: Plan) -> None:
        """Run a round on the device and emit its tokens."""
        before = [executor.seconds for executor in self._executors]
        flags, nodes = ProcessorFlags.of([sequence.params for sequence, _ in plan]), self.rounds.bucket(plan)
        self.rounds.draft(plan, nodes, flags)
        self.rounds.verify(nodes, flags)
        for executor in reversed(self._executors):  # all is enqueued: waiting for each only separates their times
            executor.wait()
        if self.cost:
            seconds = [executor.seconds - was for executor, was in zip(self._executors, before, strict=True)]
            self.cost.record("verify", self.target.batch_size * nodes, seconds[0])
            if levels := max(proposal.shape.depth if proposal.shape else 0 for _, proposal in plan):
                self.cost.record("draft", self.target.batch_size, seconds[1], levels)
        results = self.rounds.results(plan, nodes)
        if self.proposals.on_host and self.target.model.tensors.hidden:
            self.target.keep([(r.sequence.slot, r.sequence.cached, r.rows) for r in results if r.rows])
        self._emit(results)
        if any(result.fault for result in results):
            self.rounds.clear_faults(nodes)

    def _emit(self, results: Iterable[RoundResult]) -> None:
        """Emit what a round made of each sequence that still decodes; one whose part failed fails alone."""
        for result in results:
            if not result.sequence.finish_reason:
                try:
                    self._accept(result)
                except BaseException as error:
                    isolate(result.sequence, error)

    def _accept(self, result: RoundResult) -> None:
        """Emit a sequence's tokens until it ends, and commit them in both caches."""
        sequence, proposal, root = result.sequence, result.proposal, result.sequence.cached
        sequence.sampler.check()
        if result.fault:
            raise ExecutionError(f"a kernel refused the sequence's tree, fault {Fault(result.fault).name}: report it")
        drafts = sequence.drafts and sequence.shape
        path = self.emission.emit(sequence, self._choices(result))
        sequence.cache(root + len(path))
        self.target.commit(sequence.slot, (), sequence.cached)
        if self.rounds.grower and proposal.shape:  # the draft may have no row of the last accepted node
            self.rounds.grower.commit(sequence, root + max(len(result.tokens) - 1, 1))
        elif proposal.growth:  # trees that the device grows may overwrite drafted rows: keep the root alone
            self.proposer.commit(sequence, proposal, path if self.proposals.on_host else [0])
        if drafts:
            self.planner.record(replace(result, path=path))

    def _choices(self, result: RoundResult) -> Iterator[tuple[int, int]]:
        """Yield the nodes of a path with the target's choices, whose log-probabilities are noted; raise dead ends."""
        sequence, logits = result.sequence, None
        if result.rows and (sequence.params.logprobs is not None or min(result.tokens) < 0):
            logits = self.target.fetch(result.rows)
        for at, (node, token) in enumerate(zip(result.path, result.tokens, strict=True)):
            if logits is not None:
                self.emission.note(sequence, logits[at], token if token >= 0 else int(logits[at].argmax()))
            if token < 0:
                raise sequence.sampler.dead_end()
            yield node, token

    def _drain(self, resident: ResidentRun) -> None:
        """Stop the rounds that the device runs by itself, and emit what was not read yet."""
        for results in resident.drain():
            self._emit(results)
            self.tally.add(rounds=1)

    def release(self, slot: int) -> None:
        """See `Loop.release`; later steps write their padding behind the rows that the slot keeps."""
        if self.resident and self.resident.leave(slot):  # nobody is left to emit for
            with suppress(SpecbuildError):  # a device that failed says so in the next round
                self.tally.add(rounds=len(list(self.resident.drain())))
        super().release(slot)
        self.rounds.slots.hold(
            slot, self.admission.reusable(slot) + 1
        )  # a draft step of two nodes begins a row earlier

    @property
    def _executors(self) -> list[StandardExecutor]:
        draft = self.draft_executor
        return [self.target, *([draft] if isinstance(draft, StandardExecutor) else [])]

    @property
    def notes(self) -> list[str]:
        """See `Loop.notes`: which steps could not be captured as graphs, and why."""
        return list(self.rounds.device.uncaptured)

    def close(self) -> None:
        """Free the models, then all of the device's memory, once nothing runs any more."""
        if self.resident:
            self.resident.close()
        self.rounds.close()
        with ExitStack() as stack:
            stack.callback(self.rounds.device.close)
            for executor in self._executors:
                stack.callback(executor.close)
