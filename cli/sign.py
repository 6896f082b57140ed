"""`specbuild sign`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from specbuild.runtime.bundle.signature import PASSPHRASE, sign


@click.command(name="sign")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--key", required=True, type=click.Path(path_type=Path), metavar="FILE", help="An Ed25519 private key in PEM."
)
@click.option("--json", "as_json", is_flag=True, help="Print where the signature is as JSON.")
def command(bundle: Path, key: Path, as_json: bool) -> None:
    """Sign a bundle, whose files are checked first; `verify --signature` holds it against the public key.

    A key with a passphrase has it from SPECBUILD_KEY_PASSPHRASE.

    \b
    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out public.pem
    specbuild sign pycode.bundle --key key.pem
    """
    signature = sign(bundle, key, os.environ.get(PASSPHRASE))
    click.echo(json.dumps({"signature": str(signature)}) if as_json else f"signed: {signature}")
