"""A request's `Result`, and the `Chunk`s that come before it as the text grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.sampling.logprobs import TokenLogprobs

from .metrics import RequestMetrics


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one sample of one prompt.

    Attributes:
        text: The output's text, without the end-of-sequence token.
        token_ids: The output's token ids, with the end-of-sequence token. If the output was cut off, text and token
            ids are what was emitted until then.
        finish_reason: "stop" (end of sequence, a stop string or a stop token), "length", "cancelled", "deadline" or
            "error".
        metrics: Counts and times; None for a request that was refused before it ran.
        logprobs: Log-probabilities, one entry per token, if asked for.
        error: The error, if `finish_reason` is "error".
        stop_reason: As in vLLM, the stop string or the one of `stop_token_ids` that ended the output; None if
            something else did, an end of sequence included.
        drafted: Whether a drafter had proposed the token, one entry per token; the others are the target's alone. The
            JSON does not have it.
        prompt_logprobs: Log-probabilities of the prompt's tokens, None for the first, if asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    metrics: RequestMetrics | None
    logprobs: list[TokenLogprobs] | None = None
    error: SpecbuildError | None = None
    stop_reason: str | int | None = None
    drafted: list[bool] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what `specbuild generate --json` prints; `logprobs` and `error` only if they are set."""
        body: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "metrics": self.metrics and self.metrics.to_dict(),
        }
        if self.logprobs is not None:
            body["logprobs"] = [each.to_dict() for each in self.logprobs]
        if self.prompt_logprobs is not None:
            body["prompt_logprobs"] = [each and each.to_dict() for each in self.prompt_logprobs]
        if self.error is not None:
            body["error"] = str(self.error)
        return body


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one sample's output, all that was added since its last chunk; a sample's last chunk has its result.

    A reader slower than the model gets fewer, longer chunks: nothing piles up.

    Attributes:
        index: Which prompt, from 0.
        sample: Which of the prompt's n samples, from 0.
        text: New text, in complete characters.
        token_ids: New token ids.
        logprobs: Log-probabilities of the new tokens, if asked for.
        result: The result, in the last chunk; else None.
    """

    index: int
    sample: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    result: Result | None
    drafted: list[bool] = field(default_factory=list)  # see `Result.drafted`
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # in the first chunk, see `Result.prompt_logprobs`
