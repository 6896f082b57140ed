"""The flags of a canary become options; tests/cli/test_refusals.py has those that do nothing alone."""

from specbuild.serve.http import server
from specbuild.serve.telemetry import logs


def test_flags_become_options(specbuild, bundle, monkeypatch):
    seen = []
    monkeypatch.setattr(logs, "install", lambda log: None)
    monkeypatch.setattr(server, "check", lambda named, options, *_: seen.append(options))
    flags = "--canary speculation=auto --canary-weight 5 --canary-action none --canary-ignore ttft"
    for given in ([], flags.split()):
        assert specbuild("serve", bundle, "--check", *given).status == 0
    without, options = seen
    assert without.canary is None
    canary = options.canary
    assert (canary.candidate, canary.weight, canary.action, canary.ignore) == ("speculation=auto", 5, "none", ("ttft",))
