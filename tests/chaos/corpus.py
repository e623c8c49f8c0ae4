"""The requests of a storm, and which answer to each of them is right."""

import base64
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from .locksmith import FLEETING, METERED, NARROW, WRONG
from .wire import Message, Reply

WORDS = ["the", "a", "of", "cat", "dog", "sat", "on", "mat", "runs", "red", "blue", "sky", "train"]
ODD_TEXTS = ["naïve café", "猫が座った", "🙂 smile 🙂", "x" * 200, "[CLS] the [SEP]", "a\tb\nc"]
ODD_TEXTS += ["  cat  "]
FIRST_ID, LAST_ID = 5, 30  # token ids that every vocabulary here has
MAX_INPUTS = 64  # in a request; the server is started with this limit
PAYLOAD_LIMIT = 256 * 1024
EMBEDDER, RERANKER = "e", "r"  # served names
MOVED = "m"  # the name that moves from one model to the other while requests ask for it

Input = str | list[int]


@dataclass(frozen=True)
class Ask:
    """A request, and its right answer."""

    kind: str
    message: Message
    right: Callable[[Reply], bool] = lambda reply: False  # whether an answer with 200 is right
    refused: int | None = None  # the expected status if the request is wrong
    err: str | None = None  # the label under which te_request_failure counts the refusal
    stamped: bool = False  # whether te_request_success counts it
    counted: bool = True  # whether it is for models whose metrics last


