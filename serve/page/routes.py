"""The page at `/`, and what it asks of the server beside OpenAI's routes."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from specbuild.serve.errors import faults, json_response
from specbuild.serve.service import Service

PAGE = Path(__file__).with_name("page.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def routes(service: Service) -> APIRouter:
    """`GET /` and `GET /ui/models`."""
    router = APIRouter(responses=faults(statuses=(401, 405, 500)))
    page = PAGE.read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": _policy(page), "X-Content-Type-Options": "nosniff"}

    @router.get("/", responses={200: {"content": {"text/html": {}}}}, response_class=Response)
    async def show_page() -> Response:
        return Response(page, media_type="text/html", headers=headers)

    @router.get("/ui/models", response_model=list[dict[str, Any]])
    async def list_chatting_models() -> Response:
        served = service.models.all
        return json_response([{"name": each.name, "chats": each.engine.engine.tokenizer.chats} for each in served])

    return router


def _policy(page: str) -> str:
    """A content security policy under which the page's own script and style run, and nothing else."""
    own = {"script": "", "style": ""}
    for kind, text in _INLINE.findall(page):
        own[kind] += f" 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    sources = f"script-src{own['script']}; style-src{own['style']}; connect-src 'self'; img-src data:"
    return f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
