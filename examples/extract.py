"""Extract fields from a text as JSON of a schema; what the schema forces is drafted without a model.

python examples/extract.py coder.bundle 'Ada Lovelace, born in London in 1815, wrote the first program.'
"""

from __future__ import annotations

import json
import sys
from typing import Any

from specbuild.runtime import Engine, SamplingParams, SpecbuildError, StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "birthplace": {"type": "string", "maxLength": 40},
        "year_of_birth": {"type": "integer", "minimum": 0, "maximum": 2100},
    },
    "required": ["name", "birthplace", "year_of_birth"],
    "additionalProperties": False,
}


def extract(engine: Engine, text: str) -> dict[str, Any]:
    """Return the fields; a text that cannot be answered raises its error."""
    params = SamplingParams(max_new_tokens=128, structured_outputs=StructuredOutputs(json=SCHEMA))
    (result,) = engine.generate(f"{text}\nThe same as JSON: ", params)
    if result.error:
        raise result.error
    fields: dict[str, Any] = json.loads(result.text)
    return fields


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} BUNDLE TEXT")
    try:
        with Engine.load(sys.argv[1]) as engine:
            print(json.dumps(extract(engine, sys.argv[2]), indent=2))
    except (SpecbuildError, json.JSONDecodeError) as error:
        sys.exit(f"{sys.argv[0]}: {error}")
