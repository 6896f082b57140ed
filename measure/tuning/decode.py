"""Decoding of texts one by one with any way of drafting: where rounds spend time, and what drafts would gain."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from statistics import median

from specbuild.runtime import Engine, RunStats, SamplingParams
from specbuild.runtime.decoding.loop import Loop
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.requests.validation import auto_tree
from specbuild.runtime.speculation.controller import Controller
from specbuild.runtime.speculation.tree import BEST_DEPTH, TreeSpec

from .chances import Record, replay

OFF, AUTO = "off", "auto"


@dataclass(frozen=True)
class Decoded:
    """A decoded text, and the statistics of its rounds after the first token."""

    text: Sequence
    stats: RunStats

    def of(self, part: str) -> float:
        """Return the mean seconds of a round: all ("total"), or those of a part ("draft", "verify" or "loop")."""
        return float(getattr(self.stats, part)) / self.stats.rounds


Texts = Seq[Mapping[str, Decoded]]  # for each prompt, its decoded texts by the speculation that drafted


def drafted(texts: Texts) -> list[str]:
    """Return the names of what drafted, smaller trees first; they are the same for each prompt."""
    return [name for name in texts[0] if name != OFF]


def seconds(texts: Texts, name: str, part: str) -> float:
    """Return a typical round's seconds in a part, robust to prompts during which the machine was slower.

    It is the median over prompts of the part's time relative to the same prompt's plain rounds, times the median plain
    round.
    """
    alone = median(each[OFF].of("total") for each in texts)
    return alone * median(each[name].of(part) / each[OFF].of("total") for each in texts)


class Decoder:
    """Decodes prompts in the first slot of an engine that is otherwise idle and caches no prefixes."""

    def __init__(self, engine: Engine, loop: Loop, new_tokens: int) -> None:
        """Prepare the loops.

        Args:
            engine: The engine.
            loop: The engine's own loop.
            new_tokens: Tokens to decode; a speculative text ends with the round that brings the last of them.
        """
        self._engine, self._loop, self._new_tokens = engine, loop, new_tokens
        self._alone, self._all = loop.sibling(looks_up=False), loop.sibling()
        max_tokens = new_tokens + BEST_DEPTH  # so that the token limit cuts no tree short
        self._params = SamplingParams(max_new_tokens=max_tokens, seed=0, ignore_eos=True)

    def decode(
        self, prompt: list[int], speculation: str, temperature: float = 0.0, controller: Controller | None = None
    ) -> Decoded:
        """Decode a prompt.

        Args:
            prompt: Its token ids.
            speculation: OFF, a fixed tree of the draft model alone, or with a controller AUTO (all drafters).
            temperature: The sampling temperature.
            controller: Decides under AUTO.

        Raises:
            SpecbuildError: The request's error, if it failed.
        """
        text, loop = self._request(prompt, speculation, temperature), self._all if controller else self._alone
        if controller:
            tree = auto_tree(self._engine.manifest, controller.cost.table.widest, loop.trunk)
            text.request, text.controller = replace(text.request, tree=tree), controller.for_request(temperature)
        loop.admission.pick(text, [0])  # also reserves the sequence's pages of a paged cache
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

    def replay(self, decoded: Decoded, tree: str, every: bool) -> list[Record]:
        """Return what would have been accepted of such trees in a plainly decoded text; see `chances.replay`."""
        text, model = decoded.text, self._loop.proposer.model
        if not model:
            return []
        drafter = model.again()
        if self._loop.target.spec.hidden:
            self._loop.logits(text.tokens[:-1])  # computes the hidden states that the draft head reads
        prompt = text.tokens[: text.metrics.num_prompt_tokens]
        sequence = self._request(prompt, tree, text.params.temperature)
        sequence.emit(text.output[0], frozenset())
        with self._loop.borrowed(self._loop.target.spec.capacity):
            records = replay(drafter, sequence, TreeSpec.parse(tree), text.output[1:], every)
            drafter.release(0)
        return records

    def _request(self, prompt: list[int], speculation: str, temperature: float) -> Sequence:
        params = replace(self._params, temperature=temperature, speculation=speculation)
        (request,), _ = self._engine.requests([prompt], params, "raise")
        request.slot, request.controller = 0, None
        return request
