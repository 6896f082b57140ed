"""Mutations of JSON and of bytes, drawn from a `random.Random`."""

import copy
import json

from data_files import table

Place = tuple[str | int, ...]
RAW = {  # what `json.dumps` would not write, by the string that stands for it
    "@digits": "9" * 5000,
    "@negative": "-" + "8" * 5000,
    "@deep": "[" * 60000 + "]" * 60000,
    "@objects": '{"a":' * 30000 + "1" + "}" * 30000,
    "@huge": "1e999",
    "@tiny": "1e-400",
    "@nan": "NaN",
    "@infinity": "-Infinity",
    "@surrogate": '"\\ud800"',
    "@half": '"\\ud83d x"',
    "@twice": '1, "schema_version": 3',
}
HOSTILE = (*table("hostile_values.json"), "x" * 100_000, list(range(2000)), *RAW)


def places(document, here=()):
    """Every place in a document, its root first."""
    found = [here]
    items = (
        document.items() if isinstance(document, dict) else enumerate(document if isinstance(document, list) else ())
    )
    for key, each in items:
        found += places(each, (*here, key))
    return found


def _at(document, place):
    for key in place:
        document = document[key]
    return document


def mutate_json(rng, document, choose=bool):
    """A copy with one to three changes at places that `choose` takes, and which places were changed."""
    changed, touched = copy.deepcopy(document), list[Place]()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        there = [place for place in places(changed) if place and choose(place)]
        if not there:
            break
        place = rng.choice(there)
        _change(rng, changed, place, there)
        touched.append(place)
    return changed, touched


def _change(rng, document, place, others):
    parent, key = _at(document, place[:-1]), place[-1]
    value = parent[key]
    match rng.randrange(8):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[rng.choice((f"{key}x", "", "a\nb", key.upper() if isinstance(key, str) else "k"))] = parent[key]
        case 1:
            parent.insert(rng.randrange(len(parent) + 1), value)
        case 2:
            parent[key] = copy.deepcopy(_at(document, rng.choice(others)))
        case 3:
            parent[key] = rng.choice(([value], {"a": value}, str(value)[:1000], [value] * 3, not value))
        case 4 if isinstance(value, int | float) and not isinstance(value, bool):
            parent[key] = rng.choice((value + 1, value - 1, value * 2, -value, value / 2, float(value), value * 1000))
        case 4 if isinstance(value, str):
            at = rng.randrange(len(value) + 1)
            parent[key] = rng.choice((value[:at], value[:at] + rng.choice("\x00/é\n\\0") + value[at:], value[::-1]))
        case 5 if isinstance(value, list | dict) and value:
            parent[key] = list(value)[::-1] if isinstance(value, list) else dict(list(value.items())[:-1])
        case _:
            parent[key] = copy.deepcopy(rng.choice(HOSTILE))


def to_bytes(document):
    """The JSON text, with what only RAW can say."""
    text = json.dumps(document)
    for stands, raw in RAW.items():
        text = text.replace(f'"{stands}"', raw)
    return text.encode()


def mutate_bytes(rng, content):
    """One to four changes of a file's bytes; never the same file."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) or 1)
        length = min(rng.choice((1, 2, 8, 64, 4096)), max(len(data) - at, 1))
        match rng.randrange(8):
            case 0 | 1:
                for spot in range(at, min(at + rng.choice((1, 1, 4)), len(data))):
                    data[spot] ^= 1 << rng.randrange(8)
            case 2:
                del data[at:]
            case 3:
                data[at : at + length] = rng.randbytes(length)
            case 4:
                del data[at : at + length]
            case 5:
                data[at:at] = data[at : at + length] * rng.choice((1, 3))
            case 6:  # a varint that does not end, or is as large as can be
                data[at : at + 10] = rng.choice((b"\xff" * 10, b"\xff" * 9 + b"\x01", b"\x80" * 4 + b"\x08"))
            case _:
                data[at:at] = rng.choice((b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"{", b"]", b"\xef\xbb\xbf"))
    return bytes(data) if bytes(data) != content else content + b"\x00"
