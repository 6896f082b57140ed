"""The routes, from a client's side: OpenAI's shapes, the engine's texts, whole and streamed."""

import json
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event

import pytest
from route_client import ASKED, CHATS, COMPLETIONS, SAID

from specbuild.runtime import Chat, SamplingParams


def test_a_completion_is_the_engines(client, engine):
    (want,) = engine.generate("def main(", SamplingParams(max_new_tokens=12))
    reply, prompt = client.ask(return_token_ids=True), engine.encode("def main(")
    (choice,) = reply["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (want.text, want.token_ids, "length")
    assert (choice["prompt_token_ids"], reply["usage"]["total_tokens"]) == (prompt, len(prompt) + 12)
    assert (reply["object"], reply["model"], reply["id"][:5]) == ("text_completion", "pycode", "cmpl-")


@pytest.mark.slow
def test_a_chat_is_the_engines(client, engine):
    (want,) = engine.generate(Chat(SAID), SamplingParams(max_new_tokens=12))
    message = client.ask(CHATS)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": want.text, "refusal": None}
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "loop"}]
    assert client.choice(CHATS, messages=[{"role": "user", "content": parts}])["text"] == want.text
    assert client.choice(CHATS, chat_template_kwargs={"prefix": "class "})["text"] != want.text
    roles = [event["choices"][0]["delta"].get("role") for event in client.events(CHATS)]
    assert roles == ["assistant", *[None] * (len(roles) - 1)]


def test_usage_of_a_stream(client):
    assert all("usage" not in event for event in client.events())
    *events, last = client.events(stream_options={"include_usage": True})
    assert {event["usage"] for event in events} == {None}
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 12)
    told = client.events(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in told]
    assert (counts, counts[-2:]) == (sorted(counts), [12, 12])


def test_a_prediction_changes_no_text_and_usage_says_what_came_true(client):
    """OpenAI's field, of every sample, whole and streamed."""
    asked = {"temperature": 0.8, "seed": 3, "n": 2, "max_tokens": 24}
    texts = [choice["text"] for choice in client.ask(**asked)["choices"]]
    parts = [{"type": "text", "text": texts[0][:9]}, {"type": "text", "text": texts[0][9:]}]
    for content in (texts[0], parts, "something else altogether", ""):
        prediction = {"type": "content", "content": content}
        reply = client.ask(**asked, prediction=prediction)
        assert [choice["text"] for choice in reply["choices"]] == texts
        counts = reply["usage"].get("completion_tokens_details")
        assert bool(counts) == bool(content)
        *_, last = client.events(**asked, prediction=prediction, stream_options={"include_usage": True})
        assert last["usage"].get("completion_tokens_details") == counts
        if content == texts[0]:
            assert counts["accepted_prediction_tokens"] > 12
        elif isinstance(content, str) and content:
            assert counts["rejected_prediction_tokens"] > counts["accepted_prediction_tokens"]


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_speculation_changes_no_text(client, temperature):
    plain = [{"speculation": "off"}, {"disable_spec_decode": True}]
    drafted = [{"speculation": "chain:4"}, {"speculation": "best:8"}, {"num_speculative_tokens": 3}]
    replies = [client.ask(temperature=temperature, seed=5, max_tokens=32, **way) for way in plain + drafted]
    assert len({reply["choices"][0]["text"] for reply in replies}) == 1
    speculates = [reply["metrics"]["speculative_decoding"]["num_spec_steps"] > 0 for reply in replies]
    assert speculates == [False] * 2 + [True] * 3


def test_logprobs_of_a_completion(client, engine):
    asked = {"logprobs": 2, "echo": True, "max_tokens": 4}
    (choice,) = client.ask(**asked)["choices"]
    told, prompt = choice["logprobs"], engine.encode("def main(")
    assert "".join(told["tokens"]) == choice["text"]
    assert {len(each) for each in told.values()} == {len(prompt) + 4}
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    (want,) = engine.generate("def main(", SamplingParams(max_new_tokens=4, logprobs=2))
    assert told["token_logprobs"][len(prompt) :] == [each.logprob for each in want.logprobs or []]
    parts = [event["choices"][0]["logprobs"] for event in client.events(**asked)]
    assert {name: [each for part in parts if part for each in part[name]] for name in told} == told


