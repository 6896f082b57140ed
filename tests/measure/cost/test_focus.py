"""FOCUS: mandatory columns are there and filled, rows add up, and savings are no credit."""

import csv
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ledgers import DAY, machine, request

from specbuild.measure.cost.focus import COLUMNS, rows, text_of
from specbuild.measure.cost.rows import Rows
from specbuild.measure.cost.spent import spend
from specbuild.runtime.errors import OptionError

ENVIRONMENT = "SPECBUILD_FOCUS_PYTHON"  # a Python that has focus-validator; else the test makes one
_BOTH = """BilledCost BillingAccountId BillingAccountName BillingCurrency BillingPeriodStart BillingPeriodEnd
 ChargeCategory ChargeClass ChargeDescription ChargePeriodStart ChargePeriodEnd ContractedCost EffectiveCost
 InvoiceIssuerName ListCost PricingQuantity PricingUnit ServiceCategory ServiceName""".split()
MANDATORY = {
    "1.2": [*_BOTH, "ProviderName", "PublisherName"],
    "1.4": [*_BOTH, "HostProviderName", "ServiceProviderName"],
}
MAY_BE_NULL = {"ChargeClass"}  # null unless a row corrects another
INSTANT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@pytest.fixture(scope="module")
def spending():
    requests = [request(1), request(2, user=None, tenant=None, plain_seconds=None), request(3, model="n"),
                request(4, time=DAY.format(4, 9), user='b"o,b')]  # fmt: skip
    machines = [machine(), machine(time=DAY.format(4, 10), labels={"account": "a1", "provider": "Metal Ltd"})]
    return spend(Rows(requests, machines))


@pytest.mark.parametrize("version", MANDATORY)
def test_mandatory_columns_are_there_and_filled(spending, version):
    for row in rows(spending, version):
        assert {name for name in MANDATORY[version] if row[name] in (None, "")} == MAY_BE_NULL


@pytest.mark.parametrize("version", COLUMNS)
def test_columns_are_named_and_values_typed_as_the_specification_says(spending, version):
    for row in csv.DictReader(io.StringIO(text_of(spending, version))):
        assert all(re.fullmatch("x_.*|[A-Z][A-Za-z]+", name) for name in row)
        assert ("HostProviderName" in row) == ("ProviderName" not in row) == (version == "1.4")
        assert re.fullmatch("[A-Z]{3}", row["BillingCurrency"])
        for name in ("BillingPeriod", "ChargePeriod"):
            begin, end = row[f"{name}Start"], row[f"{name}End"]
            assert re.fullmatch(INSTANT, begin)
            assert re.fullmatch(INSTANT, end)
            assert begin < end
        for name in ("BilledCost", "EffectiveCost", "ListCost", "ContractedCost", "PricingQuantity"):
            assert re.fullmatch(r"\d+\.\d+", row[name])
        priced = float(row["PricingQuantity"]) * float(row["ListUnitPrice"])
        assert priced == pytest.approx(float(row["ListCost"]), abs=1e-9)


def test_rows_add_up_to_what_the_machines_cost(spending):
    found = rows(spending, "1.4")
    assert sum(row["BilledCost"] for row in found) == pytest.approx(spending.cost)
    kinds = [row["x_Kind"] for row in found]
    assert (set(kinds), kinds.count("requests")) == ({"requests", "other", "idle"}, 4)


def test_what_was_saved_is_in_a_column_of_ours_alone(spending):
    found = rows(spending, "1.2")
    assert all(row["BilledCost"] >= 0 and row["ChargeCategory"] == "Usage" for row in found)
    ann = next(row for row in found if row["x_User"] == "ann" and row["x_Model"] == "m")
    assert (ann["BilledCost"], ann["x_BaselineCost"]) == (pytest.approx(0.01), pytest.approx(0.02))
    assert (ann["ConsumedQuantity"], ann["ConsumedUnit"]) == (110.0, "Tokens")


@pytest.mark.parametrize(
    ("labels", "account", "provider"),
    [({}, "self-hosted", "self-hosted"), ({"account": "a1", "provider": "Metal Ltd"}, "a1", "Metal Ltd")],
)
def test_labels_name_the_account_and_the_provider(labels, account, provider):
    for row in rows(spend(Rows([], [machine(labels=labels)])), "1.2"):
        assert (row["BillingAccountId"], row["InvoiceIssuerName"]) == (account, provider)


def test_a_version_that_nobody_knows_is_refused(spending):
    with pytest.raises(OptionError, match=r"1\.0, 1\.2, 1\.4"):
        text_of(spending, "2.0")


@pytest.fixture(scope="module")
def validator(tmp_path_factory):
    """A Python with focus-validator 1.0.0."""
    if given := os.environ.get(ENVIRONMENT):
        return Path(given)
    folder = tmp_path_factory.mktemp("focus")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    wanted = ["focus-validator==1.0.0", "multimethod<2"]  # pandera 0.17 does not run with a newer one
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    return python


def validated(python, file):
    """What it says; it looks for its list of currencies from where it is installed."""
    where = [
        python,
        "-c",
        "import importlib.util as u; print(u.find_spec('focus_validator').submodule_search_locations[0])",
    ]
    home = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()).parent
    call = "import sys; from focus_validator.main import main; sys.exit(main())"
    command = [python, "-c", call, "--data-file", file, "--validate-version", "1.0"]
    return subprocess.run(command, cwd=home, check=True, capture_output=True, text=True).stdout


@pytest.mark.soak
def test_focus_validator_accepts_1_0_and_not_what_is_wrong(spending, validator, tmp_path):
    text, file = text_of(spending, "1.0"), tmp_path / "rows.csv"
    file.write_text(text, encoding="utf-8")
    assert "Validation succeeded." in validated(validator, file)
    for was, put in (("BilledCost", "Billed"), ("Usage-Based", "Daily"), ("EUR", "EURO"), ("T00:00:00Z", " noon")):
        assert was in text
        file.write_text(text.replace(was, put), encoding="utf-8")
        assert "Validation failed!" in validated(validator, file)
