"""Costs as rows of FOCUS 1.2, the FinOps Open Cost and Usage Specification.

A row covers a day of one model, user and tenant on one server. Work for no answered request and idle hours have rows
of their own, so all rows add up to the cost of the machines. specbuild's own columns begin with `x_`. Savings by
speculation appear only through `x_BaselineCost`, the cost of plain decoding, because no provider credits them.
"""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from typing import Any

from .spent import Day, Spending, Spent

SELF = "self-hosted"  # account and provider unless a label names them
_COMMON = (
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodStart"),
    *("BillingPeriodEnd", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency", "ChargePeriodStart"),
    *("ChargePeriodEnd", "ConsumedQuantity", "ConsumedUnit", "ContractedCost", "ContractedUnitPrice", "EffectiveCost"),
    *("InvoiceIssuerName", "ListCost", "ListUnitPrice", "PricingCategory", "PricingQuantity", "PricingUnit"),
    *("ResourceId", "ResourceName", "ResourceType", "ServiceCategory", "ServiceName", "SkuId", "SkuPriceId"),
    *("SubAccountId", "SubAccountName", "Tags"),
)
OURS = (
    *("x_BaselineCost", "x_BusySeconds", "x_BaselineSeconds", "x_Kind", "x_Model", "x_User", "x_Requests"),
    *("x_PromptTokens", "x_OutputTokens", "x_DraftTokens", "x_AcceptedTokens"),
)
COLUMNS = (*_COMMON, "ProviderName", "PublisherName", *OURS)
_SUMS = {"PromptTokens": "prompt_tokens", "OutputTokens": "output_tokens", "DraftTokens": "draft_tokens"}
_SUMS |= {"AcceptedTokens": "accepted_tokens"}


def rows(spending: Spending) -> list[dict[str, Any]]:
    """Return the rows, None in columns that are empty."""
    return [{name: row.get(name) for name in COLUMNS} for row in _rows(spending)]


def text_of(spending: Spending) -> str:
    """Return the rows as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows(spending))
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Format floats without exponents and with a decimal point, so that a column has one type."""
    return f"{value:.12f}" if isinstance(value, float) else value


def _rows(spending: Spending) -> Iterator[dict[str, Any]]:
    groups = defaultdict[tuple[str, date], dict[tuple[str, str, str], list[Spent]]](lambda: defaultdict(list))
    for each in spending.requests:
        key = each.row.model, each.row.user or "", each.row.tenant or ""
        groups[each.row.server, each.row.day][key].append(each)
    for day in spending.days:
        base = _base(day, spending.currency)
        for (model, user, tenant), found in sorted(groups[day.server, day.day].items()):
            yield base | _of_requests(day, model, user, tenant, found)
        other = "Busy seconds of models that no answered request had"
        for kind, told, cost in (("other", other, day.other), ("idle", "Unused seconds of the machine", day.idle)):
            hours = cost / (day.rate * 3600) if day.rate else 0.0
            seconds = hours * 3600 if kind == "other" else 0.0
            more = {"x_Kind": kind, "x_BusySeconds": seconds, "x_BaselineSeconds": seconds, "x_Requests": 0}
            yield base | _money(day, cost, hours) | more | {"ChargeDescription": told, "x_BaselineCost": cost}


def _of_requests(day: Day, model: str, user: str, tenant: str, found: Sequence[Spent]) -> dict[str, Any]:
    cost, busy = sum(each.cost for each in found), sum(each.row.busy_seconds for each in found)
    plain = sum(each.cost if each.plain is None else each.plain for each in found)
    before = sum(each.row.busy_seconds if each.row.plain_seconds is None else each.row.plain_seconds for each in found)
    sums = {f"x_{name}": sum(getattr(each.row, field) for each in found) for name, field in _SUMS.items()}
    return (
        _money(day, cost, busy / 3600)
        | sums
        | {
            "ChargeDescription": f"Inference by {model}: busy time of {len(found)} requests",
            "ConsumedQuantity": float(sum(each.row.prompt_tokens + each.row.output_tokens for each in found)),
            "ConsumedUnit": "Tokens",
            "ResourceId": model,
            "ResourceName": model,
            "ResourceType": "Model",
            "SubAccountId": tenant or None,
            "x_BaselineCost": plain,
            "x_BusySeconds": busy,
            "x_BaselineSeconds": before,
            "x_Kind": "requests",
            "x_Model": model,
            "x_User": user or None,
            "x_Requests": len(found),
        }
    )


def _money(day: Day, cost: float, hours: float) -> dict[str, Any]:
    """Return the cost columns: the same cost everywhere, since there are no discounts."""
    price = day.rate * 3600
    costs = dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost)
    return costs | {"PricingQuantity": hours, "ListUnitPrice": price, "ContractedUnitPrice": price}


def _base(day: Day, currency: str) -> dict[str, Any]:
    """Return the columns that all rows of a server's day share."""
    month = day.day.replace(day=1)
    after = (month + timedelta(days=32)).replace(day=1)
    account, provider = day.labels.get("account", SELF), day.labels.get("provider", SELF)
    return dict.fromkeys(("InvoiceIssuerName", "ProviderName", "PublisherName"), provider) | {
        "BillingAccountId": account,
        "BillingAccountName": account,
        "BillingCurrency": currency,
        "BillingPeriodStart": _instant(month),
        "BillingPeriodEnd": _instant(after),
        "ChargeCategory": "Usage",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _instant(day.day),
        "ChargePeriodEnd": _instant(day.day + timedelta(days=1)),
        "PricingCategory": "Standard",
        "PricingUnit": "Hours",
        "ResourceId": day.server,
        "ResourceType": "Server",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "specbuild",
        "SkuId": "machine-hour",
        "SkuPriceId": f"machine-hour-{currency}",
        "Tags": json.dumps(dict(day.labels), sort_keys=True),
    }


def _instant(day: date) -> str:
    return datetime(day.year, day.month, day.day).strftime("%Y-%m-%dT%H:%M:%SZ")
