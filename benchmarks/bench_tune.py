"""What `jaxembed tune` gains: a grid for each length mix, tried beside the default one.

For each mix: buckets are measured on this device, the grid of least cost is searched for, and both
grids run the same unseen texts of the mix in alternating rounds, under three loads: a queue that is
never empty, requests of 4, 16 and 64 texts, and lone texts. A figure after against before is the
ratio of times in each round; below 1 the tuned grid is faster.

    python -m benchmarks.bench_tune
    python -m benchmarks.bench_tune --mixes queries,abstracts,bimodal --seconds 60
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import report, workloads
from jaxembed import checkpoint, hub
from jaxembed.config import EngineConfig, TextConfig
from jaxembed.tune.lengths import Lengths
from jaxembed.tune.model import MeasuredModel, load_measured
from jaxembed.tune.report import LOADS, draw, table
from jaxembed.tune.tuning import Budget, Tuning, tune

COUNT = 4096  # texts whose lengths make a mix


def parse(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="directory or hub id; default: all-MiniLM-L6-v2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
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
    """The grid found for one mix, tried, shown and drawn."""
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
    """The model with nothing compiled: each mix is tuned as by a command of its own."""
    config = EngineConfig(
        dtype=args.dtype, max_input_tokens=args.limit, max_batch_tokens=args.max_batch_tokens
    )
    jax.clear_caches()
    return load_measured(
        args.model, cache_dir=hub.default_cache_dir(), config=config, text=TextConfig()
    )


def lengths(name: str, model: MeasuredModel, args: Namespace) -> Lengths:
    mix = workloads.workload(
        name,
        COUNT,
        limit=model.plan.max_input_tokens,
        vocab_size=int(model.spec.config["vocab_size"]),
        data=args.data,
        tokenizer=checkpoint.tokenizer_path(
            hub.resolve(args.model, cache_dir=hub.default_cache_dir())
        ),
        seed=args.seed,
    )
    return Lengths(np.bincount(mix.lengths), f"{name} ({mix.source})")


def row_of(name: str, tuning: Tuning) -> dict[str, Any]:
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
