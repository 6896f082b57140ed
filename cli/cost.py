"""`specbuild cost`."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from specbuild.measure.bench import html
from specbuild.measure.bench.report import check
from specbuild.measure.cost import focus, page
from specbuild.measure.cost.report import KEYS, keys_of, report
from specbuild.measure.cost.rows import read
from specbuild.measure.cost.spent import spend
from specbuild.measure.cost.tables import tables
from specbuild.runtime.bundle.atomic_output import write
from specbuild.runtime.errors import OptionError

File = click.Path(path_type=Path)


@click.command(name="cost")
@click.argument("ledgers", nargs=-1, required=True, type=File, metavar="LEDGER…")
@click.option("--by", default="model", show_default=True, metavar="KEY,…", help=f"Groups: {', '.join(KEYS)}.")
@click.option(
    "--price-per-hour", type=float, metavar="AMOUNT", help="The price of each machine, in place of the ledger's."
)
@click.option("--currency", metavar="CODE", help="Instead of the ledger's; nothing is converted.")
@click.option("--focus", "focus_file", type=File, metavar="FILE.csv", help="Write rows of FOCUS 1.2.")
@click.option("--parquet", type=File, metavar="FILE", help="Write the groups as Parquet; needs pyarrow.")
@click.option("--html", "page_file", type=File, metavar="FILE.html", help="Write a report with plots.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(
    ledgers: tuple[Path, ...],
    by: str,
    price_per_hour: float | None,
    currency: str | None,
    focus_file: Path | None,
    parquet: Path | None,
    page_file: Path | None,
    as_json: bool,
) -> None:
    """Say what requests cost, and what speculation saved, from the ledgers of `specbuild serve --ledger`.

    \b
    specbuild cost ledger*.jsonl --by user,day
    """
    for file in filter(None, (focus_file, parquet, page_file)):
        check(file)
    if page_file:
        html.check()
    if parquet and find_spec("pyarrow") is None:
        raise OptionError("--parquet needs pyarrow, which is not installed: pip install 'specbuild-trt[parquet]'")
    if price_per_hour is not None and not 0 <= price_per_hour < float("inf"):
        raise OptionError(f"--price-per-hour must be an amount from 0 on, not {price_per_hour}")
    keys = keys_of(by)
    spending = spend(read(ledgers), price_per_hour, currency)
    found = report(spending, keys)
    if parquet:
        write(parquet, _parquet(found))
    if page_file:
        write(page_file, page.render(found).encode())
    if focus_file:
        write(focus_file, focus.text_of(spending).encode())
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _show(found)


def _show(found: Mapping[str, Any]) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    width = None if Console().is_terminal else 220  # a file has room for whole rows
    console = Console(markup=False, highlight=False, width=width)
    for title, header, rows in tables(found):
        table = Table(*header, title=title, title_justify="left", box=None)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in found["notes"]:
        console.print(note)


def _parquet(found: Mapping[str, Any]) -> bytes:
    """The groups, an interval's ends as columns of their own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for group in found["groups"] or [found["total"]]:
        flat = {"currency": found["currency"]}
        for name, value in group.items():
            ends = {f"{name}_{end}": each for end, each in value.items()} if isinstance(value, dict) else {}
            flat |= ends or {name: value}
        rows.append(flat)
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()
