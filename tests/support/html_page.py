"""A page that commands write: its tags, its text, and what it points to."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = frozenset({"meta", "br"})  # elements that have no end


class Page(HTMLParser):
    """What a page shows; every element must end where it began, and nothing is fetched."""

    def __init__(self, text):
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []
        assert "http" not in text
        assert not {"script", "link", "img", "metadata"} & {*self.tags}

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)
        for name, value in attrs:
            if name.split(":")[-1] in ("src", "href"):
                assert str(value).startswith("#")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data
