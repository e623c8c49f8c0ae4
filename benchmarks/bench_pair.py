"""Measures how an embedder and a reranker on one device slow each other down, without HTTP.

One process holds an embedding model, and a reranker of the same size with random weights. Three
loads run alone and then at once: `bulk` embeds 64 texts at a time, `query` one at a time, and
`rerank` scores 20 documents for a query. Each client sends the next request when it has its answer.
The figures of a load alone are the ceiling.

    python -m benchmarks.bench_pair --seconds 20

Columns: `p50_ms` and `p99_ms` are latencies of a request, `texts_per_s` the texts embedded or
scored. `overlaps` is the number of programs that began while one of the other model ran; at most
two programs are in flight, of either model.
"""

import asyncio
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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


@dataclass
class Watch:
    """Records when the programs of each model ran, as (start, stop, model)."""

    runs: list[tuple[float, float, str]] = field(default_factory=list)

    def over(self, name: str, embedder: Embedder) -> None:
        """Record every run of the embedder's runners from now on, under this name."""
        for worker in _engine(embedder).workers:
            worker.runner.run = self._noting(name, worker.runner.run)

    def overlaps(self) -> int:
        """The number of programs that began while one of another model ran."""
        count = 0
        until: dict[str, float] = {}
        for start, stop, name in sorted(self.runs):
            count += any(start < end for other, end in until.items() if other != name)
            until[name] = max(stop, until.get(name, 0.0))
        return count

    def _noting(self, name: str, run: Callable) -> Callable:
        def noted(*arguments, **options):
            start = time.perf_counter()
            answer = run(*arguments, **options)
            self.runs.append((start, time.perf_counter(), name))
            return answer

        return noted


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="directory or hub id; default: all-MiniLM-L6-v2")
    parser.add_argument("--cache-dir", type=Path, help="of converted checkpoints")
    workloads.add_arguments(parser)
    report.add_arguments(parser)
    parser.add_argument("--dtype", choices=get_args(DType))
    parser.add_argument("--max-batch-tokens", type=int)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--clients", default="4,1,2", help="of bulk, query and rerank")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the loads alone and together, and print and write the results."""
    args = parse(argv)
    report.configure_jax()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cache_dir = args.cache_dir or default_cache_dir()
        path = hub.resolve(ModelSource(args.model, cache_dir=cache_dir))
        config = EngineConfig(
            dtype=args.dtype, max_batch_tokens=args.max_batch_tokens, devices=1, warmup="full"
        )
        capacity = Capacity(config.max_concurrent_requests)
        embedder, reranker = (
            stack.enter_context(
                Embedder(str(model), cache_dir=cache_dir, config=config, capacity=capacity)
            )
            for model in (path, _random_reranker(path, folder / "reranker"))
        )
        rows, overlaps = measure(embedder, reranker, args)
        facts = {
            "model": args.model or DEFAULT_MODEL,
            "dtype": embedder.dtype,
            "max_batch_tokens": embedder.model.max_batch_tokens,
            "seconds": args.seconds,
            "overlaps": overlaps,
            "results": rows,
        }
    report.show(rows, f"{facts['model']} and a reranker, {facts['dtype']}, {report.device_name()}")
    print(f"\noverlaps: {overlaps}")
    report.finish("bench_pair", argv, facts, args.out)


def measure(
    embedder: Embedder, reranker: Embedder, args: Namespace
) -> tuple[list[dict[str, Any]], int]:
    """Measure each load alone and then all at once. Returns their rows, and the overlaps."""
    _wait_for_timings((embedder, reranker))
    watch = Watch()
    for name, model in (("embedder", embedder), ("reranker", reranker)):
        watch.over(name, model)
    loads = _loads(embedder, reranker, args)
    rows = []
    for together in [*([load] for load in loads), loads]:
        seconds, times = asyncio.run(_run(together, args.seconds))
        company = "all" if len(together) > 1 else "alone"
        rows += [_row(load, company, times[load.name], seconds) for load in together]
    return rows, watch.overlaps()


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


def _wait_for_timings(embedders: Sequence[Embedder]) -> None:
    """Wait until every bucket of each model is compiled and timed."""
    for embedder in embedders:
        _engine(embedder).wait_timed()


def _engine(embedder: Embedder) -> Engine:
    assert isinstance(embedder.model.main.engine, Engine)
    return embedder.model.main.engine


def _loads(embedder: Embedder, reranker: Embedder, args: Namespace) -> list[Load]:
    sentences = workloads.texts("sts", 4096, data=args.data, seed=args.seed)
    queries = workloads.texts("queries", 1024, data=args.data, seed=args.seed)
    documents = workloads.texts("abstracts", 1024, data=args.data, seed=args.seed)
    draw = np.random.default_rng(args.seed)

    def some(texts: Sequence[str], count: int) -> list[str]:
        at = int(draw.integers(len(texts) - count + 1))
        return list(texts[at : at + count])

    bulk, query, rerank = map(int, args.clients.split(","))
    return [
        Load("bulk", bulk, BULK, lambda: embedder.encode_async(some(sentences, BULK))),
        Load("query", query, 1, lambda: embedder.encode_async(some(queries, 1))),
        Load(
            "rerank",
            rerank,
            DOCUMENTS,
            lambda: reranker.rerank_async(some(queries, 1)[0], some(documents, DOCUMENTS)),
        ),
    ]


async def _run(loads: Sequence[Load], seconds: float) -> tuple[float, dict[str, list[float]]]:
    """Run all loads at once for `seconds`.

    Returns how long it really took, and the seconds of each request by the name of its load.
    """
    times: dict[str, list[float]] = {load.name: [] for load in loads}
    started_at = time.perf_counter()

    async def client(load: Load) -> None:
        while (asked_at := time.perf_counter()) < started_at + seconds:
            await load.ask()
            times[load.name].append(time.perf_counter() - asked_at)

    await asyncio.gather(*(client(load) for load in loads for _ in range(load.clients)))
    return time.perf_counter() - started_at, times


def _row(load: Load, company: str, times: Sequence[float], seconds: float) -> dict[str, Any]:
    ms = np.array(times) * 1000
    return {
        "load": load.name,
        "with": company,
        "clients": load.clients,
        "requests": len(times),
        "p50_ms": float(np.percentile(ms, 50)),
        "p99_ms": float(np.percentile(ms, 99)),
        "texts_per_s": len(times) * load.texts / seconds,
    }


if __name__ == "__main__":
    main()
