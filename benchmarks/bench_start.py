"""Measures how long a server takes to its first answer, cold and warm.

A cold start has an empty cache folder, so that the checkpoint is converted and every bucket
compiled. A warm start has the same folder again, and should compile nothing. Times are in seconds
from the start of the process:

    embeddings  a /v1/embeddings request, sent as soon as the server listens, is answered
    ready       /ready answers 200: every request has a compiled bucket
    all         every bucket is compiled

`compiled` is jaxembed_compile_count at the end: 0 when warm.

    python -m benchmarks.bench_start
    python -m benchmarks.bench_start --repeat 3 MODEL -- --max-batch-tokens 2048
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import report, servers

REQUEST = json.dumps({"model": servers.SERVED, "input": "how long does a start take?"}).encode()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure cold and warm starts, and print and write the results."""
    parser = report.parser(__file__, __doc__)
    parser.add_argument("model", nargs="?", help="directory or hub id; default: all-MiniLM-L6-v2")
    parser.add_argument("--repeat", type=int, default=1, help="cold starts, and as many warm ones")
    args = report.parse(parser, argv, takes_flags=True)
    starts = []
    for _ in range(args.repeat):
        starts += cold_and_warm(args.model, args.flags)
    report.show(starts, "starts, seconds")
    report.finish(args, {"model": args.model, "flags": args.flags, "starts": starts})


def cold_and_warm(model: str | None, flags: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Measure a start with an empty cache, and one with the cache that the first one left."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("cold", "warm"):
            yield {"start": kind} | start(model, Path(folder), flags)


def start(model: str | None, cache_dir: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Start a server, measure it until its last bucket is compiled, and stop it."""
    with (
        servers.starting(model, ["--cache-dir", str(cache_dir), *flags]) as server,
        ThreadPoolExecutor(1) as thread,
    ):
        embedded = thread.submit(server.until, lambda: server.answers("/v1/embeddings", REQUEST))
        ready_s = server.until(lambda: server.answers("/ready"))
        all_s = server.until(lambda: server.says(servers.COMPILED))
        return {
            "embeddings_s": embedded.result(),
            "ready_s": ready_s,
            "all_s": all_s,
            "compiled": server.metrics()["jaxembed_compile_count"],
        }


if __name__ == "__main__":
    main()
