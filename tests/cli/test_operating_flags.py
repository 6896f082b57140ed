"""The flags of canary and drift become options; tests/cli/test_refusals.py has those that do nothing alone."""

from pathlib import Path

from specbuild.serve.http import server
from specbuild.serve.telemetry import logs


def test_flags_become_options(specbuild, bundle, monkeypatch):
    seen = []
    monkeypatch.setattr(logs, "install", lambda log: None)
    monkeypatch.setattr(server, "check", lambda named, options, *_: seen.append(options))
    flags = "--canary speculation=auto --canary-weight 5 --canary-action none --canary-ignore ttft --drift d"
    for given in ([], [*flags.split(), "--drift-size", 600]):
        assert specbuild("serve", bundle, "--check", *given).status == 0
    without, options = seen
    assert (without.canary, without.drift) == (None, None)
    canary, drift = options.canary, options.drift
    assert (canary.candidate, canary.weight, canary.action, canary.ignore) == ("speculation=auto", 5, "none", ("ttft",))
    assert canary.step_weight == 10
    assert (drift.reference, drift.size, drift.sample) == (Path("d"), 600, None)
