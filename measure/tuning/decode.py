"""Texts decoded one by one, whoever drafts: where the time of rounds went, and what would have come true."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from statistics import median

from specbuild.runtime import Engine, RunStats, SamplingParams
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.decoding.loop import Loop
from specbuild.runtime.drafting.lookup_first import LookupDrafter
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.requests.validation import auto_tree
from specbuild.runtime.speculation.policy import Policy
from specbuild.runtime.speculation.tree import BEST_DEPTH

from .chances import Record, replay

OFF, AUTO, AHEAD = "off", "auto", "auto, drafting ahead"


@dataclass(frozen=True)
class Decoded:
    """A text, and its rounds after the first token."""

    text: Sequence
    stats: RunStats

    def of(self, part: str) -> float:
        """Seconds of a round: in all ("total"), or of "draft", "verify", "loop"."""
        return float(getattr(self.stats, part)) / self.stats.rounds


Texts = Seq[Mapping[str, Decoded]]  # of each prompt, by what drafted


def drafted(texts: Texts) -> list[str]:
    """What did, smaller trees first; the same for each prompt."""
    return [name for name in texts[0] if name != OFF]


def seconds(texts: Texts, name: str, part: str) -> float:
    """Of a round's part: the median, by plain rounds of the same prompt, so that what slows some matters less."""
    alone = median(each[OFF].of("total") for each in texts)
    return alone * median(each[name].of(part) / each[OFF].of("total") for each in texts)


class Decoder:
    """Decodes prompts with an engine that does nothing else and keeps no prefixes, in its first slot."""

    def __init__(self, engine: Engine, loop: Loop, new_tokens: int, overlaps: bool = False) -> None:
        """`loop`: the engine's own; `overlaps`: whether it can draft ahead.

        Texts end with the round that brings the last of `new_tokens`.
        """
        self._engine, self._loop, self._new_tokens = engine, loop, new_tokens
        self._alone, self._all = loop.sibling(looks_up=False), loop.sibling()
        self._ahead = loop.sibling(overlap=True) if overlaps else None
        max_tokens = new_tokens + BEST_DEPTH  # so that no round is cut short
        self._params = SamplingParams(max_new_tokens=max_tokens, seed=0, ignore_eos=True)

    def decode(
        self, prompt: list[int], speculation: str, temperature: float = 0.0, policy: Policy | None = None
    ) -> Decoded:
        """Plainly (OFF), with a fixed tree of the model alone, or with a policy and all drafters (AUTO, AHEAD)."""
        text, loop = self._request(prompt, speculation, temperature), self._all if policy else self._alone
        loop.pick(text, [0])  # with its pages, where it has some
        if policy:
            text.tree = auto_tree(self._engine.manifest, policy.timings.widest, loop.bound)
            text.policy = policy.for_request(temperature)
        if self._ahead and speculation == AHEAD:
            loop = self._ahead
        while not (text.output or text.error):
            loop.round([text])
        before = loop.stats
        while not text.finish_reason and (speculation == OFF or len(text.output) < self._new_tokens):
            loop.round([text])
        stats = loop.stats.since(before)
        loop.release(0)
        if text.error:
            raise text.error
        return Decoded(text, stats)

    @property
    def hit_rate(self) -> float:
        """How many of the trees that were drafted ahead were those that were wanted."""
        drafter = self._ahead.drafter if isinstance(self._ahead, HostLoop) else None
        model = drafter.model if isinstance(drafter, LookupDrafter) else None
        return model.hit / max(model.guessed, 1) if model else 0.0

    def replay(self, decoded: Decoded, tree: str, every: bool) -> list[Record]:
        """What would have come true of such trees in a text that was decoded plainly; see `replay`."""
        text, drafter = decoded.text, self._loop.fresh_drafter()
        if not drafter:
            return []
        if self._loop.target.spec.hidden:
            self._loop.logits(text.tokens[:-1])  # what the head reads
        prompt = text.tokens[: text.metrics.num_prompt_tokens]
        sequence = self._request(prompt, tree, text.params.temperature)
        sequence.emit(text.output[0], frozenset())
        with self._loop.borrowed(self._loop.target.spec.capacity):
            records = replay(drafter, sequence, text.output[1:], every)
            drafter.release(0)
        return records

    def _request(self, prompt: list[int], speculation: str, temperature: float) -> Sequence:
        asked = AUTO if speculation == AHEAD else speculation
        params = replace(self._params, temperature=temperature, speculation=asked)
        (request,), _ = self._engine.requests([prompt], params, "raise")
        request.slot, request.policy = 0, None
        return request
