"""Questions of several turns as prompts: each turn's prompt includes the earlier turns and answers.

With a chat template, turns become user messages and answers assistant messages. Without one, the text is a turn, the
answer that plain decoding gives, an empty line, the next turn, and so on. Earlier answers are plain decoding's for
every contender, so all of them decode the same prompts.
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
    """A request, with the answers to its turns so far and the cases made from them."""

    request: Request
    templated: bool
    answers: list[str] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)

    @property
    def left(self) -> int:
        """The number of turns to come."""
        return max(1, len(self.request.turns)) - len(self.cases)

    def prompt(self) -> Request:
        """Return the request for the next turn, with the earlier turns and answers in its prompt."""
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
    """Return the number of answers that `converse` decodes before anything is measured."""
    return sum(request.later_turns for request in requests)


def converse(
    engine: Engine, requests: Seq[Request], advance: Callable[[int], object] = lambda done: None
) -> list[Case]:
    """Return every turn of every request as a case, in order.

    Args:
        engine: The engine that encodes the prompts and decodes the earlier answers.
        requests: The requests.
        advance: Called with the number of answers decoded so far.

    Raises:
        PromptError: A prompt cannot run; the message has its file, line and turn.
        OptionError: A parameter cannot be used; the message has the same.
        SpecbuildError: The error of an answer that failed to decode.
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
    """Describe how turns became prompts; None if no request has turns."""
    if not any(request.turns for request in requests):
        return None
    templated = engine.manifest.chat_template is not None
    how = "as user messages of the chat template" if templated else "as text, after a blank line"
    rest = "; earlier answers are plain decoding's, for every contender" if answers_needed(requests) else ""
    return f"all, {how}{rest}"
