"""Manifests and timing tables whose digest and hashes are right, and which no build wrote."""

import json

import pytest
from campaign.bundle_copy import MANIFEST, manifest, sealed
from data_files import table

from specbuild.runtime import Engine
from specbuild.runtime.errors import SpecbuildError

CHANGES = table("wrong_manifests.json") | {"max_seq_len": [0, 10**4000]}  # by the field: values that are wrong


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in CHANGES.items() for value in values])
def test_a_manifest_that_was_sealed_again_is_refused(bundle_copy, field, value):
    body = manifest(bundle_copy)
    *outer, last = (name.replace("/", ".") for name in field.split("."))
    at = body
    for name in outer:
        at = at[name]
    at[last] = value
    (bundle_copy / MANIFEST).write_text(json.dumps(sealed(body)), encoding="utf-8")
    with pytest.raises(SpecbuildError) as caught:
        Engine.load(bundle_copy, threads=1)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
