"""Links of the site's pages: those to pages stay, those to other files of the repository become paths."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.nightly
LINKS = {
    "[a](cost.md)": "[a](cost.md)",
    "[a](../internals/policy.md#a-batch)": "[a](../internals/policy.md#a-batch)",
    "[result](../../benchmarks/results/x.json)": "result (`benchmarks/results/x.json`)",
    "[README](../../README.md#serve) and [b](../../deploy)": "README (`README.md`) and b (`deploy`)",
    "[README.md](../../README.md)": "`README.md`",
    "[a](https://example.com/../x)": "[a](https://example.com/../x)",
}


def test_links(import_script):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/serving.md"))
    hooks = import_script("release/site_hooks")
    assert {text: hooks.on_page_markdown(text, page) for text in LINKS} == LINKS
