"""The flags of a canary become options; tests/cli/test_refusals.py has those that do nothing alone."""

import pytest

from specbuild.serve.http import server
from specbuild.serve.telemetry import logs


@pytest.fixture
def seen(monkeypatch):
    """The bundles and options of each `serve --check`, which loads nothing."""
    found = []
    monkeypatch.setattr(logs, "install", lambda log: None)
    monkeypatch.setattr(server, "check", lambda named, options, *_: found.append((named, options)))
    return found


def test_flags_become_options(specbuild, bundle, seen):
    flags = "--canary speculation=auto --canary-weight 5 --canary-action none --canary-ignore ttft"
    for given in ([], flags.split()):
        assert specbuild("serve", bundle, "--check", *given).status == 0
    (_, without), (_, options) = seen
    assert without.canary is None
    canary = options.canary
    assert (canary.candidate, canary.weight, canary.action, canary.ignore) == ("speculation=auto", 5, "none", ("ttft",))


def test_a_files_single_value_of_a_flag_that_may_be_repeated_is_one(specbuild, bundle, seen, tmp_path):
    (tmp_path / "f.yaml").write_text("served-model-name: one\nallowed-origins: ['https://a.example']\n")
    assert specbuild("serve", bundle, "--check", "--config", tmp_path / "f.yaml").status == 0
    ((named, options),) = seen
    assert (named, options.allowed_origins) == ([(("one",), bundle)], ("https://a.example",))


def test_replicas_are_not_checked_here(specbuild, bundle, seen):
    assert "--check loads bundles here, not on replicas" in specbuild("serve", bundle, "--check", "--ray").refusal()
    assert not seen
