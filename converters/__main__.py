"""python -m converters MODEL OUT: converts a local directory and prints what came of it."""

import logging
import sys
import time
from pathlib import Path

from converters import convert
from jaxembed.errors import CheckpointError
from jaxembed.spec import ModelSpec

USAGE = "usage: python -m converters MODEL OUT\n  MODEL  a Hugging Face directory\n  OUT    new"


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 2 with the reason on stderr."""
    if len(arguments) != 2 or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    started = time.monotonic()
    try:
        spec = convert(Path(arguments[0]), Path(arguments[1]))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    print(summary(spec, Path(arguments[1])))
    print(f"took          {time.monotonic() - started:.1f} s")
    return 0


def summary(spec: ModelSpec, out: Path) -> str:
    """The manifest in a few lines."""
    modules = [type(layer).__name__.removesuffix("Layer").lower() for layer in spec.modules]
    rows = {
        "checkpoint": out,
        "source": spec.source,
        "architecture": spec.architecture,
        "head": " + ".join(spec.pooling) + "".join(f", {module}" for module in modules),
        "dimensions": spec.dim,
        "input tokens": spec.max_input_tokens,
        "prompts": ", ".join(spec.prompts) or "none",
        "dtype": spec.dtype,
        "content hash": spec.content_hash[:16],
    }
    return "\n".join(f"{name:<14}{value}" for name, value in rows.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
