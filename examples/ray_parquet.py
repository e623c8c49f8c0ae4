"""Embeds a folder of Parquet with Ray Data. Run again, it embeds the rows that are not written yet.

    pip install "jaxembed[ray]"
    python ray_parquet.py s3://bucket/documents s3://bucket/vectors s3://bucket/checkpoint

Each row needs an id of its own. All three folders must be reachable from every machine.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.data.checkpoint import CheckpointConfig

from jaxembed.integrations.ray import Embed

OTHER_CPUS = 2  # the process that knows what is written, and one that reads or writes


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column=args.id_column,
        checkpoint_path=args.checkpoint,
        delete_checkpoint_on_success=False,  # a run after the last one would write all rows again
    )
    check_cpus(args)
    rows = ray.data.read_parquet(args.documents)
    if args.blocks is not None:  # Ray does not split a file by override_num_blocks of read_parquet
        rows = rows.repartition(args.blocks)
    rows = rows.map_batches(
        Embed,
        fn_constructor_kwargs=model_of(args),
        batch_format="pyarrow",
        batch_size=args.batch_size,
        compute=ActorPoolStrategy(size=args.actors),
        num_cpus=args.cpus,
        num_gpus=args.gpus,
        resources={"TPU": args.tpu_chips} if args.tpu_chips else None,
    )
    rows.write_parquet(args.vectors)


def model_of(args: Namespace) -> dict[str, Any]:
    """The arguments with which each actor makes its Embed."""
    return {
        "model": args.model,
        "column": args.column,
        "id_column": args.id_column,
        "outputs": args.outputs,
        "role": "document",
    }


def check_cpus(args: Namespace) -> None:
    """Say so if the job would wait for CPUs that the cluster does not have: Ray does not."""
    if not ray.is_initialized():
        ray.init()
    needed, found = args.actors * args.cpus + OTHER_CPUS, ray.cluster_resources().get("CPU", 0)
    if needed > found:
        print(
            f"{args.actors} actors of {args.cpus:g} CPUs, the checkpoint and reading need "
            f"{needed:g} CPUs, and the cluster has {found:g}: unless it grows, this waits for ever",
            file=sys.stderr,
        )


def folder(given: str) -> str:
    """A URL as it is, and a path from the root: the machines have other working directories."""
    return given if "://" in given else str(Path(given).resolve())


def parse(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("documents", type=folder, help="folder of Parquet with texts and ids")
    parser.add_argument("vectors", type=folder, help="folder that Parquet is written to")
    parser.add_argument("checkpoint", type=folder, help="folder for the ids of what is written")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--column", default="text", help="column with the texts")
    parser.add_argument("--id-column", default="id", help="column with the ids")
    parser.add_argument("--outputs", nargs="+", default=["dense"], help="dense sparse multi_vector")
    parser.add_argument("--actors", type=int, default=1, help="processes with the model each")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of an actor")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of an actor")
    parser.add_argument(
        "--tpu-chips", type=int, default=0, help="TPU chips of an actor: all of one host"
    )
    parser.add_argument("--batch-size", type=int, default=4096, help="rows of a call")
    parser.add_argument(
        "--blocks", type=int, help="parts to embed at a time: several for each actor"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
