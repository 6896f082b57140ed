"""Prompt lookup: drafts what followed an earlier occurrence of the text's last tokens; needs no model.

Source: Saxena, "Prompt Lookup Decoding" (2023); the n-gram drafter of vLLM and transformers. Two things differ: the
longest match is taken, whatever its length, and a continuation that reaches the end of the text goes on with what it
has drafted, so that a loop is drafted to any depth.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specbuild.runtime.requests.token_string import MAX_MATCH


def longest(text: str) -> tuple[int, int]:
    """Return the index after the longest earlier occurrence of a text's end, the most recent one, and its length.

    (0, 0) if its last token did not occur before. `text`: see `string_of`.
    """
    after = length = 0
    while length < MAX_MATCH and (at := text.rfind(text[-length - 1 :], 0, len(text) - 1)) >= 0:
        after, length = at + length + 1, length + 1
    return after, length


def continuation(tokens: Seq[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from `start` on; past the end of the text, those just drafted are repeated."""
    draft, period = list(tokens[start : start + count]), len(tokens) - start
    while len(draft) < count:
        draft.append(draft[len(draft) - period])
    return draft
