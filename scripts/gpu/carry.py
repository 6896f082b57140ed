"""Cut the wheels and bundles that a test on a bare machine needs into pieces, one per transfer, and join them there.

python scripts/gpu/carry.py make OUT [--wheels DIR] [--bundle DIR]... [--mib N] [--python 3.12] [--slim 90] [--rtx]
python scripts/gpu/carry.py join IN OUT

`make` cuts wheels and bundles, one after the other, into folders OUT/01, OUT/02, … of at most N MiB, each with the
list of all pieces. Without --wheels it downloads the wheels: those of PACKAGES, and with --rtx TensorRT-RTX's, in this
environment's versions, for x86_64 and the machine's Python. With --slim, ONNX Runtime's wheel has the GPU code of one
architecture only (slim.py). `join` needs no network: it joins the files whose pieces are all there, checks their
hashes, unpacks bundles, and names missing or damaged pieces, with exit status 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from slim import pack

LIST, MOST_MIB = "list.json", 60
LIST_BYTES = 1 << 16  # reserved for the list in a folder
# Packages that are missing on the machine, or there in an unknown version, and the dependencies that it has.
GPU = "onnxruntime-gpu"
PACKAGES = ("msgspec", "cuda-pathfinder", "cuda-bindings", "cuda-core", GPU)
THERE = ("numpy", "click", "tokenizers", "rich", "jinja2")
RTX = ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs")
PURE = "tensorrt-rtx-cu13"  # a few lines of Python, published as source alone
GLIBC = (17, 24, 27, 28, 31, 34, 35)  # pip matches a platform exactly


def fail(message: str) -> SystemExit:
    """Return a SystemExit with a one-line message, to be raised."""
    return SystemExit(f"carry: {message}")


def download(folder: Path, python: str, rtx: bool) -> None:
    """Download the wheels, in the versions installed here.

    Args:
        folder: Where they go.
        python: The Python version of the machine.
        rtx: Whether TensorRT-RTX's wheels are needed too.
    """
    packages = (*PACKAGES, *RTX) if rtx else PACKAGES
    named = {name: f"{name}=={version(name)}" for name in (*packages, *((PURE,) if rtx else ())) if name != GPU}
    named[GPU] = f"{GPU}<={version('onnxruntime')}"  # the GPU package is published later than the CPU one
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    there = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq"]
    wanted = [named[name] for name in packages]
    subprocess.run([*pip, "download", "--no-deps", *there, "-d", folder, *wanted], check=True)
    if rtx:
        subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, named[PURE]], check=True)


def cut(files: list[Path], out: Path, most: int) -> dict[str, Any]:
    """Cut files one after the other into folders of at most `most` bytes; return the list of files and pieces."""
    listed, number, used = [], 0, most
    for file in files:
        digest, pieces = hashlib.sha256(), list[dict[str, Any]]()
        with file.open("rb") as data:
            while part := data.read(most - used or most):
                if used == most:
                    number, used = number + 1, 0
                piece = f"{number:02}/{file.name}.{len(pieces):02}"
                (out / piece).parent.mkdir(parents=True, exist_ok=True)
                (out / piece).write_bytes(part)
                pieces.append({"path": piece, "bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()})
                digest.update(part)
                used += len(part)
        size = sum(piece["bytes"] for piece in pieces)
        listed.append({"name": file.name, "bytes": size, "sha256": digest.hexdigest(), "pieces": pieces})
    return {"files": listed}


def make(out: Path, given: argparse.Namespace) -> None:
    """Make the pieces of wheels and bundles, small files first, so that the first transfer completes most files."""
    if not 1 <= given.mib <= MOST_MIB:
        raise fail(f"--mib must be 1…{MOST_MIB}, not {given.mib}")
    if out.is_dir() and any(out.iterdir()):
        raise fail(f"{out} is not empty: remove it, or name another folder")
    with tempfile.TemporaryDirectory() as scratch:
        wheels = given.wheels or Path(scratch)
        if given.wheels is None:
            download(wheels, given.python, given.rtx)
        files = list(wheels.glob("*.whl"))
        for wheel in [each for each in files if given.slim and each.name.startswith(f"{GPU.replace('-', '_')}-")]:
            files[files.index(wheel)] = slimmed = Path(scratch) / f"{wheel.stem}.tar.xz"
            pack(wheel, slimmed, given.slim)
        for bundle in given.bundle:
            if not (bundle / "manifest.json").is_file():
                raise fail(f"{bundle} is no bundle")
            files.append(Path(scratch) / f"{bundle.name}.tar.xz")
            with tarfile.open(files[-1], "w:xz", preset=1) as tar:
                tar.add(bundle, bundle.name)
        if not files:
            raise fail(f"{wheels} has no wheel")
        files.sort(key=lambda file: (file.stat().st_size, file.name))
        listed = cut(files, out, (given.mib << 20) - LIST_BYTES)
    folders = sorted(folder for folder in out.iterdir() if folder.is_dir())
    for folder in folders:
        (folder / LIST).write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    for file in listed["files"]:
        print(f"{file['bytes'] / 2**20:8.1f} MiB in {len(file['pieces'])}  {file['name']}")
    print(f"{sum(file['bytes'] for file in listed['files']) / 2**20:8.1f} MiB in {len(folders)} folders under {out}")


def join(source: Path, out: Path) -> int:
    """Join the files whose pieces are all there; return how many could not be joined."""
    texts = {path.read_text(encoding="utf-8") for path in source.glob(f"*/{LIST}")}
    if len(texts) != 1:
        raise fail(
            f"{source} has pieces of several makes: remove it" if texts else f"{source} has no {LIST} in a folder"
        )
    out.mkdir(parents=True, exist_ok=True)
    left = 0
    for file in json.loads(texts.pop())["files"]:
        wrong = faults(source, file)
        if not wrong:
            wrong = whole(source, out / file["name"], file)
        print(f"{file['name']}: {'; '.join(wrong) or 'joined'}")
        left += bool(wrong)
    return left


def faults(source: Path, file: dict[str, Any]) -> list[str]:
    """Return which of a file's pieces are missing or damaged."""
    wrong = []
    for piece in file["pieces"]:
        path = source / piece["path"]
        if not path.is_file():
            wrong.append(f"{piece['path']} is missing")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != piece["sha256"]:
            wrong.append(f"{piece['path']} is damaged")
    return wrong


