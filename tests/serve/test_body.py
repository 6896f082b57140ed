"""Bodies: null is no field, whichever it is, and a wrong field is one error, by its name and with its bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from request_bodies import BODIES, NO_VALUES, PLACES, fields, kinds, put
from route_client import SAID

from specbuild.serve.errors import ApiError, validated
from specbuild.serve.request.body import Body, check_known, unknown
from specbuild.serve.request.fields import ChatRequest, CompletionRequest

places = st.sampled_from(PLACES)
values = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def read(kind, body):
    """What a body is read as, or its error."""
    try:
        return validated(kind, body).model_dump(exclude_unset=True)
    except ApiError as error:
        return error.param, error.message


def test_the_bodies_have_every_field_of_every_kind():
    """No other is theirs, by their schemas."""
    had = {(kind, path[-1]) for root, body in BODIES.items() for path, kind in fields(root.model_validate(body))}
    inherited = {(base, name) for kind, name in had for base in kind.__mro__ if issubclass(base, Body)}
    every = {(kind, field.alias or name) for kind in kinds() for name, field in kind.model_fields.items()}
    assert {(kind, name) for kind, name in every - had - inherited if name not in NO_VALUES} == set()
    assert all(kind.model_json_schema()["additionalProperties"] is False for kind in BODIES)


@pytest.mark.parametrize("kind", BODIES)
def test_null_is_no_field_and_others_are_named(kind):
    for path in (path for each, path in PLACES if each is kind):
        assert read(kind, put(BODIES[kind], path, None)) == read(kind, put(BODIES[kind], path)), path
        beside = (*path[:-1], "a_field_that_nothing_reads")
        assert read(kind, put(BODIES[kind], beside, None)) == read(kind, BODIES[kind])
        try:
            parsed = kind.model_validate(put(BODIES[kind], beside, 1))
        except ValueError:
            continue  # it is part of a tool or schema that is no body
        for name in unknown(parsed):
            assert name == ".".join(map(str, beside))
            with pytest.raises(ApiError) as refused:
                check_known(parsed)
            assert (refused.value.status, refused.value.param) == (400, name)


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


@pytest.mark.parametrize(("field", "value", "bound"), [("top_p", 1.5, "1"), ("n", 0, "1"), ("user", "x" * 300, "256")])
def test_a_value_beyond_a_bound_is_told_the_bound(field, value, bound):
    kind = next(kind for kind in BODIES if {field, "n"} <= kind.model_fields.keys())
    found, said = read(kind, put(BODIES[kind], (field,), value))
    assert (found, bound in said) == (field, True)


LONG = [
    (CompletionRequest, {"prompt": [-1] * 10**5}),
    (CompletionRequest, {"prompt": [[-1] * 10**5] * 4}),
    (CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(10**5)), "much")}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 10**5}]}),
    (ChatRequest, {"messages": [{}] * 4000}),
    (ChatRequest, {"messages": SAID, "metadata": dict.fromkeys(map(str, range(10**5)), 1)}),
]


@pytest.mark.parametrize(("kind", "fields"), LONG)
def test_a_body_of_many_errors_has_few(kind, fields):
    """Each would be an object made on the event loop."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(fields)
    assert refused.value.error_count() <= 2
