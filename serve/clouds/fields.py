"""Request bodies of text-generation-inference's routes and of Vertex AI's predictions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from specbuild.serve import limits
from specbuild.serve.request.body import Body
from specbuild.serve.request.fields import CompletionRequest, Count, Document, Penalty, RepetitionPenalty, Stops


class Grammar(Body):
    """A constraint on the text: JSON that follows a schema, optionally named, or a match of a regular expression."""

    type: Literal["json", "json_schema", "regex"]
    value: Document


class Parameters(Body):
    """The parameters of a text. `best_of` and the fields after it are accepted only with values that change nothing."""

    max_new_tokens: Count | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Meta(gt=0, le=100)] | None = None
    top_k: Count | None = None
    top_p: Annotated[float, Meta(gt=0, lt=1)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    stop: Stops | None = None
    truncate: Count | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    grammar: Grammar | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None
    typical_p: None = None
    watermark: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: Annotated[int, Meta(ge=0, le=0)] | None = None
    adapter_id: None = None


class GenerateRequest(Body):
    """The body of /generate, of /generate_stream, and of POST /, which is the only one that reads `stream`."""

    inputs: str
    parameters: Parameters | None = None
    stream: bool | None = None


class Continuation(CompletionRequest, kw_only=True):
    """A completion in text-generation-inference's form."""

    details: bool | None = None
    return_full_text: bool | None = None


class PredictRequest(Body):
    """The body of Vertex AI's predictions. `parameters` apply to every instance that does not give its own."""

    instances: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=limits.PROMPTS)]
    parameters: dict[str, Any] | None = None
