"""The page's routes: what is sent, and who may have it."""

import base64
import hashlib
import re

import pytest


def test_without_the_flag_there_is_no_page(client):
    assert client.get("/").status_code == 405, "text-generation-inference's route alone"
    assert client.get("/ui/models").status_code == 404


@pytest.mark.slow
def test_the_page_asks_nobody_else(make_client):
    page = make_client(ui=True).get("/")
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:,)|@import", page.text), "no file besides"
    assert set(re.findall(r"https?://[^\s\"`)]+", page.text)) == {"http://127.0.0.1:8000"}
    policy = page.headers["content-security-policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    assert policy.startswith("default-src 'none'; ")
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert "unsafe" not in policy
