"""Replays: a receipt's text is decoded again in two ways and compared with the receipt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specbuild.runtime.errors import EngineClosedError, OptionError
from specbuild.runtime.requests.result import Result
from specbuild.runtime.sampling.parameters import SamplingParams

from .handle import Handle
from .receipt import Origin, Receipt


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of decoding a receipt's text again.

    Attributes:
        receipt: The receipt.
        plain: The result of plain decoding, cancelled at most one round past the receipt's last token.
        speculative: The result of the bundle's own speculation, cancelled likewise.
        same_class: Whether this engine has the receipt's exactness class.
    """

    receipt: Receipt
    plain: Result
    speculative: Result
    same_class: bool

    @property
    def proven(self) -> bool:
        """Return whether both results have the receipt's tokens; see `Receipt.agrees`."""
        return self.receipt.agrees(self.plain) and self.receipt.agrees(self.speculative)

    def to_dict(self) -> dict[str, Any]:
        """Return what `specbuild replay --json` prints; `whole` says whether the text's end is proven too."""
        return {
            "proven": self.proven,
            "plain": self.receipt.agrees(self.plain),
            "speculation": self.receipt.agrees(self.speculative),
            "num_output_tokens": self.receipt.num_output_tokens,
            "whole": self.receipt.whole,
            "same_class": self.same_class,
        }


def replay(
    submit: Callable[[Sequence[int], SamplingParams], Handle], origin: Origin, receipt: Receipt, prompt: Sequence[int]
) -> Replay:
    """Decode a receipt's text again; see `Engine.replay`, which checks the origin first.

    Args:
        submit: Queues a request for a prompt's token ids, as `Engine.submit` does.
        origin: The engine's bundle and exactness class.
        receipt: The receipt.
        prompt: The prompt's token ids.

    Raises:
        PromptError: The receipt is of another prompt.
        EngineClosedError: The engine was closed meanwhile.
        OptionError: This engine ends texts before the receipt's last token.
        SpecbuildError: Decoding failed.
    """
    receipt.check_prompt(prompt)
    plain, speculative = (
        _decoded(submit(prompt, receipt.params(speculation)), receipt.num_output_tokens)
        for speculation in ("off", "auto")
    )
    return Replay(receipt, plain, speculative, receipt.exactness is not None and receipt.exactness == origin.exactness)


def _decoded(handle: Handle, count: int) -> Result:
    """Return the result of a request, cancelled once it passes `count` tokens; raise if it has fewer."""
    emitted = 0
    try:
        for chunk in handle:
            emitted += len(chunk.token_ids)
            if emitted > count:
                break
    finally:
        handle.cancel()
    result = handle.result()
    if len(result.token_ids) < count:
        if result.error:
            raise result.error
        if result.finish_reason == "cancelled":
            raise EngineClosedError("the engine was closed before the text was decoded again: load the bundle again")
        if result.finish_reason == "length":
            ended = len(result.token_ids)
            raise OptionError(f"this engine ends the text after {ended} tokens, the receipt has {count}: allow more")
    return result
