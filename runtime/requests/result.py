"""What comes out of a request: chunks as the text grows, and the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.sampling.logprobs import TokenLogprobs

from .metrics import RequestMetrics


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one sample of one prompt. `token_ids` hold the end-of-sequence token, `text` does not.

    finish_reason: "stop" (end of sequence or a stop string), "length", "cancelled", "deadline", or "error", with what
    was emitted until then; `error` is set for the last alone. `logprobs`: one per token, where they were asked for.
    stop_reason, as vLLM's: the stop string, or the one of `stop_token_ids`, that ended it; None where something else
    did, an end of sequence included. `metrics`: None for a request that was refused before it ran. `drafted`: one per
    token, whether a drafter had proposed it; the others are the target's alone. It is not part of the JSON.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    metrics: RequestMetrics | None
    logprobs: list[TokenLogprobs] | None = None
    error: SpecbuildError | None = None
    stop_reason: str | int | None = None
    drafted: list[bool] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As `specbuild generate --json` prints it; `logprobs` and `error` only where there are any."""
        body: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "metrics": self.metrics and self.metrics.to_dict(),
        }
        if self.logprobs is not None:
            body["logprobs"] = [each.to_dict() for each in self.logprobs]
        if self.error is not None:
            body["error"] = str(self.error)
        return body


@dataclass(frozen=True, slots=True)
class Chunk:
    """What was added to one sample's output since its last chunk; the last one of all carries the result.

    A reader who is slower than the model gets fewer, longer chunks: nothing piles up.
    """

    index: int  # which prompt
    sample: int  # which of its n samples
    text: str  # complete characters only
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    result: Result | None
    drafted: list[bool] = field(default_factory=list)  # see `Result.drafted`
