"""A loaded model without model or device: deterministic vectors and logits, failures on demand."""

import asyncio
import re
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from jaxembed.checkpoints.ranges import StoredRanges, VectorKind
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.data.inputs import ChunkedText, ChunkSize, Input, Pair, Text, Tokens
from jaxembed.data.spec import (
    DenseLayer,
    ModelSpec,
    NormalizeLayer,
    PairTemplate,
    PerToken,
    Pooled,
    Routes,
    scoring_heads,
)
from jaxembed.data.work import Ragged, WorkResult, to_sparse_rows
from jaxembed.engine.admission import Admission, Capacity, Cost, Reservation
from jaxembed.engine.engine import EngineState
from jaxembed.errors import InputTooLong, ShuttingDown
from jaxembed.observability.metrics import Telemetry
from jaxembed.preprocessing.text import TextProcessor, TokenPiece
from jaxembed.preprocessing.windows import PooledChunks
from jaxembed.quantise import quantise
from jaxembed.runtime.model import LoadedModel
from jaxembed.runtime.options import (
    Embeddings,
    EncodeOptions,
    ScoreOptions,
    Scores,
    TokenScores,
)
from jaxembed.runtime.requests import (
    Answer,
    EncodeRequest,
    LateRequest,
    Request,
    ScoreRequest,
    TokenScoreRequest,
    shape_vectors,
)
from jaxembed.runtime.routes import LoadedRoute
from jaxembed.runtime.tasks import Tasks

DIM = 8
MAX_TOKENS = 16

LAST_TOKEN = Pooled(("lasttoken",))
SPEC = ModelSpec(
    architecture="fake",
    config={},
    heads={"dense": LAST_TOKEN},
    max_input_tokens=MAX_TOKENS,
    hidden_size=DIM,
    dtype="float32",
    source="test/fake",
    content_hash="0",
)
M3 = msgspec.structs.replace(
    SPEC,
    heads={
        "dense": LAST_TOKEN,
        "token_weights": PerToken((DenseLayer(DIM, 1, activation="relu"),)),
        "multi_vector": PerToken((NormalizeLayer(),), drops_first=True),
    },
)
SCORER = msgspec.structs.replace(SPEC, heads=scoring_heads(LAST_TOKEN))
RERANKER = msgspec.structs.replace(SCORER, labels=("LABEL_0",), score_function="sigmoid")
TEMPLATE = PairTemplate("", "{instruction} {query}", "{document}", "", "Find what answers.")
GENERATOR = msgspec.structs.replace(RERANKER, template=TEMPLATE)
CLASSIFIER = msgspec.structs.replace(SCORER, labels=("bad", "fair", "good"))

TOKEN_CLASSIFIER = msgspec.structs.replace(
    SPEC, heads={"token_logits": PerToken((DenseLayer(DIM, 3),))}, labels=("O", "B-PER", "I-PER")
)

MEAN = msgspec.structs.replace(SPEC, heads={"dense": Pooled(("mean",))})

# Every route that is for a model: a body, and a model that answers it.
ROUTES: dict[str, tuple[dict, ModelSpec]] = {
    "/v1/embeddings": ({"input": ["a", {"text": "b"}]}, SPEC),
    "/embeddings": ({"input": "a", "encoding_format": "base64"}, SPEC),
    "/embed": ({"inputs": ["a"]}, SPEC),
    "/embed_all": ({"inputs": ["a b"]}, SPEC),
    "/similarity": ({"inputs": {"source_sentence": "a", "sentences": ["b"]}}, SPEC),
    "/tokenize": ({"inputs": "a"}, SPEC),
    "/decode": ({"ids": [1, 2]}, SPEC),
    "/": ({"inputs": "a"}, SPEC),
    "/invocations": ({"inputs": "a"}, SPEC),
    "/vertex": ({"instances": [{"inputs": "a"}]}, SPEC),
    "/embed_sparse": ({"inputs": ["a", "b"], "return_tokens": True}, M3),
    "/embed_multi": ({"inputs": ["a b"]}, M3),
    "/v1/multi-vector": ({"input": ["a b"], "outputs": ["dense", "sparse", "multi_vector"]}, M3),
    "/predict": ({"inputs": [["a", "b"]]}, CLASSIFIER),
    "/token_classify": ({"inputs": ["a b"]}, TOKEN_CLASSIFIER),
    "/rerank": ({"query": "a", "texts": ["a", "b"], "return_text": True}, RERANKER),
    "/v1/rerank": (
        {"query": "a", "documents": ["a", {"text": "b"}], "return_documents": True},
        RERANKER,
    ),
    "/v2/rerank": ({"query": "a", "documents": ["a", "b"], "top_n": 1}, RERANKER),
    "/v2/embed": ({"texts": ["a", "b"], "embedding_types": ["float", "base64", "binary"]}, SPEC),
    "/v1/embed": ({"inputs": [{"content": [{"type": "text", "text": "a"}]}]}, SPEC),
    "/v1/contextualizedembeddings": ({"inputs": ["a b"], "enable_auto_chunking": True}, MEAN),
    "/v1/multimodalembeddings": ({"inputs": [{"content": [{"type": "text", "text": "a"}]}]}, SPEC),
    "/classify": ({"input": ["a"]}, CLASSIFIER),
    "/v1/classify": ({"input": "a"}, CLASSIFIER),
}

