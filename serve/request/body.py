"""The base of request bodies: exact types, null as no field, one error for a wrong field, unknown fields by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, Tag, model_validator
from pydantic_core import PydanticCustomError

from specbuild.serve import limits
from specbuild.serve.errors import ApiError

TEXT, LIST, OBJECT = Tag("[text]"), Tag("[list]"), Tag("[object]")  # `field_error` leaves out what is in brackets


Value = TypeVar("Value")


class _First(FailFast):
    """Pydantic's mark of a list whose first error is the only one, as a part of unions, which hash their parts."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


Every = Annotated[list[Value], _First()]  # of a long list the first wrong value is an error, and not each


def at_most(count: int) -> BeforeValidator:
    """Return what refuses an object of more than `count` members before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_long", "has more than {count} members", {"count": count})
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """A body with exact types, in which null is the same as leaving a field out, whatever the field.

    `check_known` refuses fields that no route knows, unless they are to be ignored.
    """

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, json_schema_extra={"additionalProperties": False}
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


def told_apart(expected: str) -> Discriminator:
    """Return what picks a union's member by the value's JSON type, so that no other member's errors are reported.

    `expected`: what is allowed, for the error of a value of another type.
    """
    return Discriminator(json_type, "wrong_type", f"Input should be {expected}")


def json_type(value: Any) -> str:
    """Return the tag of a union's member for this value."""
    if isinstance(value, str):
        return TEXT.tag
    return (LIST if isinstance(value, list) else OBJECT).tag


def unknown(value: Any, path: str = "") -> Iterator[str]:
    """Yield the names of a body's unknown fields, such as `messages.0.colour`."""
    if isinstance(value, Body):
        yield from (f"{path}{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from unknown(getattr(value, name), f"{path}{name}.")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from unknown(each, f"{path}{index}.")


def check_known(body: Body) -> None:
    """Raise ApiError if a body has an unknown field."""
    if name := next(unknown(body), None):
        told = name[: limits.LABEL_CHARACTERS]
        raise ApiError(
            400,
            f"unknown field {told!r}: leave it out, or serve with --extra-fields ignore",
            param=told,
            code="unknown_field",
        )
