"""Measures what `jaxembed tune` gains over the default grid, for each length mix.

For each mix it measures buckets on this device and searches the grid of least cost. Then both grids
run the same unseen texts of the mix in alternating rounds, under three loads: a queue that is never
empty, requests of 4, 16 and 64 texts, and lone texts. The figures are ratios of times, after over
before, in each round; below 1 the tuned grid is faster.

    python -m benchmarks.bench_tune
    python -m benchmarks.bench_tune --mixes queries,abstracts,bimodal --seconds 60
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import report, workloads
from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.source import ModelSource
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.tools.tune.cost import MeasuredModel, load_measured
from jaxembed.tools.tune.lengths import Lengths
from jaxembed.tools.tune.report import LOADS, table
from jaxembed.tools.tune.tuning import Budget, Tuning, tune

COUNT = 4096  # texts of a mix whose lengths are used


def main(argv: Sequence[str] | None = None) -> None:
    """Tune a grid for each mix, and print and write the results."""
    parser = report.parser(__file__, __doc__)
    parser.add_argument("model", nargs="?", help="directory or hub id; default: all-MiniLM-L6-v2")
    parser.add_argument("--limit", type=int, help="longest sequence; default: the model's")
    parser.add_argument("--mixes", default="queries,abstracts", help="of workloads.py")
    parser.add_argument("--seconds", type=float, default=100.0, help="of each tuning")
    parser.add_argument("--rounds", type=int, default=5)
    workloads.add_arguments(parser)
    args = report.parse(parser, argv)
    report.configure_jax()
    rows, facts = [], {"rounds": args.rounds}
    for name in args.mixes.split(","):
        jax.clear_caches()  # so that each mix is tuned as by a separate command
        config = EngineConfig(max_input_tokens=args.limit)
        model = load_measured(ModelSource(args.model), config=config, text=TextConfig())
        tuning = tune(model, lengths(name, model, args), Budget(args.seconds, rounds=args.rounds))
        model.close()
        print(f"\n{table(tuning)}", flush=True)
        rows.append(row_of(name, tuning))
        facts |= {"model": model.name, "dtype": model.plan.dtype}
        facts |= {"limit": model.plan.max_input_tokens}
    report.finish(args, facts | {"results": rows})


def lengths(name: str, model: MeasuredModel, args: Namespace) -> Lengths:
    """The lengths of a mix, in tokens of this model."""
    mix = workloads.workload(
        name,
        COUNT,
        limit=model.plan.max_input_tokens,
        vocab_size=int(model.spec.config["vocab_size"]),
        data=args.data,
        tokenizer=checkpoint.tokenizer_path(hub.resolve(ModelSource(args.model))),
        seed=args.seed,
    )
    return Lengths(np.bincount(mix.lengths), f"{name} ({mix.source})")


def row_of(name: str, tuning: Tuning) -> dict[str, Any]:
    """The result of a tuning, as values for JSON."""
    rounds = tuning.comparison.by_round
    return {
        "mix": name,
        "lengths": tuning.lengths.describe(),
        "seconds": tuning.seconds,
        "is_better": tuning.is_better,
        "after_over_before": {
            load: report.spread(ratios, "median")
            for load, ratios in zip(LOADS, rounds.T, strict=True)
        },
        "before": tuning.before.describe(),
        "after": tuning.after.describe(),
    }


if __name__ == "__main__":
    main()
