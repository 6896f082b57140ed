"""Receipts: what a text was made of, so that anybody with the bundle and the prompt can prove its tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Annotated, Any

from msgspec import Meta

from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.bundle.manifest import REPORT, Manifest
from specbuild.runtime.checked_json import Text, checked
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.result import Result
from specbuild.runtime.sampling.parameters import SamplingParams
from specbuild.runtime.speculation import timings

SCHEMA = 1
_DECIDING = (  # parameters that tokens depend on, beside the seed
    *("max_new_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos"),
    "skip_special_tokens",
)
_MEASURED = (REPORT, timings.FILE, timings.OLD_FILE)  # files of a bundle that no token depends on
_Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class Receipt:
    """`bundle`, `parameters_sha256`, `prompt`, `tokens`: sha256, the latter two of token ids as JSON.

    `exactness`: the class and what it computes of a text of its own: machines that have all of it in common compute the
    same bits; None where steps have no class. `tokens` are all that there were, `count` of them, and end by
    `finish_reason`.
    """

    schema: int
    specbuild: Text
    bundle: _Sha256
    exactness: dict[Text, Text | int] | None
    seed: Annotated[int, Meta(ge=0)]
    parameters: dict[Text, Any]
    parameters_sha256: _Sha256
    prompt: _Sha256
    tokens: _Sha256
    count: Annotated[int, Meta(ge=0, le=1 << 31)]
    finish_reason: Text

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        exactness: ExactnessClass | None,
        prompt: Sequence[int],
        params: SamplingParams,
        result: Result,
    ) -> Receipt:
        """A result's; raises OptionError for one that no parameters tell: it had a constraint, or never ran."""
        if params.constraint is not None or result.metrics is None:
            raise OptionError("there is no receipt of a text with a constraint, or of a request that never ran")
        parameters = {name: _plain(getattr(params, name)) for name in _DECIDING}
        return cls(
            schema=SCHEMA,
            specbuild=version("specbuild-trt"),
            bundle=bundle_sha256(manifest),
            exactness=class_of(exactness),
            seed=result.metrics.seed,
            parameters=parameters,
            parameters_sha256=sha256(parameters),
            prompt=sha256(list(prompt)),
            tokens=sha256(result.token_ids),
            count=len(result.token_ids),
            finish_reason=result.finish_reason,
        )

    @classmethod
    def parse(cls, told: Any) -> Receipt:
        """From JSON; raises OptionError for what is no receipt, or was changed."""
        try:
            receipt = checked(told, cls)
        except ValueError as error:
            raise OptionError(f"this is no receipt ({str(error)[:200]}): give what a response has as receipt") from None
        if receipt.schema != SCHEMA:
            raise OptionError(f"the receipt is of schema {receipt.schema}, this reads {SCHEMA}: update specbuild")
        if receipt.parameters.keys() != {*_DECIDING} or sha256(receipt.parameters) != receipt.parameters_sha256:
            raise OptionError("the receipt's parameters were changed, their digest differs: give it as it was sent")
        receipt.params()
        return receipt

    def params(self, speculation: str = "off") -> SamplingParams:
        """The parameters that give this text again; raises OptionError."""
        return SamplingParams(**self.parameters, seed=self.seed % 2**64, speculation=speculation)

    def proves(self, token_ids: Sequence[int]) -> bool:
        """Whether tokens of the same parameters, without a deadline, are those of this receipt.

        What was cut short by time, by its caller or by an error has the first of them.
        """
        whole = self.finish_reason in ("stop", "length")
        return sha256(list(token_ids if whole else token_ids[: self.count])) == self.tokens

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Replay:
    """A receipt's text, decoded again: `plain`, and `speculated` as `auto` does."""

    plain: Result
    speculated: Result
    proven: bool


def bundle_sha256(manifest: Manifest) -> str:
    """Identity of a bundle's models and tokenizer; tuning and reports do not change it."""
    return sha256({name: file.sha256 for name, file in manifest.files.items() if name not in _MEASURED})


def class_of(exactness: ExactnessClass | None) -> dict[str, str | int] | None:
    """A class as receipts have it."""
    return None if exactness is None else asdict(exactness)


def sha256(value: Any) -> str:
    """Of a value as canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): each for key, each in value.items()}
    return list(value) if isinstance(value, tuple) else int(value) if type(value).__name__ == "_Default" else value
