"""Questions of several turns as prompts: each turn with what was said before it.

With a chat template turns are a user's messages, and answers an assistant's. Without one the text goes on: a turn, the
answer that plain decoding gives, an empty line, the next turn. Earlier answers are plain decoding's for every
contender, so all of them decode the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from specbuild.runtime import Chat, Engine, SpecbuildError
from specbuild.runtime.requests.prompt_file import Request

from .measure import BASELINE, Case, prepare


@dataclass(slots=True)
class _Dialogue:
    """A request, and the answers to its turns so far."""

    request: Request
    templated: bool
    answers: list[str] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)

    @property
    def left(self) -> int:
        """How many turns are to come."""
        return max(1, len(self.request.turns)) - len(self.cases)

    def prompt(self) -> Request:
        """The next turn, with what was said before it."""
        turns = self.request.turns[: len(self.answers) + 1]
        if not turns or not (self.templated or self.answers):
            return self.request
        if not self.templated:
            said = [turn + answer + "\n\n" for turn, answer in zip(turns, self.answers, strict=False)]
            return self._asking("".join(said) + turns[-1])
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(self.answers, turns[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        return self._asking(Chat(messages))

    def _asking(self, prompt: str | Chat) -> Request:
        where = f"{self.request.where}, turn {len(self.answers) + 1}" if self.answers else self.request.where
        return replace(self.request, prompt=prompt, where=where)


def answers_needed(requests: Seq[Request]) -> int:
    """How many turns are decoded before anything is measured."""
    return sum(request.later_turns for request in requests)


def converse(
    engine: Engine, requests: Seq[Request], advance: Callable[[int], object] = lambda done: None
) -> list[Case]:
    """Every turn of every request in tokens, in their order; `advance` is told how many answers are done.

    Raises PromptError or OptionError with file, line and turn of the first that cannot run, and what failed.
    """
    templated = engine.manifest.chat_template is not None
    dialogues = [_Dialogue(request, templated) for request in requests]
    open_ones, done = dialogues, 0
    while open_ones:
        for dialogue, case in zip(open_ones, prepare(engine, [each.prompt() for each in open_ones]), strict=True):
            dialogue.cases.append(case)
        open_ones = [dialogue for dialogue in open_ones if dialogue.left]
        for dialogue in open_ones:
            dialogue.answers.append(_answer(engine, dialogue))
            advance(done := done + 1)
    return [case for dialogue in dialogues for case in dialogue.cases]


def _answer(engine: Engine, dialogue: _Dialogue) -> str:
    case = dialogue.cases[-1]
    (result,) = engine.generate([case.tokens], replace(case.params, speculation=BASELINE, ignore_eos=False))
    if result.error:
        raise _named(result.error, dialogue.request.where)
    return result.text


def _named(error: SpecbuildError, where: str) -> SpecbuildError:
    return type(error)(f"{where}: {error}")


def in_words(requests: Seq[Request], engine: Engine) -> str | None:
    """How turns became prompts; None where no request has any."""
    if not any(request.turns for request in requests):
        return None
    templated = engine.manifest.chat_template is not None
    how = "as user messages of the chat template" if templated else "as text, after a blank line"
    rest = "; earlier answers are plain decoding's, for every contender" if answers_needed(requests) else ""
    return f"all, {how}{rest}"
