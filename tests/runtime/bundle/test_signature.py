"""Signatures of bundles: who signed, what was signed, and that OpenSSL agrees."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from specbuild.runtime.bundle.manifest import MANIFEST
from specbuild.runtime.bundle.signature import FILE, check, sign
from specbuild.runtime.errors import BundleError, OptionError


def keys(folder, name, made=None):
    """A key pair as NAME.pem and NAME.pub; returns the path without the ending."""
    key = made or ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
    public = key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pem").write_bytes(private)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / name


@pytest.fixture
def signed(bundle, tmp_path):
    """A copy of the bundle, signed by `own`."""
    copy = Path(shutil.copytree(bundle, tmp_path / "b"))
    assert sign(copy, keys(tmp_path, "own").with_suffix(".pem")) == copy / FILE
    return copy


def test_the_owner_s_key_and_no_other(signed, tmp_path):
    """As OpenSSL finds, too."""
    check(signed, tmp_path / "own.pub")
    with pytest.raises(BundleError, match="was not signed by the owner of"):
        check(signed, keys(tmp_path, "other").with_suffix(".pub"))
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", tmp_path / "own.pub", "-rawin"]
    subprocess.run([*command, "-in", signed / MANIFEST, "-sigfile", signed / FILE], check=True)


CHANGES = {
    "manifest": lambda folder: append(folder / MANIFEST),
    "model": lambda folder: append(folder / "target" / "weights.bin"),
    "signature": lambda folder: (folder / FILE).write_bytes(bytes(64)),
    "longer": lambda folder: append(folder / FILE),
    "none": lambda folder: (folder / FILE).unlink(),
}


def append(path):
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_found(signed, tmp_path, change):
    CHANGES[change](signed)
    with pytest.raises(BundleError):
        check(signed, tmp_path / "own.pub")


def test_a_bundle_that_was_changed_is_not_signed(signed, tmp_path):
    append(signed / "target" / "weights.bin")
    before = (signed / FILE).read_bytes()
    with pytest.raises(BundleError):
        sign(signed, tmp_path / "own.pem")
    assert (signed / FILE).read_bytes() == before


def test_what_is_no_key_is_refused(signed, tmp_path):
    curve = keys(tmp_path, "curve", ec.generate_private_key(ec.SECP256R1()))
    (tmp_path / "bad.pem").write_text("x")
    for key in (curve.with_suffix(".pem"), tmp_path / "bad.pem", tmp_path / "own.pub"):
        with pytest.raises(OptionError, match="is no private key of Ed25519 in PEM"):
            sign(signed, key)
    for key in (curve.with_suffix(".pub"), tmp_path / "bad.pem", tmp_path / "own.pem"):
        with pytest.raises(OptionError, match="is no public key of Ed25519 in PEM"):
            check(signed, key)
    with pytest.raises(OptionError, match="cannot be read"):
        check(signed, tmp_path / "absent.pem")


def test_a_passphrase(signed, tmp_path):
    key = ed25519.Ed25519PrivateKey.generate()
    locked = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"open"))
    (tmp_path / "locked.pem").write_bytes(locked)
    sign(signed, tmp_path / "locked.pem", "open")
    with pytest.raises(OptionError, match="needs a passphrase"):
        sign(signed, tmp_path / "locked.pem")
    with pytest.raises(OptionError, match="is no private key"):
        sign(signed, tmp_path / "locked.pem", "wrong")


def test_without_the_library_it_says_what_to_install(signed, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(OptionError, match=r"pip install 'specbuild-trt\[sign\]'"):
        check(signed, Path("x"))
