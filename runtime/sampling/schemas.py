"""Finds JSON schemas that no finite value satisfies, because they require themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any
from urllib.parse import unquote


def values(data: Any) -> Iterator[Any]:
    """Yield JSON data and every value within it."""
    waiting = [data]
    while waiting:
        yield (one := waiting.pop())
        waiting += inner(one)


def inner(data: Any) -> list[Any]:
    """Return the values of an object or the items of an array."""
    if isinstance(data, Mapping):
        return list(data.values())
    return list(data) if isinstance(data, list | tuple) else []


def is_finite(schema: Any) -> bool:
    """Return whether a JSON schema may have a finite instance; False only if it surely has none.

    The schemas that may have one are the least fixed point: those that need no other, then those that need only these.
    """
    waiting = [each for each in values(schema) if isinstance(each, Mapping)]
    found, users = set[int](), defaultdict[int, list[Any]](list)
    for each in waiting:
        for part in (part for ways in _needs(each, schema) for way in ways for part in way):
            users[id(part)].append(each)
    while waiting:
        each = waiting.pop()
        if id(each) not in found and _follows(_needs(each, schema), found):
            found.add(id(each))
            waiting += users[id(each)]
    return _is_known(schema, found)


def _follows(needs: Iterable[list[list[Any]]], found: Set[int]) -> bool:
    return all(any(all(_is_known(part, found) for part in way) for way in ways) for ways in needs)


def _is_known(schema: Any, found: Set[int]) -> bool:
    return id(schema) in found if isinstance(schema, Mapping) else schema is not False


def _needs(schema: Mapping[str, Any], root: Any) -> Iterator[list[list[Any]]]:
    """Yield, for each thing that an instance needs, the ways to have it: each is schemas of what it contains."""
    yield [[*_list(schema.get("allOf")), _target(schema.get("$ref"), root)]]
    for name in ("anyOf", "oneOf"):
        if union := _list(schema.get(name)):
            yield [[each] for each in union]
    types = schema.get("type", "any")
    yield [_parts(schema, kind) for kind in (types if isinstance(types, list) else [types])]


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
