"""Bundles by path and by URL: the same one on every node, whole or not at all."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specbuild.runtime import Bundle
from specbuild.runtime.errors import BundleError, OptionError
from specbuild.serve.ray import remote_bundle
from specbuild.serve.ray.remote_bundle import Source, local, source

pytest.importorskip("fsspec", reason="fsspec is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(remote_bundle.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_path_is_where_it_is_if_it_is_the_same_bundle(bundle):
    found = source(str(bundle))
    assert found.slots == Bundle.open(bundle).manifest.max_batch_size
    assert local(found) == bundle
    with pytest.raises(BundleError, match="another bundle"):
        local(replace(found, manifest="0" * 64))


def test_a_url_is_fetched_once_and_whole(bundle_copy, cache):
    found = source(f"file:{bundle_copy}")  # as a path has it, whose slashes were merged
    assert found.place == f"file://{bundle_copy}"
    folder = local(found)
    Bundle.open(folder).verify()
    shutil.rmtree(bundle_copy)
    assert local(found) == folder, "from the cache"
    assert [each.name for each in cache.iterdir()] == [found.manifest]


def test_a_url_that_has_changed_since_is_refused(bundle_copy, cache):
    found = source(f"file:{bundle_copy}")
    shutil.rmtree(cache)
    (bundle_copy / "manifest.json").write_bytes((bundle_copy / "manifest.json").read_bytes() + b"\n")
    with pytest.raises(BundleError, match="another bundle"):
        local(found)


def test_what_cannot_be_fetched_leaves_nothing(bundle_copy, cache):
    (bundle_copy / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match="cannot be fetched"):
        source(f"file:{bundle_copy}")
    assert list(cache.iterdir()) == []
    with pytest.raises(BundleError, match="cannot be fetched"):
        source("nosuchscheme://host/bundle")


def test_a_manifest_that_names_what_is_outside_is_refused(bundle_copy, cache):
    manifest = bundle_copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"tokenizer.json"', '"../tokenizer.json"'))
    with pytest.raises(BundleError, match="outside"):
        source(f"file:{bundle_copy}")
    assert list(cache.iterdir()) == []


def test_what_is_missing_is_named(bundle, tmp_path, monkeypatch):
    """A manifest at a path, and the package that reads URLs."""
    with pytest.raises(BundleError, match=r"nowhere has no manifest that can be read \(No such file"):
        local(Source(str(tmp_path / "nowhere"), "0" * 64, 1))
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(OptionError, match=r"need fsspec: pip install 'specbuild-trt\[ray\]'"):
        source(f"file:{bundle}")


def test_of_two_processes_that_fetch_one_bundle_the_faster_one_s_is_used(bundle, cache, monkeypatch):
    """A rename that fails for another reason is an error."""
    rename = Path.rename

    def late(path, to):
        if faster:
            shutil.copytree(path, to)
        rename(path, to / "manifest.json")  # a folder in place of a file

    monkeypatch.setattr(Path, "rename", late)
    faster = False
    with pytest.raises(BundleError, match="cannot be fetched"):
        source(f"file:{bundle}")
    assert list(cache.iterdir()) == []
    faster = True
    found = source(f"file:{bundle}")
    monkeypatch.undo()
    monkeypatch.setenv(remote_bundle.CACHE, str(cache))
    assert [each.name for each in cache.iterdir()] == [found.manifest]
    assert source(f"file:{bundle}") == found, "and is there for the next"
    Bundle.open(local(found)).verify()
