"""Bodies: null is no field, whichever it is, and a wrong field is one error, by its name and with its bound."""

import asyncio
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from request_bodies import BODIES, NO_VALUES, PLACES, fields, kinds, put
from route_client import ASKED, CHATS, COMPLETIONS, MESSAGES, RESPONSES

from specbuild.serve import limits
from specbuild.serve.errors import ApiError
from specbuild.serve.request import body
from specbuild.serve.request.body import Body, decoded, schemas
from specbuild.serve.request.fields import ChatRequest, CompletionRequest

places = st.sampled_from(PLACES)
values = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def read(kind, body, known=False):
    """What a body is read as, or its error."""
    try:
        return decoded(kind, json.dumps(body).encode(), known)
    except ApiError as error:
        return error.param, error.message


def test_the_bodies_have_every_field_of_every_kind():
    """No other is theirs, by their schemas."""
    had = {(kind, path[-1]) for root, body in BODIES.items() for path, kind in fields(read(root, body))}
    inherited = {(base, name) for kind, name in had for base in kind.__mro__ if issubclass(base, Body)}
    every = {(kind, name) for kind in kinds() for name in kind.__struct_fields__}
    assert {(kind, name) for kind, name in every - had - inherited if name not in NO_VALUES} == set()
    assert not any(schemas()[kind.__name__]["additionalProperties"] for kind in BODIES)


@pytest.mark.parametrize("kind", BODIES)
def test_null_is_no_field_and_others_are_named(kind):
    for path in (path for each, path in PLACES if each is kind):
        assert read(kind, put(BODIES[kind], path, None)) == read(kind, put(BODIES[kind], path)), path
        beside = (*path[:-1], "a_field_that_nothing_reads")
        assert read(kind, put(BODIES[kind], beside, None)) == read(kind, BODIES[kind])
        assert read(kind, put(BODIES[kind], beside, 1)) == read(kind, BODIES[kind])
        name = ".".join(map(str, beside))
        assert read(kind, put(BODIES[kind], beside, 1), known=True)[0] == name


@given(places, values)
def test_a_wrong_value_is_one_error_of_its_own_field(place, value):
    kind, path = place
    told, name = read(kind, put(BODIES[kind], path, value)), ".".join(map(str, path))
    if isinstance(told, tuple):
        param, message = told
        assert param == name or param.startswith(f"{name}.")
        assert message.startswith(f"{param}: ")


@pytest.mark.parametrize("kind", BODIES)
def test_types_are_exact(kind):
    """Of another type of JSON that Python takes for the same: 1 for true, "1" for 1, 1.5 for 1."""
    for path in (path for each, path in PLACES if each is kind):
        value = BODIES[kind]
        for part in path:
            value = value[part]
        others = {bool: [1, "true"], int: [True, "1", 1.5], float: [True, "1"]}.get(type(value), [])
        assert all(isinstance(read(kind, put(BODIES[kind], path, other)), tuple) for other in others), path


@pytest.mark.parametrize("field", ["session", "colour"])
def test_a_number_that_nothing_holds_is_an_error_of_the_body(field):
    """Also where no route knows its field."""
    with pytest.raises(ApiError, match="out of range"):
        decoded(CompletionRequest, f'{{"prompt": "x", "{field}": 1e999}}'.encode(), True)


@pytest.mark.parametrize(("field", "value", "bound"), [("top_p", 1.5, "1"), ("n", 0, "1"), ("user", "x" * 300, "256")])
def test_a_value_beyond_a_bound_is_told_the_bound(field, value, bound):
    kind = next(kind for kind in BODIES if {field, "n"} <= {*kind.__struct_fields__})
    found, said = read(kind, put(BODIES[kind], (field,), value))
    assert (found, bound in said) == (field, True)


MANY = [
    (CompletionRequest, "prompt.0", {"prompt": [-1] * 10**6}),
    (CompletionRequest, "prompt.3.7", {"prompt": [[1] * 9] * 3 + [[1] * 7 + [-1] * 10**6]}),
    (CompletionRequest, "logit_bias", {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(10**5)), "much")}),
    (ChatRequest, "messages.0.content.0.type", {"messages": [{"role": "user", "content": [{}] * 10**5}]}),
]


@pytest.mark.parametrize(("kind", "first", "fields"), MANY)
def test_of_many_wrong_values_the_first_is_the_error(kind, first, fields):
    found, _ = read(kind, fields)
    assert found == first


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, RESPONSES, MESSAGES, "/tokenize", "/generate"])
def test_a_large_body_is_read_in_a_thread_and_a_small_one_is_not(client, monkeypatch, path):
    """In a thread for a small body would take longer than to read it."""
    on_loop = list[bool]()

    def noted(*given):
        with suppress(RuntimeError):
            on_loop.append(False)
            asyncio.get_running_loop()
            on_loop[-1] = True
        return decoded(*given)

    monkeypatch.setattr(body, "decoded", noted)
    for size in (10, limits.SMALL_BODY_BYTES):
        client.refusal(path, **ASKED.get(path, {}), colour="x" * size)
    assert on_loop == [True, False]
