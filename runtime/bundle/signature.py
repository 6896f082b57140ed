"""A bundle's signature: Ed25519 (RFC 8032) over its manifest, which has the sha256 of every other file.

It lies beside the manifest, as 64 bytes in the form that OpenSSL writes, so that it can be checked without specbuild.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbuild.runtime.errors import BundleError, OptionError

from .atomic_output import write
from .bundle import Bundle, open_regular
from .manifest import MANIFEST, MANIFEST_BYTES

FILE = f"{MANIFEST}.sig"
PASSPHRASE = "SPECBUILD_KEY_PASSPHRASE"
_BYTES = 64
_KEY_BYTES = 1 << 16


def sign(folder: Path, key: Path, passphrase: str | None = None) -> Path:
    """Sign a bundle whose files are all as they were built, and return the signature's file.

    Args:
        folder: The bundle.
        key: A file with an Ed25519 private key in PEM.
        passphrase: The key's passphrase, if it has one.

    Raises:
        OptionError: If `key` is no such file, or needs another passphrase.
        BundleError: If the bundle is not as it was built.
    """
    serialization, private, _ = _library()
    secret = None if passphrase is None else passphrase.encode()
    try:
        found = serialization.load_pem_private_key(_read(key), secret)
    except (ValueError, TypeError) as error:
        raise _no_key(key, "private", error) from None
    if not isinstance(found, private):
        raise _no_key(key, "private")
    Bundle.open(folder).verify()
    write(folder / FILE, found.sign(_manifest(folder)))
    return folder / FILE


def check(folder: Path, key: Path) -> None:
    """Check a bundle's signature against a public key, and its files against its manifest.

    Args:
        folder: The bundle.
        key: A file with an Ed25519 public key in PEM.

    Raises:
        OptionError: If `key` is no such file.
        BundleError: If the signature is missing or not the key's, or a file differs.
    """
    serialization, _, public = _library()
    from cryptography.exceptions import InvalidSignature

    try:
        found = serialization.load_pem_public_key(_read(key))
    except ValueError as error:
        raise _no_key(key, "public", error) from None
    if not isinstance(found, public):
        raise _no_key(key, "public")
    bundle = Bundle.open(folder)
    if not (folder / FILE).exists():
        raise BundleError(f"{folder} has no {FILE}: sign it with `specbuild sign`, also after `specbuild tune`")
    with open_regular(folder / FILE) as file:
        signature = file.read(_BYTES + 1)
    try:
        found.verify(signature, _manifest(folder))
    except InvalidSignature:
        raise BundleError(f"{folder} was not signed by the owner of {key}: do not use it") from None
    bundle.verify()


def _manifest(folder: Path) -> bytes:
    with open_regular(folder / MANIFEST) as file:
        return file.read(MANIFEST_BYTES)


def _read(key: Path) -> bytes:
    try:
        with key.open("rb") as file:
            return file.read(_KEY_BYTES)
    except OSError as error:
        raise OptionError(f"{key} cannot be read ({error.strerror}): give a key in PEM") from None


def _no_key(key: Path, kind: str, error: Exception | None = None) -> OptionError:
    if isinstance(error, TypeError):
        return OptionError(f"{key} needs a passphrase: set {PASSPHRASE}, or unset it for a key without one")
    return OptionError(f"{key} is no {kind} key of Ed25519 in PEM: openssl genpkey -algorithm ed25519 makes one")


def _library() -> tuple[Any, Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise OptionError("signatures need cryptography: pip install 'specbuild-trt[sign]'") from None
    return serialization, ed25519.Ed25519PrivateKey, ed25519.Ed25519PublicKey
