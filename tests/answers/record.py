"""Records the answers of real servers with tiny models, and compares two recordings.

python -m tests.answers.record OUT.jsonl --front-ends 2
python -m tests.answers.record --compare BEFORE.jsonl AFTER.jsonl

A line is a request and its answer, in which masks.py puts marks for what may differ. The exit
status is 1 if recordings differ.
"""

import argparse
import base64
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .cases import Case, Cases
from .masks import masked, masked_body, masked_header
from .models import MODELS
from .servers import Answer, calibrate, finish, pictures, running

MAX_REQUEST = 2048  # bytes of a request's body that are kept; of longer ones the digest
MAX_ANSWER = 2**20
SHOWN = 20  # differences
AROUND = 100  # characters that are shown before and after the first one that differs
DRAWS = 8  # of each route, of a server that is asked without the name of a model
OCTETS = "application/octet-stream"
HELD = Case("POST", "/embed", b'{"inputs": "cat", "model": "plain"}')  # while a server drains
LONG_FLAGS = "--max-batch-tokens 160 --buckets {folder}/buckets.json"
# The models and the flags of each server.
SERVERS = {
    "all": (
        " ".join(name for name in MODELS if not name.startswith("long")),
        "--served-model-name alias={folder}/plain --allow-media-urls {host} "
        "--allow-media-network 127.0.0.0/8",
    ),
    "limited": (
        "plain",
        "--max-client-batch-size 4 --payload-limit 4000 --auto-truncate false --no-playground "
        "--default-prompt-name query --cors-allow-origin https://a.example --prometheus-port 0 "
        "--cache-bytes 1000000 --accept-bare-token-ids",
    ),
    "keyed": (
        "plain tasks reranker",
        "--api-key in-flag --api-key-file {folder}/keys.toml --admin-key jx-admin "
        "--audit-log {folder}/audit.log",
    ),
    "scorers": (
        "reranker classifier",
        "--max-client-batch-size 0 --max-concurrent-requests 16",
    ),
    "pairs": ("long-reranker", LONG_FLAGS),
    "vectors": ("long-three", LONG_FLAGS),
    "repository": (
        "",
        "--model-repository {folder}/repository --loadable extra={folder}/classifier "
        "--admin-key jx-admin --admin-port 0",
    ),
}
KEYS: dict[str, dict[str, Any]] = {
    "all": {},
    "plain": {"models": ["plain", "nope"]},
    "sql": {"models": ["tasks:sql"]},
    "none": {"models": ["elsewhere"]},
    "routes": {"routes": ["/v1/*", "/embed"]},
    "few": {"requests_per_minute": 3},
    "tokens": {"tokens_per_minute": 9},
    "waiting": {"max_inputs_waiting": 2},
    "expired": {},
}

Record = dict[str, Any]