class Corpus:
    """Inputs, and the right answer to each, which `learn` gets from a server without faults."""

    def __init__(self, seed: int, reranks: bool, moved: Sequence[str] = ()):
        """`moved` are the models that MOVED names in turn."""
        random = Random(f"{seed}/corpus")
        self.reranks = reranks
        self.moved = moved
        self.exact = True  # results in float32 are compared by value, others by cosine
        self.inputs: list[Input] = list(ODD_TEXTS)
        for most, count in ((4, 20), (30, 12), (400, 6)):
            self.inputs += [_text(random, random.randint(1, most)) for _ in range(count)]
        for _ in range(6):
            ids = range(FIRST_ID, LAST_ID + 1)
            self.inputs.append(random.choices(ids, k=random.randint(1, 40)))
        self.queries = [_text(random, 4) for _ in range(3)]
        self._vectors: dict[int, np.ndarray] = {}
        self._moved_vectors: dict[str, dict[int, np.ndarray]] = {name: {} for name in moved}
        self._hidden: dict[int, np.ndarray] = {}
        self._pieces: dict[int, list] = {}
        self._scores: dict[tuple[int, int], float] = {}
        self._texts = [k for k, one in enumerate(self.inputs) if isinstance(one, str)]

    async def learn(self, ask: Callable[[Message], Awaitable[Reply]]) -> None:
        """Ask for each input alone, and keep the answers. `ask` sends a message."""
        info = (await ask(Message(f"/info?model={EMBEDDER}"))).json()
        self.exact = info["model_dtype"] == "float32"
        for k, one in enumerate(self.inputs):
            self._vectors[k] = _matrix(await ask(_embed([one])))[0]
            hidden = await ask(_message("/embed_all", inputs=[one]))
            self._hidden[k] = np.array(hidden.json()[0], np.float32)
            for name, vectors in self._moved_vectors.items():
                vectors[k] = _matrix(await ask(_embed([one], model=name)))[0]
        for k in self._texts:
            pieces = await ask(_message("/tokenize", inputs=[self.inputs[k]]))
            self._pieces[k] = pieces.json()[0]
        for q in range(len(self.queries) if self.reranks else 0):
            for k in self._texts:
                (rank,) = (await ask(self._rerank(q, [k]))).json()
                self._scores[q, k] = rank["score"]

    def calm(self) -> list[Ask]:
        """Requests for each input alone, and one of each further kind."""
        asks = [self._ask_embed([k], {}) for k in range(len(self.inputs))]
        further = [self._ask_openai([0, 1], "base64"), self._ask_hidden([2]), self._ask_pieces([0])]
        return asks + further

    def draw(self, random: Random) -> Ask:
        """Draw a request of a random kind."""
        kinds: dict[Callable[[Random], Ask], float] = {
            self._draw_embed: 8,
            self._draw_openai: 6,
            lambda random: self._ask_hidden(self._some(random, 4)): 2,
            lambda random: self._ask_pieces(random.choices(self._texts, k=4)): 2,
            self._draw_bad: 4,
            self._draw_probe: 2,
            self._draw_key: 4,
            self._draw_ranks: 4 * self.reranks,
            self._draw_moved: 6 * bool(self.moved),
        }
        (kind,) = random.choices(list(kinds), list(kinds.values()))
        return kind(random)

    def plain(self) -> Ask:
        return self._ask_embed([7], {})

    def _draw_openai(self, random: Random) -> Ask:
        return self._ask_openai(self._some(random, 24), random.choice(["float", "base64"]))

    def _draw_embed(self, random: Random) -> Ask:
        options: dict = {}
        if random.random() < 0.4:
            options["priority"] = random.choice(["interactive", "bulk"])
        if random.random() < 0.3:
            options["dimensions"] = random.randint(1, 8)
        return self._ask_embed(self._some(random, 24), options, octets=random.random() < 0.2)

    def _draw_moved(self, random: Random) -> Ask:
        """An answer is right if all of it is of one of the models."""
        places = self._some(random, 8)
        learnt = self._moved_vectors.values()
        allowed = [np.stack([vectors[k] for k in places]) for vectors in learnt]
        message = _embed([self.inputs[k] for k in places], model=MOVED)

        def right(reply: Reply) -> bool:
            return any(self._same(_matrix(reply), expected) for expected in allowed)

        return Ask("moved", message, right, counted=False)

    def _draw_ranks(self, random: Random) -> Ask:
        q, texts = random.randrange(len(self.queries)), random.choices(self._texts, k=12)
        expected = [self._scores[q, k] for k in texts]

        def right(reply: Reply) -> bool:
            ranks = sorted(reply.json(), key=lambda rank: rank["index"])
            scores = [rank["score"] for rank in ranks]
            atol = 1e-5 if self.exact else 2e-2  # bfloat16 rounds a logit of 4 to 0.016
            return [rank["index"] for rank in ranks] == list(range(len(expected))) and bool(
                np.allclose(scores, expected, atol=atol)
            )

        return Ask("rerank", self._rerank(q, texts), right, stamped=True)

    def _draw_bad(self, random: Random) -> Ask:
        name, path, body, status, err = random.choice(BAD)
        data = body if isinstance(body, bytes) else json.dumps({"model": EMBEDDER} | body).encode()
        return Ask(f"bad {name}", Message(path, data), refused=status, err=err)

    def _draw_key(self, random: Random) -> Ask:
        """A request with another key than the others: it may be refused as well as answered, or
        must be refused, as the key has it."""
        # two inputs have fewer tokens than the metered key may use in a minute
        ask = self._ask_embed(self._some(random, 2), {})
        refusals = {FLEETING: 401, METERED: None, NARROW: 403, WRONG: 401}
        key = random.choice(list(refusals))
        ask.message.headers["authorization"] = f"Bearer {key}"
        ask = replace(ask, kind=f"key {key}", refused=refusals[key])
        return ask if key in (FLEETING, METERED) else replace(ask, right=lambda reply: False)

    def _draw_probe(self, random: Random) -> Ask:
        path = random.choice(["/health", "/ready", "/livez", "/metrics", "/v1/models"])
        return Ask(f"probe {path}", Message(path), lambda reply: True)

    def _ask_embed(self, places: Sequence[int], options: dict, octets: bool = False) -> Ask:
        expected = np.stack([self._vectors[k] for k in places])
        kept = np.ones(len(places))
        if dimensions := options.get("dimensions"):
            expected = expected[:, :dimensions]
            kept = np.linalg.norm(expected, axis=1)
            expected = expected / kept[:, None]
        message = _embed([self.inputs[k] for k in places], **options)
        if octets:
            message.headers["accept"] = "application/octet-stream"

        def right(reply: Reply) -> bool:
            got = _octets(reply) if octets else _matrix(reply)
            return self._same(got, expected, kept)

        return Ask("embed", message, right, stamped=True)

    def _ask_openai(self, places: Sequence[int], form: str) -> Ask:
        expected = np.stack([self._vectors[k] for k in places])
        body = {"input": [self.inputs[k] for k in places], "encoding_format": form}

        def right(reply: Reply) -> bool:
            data = sorted(reply.json()["data"], key=lambda one: one["index"])
            rows = [one["embedding"] for one in data]
            if form == "base64":
                rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
            return self._same(np.array(rows, np.float32), expected)

        return Ask(f"openai {form}", _message("/v1/embeddings", **body), right, stamped=True)

    def _ask_hidden(self, places: Sequence[int]) -> Ask:
        message = _message("/embed_all", inputs=[self.inputs[k] for k in places])

        def right(reply: Reply) -> bool:
            matrices = [np.array(rows, np.float32) for rows in reply.json()]
            return len(matrices) == len(places) and all(
                self._same(rows, self._hidden[k]) for rows, k in zip(matrices, places, strict=True)
            )

        return Ask("embed_all", message, right, stamped=True)

    def _ask_pieces(self, places: Sequence[int]) -> Ask:
        expected = [self._pieces[k] for k in places]
        message = _message("/tokenize", inputs=[self.inputs[k] for k in places])
        return Ask("tokenize", message, lambda reply: reply.json() == expected)

    def _rerank(self, query: int, places: Sequence[int]) -> Message:
        texts = [self.inputs[k] for k in places]
        return _message("/rerank", query=self.queries[query], texts=texts, model=RERANKER)

    def _some(self, random: Random, most: int) -> list[int]:
        """The indices of some inputs; an index may come twice."""
        count = 1 if random.random() < 0.4 else random.randint(1, most)
        return random.choices(range(len(self.inputs)), k=count)

    def _same(self, got: np.ndarray, expected: np.ndarray, kept: np.ndarray | float = 1.0) -> bool:
        """Whether two results are equal, with the tolerances of tests/models/test_invariance.py.

        Other sequences in a batch change the order of sums and the rounding of bfloat16. `kept` is
        the length that is left of a unit vector that was cut: in it, differences weigh more.
        """
        if got.shape != expected.shape or not np.isfinite(got).all():
            return False
        if self.exact:
            return bool(np.allclose(got, expected, rtol=1e-5, atol=1e-5))
        norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(expected, axis=-1)
        return bool(((got * expected).sum(axis=-1) > (1 - 1e-4 / kept**2) * norms).all())


