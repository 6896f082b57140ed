"""Turns the pieces of a turn into output items of a response and their stream events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from specbuild.serve.output_parsers.parser_base import Piece
from specbuild.serve.request import tools

Event = dict[str, Any]
_KINDS = {"content": "message", "reasoning": "reasoning", "call": "function_call", "arguments": "function_call"}
_DELTAS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


class Output:
    """The output items of one response, in order; `items` has those that have begun."""

    def __init__(self) -> None:
        self.items = list[dict[str, Any]]()
        self._open = False

    def add(self, piece: Piece) -> Iterator[Event]:
        """Yield the events of a piece."""
        kind = _KINDS[piece.kind]
        if self._open and (piece.kind == "call" or self.items[-1]["type"] != kind):
            yield from self.close("completed")
        if not self._open:
            yield from self._begin(kind, piece)
        if piece.kind != "call" and piece.text:
            item, where = self.items[-1], self._where()
            if kind == "function_call":
                item["arguments"] += piece.text
            else:
                item["content"][0]["text"] += piece.text
            logprobs: Event = {"logprobs": []} if kind == "message" else {}
            yield {"type": f"response.{_DELTAS[kind]}.delta", **where, "delta": piece.text, **logprobs}

    def close(self, status: str) -> Iterator[Event]:
        """Yield the events that end the open item, if any; `status`: completed or incomplete."""
        if not self._open:
            return
        self._open, item, where = False, self.items[-1], self._where()
        kind = item["type"]
        item["status"] = status
        if kind == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **where, **said}
        else:
            (part,) = item["content"]
            logprobs: Event = {"logprobs": []} if kind == "message" else {}
            yield {"type": f"response.{_DELTAS[kind]}.done", **where, "text": part["text"], **logprobs}
            yield {"type": "response.content_part.done", **where, "part": part}
        yield {"type": "response.output_item.done", "output_index": where["output_index"], "item": item}

    def _begin(self, kind: str, piece: Piece) -> Iterator[Event]:
        number = secrets.token_hex(16)
        item: dict[str, Any]
        if kind == "function_call":
            item = {"id": f"fc_{number}", "call_id": tools.new_id(), "name": piece.text, "arguments": ""}
        elif kind == "message":
            item = {"id": f"msg_{number}", "role": "assistant", "content": []}
        else:
            item = {"id": f"rs_{number}", "summary": [], "content": []}
        item = {"type": kind, "status": "in_progress", **item}
        self._open = True
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": _copy(item)}
        if kind != "function_call":
            more: Event = {"annotations": [], "logprobs": []} if kind == "message" else {}
            part = {"type": _DELTAS[kind], "text": "", **more}
            item["content"].append(part)
            yield {"type": "response.content_part.added", **self._where(), "part": dict(part)}

    def _where(self) -> Event:
        item = self.items[-1]
        told: Event = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return told if item["type"] == "function_call" else {**told, "content_index": 0}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in item.items()}
