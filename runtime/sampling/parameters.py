"""`SamplingParams`: how a request is decoded, and the ranges of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from specbuild.runtime.errors import OptionError, message_of, shown
from specbuild.runtime.speculation.tree import TreeSpec

from .constraint import Constraint
from .structured import StructuredOutputs

MIN_TEMPERATURE = 0.01  # a lower one is greedy: logits divided by it would leave float32
MAX_SAMPLES = 1024  # maximum samples of one prompt
MAX_LOGPROBS = 20  # maximum tokens reported besides the emitted one, as in OpenAI's API
MAX_LABEL = 256  # maximum characters of a session's name or of a salt
MAX_STOPS = 64  # maximum stop strings, and as many stop token ids
MAX_STOP_CHARACTERS = 4096  # maximum characters of all stop strings together
MAX_TREE = 32  # maximum characters of a tree's name
_INT32 = 2**31 - 1


class _Default(int):
    """A default value that can be told apart from the same number given by a caller."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request; validated on construction, which raises OptionError.

    Example:
        from specbuild import Engine, SamplingParams

        params = SamplingParams(max_new_tokens=64, temperature=0.8, top_p=0.95, seed=7, n=2, stop="class ")
        with Engine.load("pycode.bundle") as engine:
            for result in engine.generate("def main(", params):
                print(result.text, result.finish_reason)

    Attributes:
        max_new_tokens: Maximum output tokens, at least 1.
        temperature: 0.01 to 100, or less for greedy decoding, which is kept as 0.
        top_k: Keep the k likeliest tokens; 0 is off.
        top_p: Keep the likeliest tokens until their probabilities add up to this, above 0 to 1; 1 is off.
        min_p: Keep tokens with at least this share of the likeliest token's probability, 0 to 1; 0 is off.
        repetition_penalty: Hugging Face's, 0.01 to 100, for tokens of prompt and output: positive logits are divided
            by it, negative ones multiplied; 1 is off.
        frequency_penalty: OpenAI's, −100 to 100: subtracted from a token's logit for each time it is in the output.
        presence_penalty: OpenAI's, −100 to 100: subtracted from a token's logit once if it is in the output.
        logit_bias: What to add to the logits of token ids, −1e6 to 1e6.
        seed: Seed of the first sample, 0 to 2⁶⁴ − 1; None draws fresh entropy, which the result reports. On an engine
            with `Engine.exact`, one seed gives one text in every bit, whatever is drafted, what else runs and what ran
            before.
        stop: At most 64 stop strings of together at most 4,096 characters; the text ends before the first.
        stop_token_ids: At most 64 token ids that end the text besides the model's own, whatever `ignore_eos` says, and
            are not part of it.
        ignore_eos: Whether to go on after the model's end-of-sequence tokens.
        min_tokens: Minimum output tokens before any token may end the text and before a stop string counts.
        skip_special_tokens: Whether the text leaves special tokens out.
        speculation: "auto" (in a tuned bundle what the policy decides for each round, else the bundle's default tree),
            "off", or a tree such as "chain:4".
        prediction: What the output will be, about, as a text or token ids: drafted from, wherever the output stands in
            it. The output is the same without. It is at most as long as a text may be; with "off" nothing is drafted.
        n: Samples of the prompt, 1 to 1,024; sample i is what `seed + i` (mod 2⁶⁴) alone gives.
        logprobs: How many of the best tokens, 0 to 20, to report besides the emitted one; None reports nothing.
        prompt_logprobs: The same for the tokens of the prompt, which then shares no cached one; None reports nothing.
        deadline: Seconds from submission after which the request ends with what it has; None: never.
        session: A name of at most 256 characters; in a tuned bundle, the requests of a session share what "auto" learns
            about their drafts.
        priority: Requests of a lower priority get a slot first; among equals, the earlier.
        background: Whether to run only while the engine has nothing else to do. Otherwise the request ends as
            "cancelled", with the tokens so far.
        cache_salt: At most 256 characters; requests share cached prompts only with requests of the same salt.
        constraint: What the texts may be. Tokens that it does not allow are excluded before the cut-offs apply.
        structured_outputs: The same as data, such as a JSON schema: `StructuredOutputs`, or a mapping of its fields.
        max_tokens: Another name for `max_new_tokens`, for the constructor only.
        OF_CHECKPOINTS: Names of the parameters whose defaults a checkpoint may set.
    """

    max_new_tokens: int = _Default(128)
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    speculation: str = "auto"
    prediction: str | Sequence[int] | None = None
    n: int = 1
    logprobs: int | None = None
    deadline: float | None = None
    session: str | None = None
    priority: int = 0
    background: bool = False
    cache_salt: str | None = None
    constraint: Constraint | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    prompt_logprobs: int | None = None
    max_tokens: InitVar[int | None] = None
    OF_CHECKPOINTS: ClassVar = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

    def __post_init__(self, max_tokens: int | None) -> None:
        if max_tokens is not None:
            given = {} if isinstance(self.max_new_tokens, _Default) else {"max_new_tokens": self.max_new_tokens}
            self._keep(**renamed(given | {"max_tokens": _integer("max_tokens", max_tokens, 1)}))
        elif not isinstance(self.max_new_tokens, _Default):
            self._keep(max_new_tokens=_integer("max_new_tokens", self.max_new_tokens, 1))
        self._keep(
            temperature=_number("temperature", self.temperature, 0, 100),
            top_k=_integer("top_k", self.top_k, 0),
            top_p=_number("top_p", self.top_p, 0, 1, open_low=True),
            min_p=_number("min_p", self.min_p, 0, 1),
            repetition_penalty=_number("repetition_penalty", self.repetition_penalty, 0.01, 100),
            frequency_penalty=_number("frequency_penalty", self.frequency_penalty, -100, 100),
            presence_penalty=_number("presence_penalty", self.presence_penalty, -100, 100),
            logit_bias=_logit_bias(self.logit_bias),
            stop=_stop(self.stop),
            stop_token_ids=_stop_token_ids(self.stop_token_ids),
            speculation=_speculation(self.speculation),
            prediction=_prediction(self.prediction),
            n=_integer("n", self.n, 1, MAX_SAMPLES),
            session=_optional(_label, "session", self.session),
            cache_salt=_optional(_label, "cache_salt", self.cache_salt),
            min_tokens=_integer("min_tokens", self.min_tokens, 0),
            priority=_integer("priority", self.priority, -_INT32 - 1),
            seed=_optional(_integer, "seed", self.seed, 0, 2**64 - 1),
            logprobs=_optional(_integer, "logprobs", self.logprobs, 0, MAX_LOGPROBS),
            prompt_logprobs=_optional(_integer, "prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS),
            deadline=_optional(_number, "deadline", self.deadline, 0, 10**9, True),
        )
        if self.temperature < MIN_TEMPERATURE:
            self._keep(temperature=0.0)
        for name in ("ignore_eos", "skip_special_tokens", "background"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} must be true or false, not {shown(getattr(self, name))}")
        if self.min_tokens > self.max_new_tokens:
            raise OptionError(f"min_tokens is {self.min_tokens}, more than max_new_tokens, {self.max_new_tokens}")
        if self.constraint is not None and not _has_matcher(self.constraint):
            raise OptionError(f"constraint must have a method matcher(vocab_size), not be {shown(self.constraint)}")
        if self.structured_outputs is None:
            return
        self._keep(structured_outputs=StructuredOutputs.of(self.structured_outputs))
        if self.constraint is not None:
            raise OptionError("constraint and structured_outputs are both given: give one of them")
        if self.ignore_eos:
            raise OptionError("ignore_eos has no text to go on with after structured_outputs: drop one of them")

    def _keep(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return the names of all parameters, `max_tokens` included."""
        return frozenset({"max_tokens", *(f.name for f in fields(cls))})


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with `max_tokens` renamed to `max_new_tokens`; raise OptionError if both are given."""
    if "max_tokens" not in given:
        return dict(given)
    if "max_new_tokens" in given:
        raise OptionError("max_tokens and max_new_tokens are one parameter: give one of them")
    return {"max_new_tokens" if name == "max_tokens" else name: value for name, value in given.items()}


def _plain(value: Any) -> int | float | None:
    """Return a Python or NumPy number as a plain int or float, whatever subclass it is; None for anything else."""
    kind = type(value)
    if issubclass(kind, int) and kind is not bool:
        return int.__int__(value)
    if issubclass(kind, float):
        return float.__float__(value)
    if issubclass(kind, np.integer):
        return int(value)
    return float(value) if issubclass(kind, np.floating) else None


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> int | float:
    number = _plain(value)
    if number is None or not low <= number <= high or (open_low and number == low):
        range_ = f"{'above' if open_low else 'from'} {low} to {high}"
        raise OptionError(f"{name} must be a number {range_}, not {shown(value)}")
    return number


def _optional(check: Callable[..., Any], name: str, value: Any, *limits: Any) -> Any:
    return None if value is None else check(name, value, *limits)


def _integer(name: str, value: Any, low: int, high: int = _INT32) -> int:
    number = _plain(value)
    if not isinstance(number, int) or not low <= number <= high:
        raise OptionError(f"{name} must be a whole number from {low} to {high}, not {shown(value)}")
    return number


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise OptionError(f"logit_bias must map token ids to numbers, not {shown(value)}")
    try:
        given = list(value.items())
    except Exception as error:
        raise OptionError(f"logit_bias cannot be read, {type(error).__name__}: {message_of(error)}") from None
    bias = {}
    for token, amount in given:
        text = token if isinstance(token, str) and len(token) <= 20 and token.isdecimal() else None
        number = _plain(token) if text is None else int(text)
        if not isinstance(number, int) or not 0 <= number <= _INT32:
            raise OptionError(f"logit_bias has {shown(token)} for a token id: use whole numbers")
        bias[number] = _number("an amount in logit_bias", amount, -1e6, 1e6)
    return bias


def _stop(value: Any) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        raise OptionError(f"stop must be a string or a list of strings, none of them empty, not {shown(value)}")
    if len(given) > MAX_STOPS:
        raise OptionError(f"stop has {len(given):,} strings: give at most {MAX_STOPS}")
    if not all(issubclass(type(each), str) for each in given) or not all(str.__len__(each) for each in given):
        raise OptionError(f"stop must be a string or a list of strings, none of them empty, not {shown(value)}")
    plain = tuple(str.__str__(each) for each in given)
    if (characters := sum(map(len, plain))) > MAX_STOP_CHARACTERS:
        raise OptionError(f"stop has {characters:,} characters: give at most {MAX_STOP_CHARACTERS:,} in all strings")
    if any("\ud800" <= character <= "\udfff" for character in "".join(plain)):
        raise OptionError(f"stop is not valid Unicode, so no text has it: {shown(value)}")
    return plain


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_STOPS:
        raise OptionError(f"stop_token_ids must be a list of at most {MAX_STOPS} token ids, not {shown(value)}")
    return tuple(_integer("a token id in stop_token_ids", each, 0) for each in value)


def _speculation(value: Any) -> str:
    if not issubclass(type(value), str) or str.__len__(value) > MAX_TREE:
        raise OptionError(f'speculation must be "auto", "off" or a tree such as chain:4, not {shown(value)}')
    text = str.__str__(value)
    if text not in ("auto", "off"):
        try:
            TreeSpec.parse(text)
        except OptionError as error:
            raise OptionError(f'speculation must be "auto", "off" or a tree: {error}') from None
    return text


def _prediction(value: Any) -> str | tuple[int, ...] | None:
    if value is None:
        return None
    if issubclass(type(value), str):
        return str.__str__(value)
    if not isinstance(value, list | tuple):
        raise OptionError(f"prediction must be a text or a list of token ids, not {shown(value)}")
    return tuple(_integer("a token id in prediction", each, 0) for each in value)


def _label(name: str, value: Any) -> str:
    if not issubclass(type(value), str) or not 0 < str.__len__(value) <= MAX_LABEL:
        raise OptionError(f"{name} must be a string of 1…{MAX_LABEL} characters, not {shown(value)}")
    return str.__str__(value)


def _has_matcher(value: Any) -> bool:
    try:
        return callable(getattr(value, "matcher", None))
    except Exception:
        return False
