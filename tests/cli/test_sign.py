"""`specbuild sign`, and `verify --signature`."""

import json
import shutil

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ed25519

from specbuild.cli.application import cli
from specbuild.runtime.errors import BundleError


@pytest.mark.slow
def test_a_bundle_is_signed_and_verified(bundle, tmp_path, monkeypatch):
    key = ed25519.Ed25519PrivateKey.generate()
    secret = pem.BestAvailableEncryption(b"open")
    (tmp_path / "key.pem").write_bytes(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, secret))
    public = key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(public)
    copy = str(shutil.copytree(bundle, tmp_path / "b"))
    asked = [copy, "--signature", str(tmp_path / "public.pem"), "-n", "2", "--quiet"]
    with pytest.raises(BundleError, match=r"has no manifest\.json\.sig"):
        CliRunner().invoke(cli, ["verify", *asked], catch_exceptions=False)
    monkeypatch.setenv("SPECBUILD_KEY_PASSPHRASE", "open")
    done = CliRunner().invoke(cli, ["sign", copy, "--key", str(tmp_path / "key.pem")], catch_exceptions=False)
    assert done.output == f"signed: {copy}/manifest.json.sig\n"
    done = CliRunner().invoke(cli, ["sign", copy, "--key", str(tmp_path / "key.pem"), "--json"], catch_exceptions=False)
    assert json.loads(done.output) == {"signature": f"{copy}/manifest.json.sig"}
    done = CliRunner().invoke(cli, ["verify", *asked], catch_exceptions=False)
    assert done.exit_code == 0
    assert "signed by the owner of" in done.output
