"""What a campaign has to say: a table, a JSON file, and a folder for each finding."""

import json
import shlex
import time

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def command(finding, campaign):
    """What tries a finding's case again."""
    return f"make attack SEED={campaign.seed} ONLY={shlex.quote(f'{finding.case.name}:{finding.case.number}')}"


def write(finding, campaign):
    """Keep a finding, beside what it was made of, and say so."""
    outcome = finding.outcome
    text = f"{outcome.kind}: {outcome.detail}\n\nagain: {command(finding, campaign)}\n\n{outcome.trace}\n"
    finding.folder.mkdir(parents=True, exist_ok=True)
    (finding.folder / "finding.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
    said = f"{finding.case.name}:{finding.case.number} {outcome.kind}: {outcome.detail[:300]} {outcome.where}"
    print(said.encode(errors="backslashreplace").decode(), flush=True)


class Progress:
    """Says every so often how far a campaign has come."""

    def __init__(self, seconds, every=30.0):
        self._seconds, self._every, self._began = seconds, every, time.monotonic()
        self._next = every

    def __call__(self, campaign):
        now = time.monotonic() - self._began
        if now >= self._next:
            self._next = now + self._every
            tallies = campaign.tallies.values()
            cases, found = (sum(getattr(each, name) for each in tallies) for name in ("cases", "found"))
            print(f"{now:.0f} of {self._seconds:.0f} s: {cases:,} cases, {found} findings", flush=True)


def as_json(campaign):
    """Everything that was counted, and each fault once."""
    return {
        "seed": campaign.seed,
        "classes": {
            name: {
                "cases": tally.cases,
                "passed": tally.passed,
                "refused": tally.refused,
                "findings": tally.found,
                "seconds": round(tally.seconds, 1),
            }
            for name, tally in campaign.tallies.items()
        },
        "findings": [
            {
                "signature": signature,
                "times": campaign.times[signature],
                "kind": found[0].outcome.kind,
                "detail": found[0].outcome.detail,
                "where": found[0].outcome.where,
                "again": [command(each, campaign) for each in found],
                "folder": str(found[0].folder),
            }
            for signature, found in campaign.findings.items()
        ],
    }


def show(campaign, file):
    """Print the table and the findings; write the JSON where it is asked for."""
    body = as_json(campaign)
    table = Table("class", "cases", "as promised", "refused", "findings", "seconds", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    total = dict.fromkeys(("cases", "passed", "refused", "findings", "seconds"), 0.0)
    for name, row in body["classes"].items():
        total = {key: total[key] + row[key] for key in total}
        table.add_row(name, *(f"{row[key]:,.0f}" for key in total))
    table.add_row("all", *(f"{each:,.0f}" for each in total.values()))
    console = Console(width=160, soft_wrap=True, highlight=False)
    console.print(table)
    for each in body["findings"]:
        again = each["again"][0]
        console.print(f"{each['times']} × {escape(each['signature'])}\n    {again}\n    {each['folder']}", markup=True)
    console.print(f"seed {campaign.seed}: {len(body['findings'])} faults in {total['findings']:.0f} findings")
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8", errors="backslashreplace")
