"""Attacks by prompts: lines of prompt files, and whatever may be handed to `Engine.generate`."""

import json

from data_files import table

from specbuild.runtime import Chat, Engine, SamplingParams
from specbuild.runtime.requests import prompt_file

from .attack import Attack
from .mutations import HOSTILE, mutate_bytes, mutate_json, to_bytes
from .outcome import check_error

PARTS = table("prompt_parts.json")
LINES, PIECES = PARTS["lines"], PARTS["pieces"]
SHORT = {"max_new_tokens": 3}


def text(rng):
    """Any text, now and then a long one."""
    whole = "".join(rng.choice(PIECES) for _ in range(rng.choice((0, 1, 5, 50))))
    if whole and rng.random() < 0.01:
        return whole * (12_000_000 // len(whole))
    return whole * rng.choice((1, 1, 1, 1, 1, 100, 20_000 if rng.random() < 0.2 else 1))


def prompt(rng, depth=2):
    """Anything that somebody may take for a prompt."""
    ids = (0, 1, 4095, 4096, -1, 2**31, 2**63, 2**64, 10**30, True, 1.0, "1", None)
    match rng.randrange(9 if depth else 7):
        case 0 | 1 | 2:
            return text(rng)
        case 3:
            return [rng.randrange(4096) for _ in range(rng.choice((0, 1, 40, 1023, 1024, 5000)))]
        case 4:
            return [rng.choice(ids) for _ in range(rng.choice((1, 3)))]
        case 5:
            message = {"role": rng.choice(("user", "", 5, None)), "content": rng.choice((text(rng), None, [], 5))}
            return rng.choice(([message], [message] * 3, Chat([message]), [{}], [message, "x"], [message | {"a": {1}}]))
        case 6:
            return rng.choice(
                (None, 5, 1.5, b"bytes", bytearray(b"x"), {"a": 1}, {1, 2}, object(), ..., range(3), str, ())
            )
        case _:
            return [prompt(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 5)))]


def line(rng):
    """A line of a prompt file."""
    body = rng.choice(LINES)
    match rng.randrange(5):
        case 0:
            return mutate_bytes(rng, json.dumps(body, ensure_ascii=False).encode())
        case 1:
            return to_bytes(body | {rng.choice((*body, "seed", "n", "stop", "x", "prompt")): rng.choice(HOSTILE)})
        case 2:
            return to_bytes({"prompt": rng.choice((text(rng), rng.choice(HOSTILE)))})
        case 3:
            return rng.choice((b"", b"null", b"[]", b'"x"', b"{}", b"\xff", b'{"prompt": "a"}' * 2, b"\x00", b"\r"))
        case _:
            return to_bytes(mutate_json(rng, body)[0])


class PromptsAttack(Attack):
    """Gives prompts to an engine that lives as long as its worker; the golden ones still get their tokens."""

    def __init__(self, bench):
        super().__init__(bench)
        self.engine = Engine.load(bench.bundle, batch_size=2)

    def attempt(self, rng, place):
        try:
            if rng.random() < 0.5:
                self._file(rng, place / "prompts.jsonl")
            else:
                given = prompt(rng)
                (place / "prompt.txt").write_text(f"{given!r:.100000}", errors="backslashreplace")
                errors = rng.choice(("raise", "return"))
                for result in self.engine.generate(given, SamplingParams(**SHORT), errors=errors):
                    check_error(result.error)
        finally:
            if rng.random() < 0.1:
                self.bench.golden.check(self.engine)

    def _file(self, rng, path):
        path.write_bytes(rng.choice((b"\n", b"\r\n")).join(line(rng) for _ in range(rng.choice((1, 1, 2, 5)))))
        requests = prompt_file.read(str(path), rng.choice(({}, SHORT)))
        few = [request for request in requests if request.params.n <= 4][:4]
        params = [SamplingParams(**SHORT, stop=request.params.stop) for request in few]
        for result in self.engine.generate([request.prompt for request in few], params, errors="return"):
            check_error(result.error)

    def close(self):
        self.engine.close()
