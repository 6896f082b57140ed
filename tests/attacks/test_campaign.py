"""The campaign: every class runs, every kind of fault is found by its name, and a case is the same again."""

import json
from pathlib import Path

import pytest
from campaign import __main__ as command
from campaign.attack import Bench
from campaign.bundle_copy import copied, manifest, put, sealed
from campaign.campaign import Campaign
from campaign.classes import CLASSES, LIMITS
from campaign.watch import Bounds

from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.speculation.timing_table import FILE

SEED, PLANTED = 6, "planted_attacks:"
SLOW = ("checkpoints", "signals")  # to prepare: torch, and a build
FAST = tuple(name for name in CLASSES if name not in SLOW)


CHANCES = {"likely": [-2.0, 0.0], "chance": [0.1, 0.9], "step": 0.7, "reach": [0, 1], "lookup": [0.0, 0.5]}
TIMES = {"verify": [[1, 0.002], [8, 0.004]], "draft": [[1, 0.001]], "plain": 0.1, "round": 0.2, "level": 0.3}


def tuned(bundle, place):
    """A copy of a bundle with a table of timings that nobody measured."""
    root = copied(bundle, place)
    table = {"schema": 2, "machine": {}, "widest": "best:8", "times": {"1": TIMES, "4": TIMES}}
    put(root, FILE, json.dumps(table | {"chances": {"greedy": CHANCES, "sampled": CHANCES}}).encode(), hashed=True)
    return root


@pytest.fixture
def campaign(tmp_path):
    """Of no bundle, which planted faults do not need."""
    return Campaign(Bench(tmp_path, tmp_path), SEED, tmp_path / "findings")


@pytest.mark.slow(only=("fast",))
@pytest.mark.nightly(only=("slow",))
@pytest.mark.parametrize("classes", [FAST, SLOW], ids=["fast", "slow"])
def test_every_class_runs(classes, bundle, campaign, tmp_path):
    campaign.bench = Bench(tuned(bundle, tmp_path), tmp_path)
    campaign.replay([(name, number) for number in (1, 3) for name in classes])
    assert {name: tally.cases for name, tally in campaign.tallies.items()} == dict.fromkeys(classes, 2)
    assert not campaign.findings


@pytest.mark.slow(but=("Crash-crash", "Lines-raw"))
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("Raw", "raw"), ("Panic", "raw"), ("Lines", "raw"), ("Wrong", "wrong"), ("Crash", "crash"), ("Hang", "hang")),
        ("Memory", "memory"),
    ],
)
def test_a_planted_fault_is_found(name, kind, campaign, monkeypatch):
    monkeypatch.setitem(LIMITS, PLANTED + name, 60.0 if name == "Memory" else 0.5)
    campaign.bounds = Bounds(growth=64 << 20, still=0.2)
    campaign.replay([(PLANTED + name, 3)])
    (found,) = campaign.findings.values()
    assert found[0].outcome.kind == kind
    assert campaign.tallies[PLANTED + name].found == 1


@pytest.mark.nightly
def test_a_campaign_goes_on_after_findings_and_says_what_it_found(tmp_path):
    """One status for findings, one for none, one where nothing could be tried; and the same findings again."""

    def run(*given):
        told = tmp_path / "told.json"
        more = ["--bundle", str(tmp_path), "--findings", str(tmp_path / "findings"), "--json", str(told)]
        return command.main([*given, *more]), json.loads(told.read_text()) if told.exists() else {}

    cases = [f"{PLANTED}Mixed:{number}" for number in range(40)] + [f"{PLANTED}Crash:{number}" for number in range(2)]
    status, told = run("--only", ",".join(cases[::-1]), "--seed", "9")
    mixed, crash = (told["classes"][PLANTED + name] for name in ("Mixed", "Crash"))
    assert (status, told["seed"], crash["findings"]) == (1, 9, 2)
    assert mixed["cases"] == mixed["passed"] + mixed["refused"] + mixed["findings"] == 40
    raw, _ = sorted(told["findings"], key=lambda each: each["kind"] != "raw")  # each fault once, however often found
    number = (Path(raw["folder"]) / "input" / "input.txt").read_text()
    status, told = run("--only", raw["again"][0].partition("ONLY=")[2], "--seed", "9")
    assert (status, [each["detail"] for each in told["findings"]]) == (1, [f"ValueError: raw {number}"])
    assert run("--only", f"{PLANTED}Unprepared:0")[0] == 2
    status, told = run("--classes", f"{PLANTED}Sound,{PLANTED}Refused", "--minutes", "0.02")
    assert (status, told["findings"]) == (0, [])


def test_a_manifest_is_sealed_as_a_build_seals_it(bundle):
    body = manifest(bundle)
    assert sealed(body)["digest"] == body["digest"]
    assert Bundle.open(bundle).manifest.backend == body["backend"]
