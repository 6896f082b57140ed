"""A body for each route of the server with every field that it knows, and what is done to such bodies."""

import copy

from data_files import rows

from specbuild.serve.http import app  # noqa: F401 - whose routes have the bodies
from specbuild.serve.request.body import Body, converted

NO_VALUES = {"refusal", "audio", "function_call", "encrypted_content", "typical_p", "adapter_id"}  # null and no other


def kinds(base=Body):
    """Every kind of body and part of one."""
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


NAMED = {kind.__name__: kind for kind in kinds()}
BODIES = {NAMED[each["kind"]]: each["body"] for each in rows("request_bodies.jsonl")}


def fields(value, path=()):
    """Where a body's fields are, those of its parts included, and which kind of body has each."""
    if isinstance(value, Body):
        for name in value.__struct_fields__:
            if getattr(value, name) is not None:
                yield (*path, name), type(value)
                yield from fields(getattr(value, name), (*path, name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from fields(each, (*path, index))


PLACES = [(kind, path) for kind, body in BODIES.items() for path, _ in fields(converted(kind, body))]


def put(body, path, *value):
    """The body with this value at a place, or without the field if there is no value."""
    changed = copy.deepcopy(body)
    parent = changed
    for part in path[:-1]:
        parent = parent[part]
    if value:
        parent[path[-1]] = value[0]
    else:
        del parent[path[-1]]
    return changed