def move(name: str, admin_key: str) -> Ask:
    """Let MOVED name this model from now on."""
    return administer("PUT", f"aliases/{MOVED}", admin_key, model=name)


def administer(method: str, path: str, key: str, **body) -> Ask:
    """A change of the repository of models."""
    headers = {"authorization": f"Bearer {key}"}
    message = Message(f"/v2/repository/{path}", json.dumps(body).encode(), headers, method)
    kind = path.split("/")[0] if method == "PUT" else path.split("/")[-1]
    return Ask(kind, message, lambda reply: True, counted=False)


BAD = [
    ("JSON", "/embed", b'{"inputs":', 400, "validation"),
    ("field", "/embed", {}, 422, "validation"),
    ("type", "/v1/embeddings", {"input": {"a": 1}}, 400, "validation"),
    ("mixture", "/embed", {"inputs": ["a", 1]}, 422, "validation"),
    ("emptiness", "/embed", {"inputs": ""}, 400, "tokenization"),
    ("count", "/embed", {"inputs": ["a"] * (MAX_INPUTS + 1)}, 422, "batch_size"),
    ("token id", "/embed", {"inputs": [10**9]}, 422, "validation"),
    ("model", "/v1/embeddings", {"input": "a", "model": "nobody"}, 404, "validation"),
    ("length", "/embed", {"inputs": ["a", "cat " * 9000], "truncate": False}, 422, "tokenization"),
    ("task", "/predict", {"inputs": "a"}, 424, "model_type"),
    ("size", "/embed", {"inputs": "a" * PAYLOAD_LIMIT}, 413, None),
    ("route", "/nowhere", {"inputs": "a"}, 404, None),
]


def _text(random: Random, words: int) -> str:
    return " ".join(random.choices(WORDS, k=words))


def _message(path: str, model: str = EMBEDDER, **body) -> Message:
    return Message(path, json.dumps(body | {"model": model}).encode())


def _embed(inputs: Sequence[Input], model: str = EMBEDDER, **options) -> Message:
    return _message("/embed", inputs=list(inputs), model=model, **options)


def _matrix(reply: Reply) -> np.ndarray:
    return np.array(reply.json(), np.float32)


def _octets(reply: Reply) -> np.ndarray:
    shape = [int(side) for side in reply.headers["x-embedding-shape"].split(",")]
    return np.frombuffer(reply.body, "<f4").reshape(shape)