ZEROS = ("waiting_inputs", "waiting_tokens", "stuck", "lost_share", "longest_call_s", "threads")
IDLE = EngineState(
    **dict.fromkeys(ZEROS, 0),
    **{name: {} for name in ("queues", "costs", "cost_sources", "ran")},
    failures=(0,),
    joined=1,
    drift=1.0,
    timed=True,
    compiled=(),
    covered=True,
    closing=False,
)


class NoPrompts(TextProcessor):
    """A processor of a model without prompts, which tokenizes nothing."""

    default_prompt_name = None

    def __init__(self):
        pass

    def prompt(self, prompt, prompt_name):
        return prompt or ""

    def term_names(self, ids):
        return [f"term {one}" for one in ids]

    @property
    def tokenizer(self):
        return SimpleNamespace(words=spelled, joined=" ".join)


def spelled(text, ids, offsets):
    """Of a text of words, each of which is a token."""
    return [text[start:end] for start, end in offsets], [False] * len(ids)


class FakeEmbedder(LoadedModel):
    """One token a word. `failure` is raised by every call; `gate`, once set, holds calls back.

    `FakeEmbedder(spec=RERANKER)` and `spec=CLASSIFIER` score instead of embedding. `attributes` are
    set on it, such as its name.
    """

    # Class attributes, so that properties of the real one can be set here.
    spec = SPEC
    telemetry: Telemetry = None
    config = EngineConfig()
    text = TextConfig()
    name = "test/fake"
    max_input_tokens = MAX_TOKENS
    max_batch_tokens = 1024
    tokenization_workers = 2
    tokenizing_bytes = 1000
    attention = "none"
    ready = healthy = True
    stuck = draining = takes_images = False
    device = "cpu"
    dtype = "float32"
    waiting = 0
    resident_bytes = 100

    def __init__(self, failure: Exception | None = None, spec: ModelSpec = SPEC, **attributes: Any):
        vars(self).update(attributes)
        self.spec = spec
        self.ranges: dict[VectorKind, StoredRanges] = {}
        plan = SimpleNamespace(device_name="cpu", dtype="float32")
        runner = SimpleNamespace(off_loop=asyncio.to_thread)
        self.main = LoadedRoute(spec, NoPrompts(), runner, "cpu", "float32", plan, None)
        self.routes = self.text_routes = self.engines = {"": self.main}
        self.runner = runner
        self.admission = Admission(Capacity(1000, 100_000), 0, lambda: 0.0)
        self.telemetry = Telemetry()
        self.failure = failure
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.closed = False
        self.requested: list[EncodeOptions | ScoreOptions] = []
        self.reservation: list[Reservation | None] = []  # of each call

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return at once: it is ready from the start."""

    @property
    def tasks(self) -> Tasks:
        return Tasks(self.name, Routes({"": self.spec}), NoPrompts(), self.text, self.ranges)

    async def answer(
        self, request: Request[Answer], reservation: Reservation | None = None
    ) -> Answer:
        """A word is estimated as two tokens."""
        inputs = request.inputs()
        lengths = np.array([length(item) for item in inputs])
        cost = Cost(len(inputs), 2 * int(lengths.sum()))
        with self.admission.admit(cost, reservation) as permit:
            answer = await self._answer(request, reservation, inputs, lengths)
            permit.charge_answer(int(answer.num_tokens.sum()))
            return answer

    async def _answer(self, request: Request[Answer], reservation, inputs, lengths) -> Answer:
        await self._weather(reservation)
        self.requested.append(request.options)
        if lengths.max() > MAX_TOKENS and not request.tokenization.truncate:
            raise InputTooLong(MAX_TOKENS, int(lengths.max()), int(lengths.argmax()))
        common_fields = {"tokenization_s": 0.001, "queue_s": 0.002, "inference_s": 0.003}
        common_fields["num_tokens"] = np.minimum(lengths, MAX_TOKENS)
        common_fields["truncated"] = int((lengths > MAX_TOKENS).sum())
        if isinstance(request, LateRequest):
            chunked = chunks_of(request.items)
            common_fields |= {"num_tokens": chunked.tokens, "truncated": 0, "chunked": chunked}
            inputs = [Text(one.text[i:k]) for one in request.items for i, k in places_of(one)]
            lengths = np.array([length(item) for item in inputs])
        if isinstance(request, EncodeRequest):
            return Embeddings(self._values(inputs, request, lengths), **common_fields)
        if isinstance(request, TokenScoreRequest):
            return tokens_of(inputs, self.spec.labels, common_fields)
        assert isinstance(request, ScoreRequest)
        values = np.stack([logits(item, len(self.spec.labels)) for item in inputs])
        return Scores(values, self.spec.labels, self.spec.score_function, **common_fields)

    def _values(self, inputs: Sequence[Input], request: EncodeRequest, lengths) -> WorkResult:
        options = request.options
        dense = shape_vectors(
            np.stack([vector(item) for item in inputs]),
            dimensions=options.dimensions,
            normalize=bool(options.normalize),
        )
        rows = [np.full((n, DIM), n, np.float32) for n in np.minimum(lengths, MAX_TOKENS)]
        per_token = np.concatenate(rows)
        everything = {"dense": dense, "tokens": per_token, "multi_vector": per_token}
        encoded = {
            name: quantise(everything[name], options.output_dtype, request.ranges)
            for name in options.outputs
            if name != "sparse"
        }
        for name in {"tokens", "multi_vector"} & encoded.keys():
            encoded[name] = Ragged(encoded[name], np.cumsum([0, *map(len, rows)]))
        if "sparse" in options.outputs:  # a term for each token, of its number
            encoded["sparse"] = to_sparse_rows(np.tri(len(rows), MAX_TOKENS, dtype=np.float32))
        return encoded

    async def tokenize_async(self, texts, *, add_special_tokens, prompt_name, reservation=None):
        await self._weather(reservation)
        first = TokenPiece(1, "[CLS]", special=True, start=None, stop=None)
        return [[first, TokenPiece(7, text, False, 0, len(text.encode()))] for text in texts]

    async def decode_async(self, ids, *, skip_special_tokens, prompt_name=None, reservation=None):
        await self._weather(reservation)
        return [" ".join(map(str, sequence)) for sequence in ids]

    def describe(self) -> dict:
        return {"attention": self.attention}

    def snapshot(self) -> dict[str, EngineState]:
        return {"": IDLE}

    def drain(self) -> None:
        self.draining = True

    def close(self, timeout_s: float | None = None) -> None:
        self.closed = True

    async def _weather(self, reservation: Reservation | None) -> None:
        self.reservation.append(reservation)
        if self.draining:
            raise ShuttingDown("the server is shutting down", retry_after_s=5)
        if self.failure is not None:
            raise self.failure
        if self.gate is not None:
            self.entered.set()
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise


def places_of(item: ChunkedText) -> Sequence[tuple[int, int]]:
    """The chunks of a text; its halves if it is to be divided."""
    if isinstance(item.chunks, ChunkSize):
        half = len(item.text) // 2
        return [(0, half), (half, len(item.text))]
    return item.chunks


def chunks_of(items: Sequence[ChunkedText]) -> PooledChunks:
    """The chunks of all texts, each of which is one window."""
    places = [places_of(item) for item in items]
    bounds = np.array([place for one in places for place in one], np.int64).reshape(-1, 2)
    return PooledChunks(
        np.array([len(one) for one in places], np.int64),
        bounds,
        np.array([len(item.text.split()) for item in items], np.int64),
        np.ones(len(items), np.int64),
        np.arange(len(bounds)),
    )


def length(item: Input) -> int:
    return len(item.ids) if isinstance(item, Tokens) else len(words(item))


def words(item: Text | Pair) -> list[str]:
    text = item.text if isinstance(item, Text) else f"{item.first} {item.second}"
    return text.split()


def vector(item: Input) -> np.ndarray:
    """The vector of an input: not normalised, and the same for equal inputs."""
    name = str(list(item.ids)) if isinstance(item, Tokens) else " ".join(words(item))
    return np.random.default_rng(zlib.crc32(name.encode())).normal(size=DIM).astype(np.float32)


def tokens_of(texts: Sequence[Text], labels: tuple[str, ...], fields: dict) -> TokenScores:
    """Of each word the logits of the text that it is."""
    found = [list(re.finditer(r"\S+", item.text)) for item in texts]
    rows = [vector(Text(word[0]))[: len(labels)] for in_text in found for word in in_text]
    places = [word.span() for in_text in found for word in in_text]
    ends = np.cumsum([0, *map(len, found)])
    ids = np.ones(len(rows), np.int32)
    return TokenScores(Ragged(np.stack(rows), ends), ids, np.array(places), labels, **fields)


def logits(item: Text | Pair, labels: int) -> np.ndarray:
    """Of a reranker: how many words of the second text are in the first, less one; float32."""
    if labels > 1 or isinstance(item, Text):
        return vector(item)[:labels]
    common = set(item.first.split()) & set(item.second.split())
    return np.array([len(common) - 1], np.float32)
