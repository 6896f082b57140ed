"""What deploy/ has fits the server: its metrics, its routes, its flags."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from specbuild.cli.application import cli
from specbuild.cli.serve import command
from specbuild.runtime import Engine
from specbuild.runtime.errors import BundleError
from specbuild.serve.metrics import Metrics

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FLAGS = {flag for option in command.params for flag in option.opts}


@pytest.fixture(scope="module")
def engine(bundle):
    with Engine.load(bundle) as engine:
        yield engine


def test_the_dashboard_asks_for_metrics_that_there_are(engine):
    text = Metrics({"model": engine}).render()[0].decode()
    there = set(re.findall(r"^(specbuild:\w+)", text, re.MULTILINE))
    there |= {
        f"{name}_total" for name in re.findall(r"^# TYPE (specbuild:\w+?)(?:_total)? counter", text, re.MULTILINE)
    }
    there |= {f"{name}_bucket" for name in re.findall(r"^# TYPE (specbuild:\w+) histogram", text, re.MULTILINE)}
    board = json.loads((DEPLOY / "grafana.json").read_text())
    asked = re.findall(r"specbuild:\w+", json.dumps(board))
    assert len(asked) > 20
    assert set(asked) <= there
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in board["panels"]})


NAMES = """canary_harmful watcher_up"""  # of what is asked for by a flag


def test_alerts_are_of_metrics_that_there_are(engine):
    text = Metrics({"model": engine}).render()[0].decode()
    there = set(re.findall(r"specbuild:\w+", text)) | {f"specbuild:{name}" for name in NAMES.split()}
    there |= {f"{name}_total" for name in there}  # the type of a counter, which has no sample yet
    there |= {f"{name}{part}" for name in there for part in ("_bucket", "_count")}  # of a histogram
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    assert {name for rule in rules for name in re.findall(r"specbuild:\w+", rule["expr"])} <= there
    for rule in rules:
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        (by,) = {*re.findall(r"by \(([^)]*)\)", rule["expr"])}
        assert labels <= set(by.split(", "))


def manifests():
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_the_pod_s_flags_probes_and_times_are_the_server_s():
    deployment, service, _ = manifests()
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    flags = [each for each in container["args"] if each.startswith("--")]
    assert set(flags) <= FLAGS
    scraped = deployment["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"]
    assert container["args"][container["args"].index("--admin-port") + 1] == scraped, "where metrics need no key"
    drain = float(container["args"][container["args"].index("--shutdown-timeout") + 1])
    waits = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain + waits
    probes = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert probes == {"/health/ready", "/health/live"}
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


def test_the_unit_is_one_and_its_flags_are_the_server_s():
    text = (DEPLOY / "specbuild.service").read_text()
    commands = [line.partition("=")[2] for line in text.splitlines() if line.startswith("ExecStart")]
    for each in commands:
        assert {word for word in shlex.split(each) if word.startswith("--")} <= FLAGS
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    done = subprocess.run(["systemd-analyze", "verify", DEPLOY / "specbuild.service"], capture_output=True, text=True)
    wrong = [line for line in done.stderr.splitlines() if "specbuild.service" in line and "not executable" not in line]
    assert wrong == []


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_the_images_serve_as_nobody_in_particular(name):
    lines = (DEPLOY / name).read_text().splitlines()
    entry = json.loads(next(line for line in lines if line.startswith("ENTRYPOINT")).partition(" ")[2])
    assert [Path(entry[0]).name, entry[1]] == ["specbuild", "serve"]
    assert {word for word in entry if word.startswith("--")} <= FLAGS
    assert "USER 10001" in lines
    copied = [line.split()[-2] for line in lines if line.startswith("COPY") and "--from" not in line]
    assert copied == ["."]


@pytest.mark.slow
def test_a_check_loads_and_ends(bundle):
    done = CliRunner().invoke(cli, ["serve", str(bundle), "--check", "--port", "1"])
    assert done.exit_code == 0
    assert "this can be served" in done.stderr


def test_a_check_says_what_is_wrong(bundle, tmp_path):
    with pytest.raises(BundleError, match=r"manifest\.json"):
        CliRunner().invoke(cli, ["serve", str(tmp_path), "--check"], catch_exceptions=False)
