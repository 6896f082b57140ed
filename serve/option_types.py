"""Types of options with their bounds, and the check that values are of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from specbuild.runtime.errors import OptionError, shown

Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0, le=1e12)]  # without infinity
Share = Annotated[float, Meta(ge=0, le=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]


def check_types(options: Any) -> None:
    """Raise OptionError if a field of a dataclass has a value that is not of its type."""
    for name, kind in get_type_hints(type(options), include_extras=True).items():
        value = getattr(options, name)
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            known = f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else str(error)
            wanted = known.removeprefix("Expected ").replace("`", "")
            raise OptionError(f"{name} must be {wanted}, not {shown(value)}") from None
