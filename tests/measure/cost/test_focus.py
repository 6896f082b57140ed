"""FOCUS: mandatory columns are there and filled, rows add up, and savings are no credit."""

import csv
import io
import re

import pytest
from ledgers import DAY, machine, request

from specbuild.measure.cost.focus import rows, text_of
from specbuild.measure.cost.rows import Rows
from specbuild.measure.cost.spent import spend

MANDATORY = """BilledCost BillingAccountId BillingAccountName BillingCurrency BillingPeriodStart BillingPeriodEnd
 ChargeCategory ChargeClass ChargeDescription ChargePeriodStart ChargePeriodEnd ContractedCost EffectiveCost
 InvoiceIssuerName ListCost PricingQuantity PricingUnit ProviderName PublisherName ServiceCategory
 ServiceName""".split()
MAY_BE_NULL = {"ChargeClass"}  # null unless a row corrects another
INSTANT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@pytest.fixture(scope="module")
def spending():
    requests = [request(1), request(2, user=None, tenant=None, plain_seconds=None), request(3, model="n"),
                request(4, time=DAY.format(4, 9), user='b"o,b')]  # fmt: skip
    machines = [machine(), machine(time=DAY.format(4, 10), labels={"account": "a1", "provider": "Metal Ltd"})]
    return spend(Rows(requests, machines))


def test_mandatory_columns_are_there_and_filled(spending):
    for row in rows(spending):
        assert {name for name in MANDATORY if row[name] in (None, "")} == MAY_BE_NULL


def test_columns_are_named_and_values_typed_as_the_specification_says(spending):
    for row in csv.DictReader(io.StringIO(text_of(spending))):
        assert all(re.fullmatch("x_.*|[A-Z][A-Za-z]+", name) for name in row)
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
    found = rows(spending)
    assert sum(row["BilledCost"] for row in found) == pytest.approx(spending.cost)
    kinds = [row["x_Kind"] for row in found]
    assert (set(kinds), kinds.count("requests")) == ({"requests", "other", "idle"}, 4)


def test_what_was_saved_is_in_a_column_of_ours_alone(spending):
    found = rows(spending)
    assert all(row["BilledCost"] >= 0 and row["ChargeCategory"] == "Usage" for row in found)
    ann = next(row for row in found if row["x_User"] == "ann" and row["x_Model"] == "m")
    assert (ann["BilledCost"], ann["x_BaselineCost"]) == (pytest.approx(0.01), pytest.approx(0.02))
    assert (ann["ConsumedQuantity"], ann["ConsumedUnit"]) == (110.0, "Tokens")


@pytest.mark.parametrize(
    ("labels", "account", "provider"),
    [({}, "self-hosted", "self-hosted"), ({"account": "a1", "provider": "Metal Ltd"}, "a1", "Metal Ltd")],
)
def test_labels_name_the_account_and_the_provider(labels, account, provider):
    for row in rows(spend(Rows([], [machine(labels=labels)]))):
        assert (row["BillingAccountId"], row["InvoiceIssuerName"]) == (account, provider)
