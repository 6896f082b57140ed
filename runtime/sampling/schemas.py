"""Whether a JSON schema has a finite instance at all, or a recursion without an end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def is_finite(schema: Any) -> bool:
    """Return whether a JSON schema may have a finite instance; False only if it surely has none."""
    return _is_finite(schema, schema, {})


def _is_finite(schema: Any, root: Any, known: dict[int, bool]) -> bool:
    """Return it for a schema within `root`; `known`: what was found, and False for the schemas around this one."""
    if not isinstance(schema, Mapping):
        return schema is not False
    if known.get(id(schema)) is not None:
        return known[id(schema)]
    known[id(schema)] = False
    needed = [*_list(schema.get("allOf")), _target(schema.get("$ref"), root)]
    found = all(_is_finite(each, root, known) for each in needed)
    for name in ("anyOf", "oneOf"):
        ways = _list(schema.get(name))
        found = found and (not ways or any(_is_finite(each, root, known) for each in ways))
    types = schema.get("type", "any")
    ways = [_parts(schema, kind) for kind in (types if isinstance(types, list) else [types])]
    found = found and any(all(_is_finite(each, root, known) for each in parts) for parts in ways)
    if found:
        known[id(schema)] = True
    else:  # within another schema around it, it may be found otherwise
        del known[id(schema)]
    return found


def _parts(schema: Mapping[str, Any], kind: Any) -> list[Any]:
    """Return the schemas of what an instance of a type has to contain."""
    if "enum" in schema or "const" in schema:
        return []
    if kind == "object":
        known = schema.get("properties")
        known = known if isinstance(known, Mapping) else {}
        other = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        return [known.get(name, other) for name in _list(schema.get("required")) if isinstance(name, str)]
    if kind == "array" and isinstance(least := schema.get("minItems", 0), int) and least > 0:
        first = _list(schema.get("prefixItems"))
        return [*first[:least], *([schema.get("items", True)] if least > len(first) else [])]
    return []


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _target(reference: Any, root: Any) -> Any:
    """Return what a `$ref` within a schema points to; True if that is not known."""
    if reference == "#":
        return root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return True
    found = root
    for part in unquote(reference[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            return True
    return found
