"""The bundle: every damage is found and said in one line, and nothing outside the folder is ever named."""

import random

import pytest

from specbuild.runtime import Engine
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import MANIFEST
from specbuild.runtime.errors import BundleError


def open_and_verify(folder):
    Bundle.open(folder).verify()


def refused(folder, what="", check=open_and_verify):
    """The one line with which a bundle is refused."""
    with pytest.raises(BundleError) as caught:
        check(folder)
    message = str(caught.value)
    assert what in message
    return message


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def test_an_undamaged_bundle_is_as_it_was_written(bundle):
    opened = Bundle.open(bundle)
    assert opened.manifest.to_json() == (bundle / MANIFEST).read_text(encoding="utf-8")
    on_disk = {path for path in bundle.rglob("*") if path.is_file()}
    assert on_disk == {bundle / MANIFEST, *map(opened.path, opened.manifest.files)}
    for name in opened.manifest.files:
        assert opened.read(name) == opened.map(name)[:] == (bundle / name).read_bytes()
    with opened.verified():
        assert opened.map("target/weights.bin") is opened.map("target/weights.bin")
        assert opened.map("tokenizer.json") is not opened.map("tokenizer.json")
    with pytest.raises(BundleError, match="more than 7"):
        opened.read("tokenizer.json", 7)


def test_what_is_no_bundle(tmp_path):
    refused(tmp_path / "missing", "not a folder")
    refused(tmp_path, MANIFEST)
    (tmp_path / MANIFEST).mkdir()
    refused(tmp_path, MANIFEST)


def test_nothing_is_done_with_a_bundle_before_every_file_is_right(bundle_copy):
    opened, ran = Bundle.open(bundle_copy), list[bool]()
    with opened.verified():
        ran.append(True)
    flip(bundle_copy / "report.json", 3)
    with pytest.raises(BundleError, match="report"), opened.verified():
        ran.append(False)
    assert ran == [True]


def test_a_file_that_is_not_listed_is_not_read(bundle_copy):
    (bundle_copy / "more").write_text("x")
    for read in (Bundle.open(bundle_copy).read, Bundle.open(bundle_copy).map):
        with pytest.raises(BundleError, match="uses 'more' but does not list its hash"):
            read("more")


@pytest.mark.slow
def test_a_damaged_file_is_found(bundle_copy):
    """By an engine that loads it, too."""
    rng = random.Random(0)
    names = list(Bundle.open(bundle_copy).manifest.files)
    for name in names:
        path, check = bundle_copy / name, Engine.load if name == "tokenizer.json" else open_and_verify
        content = path.read_bytes()
        for bit in (0, 8 * len(content) - 1, rng.randrange(8 * len(content))):
            flip(path, bit)
            assert "hash" in refused(bundle_copy, str(path), check)
            flip(path, bit)
        path.write_bytes(content[: len(content) // 2])
        assert "size" in refused(bundle_copy, str(path), check)
        path.unlink()
        refused(bundle_copy, str(path), check)
        path.mkdir()
        refused(bundle_copy, name, check)
        path.rmdir()
        path.symlink_to(path.name)
        refused(bundle_copy, name, check)
        path.unlink()
        path.write_bytes(content)
    Bundle.open(bundle_copy).verify()
