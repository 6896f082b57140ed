"""MkDocs' hook: a link from a page to a file outside docs/ becomes the file's path, for the site has no such file."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_given: Any) -> str:
    """The page's text as it is built.

    Args:
        markdown: The text as it was written.
        page: MkDocs' page; its file says where it lies in docs/.
    """
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def outside(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if target.startswith("docs/"):
            return link[0]
        return f"{link[1]} (`{target}`)" if link[1] != target else f"`{target}`"

    return _LINK.sub(outside, markdown)