def test_logprobs_of_a_chat(client):
    (choice,) = client.ask(CHATS, logprobs=True, top_logprobs=3)["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == choice["message"]["content"]
    assert all(each["top_logprobs"][0]["token"] == each["token"] for each in content)
    assert {len(each["top_logprobs"]) for each in content} == {3}


def test_sloppy_clients(make_client):
    message = {"role": "user", "content": "a loop", "mood": 1}
    assert make_client(extra_fields="ignore").choice(CHATS, colour=1, messages=[message])


def test_models_and_their_names(client):
    assert client.ask(model="alias")["model"] == "pycode"
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["pycode", "alias"]
    assert client.get("/v1/models/alias").json()["max_model_len"] == 1024


def test_tokens_there_and_back(client, engine):
    tokens = engine.encode("def main(")
    told = client.ask("/tokenize", prompt="def main(", return_token_strs=True)
    assert (told["tokens"], told["count"], "".join(told["token_strs"])) == (tokens, len(tokens), "def main(")
    assert client.ask("/detokenize", tokens=tokens) == {"prompt": "def main("}
    assert client.ask("/tokenize", messages=SAID)["tokens"] == engine.encode(Chat(SAID))


TEXTS = {
    **{"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}},
    "/v1/messages/count_tokens": {"messages": SAID},
}


@pytest.mark.parametrize("path", TEXTS)
def test_counting_tokens_has_a_queue_of_its_own_which_may_be_full(client, path):
    """Generation that is busy does not hold it up, nor does it hold up generation or a scrape."""
    free = Event()
    held = [pool.submit(free.wait) for pool in [client.service.pool] * 2]
    try:
        with ThreadPoolExecutor(1) as asking:
            for found in (asking.submit(client.ask, path, **TEXTS[path]), asking.submit(client.get, "/metrics")):
                found.result(10)
    finally:
        free.set()
        wait(held)
    room = client.service.text_admission
    with room.room(room.max_samples):
        reply = client.post(path, json=TEXTS[path])
        assert (reply.status_code, "retry-after" in reply.headers) == (429, True)
        assert client.ask()


@pytest.mark.parametrize(
    ("share", "keys", "cached"), [(False, "aab", [False, True, False]), (True, "ab", [False, True])]
)
def test_caches_are_apart_by_key(make_client, share, keys, cached):
    client, found = make_client(api_keys=("a", "b"), share_prefix_cache=share), []
    for key in keys:
        body = {"prompt": f"import sys\nimport json # {share}\n" * 8, "max_tokens": 1}
        reply = client.post(COMPLETIONS, json=body, headers={"Authorization": f"Bearer {key}"}).json()
        found.append(bool(reply["usage"]["prompt_tokens_details"]["cached_tokens"]))
    assert found == cached


@pytest.mark.slow
def test_a_full_queue_and_a_draining_server(client):
    def refused():
        reply = client.post(COMPLETIONS, json=ASKED[COMPLETIONS])
        assert int(reply.headers["retry-after"]) >= 1
        return reply.status_code

    with client.admission.room(client.admission.max_samples):
        assert refused() == 429
    client.service.drain()
    assert refused() == 503
    ready, live = (client.get(f"/health/{each}") for each in ("ready", "live"))
    assert (ready.status_code, live.status_code, ready.json()["models"]) == (503, 200, {"pycode": "draining"})
    rejections = [name for name in client.series() if name.startswith("specbuild:admission_rejections_total")]
    assert [name.split('"')[3] for name in rejections] == ["queue_full", "draining"]


@pytest.mark.slow
def test_deadlines(make_client):
    assert make_client(request_timeout=1e-6).refusal(COMPLETIONS, prompt="x")[0] == 408
    (cut,) = make_client().ask(max_tokens=900, ignore_eos=True, deadline=0.3)["choices"]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("length", "deadline")


def test_request_ids_and_the_log(client, log):
    reply = client.post(COMPLETIONS, json=ASKED[COMPLETIONS] | {"user": "u"}, headers={"X-Request-Id": "abc"})
    assert (reply.headers["x-request-id"], reply.json()["id"]) == ("abc", "cmpl-abc")
    told = {"request_id": "abc", "status": 200, "model": "pycode", "user": "u", "output_tokens": 12}
    assert told.items() <= log.lines[-1].items()
    assert "def main" not in json.dumps(log.lines)
    assert client.ask(request_id="own")["id"] == "cmpl-own"
    assert len(client.get("/version", headers={"X-Request-Id": "two words"}).headers["x-request-id"]) == 32


@pytest.mark.parametrize(("how", "names"), [("none", 0), ("summary", 5), ("detailed", 7)])
def test_metrics_of_a_request(make_client, how, names):
    reply = make_client(spec_metrics=how).ask()
    for told in (reply, reply["choices"][0]):
        assert len(told.get("metrics", {}).get("speculative_decoding", ())) == names


def test_a_page_of_another_origin(make_client):
    client = make_client(allowed_origins=("https://here.example",), api_keys=("k",))
    for origin, allowed in (("https://here.example", "https://here.example"), ("https://there.example", None)):
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        assert client.options(COMPLETIONS, headers=asked).headers.get("access-control-allow-origin") == allowed
