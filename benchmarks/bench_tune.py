"""Measures what `jaxembed tune` gains over the default grid, for each length mix.

For each mix it measures buckets on this device and searches the grid of least cost. Then both grids
run the same unseen texts of the mix in alternating rounds, under three loads: a queue that is never
empty, requests of 4, 16 and 64 texts, and lone texts. The figures are ratios of times, after over
before, in each round; below 1 the tuned grid is faster.

    python -m benchmarks.bench_tune
    python -m benchmarks.bench_tune --mixes queries,abstracts,bimodal --seconds 60
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from benchmarks import report, workloads
from jaxembed.checkpoints import checkpoint, hub
from jaxembed.checkpoints.source import ModelSource
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.data.spec import DType
from jaxembed.tools.tune.cost import MeasuredModel, load_measured
from jaxembed.tools.tune.lengths import Lengths
from jaxembed.tools.tune.report import LOADS, draw, table
from jaxembed.tools.tune.tuning import Budget, Tuning, tune

COUNT = 4096  # texts of a mix whose lengths are used


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; None means this program's own arguments."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="directory or hub id; default: all-MiniLM-L6-v2")
    parser.add_argument("--dtype", choices=get_args(DType))
    parser.add_argument("--limit", type=int, help="longest sequence; default: the model's")
    parser.add_argument("--max-batch-tokens", type=int, help="of the default grid")
    parser.add_argument("--mixes", default="queries,abstracts", help="of workloads.py")
    parser.add_argument("--seconds", type=float, default=100.0, help="of each tuning")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="a PNG of each mix; needs matplotlib"
    )
    workloads.add_arguments(parser)
    report.add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Tune a grid for each mix, and print and write the results."""
    args = parse(argv)
    report.configure_jax()
    tunings = {name: tuned(name, args) for name in args.mixes.split(",")}
    rows = [row_of(name, tuning) for name, tuning in tunings.items()]
    report.show([summary(row) for row in rows], "time after / before, median of the rounds")
    grids = {tuple(map(tuple, row["after"]["buckets"])) for row in rows}
    model = next(iter(tunings.values())).model
    facts = {
        "model": model.name,
        "dtype": model.plan.dtype,
        "limit": model.plan.max_input_tokens,
        "rounds": args.rounds,
        "different_grids": len(grids),
        "results": rows,
    }
    report.finish("bench_tune", argv, facts, args.out)


def tuned(name: str, args: Namespace) -> Tuning:
    """Tune a grid for a mix, print the result, and draw it if asked."""
    model = opened(args)
    budget = Budget(args.seconds, rounds=args.rounds)
    tuning = tune(model, lengths(name, model, args), budget)
    model.close()
    print(f"\n{table(tuning)}", flush=True)
    if args.pictures is not None:
        args.pictures.mkdir(parents=True, exist_ok=True)
        draw(tuning, args.pictures / f"tune-{name}.png")
    return tuning


def opened(args: Namespace) -> MeasuredModel:
    """Load the model with nothing compiled, so that each mix is tuned as by a separate command."""
    config = EngineConfig(
        dtype=args.dtype, max_input_tokens=args.limit, max_batch_tokens=args.max_batch_tokens
    )
    jax.clear_caches()
    return load_measured(ModelSource(args.model), config=config, text=TextConfig())


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
            load: {
                "median": float(np.median(ratios)),
                "least": float(ratios.min()),
                "most": float(ratios.max()),
            }
            for load, ratios in zip(LOADS, rounds.T, strict=True)
        },
        "before": tuning.before.describe(),
        "after": tuning.after.describe(),
    }


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of the table, from the result of a tuning."""
    ratios = {load: figures["median"] for load, figures in row["after_over_before"].items()}
    return {
        "mix": row["mix"],
        "better": row["is_better"],
        **ratios,
        "buckets": len(row["after"]["buckets"]),
        "of": len(row["before"]["buckets"]),
        "tuning_s": row["seconds"],
    }


if __name__ == "__main__":
    main()
