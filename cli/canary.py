"""`specbuild canary`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import click

from specbuild.runtime.checked_json import JSON_BYTES, decode
from specbuild.runtime.errors import ExecutionError, OptionError

ADMIN_KEY = "SPECBUILD_ADMIN_KEY"
_SECONDS = 30.0


@click.command(name="canary")
@click.argument("url")
@click.option("--admin-key", envvar=ADMIN_KEY, metavar="KEY", help=f"The operator's key, or {ADMIN_KEY}.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(url: str, admin_key: str | None, as_json: bool) -> None:
    """Show the canary of a server: its weight, its verdict, and the evidence of each metric.

    \b
    specbuild canary http://localhost:9000
    """
    view = _asked(url, admin_key or "")
    if as_json:
        click.echo(json.dumps(view))
        return
    try:
        _show(view)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ExecutionError(
            f"{url} answers with no canary ({type(error).__name__}: {error}): is it specbuild?"
        ) from None


def _asked(url: str, key: str) -> Any:
    """Return the server's canary as JSON.

    Raises OptionError for a bad URL or an HTTP error, and ExecutionError if the server cannot be reached.
    """
    if not url.startswith(("http://", "https://")):
        raise OptionError(f"{url[:200]!r} is no URL of a server: give http://HOST:PORT")
    request = urllib.request.Request(f"{url.rstrip('/')}/canary")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return decode(answer.read(JSON_BYTES))
    except urllib.error.HTTPError as error:
        what = {
            401: "wants the operator's key: give --admin-key",
            404: "has no canary: start it with --canary, and give the URL of its --admin-port",
        }
        raise OptionError(f"{url} {what.get(error.code, f'answers {error.code} {error.reason}')}") from None
    except (OSError, ValueError) as error:
        raise ExecutionError(f"{url} cannot be asked ({getattr(error, 'reason', error)})") from None


def _show(view: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    requests, verdict = view["requests"], view["verdict"]
    share = f"{requests['candidate']} requests of {requests['candidate'] + requests['baseline']}"
    about = verdict["evidence"]["metric"]
    lines = [
        f"{view['model']}: {view['candidate']} against {view['baseline']}",
        f"{view['phase']} at {view['weight']:g} % of {view['max_weight']:g} %; {share}",
        f"{verdict['kind']}: E {verdict['e']:.3g} of {1 / view['alpha']:g}, by {about}",
    ]
    table = Table("metric", "baseline", "candidate", "requests", "E of harm", "E of no harm", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for each in view["evidence"]:
        means = ["" if mean is None else f"{mean:.4g}" for mean in each["means"]]
        fine = "" if each["fine"] is None else f"{each['fine']:.3g}"
        table.add_row(each["metric"], *means, "{} + {}".format(*each["n"]), f"{each['harm']:.3g}", fine)
    click.echo("\n".join(lines[:2]))
    Console().print(table)
    click.echo("\n".join(lines[2:]))
