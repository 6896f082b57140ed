"""Copies of a bundle to damage: every file a hard link to the sound one until it is written anew."""

import hashlib
import json
import os
import shutil

MANIFEST = "manifest.json"


def copied(bundle, place):
    """A copy at `place/bundle`; replace files, never write into them."""
    root = place / "bundle"
    for path in sorted(bundle.rglob("*")):
        target = root / path.relative_to(bundle)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, target)
            except OSError:  # another file system
                shutil.copyfile(path, target)
    return root


def manifest(root):
    """A bundle's manifest as JSON."""
    body = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
    return body


def replace(path, content):
    """Write a file anew, so that what it was linked to stays."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def sealed(body):
    """A manifest with the digest that a build would give it."""
    rest = {name: value for name, value in body.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return rest | {"digest": hashlib.sha256(text).hexdigest()}


def put(root, name, content, hashed, **fields):
    """Replace a file of a bundle; `hashed`: the manifest then says that it was built so, and has these `fields`."""
    replace(root / name, content)
    if hashed:
        body = manifest(root) | fields
        body["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        replace(root / MANIFEST, json.dumps(sealed(body)).encode())
