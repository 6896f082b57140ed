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
    """Show the canary of a server, or those of Ray's replicas: weight, evidence of each metric, equal texts.

    \b
    specbuild canary http://localhost:9000
    """
    view = _request(url, admin_key or "")
    if as_json:
        click.echo(json.dumps(view))
        return
    try:
        for name, each in view.get("replicas", {"": view}).items():
            if name:
                click.echo(name)
            _show(each)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ExecutionError(
            f"{url} answers with no canary ({type(error).__name__}: {error}): is it specbuild?"
        ) from None


def _request(url: str, key: str) -> Any:
    """Return the server's canary as JSON.

    Raises OptionError for a bad URL or an HTTP error, and ExecutionError if the server cannot be reached.
    """
    if not url.startswith(("http://", "https://")):
        raise OptionError(f"{url[:200]!r} is no URL of a server: give http://HOST:PORT")
    request = urllib.request.Request(f"{url.rstrip('/')}/canary")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            return decode(response.read(JSON_BYTES))
    except urllib.error.HTTPError as error:
        what = {
            401: "wants the operator's key: give --admin-key",
            404: "has no canary: start it with --canary, and give the URL of its --admin-port",
        }
        raise OptionError(f"{url} {what.get(error.code, f'answers {error.code} {error.reason}')}") from None
    except (OSError, ValueError) as error:
        raise ExecutionError(f"{url} cannot be reached ({getattr(error, 'reason', error)})") from None


def _show(view: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    requests, texts = view["requests"], view["texts"]
    share = f"{requests['candidate']} requests of {requests['candidate'] + requests['baseline']}"
    table = Table("metric", "baseline", "candidate", "requests", "E of harm", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for each in view["evidence"]:
        means = ["" if mean is None else f"{mean:.4g}" for mean in each["means"]]
        table.add_row(each["metric"], *means, "{} + {}".format(*each["n"]), f"{each['harm']:.3g}")
    click.echo(f"{view['model']}: {view['candidate']} against {view['baseline']}")
    click.echo(f"{view['phase']} at {view['weight']:g} %; {share}")
    Console().print(table)
    click.echo(f"E {view['e']:.3g}; {1 / view['alpha']:g} is proof of harm")
    click.echo(f"{texts['equal']} texts of {sum(texts.values())} are the baseline's, token by token")