class Recorder:
    """Records answers of servers whose models are in a folder."""

    def __init__(
        self,
        folder: Path,
        host: str,
        flags: Sequence[str] = (),
        servers: Collection[str] = tuple(SERVERS),
    ):
        """`flags` are of each of the `servers`."""
        self._folder, self._flags, self._servers = folder, flags, servers
        self._cases = Cases(host)
        self._places = {str(folder): "<folder>", host: "<host>"}
        self._host = host
        for name, write in MODELS.items():
            write(folder / name)
        calibrate(folder / "plain", folder)
        (folder / "buckets.json").write_text('{"buckets": [[1, 160]]}')
        self._write_keys()
        self._write_repository()

    def record(self) -> Iterator[Record]:
        """The records of all servers, one after another."""
        cases, written = self._cases, self._cases.listed
        unnamed, windows = list(cases.unnamed(DRAWS)), list(cases.of_grids("windows"))
        images = [*cases.of_images("clip"), *cases.of_images("pages", 3)]
        others = [*images, *cases.of_grids("grids"), Case("GET", "/metrics")]
        usual = [*written("gets"), *written("all"), *cases.of_routes()]
        yield from self._served("all", [*usual, *others])
        limited = [*written("limited"), *written("gets"), *unnamed]
        yield from self._served("limited", limited, drains=True)
        yield from self._served("keyed", [*written("keyed"), *written("gets")])
        audit = self._folder / "audit.log"
        lines = audit.read_text().splitlines() if audit.exists() else []
        # sorted: each process writes the lines of its own requests
        for number, line in enumerate(sorted(masked(line, self._places) for line in lines)):
            yield {"id": f"audit {number:05}", "answer": line}
        yield from self._served("scorers", [*written("scorers"), *unnamed])
        yield from self._served("pairs", windows)
        yield from self._served("vectors", [*windows, *cases.of_grids("chunks")])
        yield from self._served("repository", written("repository"), drains=True)

    def _served(
        self, name: str, cases: Iterable[Case], *, drains: bool = False
    ) -> Iterator[Record]:
        """The answers of one server, if it is one of those to record."""
        if name not in self._servers:
            return
        models, flags = SERVERS[name]
        given = flags.format(folder=self._folder, host=self._host).split()
        given = ("serve", *self._models(*models.split()), *given, *self._flags)
        with running(given, self._folder / "cache", self._folder / f"{name}.log") as server:
            for number, case in enumerate(cases):
                yield self._line(f"{name} {number:05}", case, server.ask(case))
            if not drains:
                return
            with server.draining(HELD) as held:
                for number, case in enumerate(self._cases.listed("draining")):
                    yield self._line(f"{name}, draining {number:05}", case, server.ask(case))
                yield self._line(f"{name}, draining, held", HELD, finish(held, HELD))

    def _line(self, name: str, case: Case, answer: Answer) -> Record:
        size = None if case.method == "HEAD" else len(answer.body)
        return {
            "id": name,
            "method": case.method,
            "path": masked(case.path, self._places),
            "headers": case.headers,
            "body": self._shown(case.body, MAX_REQUEST),
            "status": answer.status,
            "answer headers": [
                (key, masked_header(key, value, self._places, size))
                for key, value in answer.headers
            ],
            "answer": self._answer(case, answer),
        }

    def _answer(self, case: Case, answer: Answer) -> str | Mapping[str, Any]:
        is_text = dict(answer.headers).get("content-type") != OCTETS
        if is_text and len(answer.body) <= MAX_ANSWER:
            try:
                return masked_body(case.path, answer.body.decode(), self._places)
            except UnicodeDecodeError:
                pass
        return _digest(answer.body) | {
            "base64": base64.b64encode(answer.body[:MAX_REQUEST]).decode()
        }

    def _shown(self, body: bytes, most: int) -> str | Mapping[str, Any]:
        text = masked(body.decode(errors="backslashreplace"), self._places)
        return text if len(text) <= most else _digest(text.encode())

    def _models(self, *names: str) -> tuple[str, ...]:
        """The flags of models that are served by their names here."""
        paths = {name: str(self._folder / name) for name in names}
        named = (("--served-model-name", f"{name}={path}") for name, path in paths.items())
        return (*paths.values(), *(word for pair in named for word in pair))

    def _write_repository(self) -> None:
        """Write a folder of models, of which one cannot be loaded."""
        repository = self._folder / "repository"
        (repository / "broken").mkdir(parents=True)
        (repository / "broken" / "config.json").write_text("{")
        for name in ("plain", "tasks", "reranker"):
            (repository / name).symlink_to(self._folder / name)

    def _write_keys(self) -> None:
        """Write a file of API keys: the key of each name is `jx-NAME`."""
        lines = []
        for name, fields in KEYS.items():
            digest = hashlib.sha256(f"jx-{name}".encode()).hexdigest()
            given = {"name": name, "sha256": digest} | fields
            lines += ["[[key]]", *(f"{key} = {json.dumps(value)}" for key, value in given.items())]
        lines += ["expires = 2020-01-31", ""]  # of the last one
        (self._folder / "keys.toml").write_text("\n".join(lines))


def _digest(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def record(out: Path, flags: Sequence[str] = (), servers: Collection[str] = tuple(SERVERS)) -> None:
    """Write a recording, and say how many answers of each status each route gave."""
    started_at, counts = time.monotonic(), Counter()
    with tempfile.TemporaryDirectory() as folder, pictures() as host, out.open("w") as file:
        for line in Recorder(Path(folder), host, flags, servers).record():
            print(json.dumps(line, ensure_ascii=False), file=file)
            path = line.get("path", "audit log").partition("?")[0]
            counts[path[:40], f"{str(line.get('status', '-'))[0]}xx"] += 1
    for (path, status), count in sorted(counts.items()):
        print(f"{count:6} {status} {path}")
    print(f"{counts.total()} answers in {time.monotonic() - started_at:.0f} s")


def differences(before: Path, after: Path) -> Iterator[str]:
    """What differs between two recordings, each in a few lines."""
    old, new = ({one["id"]: one for one in _lines(path)} for path in (before, after))
    for name in dict.fromkeys([*old, *new]):
        one, other = old.get(name), new.get(name)
        if one is None or other is None:
            yield f"{name}: only in {after if one is None else before}"
            continue
        for field in dict.fromkeys([*one, *other]):
            if one.get(field) != other.get(field):
                shown = _around(*(json.dumps(both.get(field)) for both in (one, other)))
                place = f"{name}: {one.get('method')} {one.get('path')}: {field}"
                yield "\n".join([place, *(f"    {text}" for text in shown)])


def _lines(path: Path) -> Iterator[Record]:
    with path.open() as file:
        yield from map(json.loads, file)


def _around(one: str, other: str) -> tuple[str, str]:
    """Both texts where they begin to differ."""
    pairs = enumerate(zip(one, other, strict=False))
    place = next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)))
    start = max(place - AROUND, 0)
    return one[start : place + AROUND], other[start : place + AROUND]


def main() -> int:
    """Record, or compare. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.answers.record", description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", help="file to write")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--front-ends", default="0", help="of each server")
    options = parser.parse_args()
    if (options.out is None) == (options.compare is None):
        parser.error("give a file to write, or --compare with two")
    if options.compare is None:
        record(options.out, ("--front-ends", options.front_ends))
        return 0
    found = list(differences(*options.compare))
    print("\n".join([*found[:SHOWN], f"{len(found)} differences"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
