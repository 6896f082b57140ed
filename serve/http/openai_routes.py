"""The routes that OpenAI's and vLLM's clients call."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from specbuild.serve.errors import ApiError, faults, json_response
from specbuild.serve.request.body import read, takes
from specbuild.serve.request.fields import DetokenizeRequest, TokenizeRequest
from specbuild.serve.request.models import ServedModel
from specbuild.serve.request.prepare import chat_of, encoded
from specbuild.serve.service import Service
from specbuild.serve.text_route import CHATS, COMPLETIONS


def routes(service: Service) -> APIRouter:
    """Return the routes that OpenAI's and vLLM's clients call."""
    router = APIRouter(responses=faults())
    models = service.models
    COMPLETIONS.add(router, service)
    CHATS.add(router, service)

    @router.get("/v1/models", response_model=dict[str, Any])
    async def list_models() -> Response:
        cards = [_card(model, name) for model in models.all for name in model.names]
        return json_response({"object": "list", "data": cards})

    @router.get("/v1/models/{name:path}", response_model=dict[str, Any])
    async def retrieve_model(name: str) -> Response:
        return json_response(_card(models.pick(name), name))

    @router.post("/tokenize", response_model=dict[str, Any], openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await read(request, TokenizeRequest, service.refuses_unknown)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give prompt, a text, or messages, a chat", param="prompt")
        engine = models.pick(body.model).engine.engine

        def work() -> dict[str, Any]:
            if body.messages is None:
                tokens = engine.encode(body.prompt or "")
            else:
                chat = chat_of(body.messages, body.chat_template_kwargs, body.add_generation_prompt)
                tokens = encoded(engine, chat)
            texts = [engine.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
            told = {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens}
            return {**told, "token_strs": texts}

        return json_response(await service.tokenizing(work))

    @router.post("/detokenize", response_model=dict[str, str], openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await read(request, DetokenizeRequest, service.refuses_unknown)
        engine = models.pick(body.model).engine.engine
        size = engine.manifest.models["target"].vocab_size
        if any(token >= size for token in body.tokens):
            raise ApiError(400, f"tokens has an id outside the vocabulary of {size}", param="tokens")
        return json_response({"prompt": await service.tokenizing(partial(engine.decode, body.tokens, False))})

    return router


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "specbuild",
        "root": model.path.name,
        "max_model_len": model.engine.engine.max_model_len,
    }
