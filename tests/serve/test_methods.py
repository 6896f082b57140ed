"""Methods: HEAD is GET without its body, OPTIONS and 405 say what a path allows, for every route."""

import pytest

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def routes(client):
    """The paths of the schema with their methods, the schema's own among them."""
    told = client.get("/openapi.json").json()["paths"] | {"/openapi.json": {"get": {}}}
    paths = {path.replace("{number}", "x").replace("{name}", "alias"): methods for path, methods in told.items()}
    return {path: {method.upper() for method in methods} for path, methods in paths.items()}


@pytest.mark.slow(but=("/llm",))
@pytest.mark.parametrize("root", ["", "/llm"])
def test_every_path_says_what_it_allows(make_client, root):
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


@pytest.mark.slow
def test_head_is_get_without_a_body(make_client):
    client = make_client(ui=True)
    for path in (path for path, methods in routes(client).items() if "GET" in methods):
        whole, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b""), path
        assert head.headers["content-type"] == whole.headers["content-type"]
        if path in ("/health", "/v1/models"):
            assert head.headers["content-length"] == str(len(whole.content))
    client.service.drain()
    assert client.head("/health/ready").status_code == 503
    assert client.head("/nowhere").status_code == client.options("/nowhere").status_code == 404
