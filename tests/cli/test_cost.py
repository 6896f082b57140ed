"""`specbuild cost` from a shell."""

import csv
import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from ledgers import machine, request, written


@pytest.fixture
def ledger(tmp_path):
    rows = [machine(), request(1), request(2, user="[red]bob"), request(3, user=None, plain_seconds=None)]
    return written(tmp_path / "l.jsonl", rows, torn=b'{"time"')


def test_tables(specbuild, ledger):
    done = specbuild("cost", ledger, "--by", "user")
    assert (done.status, done.err) == (0, "")
    for words in ("the machine, EUR", "other work", "[red]bob", "all requests", "1 lines were cut off", "1e+04"):
        assert words in done.out


def test_json_in_another_price(specbuild, ledger):
    asked = ("--json", "--by", "user,day", "--price-per-hour", 36, "--currency", "USD")
    found = json.loads(specbuild("cost", ledger, ledger, *asked).out)
    assert (found["currency"], found["total"]["requests"], len(found["groups"])) == ("USD", 6, 3)
    assert found["total"]["cost"] == pytest.approx(0.6)


@pytest.mark.slow
def test_files(specbuild, ledger, tmp_path):
    files = [tmp_path / name for name in ("rows.csv", "groups.parquet", "page.html")]
    done = specbuild("cost", ledger, "--by", "user", "--focus", files[0], "--parquet", files[1],
                     "--html", files[2])  # fmt: skip
    assert done.status == 0, done.err
    rows = [*csv.DictReader(files[0].open(encoding="utf-8"))]
    assert sum(float(row["BilledCost"]) for row in rows) == pytest.approx(3.6)
    groups = pq.read_table(files[1]).to_pylist()
    assert [(each["user"], each["requests"], each["saved_value"]) for each in groups] == [
        ("", 1, 0.0), ("[red]bob", 1, pytest.approx(0.01)), ("ann", 1, pytest.approx(0.01)),
    ]  # fmt: skip
    assert "<svg" in files[2].read_text(encoding="utf-8")


def test_what_is_not_installed_is_named(specbuild, ledger, tmp_path, monkeypatch):
    for flag, package in (("--parquet", "pyarrow"), ("--html", "matplotlib")):
        monkeypatch.setitem(sys.modules, package, None)
        assert package in specbuild("cost", ledger, flag, tmp_path / "x").refusal()
        assert not (tmp_path / "x").exists()


def test_nothing_large_is_imported_for_a_table():
    large = {"torch", "matplotlib", "pyarrow", "onnxruntime"}
    code = f"import sys, specbuild.cli.cost; print(sorted({large} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
