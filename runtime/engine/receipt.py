"""Receipts: what a text was made from and by, with hashes of its tokens, so that others can decode it again."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from specbuild.runtime.checked_json import Text, checked
from specbuild.runtime.errors import BundleError, OptionError, PromptError, shown
from specbuild.runtime.requests.result import Result
from specbuild.runtime.sampling.parameters import SamplingParams
from specbuild.runtime.sampling.structured import StructuredOutputs

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Rows = Annotated[int, Meta(ge=1, le=1 << 24)]
# A sample's own seed is beside its parameters, a constraint is a program, and no text depends on the others.
_LEFT_OUT = {
    *("seed", "constraint", "n", "logprobs", "prompt_logprobs", "deadline", "priority", "background", "session"),
    *("cache_salt", "speculation", "prediction"),
}
_PARAMETERS = tuple(each.name for each in fields(SamplingParams) if each.name not in _LEFT_OUT)


@dataclass(frozen=True, slots=True)
class ReceiptClass:
    """An engine's exactness class, with the sha256 of a text's logits in it; see `ExactnessClass`."""

    rows: Rows
    sequence_rows: Rows
    digest: Sha256


class Origin(NamedTuple):
    """The part that all receipts of an engine share: the bundle's digest, and the exactness class or None."""

    bundle: str
    exactness: ReceiptClass | None


