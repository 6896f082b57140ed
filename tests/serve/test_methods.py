"""Methods: HEAD is GET without its body, OPTIONS and 405 say what a path allows, for every route."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient
from serving import Log

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def routes(client: TestClient) -> dict[str, set[str]]:
    """The paths of the schema with their methods, the schema's own among them."""
    told = client.get("/openapi.json").json()["paths"]
    paths = {path.replace("{number}", "x").replace("{name}", "alias"): methods for path, methods in told.items()}
    return {path: {method.upper() for method in methods} for path, methods in paths.items()} | {
        "/openapi.json": {"GET"}
    }


@pytest.mark.parametrize("root", ["", "/llm"])
def test_every_path_says_what_it_allows(make_client: Callable[..., TestClient], root: str) -> None:
    client = make_client(ui=True, root_path=root)
    paths = routes(client)
    assert paths["/"] == {"GET", "POST"}
    for path, own in paths.items():
        methods = own | {"OPTIONS"} | ({"HEAD"} if "GET" in own else set())
        told = client.options(root + path)
        assert (told.status_code, told.content) == (204, b"")
        assert set(told.headers["allow"].split(", ")) == methods
        for method in {*METHODS} - methods:
            refused = client.request(method, root + path)
            assert (refused.status_code, refused.headers["allow"]) == (405, told.headers["allow"]), (method, path)


def test_head_is_get_without_a_body(make_client: Callable[..., TestClient], log: Log) -> None:
    client = make_client(ui=True)
    for path in (path for path, methods in routes(client).items() if "GET" in methods):
        whole, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b""), path
        assert head.headers["content-type"] == whole.headers["content-type"]
        if path in ("/health", "/v1/models"):
            assert head.headers["content-length"] == str(len(whole.content))
    client.service.drain()  # type: ignore[attr-defined]
    assert client.head("/health/ready").status_code == 503
    assert client.head("/v1/completions").status_code == 405
    assert client.head("/nowhere").status_code == client.options("/nowhere").status_code == 404


def test_probes_need_no_key_and_are_not_logged(make_client: Callable[..., TestClient], log: Log) -> None:
    client = make_client(api_keys=("key",), health_route="/alive", ui=True)
    for path in ("/health", "/health/live", "/health/ready", "/ping", "/alive"):
        assert [client.request(method, path).status_code for method in ("GET", "HEAD", "OPTIONS")] == [200, 200, 204]
    assert not log.lines
    assert client.head("/").status_code == 200
    for method in ("HEAD", "OPTIONS"):
        assert client.request(method, "/v1/models").status_code == 401
        assert client.request(method, "/v1/models", headers={"Authorization": "Bearer key"}).is_success


def test_a_page_of_another_origin_still_asks_beforehand(make_client: Callable[..., TestClient]) -> None:
    client = make_client(allowed_origins=("https://here.example",))
    asked = {"Origin": "https://here.example", "Access-Control-Request-Method": "POST"}
    assert client.options("/v1/completions", headers=asked).headers["access-control-allow-origin"] == asked["Origin"]
    assert client.options("/v1/completions", headers={"Origin": asked["Origin"]}).headers["allow"] == "OPTIONS, POST"
