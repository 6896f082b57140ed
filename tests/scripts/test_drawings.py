"""The drawings are those of the sources: the packages' layers, and a round whose path is the target's own."""

from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]


def test_they_are_up_to_date(import_script):
    drawings = import_script("release/drawings")
    for name, picture in drawings.pictures().items():
        written = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
        assert written == picture, "run python scripts/release/drawings.py"
        ElementTree.fromstring(picture)


def test_a_request_passes_packages_that_there_are(import_script):
    drawings = import_script("release/drawings")
    for name in {*drawings.PACKAGES, *(package for package, _ in drawings.WAY)}:
        assert (ROOT / name).is_dir() or (ROOT / "runtime" / name).is_dir(), name
