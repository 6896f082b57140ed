"""Limits: docs/reference/http.md has each of them."""

import re
from pathlib import Path

from specbuild.serve import limits

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "http.md"


def test_the_docs_have_each_limit():
    table = dict(re.findall(r"^\| `([A-Z_]+)` \| ([0-9,]+)", DOCS.read_text(), re.MULTILINE))
    own = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert {name: int(told.replace(",", "")) for name, told in table.items()} == own
