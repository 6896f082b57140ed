"""The pages of the site: short ones, each in the map and in the navigation, with every term that the glossary owes."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TERMS = (
    "round",
    "step",
    "node",
    "bucket",
    "bound",
    "slot",
    "batch",
    "prefill",
    "chunk",
    "draft",
    "tree",
    "bonus token",
)


def unfenced(page):
    """A page's lines outside of blocks of code."""
    text = re.sub(r"^( *)(```|~~~).*?^\1\2", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return text.splitlines()


def prose(page):
    """A page's lines without code, tables, headings and links' definitions."""
    return [line for line in unfenced(page) if not re.match(r" {4}|\s*[|<\[#]", line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_read_in_one_go(page):
    assert len(unfenced(page)) <= 250


def test_the_pages_are_no_more_than_somebody_reads():
    assert sum(bool(line.strip()) for page in PAGES for line in prose(page)) <= 3500


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_prose_wraps_at_100_columns(page):
    """But for a line that cannot be broken."""
    long = [line for line in prose(page) if len(line) > 100 and " " in re.sub(r"`[^`]*`", "", line)[60:]]
    assert not long, long[0]


def test_sentences_are_read_once():
    """At most 25 words in the mean over all pages."""
    words = []
    for page in PAGES:
        sentences = re.split(r"(?<=[.!?])\s+|\n\s*\n|\n(?=\s*[-*] )", "\n".join(prose(page)))
        words += [count for sentence in sentences if (count := len(sentence.split())) > 2]
    assert sum(words) / len(words) <= 25


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_every_page_is_in_the_navigation_and_in_the_map():
    names = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES}
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/-]+\.md", yaml.dump(yaml.safe_load(settings)["nav"])))
    assert listed == names
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    assert linked == names - {"index.md"}


@pytest.mark.parametrize("term", TERMS)
def test_the_glossary_has_it(term):
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8").lower()
    assert re.search(rf"^(\| |- |#+ )?\**{term}\b", text, re.MULTILINE), term


def test_ten_questions_have_pages():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Questions a new user asks")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE)[1:]
    asked = [row for row in rows if not row[0].startswith("---")]
    assert len(asked) == 10
    for question, answer in asked:
        ((target, heading),) = re.findall(r"\]\(([^)#]*)#?([^)]*)\)", answer)
        page = (ROOT / (target or "CONTRIBUTING.md")).read_text(encoding="utf-8")
        named = {
            re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-")
            for line in re.findall(r"^#+ (.*)", page, re.M)
        }
        assert not heading or heading in named, question