def whole(source: Path, target: Path, file: dict[str, Any]) -> list[str]:
    """Write a file from its pieces and unpack it if it is an archive; return what is wrong with it."""
    digest, partial = hashlib.sha256(), target.with_name(f"{target.name}.part")
    with partial.open("wb") as to:
        for piece in file["pieces"]:
            part = (source / piece["path"]).read_bytes()
            digest.update(part)
            to.write(part)
    if digest.hexdigest() != file["sha256"]:
        partial.unlink()
        return ["its pieces do not make it: make them again"]
    partial.replace(target)
    if target.name.endswith(".tar.xz"):
        with tarfile.open(target) as tar:
            tar.extractall(target.parent, filter="data")
        target.unlink()
    return []


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making, joining = commands.add_parser("make"), commands.add_parser("join")
    making.add_argument("out", type=Path)
    making.add_argument("--wheels", type=Path, help="a folder of wheels, instead of downloading them")
    making.add_argument("--bundle", type=Path, action="append", default=[], help="a bundle's folder; may be repeated")
    making.add_argument("--mib", type=int, default=42, help="of a folder: the working tree travels in the same call")
    making.add_argument("--python", default="3.12", help="the machine's")
    making.add_argument("--rtx", action="store_true", help="TensorRT-RTX's wheels as well")
    joining.add_argument("source", type=Path)
    joining.add_argument("out", type=Path)
    making.add_argument("--slim", type=int, metavar="ARCH", help="ONNX Runtime's GPU code for it alone (90)")
    given = parser.parse_args()
    if given.command == "join":
        return int(join(given.source, given.out) > 0)
    make(given.out, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
