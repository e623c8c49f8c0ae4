"""Measures how an embedder and a reranker on one device slow each other down, without HTTP.

One process holds an embedding model, and a reranker of the same size with random weights. Three
loads run alone and then at once: `bulk` embeds 64 texts at a time, `query` one at a time, and
`rerank` scores 20 documents for a query. Each client sends the next request when it has its answer.
The figures of a load alone are the ceiling.

    python -m benchmarks.bench_pair --seconds 20

Columns: `p50_ms` and `p99_ms` are latencies of a request, `texts_per_s` the texts embedded or
scored.
"""

import asyncio
import tempfile
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from benchmarks import report, workloads
from benchmarks.parameters import random_parameters
from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.source import DEFAULT_MODEL, ModelSource, default_cache_dir
from jaxembed.config import EngineConfig
from jaxembed.data.spec import DenseLayer, DType, Pooled, scoring_heads
from jaxembed.embedder import Embedder
from jaxembed.engine.admission import Capacity
from jaxembed.engine.engine import Engine

BULK, DOCUMENTS = 64, 20  # texts of a bulk request, and documents of a rerank request


@dataclass(frozen=True)
class Load:
    """Clients that send the same kind of request repeatedly."""

    name: str
    clients: int
    texts: int  # in one request
    ask: Callable[[], Awaitable[Any]]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the loads alone and together, and print and write the results."""
    parser = report.parser(__file__, __doc__)
    parser.add_argument("model", nargs="?", help="directory or hub id; default: all-MiniLM-L6-v2")
    parser.add_argument("--cache-dir", type=Path, help="of converted checkpoints")
    workloads.add_arguments(parser)
    parser.add_argument("--dtype", choices=get_args(DType))
    parser.add_argument("--max-batch-tokens", type=int)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    args = report.parse(parser, argv)
    report.configure_jax()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cache_dir = args.cache_dir or default_cache_dir()
        path = hub.resolve(ModelSource(args.model, cache_dir=cache_dir))
        config = EngineConfig(
            dtype=args.dtype, max_batch_tokens=args.max_batch_tokens, devices=1, warmup="full"
        )
        capacity = Capacity(config.max_concurrent_requests)
        both = embedder, reranker = [
            stack.enter_context(
                Embedder(str(model), cache_dir=cache_dir, config=config, capacity=capacity)
            )
            for model in (path, _random_reranker(path, folder / "reranker"))
        ]
        for one in both:
            assert isinstance(one.model.main.engine, Engine)
            one.model.main.engine.wait_timed()
        loads, rows = _loads(embedder, reranker, args), []
        for together in [*([load] for load in loads), loads]:
            rows += asyncio.run(_run(together, args.seconds))
        facts = {
            "model": args.model or DEFAULT_MODEL,
            "dtype": embedder.dtype,
            "max_batch_tokens": embedder.model.max_batch_tokens,
            "seconds": args.seconds,
            "results": rows,
        }
    report.show(rows, f"{facts['model']} and a reranker, {facts['dtype']}, {report.device_name()}")
    report.finish(args, facts)


def _random_reranker(path: Path, folder: Path) -> Path:
    """Save a cross-encoder with random weights, and with the embedder's tower and tokenizer."""
    spec = checkpoint.load_spec(path)
    width = spec.hidden_size
    layers = (DenseLayer(width, width), DenseLayer(width, 1, activation="identity"))
    reranker = msgspec.structs.replace(
        spec,
        heads=scoring_heads(Pooled(("cls",), layers)),
        labels=("LABEL_0",),
        score_function="sigmoid",
        prompts={},
        default_prompt_name=None,
    )
    tokenizer = checkpoint.tokenizer_path(path).read_bytes()
    checkpoint.save(folder, reranker, random_parameters(reranker), tokenizer)
    return folder


def _loads(embedder: Embedder, reranker: Embedder, args: Namespace) -> list[Load]:
    sentences = workloads.texts("sts", 4096, data=args.data, seed=args.seed)
    queries = workloads.texts("queries", 1024, data=args.data, seed=args.seed)
    documents = workloads.texts("abstracts", 1024, data=args.data, seed=args.seed)
    draw = np.random.default_rng(args.seed)

    def some(texts: Sequence[str], count: int) -> list[str]:
        at = int(draw.integers(len(texts) - count + 1))
        return list(texts[at : at + count])

    def rerank() -> Awaitable[Any]:
        return reranker.rerank_async(some(queries, 1)[0], some(documents, DOCUMENTS))

    return [
        Load("bulk", 4, BULK, lambda: embedder.encode_async(some(sentences, BULK))),
        Load("query", 1, 1, lambda: embedder.encode_async(some(queries, 1))),
        Load("rerank", 2, DOCUMENTS, rerank),
    ]


async def _run(loads: Sequence[Load], seconds: float) -> list[dict[str, Any]]:
    """Run all loads at once for `seconds`. Returns a row for each."""
    times: dict[str, list[float]] = {load.name: [] for load in loads}
    started_at = time.perf_counter()

    async def client(load: Load) -> None:
        while (asked_at := time.perf_counter()) < started_at + seconds:
            await load.ask()
            times[load.name].append(time.perf_counter() - asked_at)

    await asyncio.gather(*(client(load) for load in loads for _ in range(load.clients)))
    elapsed = time.perf_counter() - started_at
    return [
        {
            "load": load.name,
            "with": "all" if len(loads) > 1 else "alone",
            "clients": load.clients,
            "requests": len(times[load.name]),
            "p50_ms": 1000 * float(np.percentile(times[load.name], 50)),
            "p99_ms": 1000 * float(np.percentile(times[load.name], 99)),
            "texts_per_s": len(times[load.name]) * load.texts / elapsed,
        }
        for load in loads
    ]


if __name__ == "__main__":
    main()
