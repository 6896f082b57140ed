"""Request bodies: structs that msgspec reads from bytes, up to the first value that is wrong."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from specbuild.serve import limits
from specbuild.serve.errors import ApiError

_PLACE = re.compile(r"\.(\w+)|\[(\d+)\]")  # of a value: names of fields and numbers of items
_TOOL_TYPE = re.compile(r"tools\.\d+\.type")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_SCHEMAS = "#/components/schemas/{name}"


class Body(msgspec.Struct, omit_defaults=True):
    """A body, or a part of one. Types are exact, and null is the same as leaving a field out."""


Kind = TypeVar("Kind", bound=Body)


async def read(request: Request, kind: type[Kind], known: bool) -> Kind:
    """Return a request's body, which is decoded in a thread unless it is small; see `decoded`."""
    data = await json_of(request)
    if len(data) <= limits.SMALL_BODY_BYTES:
        return decoded(kind, data, known)
    return await asyncio.to_thread(decoded, kind, data, known)


async def json_of(request: Request) -> bytes:
    """Return the bytes of a body that is JSON by its header, which no page of another origin can claim unasked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(400, "the body is not JSON by its header: send Content-Type: application/json")
    return await request.body()


def decoded(kind: type[Kind], data: bytes, known: bool = False) -> Kind:
    """Return the body that JSON has; raises ApiError for its first wrong value.

    `known`: whether a field that no route knows is an error too.
    """
    try:
        if known:
            return converted(kind, msgspec.json.decode(data), known)
        return _decoder(kind).decode(data)  # type: ignore[no-any-return]
    except (ValueError, RecursionError) as error:
        raise _body_error(error) from None


def converted(kind: type[Kind], fields: Any, known: bool = False) -> Kind:
    """Return the body with these fields; see `decoded`."""
    try:
        body = msgspec.convert(fields, kind)
    except (ValueError, RecursionError) as error:
        raise _body_error(error) from None
    if known:
        _check_known(body, fields)
    return body


def fields_of(data: bytes) -> dict[str, Any]:
    """Return the fields of any JSON object; raises ApiError if it is none."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise _body_error(error) from None


@lru_cache
def _decoder(kind: type[Body]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _body_error(error: Exception) -> ApiError:
    """Return the error for a body that msgspec refuses, by the name of the field that is wrong."""
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, "the body is not JSON: send an object")
    said, _, place = str(error).partition(" - at ")
    path = [name or number for name, number in _PLACE.findall(place)]
    missing = _MISSING.fullmatch(said)
    if missing:
        path.append(missing[1])
    if missing or said.endswith("got `null`"):
        said = "missing: give it"
    where = ".".join(path)
    if _TOOL_TYPE.fullmatch(where):
        said += ": tools here are functions with a JSON schema, no custom and no hosted ones"
    said = said.replace(" | null", "").replace("`", "")
    return ApiError(400, f"{where or 'the body'}: {said}"[:500], param=where or None)


def _check_known(body: Body, fields: Any) -> None:
    if name := next(_unknown(body, fields, ""), None):
        told = name[: limits.LABEL_CHARACTERS]
        raise ApiError(
            400,
            f"unknown field {told!r}: leave it out, or serve with --extra-fields ignore",
            param=told,
            code="unknown_field",
        )


def _unknown(value: Any, given: Any, path: str) -> Iterator[str]:
    """Yield the names of fields that were given and that a body does not have, such as `messages.0.colour`."""
    if isinstance(value, Body):
        for name, each in given.items():
            if name in value.__struct_fields__:
                yield from _unknown(getattr(value, name), each, f"{path}{name}.")
            elif each is not None and name != value.__struct_config__.tag_field:
                yield f"{path}{name}"
    elif isinstance(value, list) and value and isinstance(value[0], Body):
        for number, (one, each) in enumerate(zip(value, given, strict=True)):
            yield from _unknown(one, each, f"{path}{number}.")


def takes(kind: type[Body] | None = None) -> dict[str, Any]:
    """Return what OpenAPI says of a route with this body; None: with any object."""
    schema = {"$ref": _SCHEMAS.format(name=kind.__name__)} if kind else {"type": "object"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def schemas() -> dict[str, Any]:
    """Return OpenAPI's schema of every body, by name."""
    _, found = msgspec.json.schema_components(_kinds(Body), ref_template=_SCHEMAS)
    return {name: {**schema, "additionalProperties": False} for name, schema in found.items()}


def _kinds(base: type[Body]) -> Iterator[type[Body]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)
