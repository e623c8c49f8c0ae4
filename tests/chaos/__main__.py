"""Runs a storm from the command line. The last line is JSON; the exit status is 1 on a violation.

Flags that are not listed are passed to `jaxembed serve`.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from .storm import Life, Storm, Wave, Weather, draw_life

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def main() -> int:
    """Run lives of a server until the time is up. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="about; a life is finished")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="an embedding model")
    parser.add_argument("--reranker", help="a model to serve beside it")
    parser.add_argument("--repository", type=Path, help="a name moves between its first models")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--actions", type=int, default=60, help="of each client in a wave")
    parser.add_argument("--fault-rate", type=float, default=0.02, help="of calls that fail")
    parser.add_argument("--cache-dir", type=Path, help="kept for the next storm")
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = (options.cache_dir or Path(folder)).absolute()
        further = {"clients": options.clients, "fault_rate": options.fault_rate}
        further |= {"flags": tuple(flags), "repository": options.repository}
        storm = Storm(Weather(options.seed, options.model, cache, options.reranker, **further))
        asyncio.run(_blow(storm, options.seconds, options.actions))
    sums = storm.sums()
    if sums["violations"]:
        print("\n".join(["the log of the server:", *storm.wrong_logs]), file=sys.stderr)
        print("\n".join(["violations:", *sums["violations"]]), file=sys.stderr)
    print(json.dumps(sums))
    return bool(sums["violations"])


async def _blow(storm: Storm, seconds: float, actions: int) -> None:
    """Run a first life, random ones until the time is up, and a last one that ends quietly."""
    random = Random(f"{storm.weather.seed}/lives")
    deadline = time.monotonic() + seconds
    await storm.live(Life((Wave(actions, armed=False), Wave(actions, armed=True))))
    while time.monotonic() < deadline and not storm.ledger.violations:
        await storm.live(draw_life(random, actions))
    await storm.live(Life((Wave(actions, armed=True), Wave(actions, armed=True))))


if __name__ == "__main__":
    sys.exit(main())
