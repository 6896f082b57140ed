"""The documents of a canary: their templates are what they say, and name flags and metrics that there are."""

import re
from pathlib import Path

import pytest
import yaml

from specbuild.cli.operating_flags import OPTIONS
from specbuild.serve.canary.assignment import CanaryOptions

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, METRICS = ((DOCS / name).read_text(encoding="utf-8") for name in ("guides/operating.md", "reference/metrics.md"))


def templates():
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", METRICS, re.DOTALL)]
    return {block["kind"]: block for block in blocks}


@pytest.fixture
def exposed(make_client):
    return make_client(canary=CanaryOptions(candidate="speculation=chain:2")).get("/metrics").text


def test_templates_ask_for_what_is_exposed(exposed):
    found = templates()
    argo, flagger = found["AnalysisTemplate"], found["MetricTemplate"]
    assert (argo["apiVersion"], flagger["apiVersion"]) == ("argoproj.io/v1alpha1", "flagger.app/v1beta1")
    (metric,) = argo["spec"]["metrics"]
    assert {"name", "interval", "failureCondition", "successCondition", "provider"} <= metric.keys()
    assert flagger["spec"]["provider"]["type"] == "prometheus"
    for query in (metric["provider"]["prometheus"]["query"], flagger["spec"]["query"]):
        name, labels = re.fullmatch(r"max\(([\w:]+)\{(.*)\}\)\s*", query).groups()
        assert f"\n{name}{{" in exposed
        assert labels


def test_every_metric_and_flag_is_on_its_page(exposed):
    named = set(re.findall(r"`(specbuild:canary_\w+)", METRICS))
    assert named == set(re.findall(r"^# TYPE (specbuild:canary_\w+)", exposed, re.MULTILINE))
    for option in OPTIONS:
        assert f"| `{option.opts[0]}` |" in PAGE
