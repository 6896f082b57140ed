"""The extraction: JSON of the schema, whatever the model is."""

import jsonschema
import pytest

from specbuild.runtime import Engine
from specbuild.runtime.errors import PromptError


def test_the_fields_are_those_of_the_schema(example, bundle):
    extract = example("extract")
    with Engine.load(bundle) as engine:
        fields = extract.extract(engine, "Ada Lovelace, born in London in 1815, wrote the first program.")
        jsonschema.validate(fields, extract.SCHEMA)
        with pytest.raises(PromptError):
            extract.extract(engine, "a " * 5000)