@dataclass(frozen=True, slots=True)
class Receipt:
    """A record of what one sample of one prompt was made from and by; validated when made, which raises OptionError.

    Each hash is the sha256, in hexadecimal, of JSON in UTF-8 with sorted keys and without spaces.

    Attributes:
        specbuild_version: Version of the runtime that decoded the sample.
        bundle: Digest of the bundle's manifest.
        exactness: Exactness class of the engine's steps; None if it had none, so that a near-tie may fall otherwise.
        seed: The sample's own seed.
        parameters: The fields of `SamplingParams` that a text depends on, whole numbers written without a fraction.
        parameters_sha256: Hash of `parameters`.
        prompt_sha256: Hash of the prompt's token ids.
        output_sha256: Hash of the output's token ids.
        num_output_tokens: Number of output tokens.
        finish_reason: The result's. "deadline", "cancelled" and "error" cut a text off: a replay then proves its first
            tokens only.
    """

    specbuild_version: Text
    bundle: Sha256
    exactness: ReceiptClass | None
    seed: int
    parameters: dict[str, Any]
    parameters_sha256: Sha256
    prompt_sha256: Sha256
    output_sha256: Sha256
    num_output_tokens: Annotated[int, Meta(ge=0, le=1 << 31)]
    finish_reason: Literal["stop", "length", "cancelled", "deadline", "error"]

    def __post_init__(self) -> None:
        if unknown := sorted(map(str, self.parameters.keys() - {*_PARAMETERS})):
            raise OptionError(f"the receipt has an unknown parameter, {shown(unknown[0])}: update specbuild")
        if self.num_output_tokens > self.params().max_new_tokens:
            raise OptionError("the receipt has more tokens than its max_new_tokens: it was changed, ask for it again")
        object.__setattr__(self, "parameters", _plain(self.parameters))
        if sha256(self.parameters) != self.parameters_sha256:
            raise OptionError("the receipt's parameters are not those of its hash: it was changed, ask for it again")

    @classmethod
    def of(cls, origin: Origin, prompt: Sequence[int], params: SamplingParams, result: Result) -> Receipt:
        """Return the receipt of a result; see `Engine.receipt`.

        Args:
            origin: Bundle and exactness class of the engine that decoded the result.
            prompt: The prompt's token ids.
            params: The request's parameters as they were given.
            result: One sample's result.

        Raises:
            OptionError: The request was refused before it ran or has a constraint, or the prompt has another length.
        """
        metrics = result.metrics
        if metrics is None:
            raise OptionError("a request that was refused before it ran has no receipt")
        if params.constraint is not None:
            raise OptionError("a receipt cannot say what a constraint is: ask for none, or for no constraint")
        if (given := len(prompt)) != (read := metrics.num_prompt_tokens):
            raise OptionError(f"the result is of a prompt of {read} tokens, not {given}: give the prompt's token ids")
        parameters = _parameters(params)
        return cls(
            specbuild_version=_version(),
            bundle=origin.bundle,
            exactness=origin.exactness,
            seed=metrics.seed,
            parameters=parameters,
            parameters_sha256=sha256(parameters),
            prompt_sha256=sha256([*map(int, prompt)]),
            output_sha256=sha256(result.token_ids),
            num_output_tokens=len(result.token_ids),
            finish_reason=result.finish_reason,  # type: ignore[arg-type]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the receipt as JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, body: Any) -> Receipt:
        """Return the receipt in `body`, which is JSON data; raise OptionError if it is no receipt or was changed."""
        try:
            return checked(body, cls)
        except (ValueError, TypeError, RecursionError) as error:
            raise OptionError(f"this is no receipt ({str(error)[:300]}): give what a result's receipt says") from None

    def params(self, speculation: str = "off") -> SamplingParams:
        """Return the parameters of a request that decodes the sample again; raise OptionError if they are invalid.

        Args:
            speculation: How the request speculates, as in `SamplingParams`.
        """
        return SamplingParams(**self.parameters, seed=self.seed, speculation=speculation)

    @property
    def whole(self) -> bool:
        """Return whether the text ended by itself, so that a replay proves its end too."""
        return self.finish_reason in ("stop", "length")

    def check_origin(self, origin: Origin, any_class: bool = False) -> None:
        """Raise an error if an engine's bundle or exactness class is not the receipt's.

        Args:
            origin: The engine's bundle and exactness class.
            any_class: Whether to accept a receipt of another exactness class or of none.

        Raises:
            BundleError: The receipt is of another bundle.
            OptionError: The receipt is of another exactness class or of none, and `any_class` is False.
        """
        if origin.bundle != self.bundle:
            raise BundleError(
                f"the receipt is of another bundle, {self.bundle[:12]}…, and this is {origin.bundle[:12]}…: "
                "give the bundle that made it"
            )
        if any_class:
            return
        if self.exactness is None:
            raise OptionError(
                "the receipt is of an engine without an exactness class, where rounding may turn a near-tie: "
                "--any-class (any_class) tries it all the same"
            )
        if origin.exactness != self.exactness:
            raise OptionError(
                f"the receipt is of {_class_text(self.exactness)}, this engine of {_class_text(origin.exactness)}: "
                "load it on such a processor, on a GPU with such a batch size, or try all the same with --any-class "
                "(any_class)"
            )

    def has_prompt(self, tokens: Sequence[int]) -> bool:
        """Return whether `tokens` are the prompt's token ids."""
        return sha256(tokens) == self.prompt_sha256

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise PromptError if `tokens` are not the prompt's token ids."""
        if not self.has_prompt(tokens):
            raise PromptError("the receipt is of another prompt, its token ids differ: give the one it was made from")

    def agrees(self, result: Result) -> bool:
        """Return whether `result` begins with the receipt's tokens and, if the receipt is `whole`, ends there too.

        A receipt that ends with "length" before its max_new_tokens comes from an engine with a smaller max_model_len;
        a longer result agrees with it.
        """
        count = self.num_output_tokens
        if sha256(result.token_ids[:count]) != self.output_sha256 or len(result.token_ids) < count:
            return False
        ended = len(result.token_ids) == count and result.finish_reason == self.finish_reason
        cut = len(result.token_ids) > count and count < self.params().max_new_tokens
        return ended or not self.whole or (self.finish_reason == "length" and cut)


def sha256(value: Any) -> str:
    """Return the sha256, in hexadecimal, of a value's JSON with sorted keys and no spaces; raises OptionError."""
    return hashlib.sha256(_json(value)).hexdigest()


def keyed_sha256(key: bytes, value: Any) -> str:
    """Return the HMAC-SHA256 of the same JSON: without the key, even a short value cannot be guessed from it."""
    return hmac.new(key, _json(value), "sha256").hexdigest()


def _json(value: Any) -> bytes:
    try:
        text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise OptionError(f"a receipt cannot say what is no JSON: {error}") from None


def _parameters(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that a sample's text depends on, except the seed."""
    values = {name: _plain(getattr(params, name)) for name in _PARAMETERS}
    return {name: value for name, value in values.items() if name != "structured_outputs" or value is not None}


def _plain(value: Any) -> Any:
    """Return a value as JSON data, in which equal numbers are written alike: 1.0 becomes 1."""
    if isinstance(value, StructuredOutputs):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _class_text(found: ReceiptClass | None) -> str:
    return f"class {found.rows}/{found.sequence_rows}, {found.digest[:12]}…" if found else "no exactness class"


@cache
def _version() -> str:
    from importlib.metadata import version  # slow to import, and only receipts need it

    return version("specbuild-trt")
