"""What text-generation-inference's fields may be: what would change nothing is taken, what would be ignored is not."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specbuild.serve.clouds.fields import Parameters


@pytest.mark.parametrize(
    "fields", [{"watermark": False}, {"best_of": 1}, {"typical_p": None}, {"top_n_tokens": 0}, {"adapter_id": None}]
)
def test_what_changes_nothing_is_taken(fields: dict[str, Any]) -> None:
    assert Parameters.model_validate(fields).max_new_tokens is None


@pytest.mark.parametrize(
    "fields",
    [
        *({"watermark": True}, {"best_of": 2}, {"typical_p": 0.9}, {"top_n_tokens": 3}, {"adapter_id": "x"}),
        *({"temperature": 0.0}, {"top_p": 1.0}, {"top_k": 0}, {"decoder_input_details": True}, {"seed": -1}),
        *({"max_new_tokens": 0}, {"temperature": "1"}, {"stop": "x"}, {"grammar": {"type": "ebnf", "value": ""}}),
    ],
)
def test_what_would_be_ignored_or_is_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        Parameters.model_validate(fields)
