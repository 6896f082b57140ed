"""Rows of ledgers for tests."""

from data_files import table

from specbuild.measure.cost.rows import MachineRow, RequestRow, line_of

ROWS = table("ledger.json")
DAY = "2026-03-0{}T{:02d}:00:00.000+00:00"


def request(number=0, **given):
    """Ten busy seconds for a hundred tokens, which plain decoding would have taken twenty for."""
    return RequestRow(**ROWS["request"] | {"request_id": f"r{number}"} | given)


def machine(**given):
    """An hour at 3.6 of which a hundred seconds were busy: a second costs a thousandth."""
    return MachineRow(**ROWS["machine"] | given)


def written(path, rows, torn=b""):
    """A file of them."""
    path.write_bytes(b"".join(map(line_of, rows)) + torn)
    return path
