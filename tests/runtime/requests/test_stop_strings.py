"""Stop strings: an automaton that finds what a search for each of them would, and knows what may still become one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.requests.stop_strings import Match, StopStrings, automaton

letters = st.text("abé🙂", max_size=6)
stops = st.lists(st.text("abé🙂", min_size=1, max_size=5), min_size=1, max_size=6)


@settings(deadline=None, max_examples=500)
@given(stop=stops, pieces=st.lists(letters, max_size=8))
def test_what_ends_in_a_piece_is_what_a_search_finds(stop: list[str], pieces: list[str]) -> None:
    made, state, text = StopStrings(stop), 0, ""
    for piece in pieces:
        state, match = made.read(state, piece)
        begun = len(text)
        text += piece
        found = [
            (at, len(s)) for s in stop for at in range(len(text)) if text.startswith(s, at) and at + len(s) > begun
        ]
        assert match == (Match(min(found)[0] - begun, min(found)[1]) if found else None)
        ends = [
            length for length in range(len(text) + 1) if any(s.startswith(text[len(text) - length :]) for s in stop)
        ]
        assert made.depth[state] == max(ends)


def test_requests_with_the_same_stop_strings_share_an_automaton() -> None:
    assert automaton(("a", "b")) is automaton(("a", "b"))
