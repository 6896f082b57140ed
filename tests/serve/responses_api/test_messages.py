"""/v1/messages as translated: blocks of pieces with their events."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specbuild.serve.anthropic.messages import Content
from specbuild.serve.output_parsers.parser_base import Piece

PIECES = st.lists(
    st.builds(Piece, st.sampled_from(["content", "reasoning"]), st.text(max_size=5))
    | st.just(Piece("call", "weather"))
    | st.builds(Piece, st.just("arguments"), st.sampled_from(["{", '"a"', ": 1", "}"])),
    max_size=12,
)


@given(PIECES)
def test_events_add_up_to_the_blocks(pieces):
    called, content, told = False, Content(), list[dict[str, Any]]()
    for piece in pieces:
        if piece.kind != "arguments" or called:
            called = piece.kind in ("call", "arguments")
            told += content.add(piece)
    blocks = list[dict[str, Any]]()
    for event in told + list(content.close()):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({"text": "", "thinking": "", "partial_json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            for name in blocks[-1]:
                blocks[-1][name] += event["delta"].get(name, "")
    for block, found in zip(content.blocks, blocks, strict=True):
        if block["type"] != "tool_use":
            assert found[block["type"]] == block[block["type"]]
        elif block["input"]:
            assert json.loads(found["partial_json"]) == block["input"]
