"""Makes requests of the tables in cases.txt: the same ones in the same order each time."""

import base64
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

JSON = ("content-type", "application/json")
METHODS = ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS")
MAX_FIELDS = 4  # of a draw
BAD_SHARE = 0.06  # of the values of a draw

Fields = dict[str, Any]
Blocks = list[list[str]]  # a line and those that go on with it


@dataclass(frozen=True)
class Case:
    """A request. Its `door` is the path that the log names another port of the server with."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    door: str = ""

    @property
    def all_headers(self) -> list[tuple[str, str]]:
        """The headers that are sent: with those that every request has, unless it says otherwise.
        A header without a value is not sent."""
        names = {name for name, _ in self.headers}
        usual = [("host", "127.0.0.1")]
        if self.body:
            usual.append(JSON)
            if "transfer-encoding" not in names:
                usual.append(("content-length", str(len(self.body))))
        headers = [*(pair for pair in usual if pair[0] not in names), *self.headers]
        return [(name, value) for name, value in headers if value]

    @property
    def parts(self) -> list[bytes]:
        """The body as it is sent."""
        if ("transfer-encoding", "chunked") not in self.headers:
            return [self.body]
        return [b"%x\r\n%b\r\n" % (len(self.body), self.body), b"0\r\n\r\n"]


@dataclass(frozen=True)
class Route:
    """What a POST route takes: bodies, the usual one first; models, and fields."""

    path: str
    draws: int
    good: list[Fields]
    bad: list[Fields]
    models: list[str]
    fields: list[str]

    def body(self, inputs: Fields, model: str | None = None) -> Fields:
        """A body for a model, the usual one if none is named."""
        model = model or next(iter(self.models), None)
        return ({"model": model} if model else {}) | inputs


def _picture(form: str, height: int = 32, width: int = 32) -> bytes:
    colours = Random(height * width).randbytes(3 * height * width)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), colours).save(file, form)
    return file.getvalue()


PNG = _picture("PNG")
PICTURES = {
    "png": PNG,
    "jpeg": _picture("JPEG", 20, 50),
    "webp": _picture("WEBP", 90, 8),
    "gif": _picture("GIF"),
    "cut": PNG[: len(PNG) // 2],
    "huge": PNG[:16] + (60_000).to_bytes(4, "big") * 2 + PNG[24:],
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
}
CONTENTS = {name: base64.b64encode(data).decode() for name, data in PICTURES.items()}
MARKS = {
    "$nothing": "",
    "$nested": "[" * 3000,
    "$300": "x" * 300,
    "$long": "the red cat " * 12,
    "$story": "the red cat sat on a mat. " * 30,
    "$cats": "cat " * 4000,
    "$ids": ", ".join(["8"] * 700),
    "$many": ", ".join(['"dense"'] * 40),
    "$17": ", ".join(['"cat"'] * 17),
    "$text": '{"type": "text", "text": "a cat"}',
    **{f"$uri-{name}": f"data:image/{name};base64,{text}" for name, text in CONTENTS.items()},
    **{f"$64-{name}": text for name, text in CONTENTS.items()},
}
BYTES = {b"$ff": b"\xff"}  # what no text can hold


class Cases:
    """The tables. `host` serves PICTURES."""

    def __init__(self, host: str):
        text = Path(__file__).with_name("cases.txt").read_text(encoding="utf-8")
        for mark, content in (*MARKS.items(), ("$host", host)):
            text = text.replace(mark, content)
        self._sections = dict(_sections(text))
        self._words = {name: rest for name, rest in self._named("words")}
        self.fields = {name: _good_and_bad(rest) for name, rest in self._named("fields")}
        self._unserved = {name: list(_values(rest)) for name, rest in self._named("unserved")}
        self._inputs: dict[str, tuple[list, list]] = {}
        for name, rest in self._named("inputs"):
            self._inputs[name] = _good_and_bad(rest, self._inputs)
        self.routes = [self._route(path, rest) for path, rest in self._named("routes")]

    def listed(self, section: str) -> Iterator[Case]:
        """The requests that are written out in a section."""
        for block in self._sections[section]:
            method, path, *rest = " ".join(map(str.strip, block)).split(" ", 2)
            yield _case(method, path, rest[0] if rest else "")

    def of_routes(self) -> Iterator[Case]:
        """Of each route: every input, model and field alone, several fields, and what is no body
        of it."""
        for route in self.routes:
            bodies = [route.body(inputs) for inputs in (*route.good, *route.bad)]
            bodies += [route.body(route.good[0], model) for model in route.models[1:]]
            bodies += [
                route.body(one, model) for model in route.models[2:4] for one in route.good[1:5]
            ]
            usual = route.body(route.good[0])
            for field in route.fields:
                bodies += [usual | {field: value} for some in self.fields[field] for value in some]
            bodies += self._of_other_routes(route)
            bodies += self.drawn(route, route.draws)
            yield from (_post(route.path, body) for body in bodies)
            yield from (Case(method, route.path) for method in METHODS)
            for block in self._sections["bodies"]:
                yield _case("POST", route.path, block[0].replace("$good", json.dumps(usual)))

    def unnamed(self, draws: int) -> Iterator[Case]:
        """Of each route some bodies that name no model."""
        for route in self.routes:
            for body in (*route.good, *self.drawn(route, draws)):
                yield _post(route.path, {k: v for k, v in body.items() if k != "model"})

    def drawn(self, route: Route, count: int) -> Iterator[Fields]:
        """Bodies with a few fields each, most of their values good."""
        random = Random(f"{route.path} {count}")
        for _ in range(count):
            inputs = random.choice(route.bad if random.random() < BAD_SHARE else route.good)
            model = random.choice(route.models or [""])
            body = route.body(inputs, model if random.random() < 0.5 else None)
            some = [field for field in route.fields if any(self.fields[field][0])]
            for field in random.sample(some, min(random.randint(1, MAX_FIELDS), len(some))):
                good, bad = self.fields[field]
                body[field] = random.choice(bad if random.random() < BAD_SHARE else good)
            yield body

    def of_grids(self, section: str) -> Iterator[Case]:
        """All combinations of the values of some fields."""
        for head, *lines in self._sections[section]:
            path, rest = head.split(" ", 1)
            (body,), models = _leading_values(rest)
            names, axes = zip(*(_named_values(line.strip()) for line in lines), strict=True)
            for model, values in product(models.split() or [None], product(*axes)):
                given = zip(("model", *names), (model, *values), strict=True)
                yield _post(path, body | {name: one for name, one in given if one is not None})

    def of_images(self, model: str, most: int | None = None) -> Iterator[Case]:
        """Each body with an image, of each source, or of the first ones."""
        (sources,) = self._sections["sources"]
        for block in self._sections["images"]:
            path, body = " ".join(map(str.strip, block)).split(" ", 1)
            for source in " ".join(sources).split()[:most]:
                yield _post(path, {"model": model} | json.loads(body.replace("$image", source)))

    def _of_other_routes(self, route: Route) -> Iterator[Fields]:
        """Bodies with fields that the route does not serve: all that ask for nothing at once, and
        each that asks; of those that no route serves every fourth."""
        usual, number = route.body(route.good[0]), self.routes.index(route)
        asked = {name: good[0] for name, (good, _) in self.fields.items() if good}
        asked |= {name: one for name, (_, one) in list(self._unserved.items())[number % 4 :: 4]}
        yield usual | {name: nothing for name, (nothing, _) in self._unserved.items()}
        served = {*route.fields, *usual}
        yield from (usual | {name: one} for name, one in asked.items() if name not in served)

    def _named(self, section: str) -> Iterator[tuple[str, str]]:
        for block in self._sections[section]:
            name, rest = " ".join(map(str.strip, block)).split(" ", 1)
            yield name, rest

    def _route(self, path: str, rest: str) -> Route:
        head, _, rest = rest.partition(" for ")
        models, _, fields = rest.partition("with ")
        draws, *inputs = head.split()
        good, bad = [], []
        for one in inputs:
            field, _, name = one.partition("=")
            for found, values in zip((good, bad), self._inputs[name], strict=True):
                found += values if field == "*" else [{field: value} for value in values]
        return Route(path, int(draws), good, bad, self._expanded(models), self._expanded(fields))

    def _expanded(self, words: str) -> list[str]:
        found: list[str] = []
        for word in words.split():
            found += self._expanded(self._words[word[1:]]) if word.startswith("@") else [word]
        return list(dict.fromkeys(found))


def _sections(text: str) -> Iterator[tuple[str, Blocks]]:
    parts = re.split(r"^\[([a-z]+)\]\n", text, flags=re.MULTILINE)[1:]
    for name, rest in zip(parts[::2], parts[1::2], strict=True):
        blocks: Blocks = []
        for line in rest.splitlines():
            if line.startswith("    "):
                blocks[-1].append(line)
            elif line and not line.startswith("#"):
                blocks.append([line])
        yield name, blocks


def _values(text: str) -> Iterator[Any]:
    """The JSON values that follow each other in a text, and words with a plus."""
    values, rest = _leading_values(text)
    yield from values
    if rest:
        word, _, rest = rest.partition(" ")
        yield word if word.startswith("+") else json.loads(word)
        yield from _values(rest)


def _leading_values(text: str) -> tuple[list[Any], str]:
    """The JSON values that a text begins with, and the rest of it."""
    decoder, values = json.JSONDecoder(), []
    while text := text.strip():
        try:
            value, end = decoder.raw_decode(text)
        except ValueError:
            break
        values.append(value)
        text = text[end:]
    return values, text


def _named_values(line: str) -> tuple[str, list[Any]]:
    name, rest = line.split(" ", 1)
    return name, list(_values(rest))


def _good_and_bad(
    text: str, others: dict[str, tuple[list, list]] | None = None
) -> tuple[list[Any], list[Any]]:
    """The values before and after a bar; those of others where a word with a plus names these."""
    found: tuple[list, list] = ([], [])
    for number, half in enumerate(text.split("|")):
        for value in _values(half):
            named = others is not None and isinstance(value, str) and others.get(value[1:])
            if named and value.startswith("+"):
                found[number].extend(named[number])
            else:
                found[number].append(value)
    return found


def _post(path: str, body: Fields) -> Case:
    return Case("POST", path, json.dumps(body, ensure_ascii=False).encode())


def _case(method: str, path: str, rest: str) -> Case:
    """A request of its body and headers, which a bar comes before."""
    body, *given = rest.split("| ")
    content = body.strip().encode()
    for mark, data in BYTES.items():
        content = content.replace(mark, data)
    pairs = (one.split(":", 1) for one in given)
    headers = tuple((name.strip(), value.strip()) for name, value in pairs)
    door = dict(headers).get("door", "")
    return Case(method, path, content, tuple(one for one in headers if one[0] != "door"), door)
