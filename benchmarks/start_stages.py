"""Times the stages of a server's start one after the other; bench_start runs it in new processes.

    python -m benchmarks.start_stages CACHE_DIR [MODEL]

It prints one JSON object, seconds by stage. The order is that of `jaxembed serve`.
"""

import os
import sys
import time

ENTERED_AT = time.time()  # before any other import: the time before this is the interpreter's


class Laps:
    """The seconds of each stage, from the end of the stage before."""

    def __init__(self) -> None:
        self.began_at = float(os.environ.get("STARTED_AT", ENTERED_AT))
        self.seconds = {"interpreter": ENTERED_AT - self.began_at}
        self._last = ENTERED_AT

    def end(self, stage: str) -> None:
        """Note that a stage has ended."""
        now = time.time()
        self.seconds[stage] = now - self._last
        self.seconds["total"] = now - self.began_at
        self._last = now


def main() -> None:
    """Run the stages and print their seconds as JSON."""
    import json
    from pathlib import Path

    cache_dir, model_name = Path(sys.argv[1]), (sys.argv[2:] or [None])[0]
    laps = Laps()
    import_all(laps)
    start(laps, cache_dir, model_name)
    print(json.dumps(laps.seconds))


def import_all(laps: Laps) -> None:
    """Import what the server imports."""
    import jax  # noqa: F401

    laps.end("import jax")
    from jaxembed.checkpoints import checkpoint, hub  # noqa: F401

    laps.end("import hub and checkpoint")
    import jaxembed.server.run

    laps.end("import server")
    import jaxembed.embedder  # noqa: F401

    laps.end("import embedder")


def start(laps: Laps, cache_dir, model_name) -> None:
    """Load a model and compile its buckets; None means the default model."""
    import jax

    from jaxembed.checkpoints import checkpoint, hub
    from jaxembed.checkpoints.source import ModelSource
    from jaxembed.cli.loading import configure_jax
    from jaxembed.config import EngineConfig
    from jaxembed.engine.build import make_plan
    from jaxembed.engine.replica import Replica
    from jaxembed.models import program

    configure_jax(cache_dir, None)
    path = hub.resolve(ModelSource(model_name, cache_dir=cache_dir))
    laps.end("resolve and convert")
    spec = checkpoint.load_spec(path)
    model = program(spec)
    laps.end("build the model")
    jax.local_devices()
    laps.end("start the device")
    planned = make_plan(spec, model, EngineConfig(), cache_dir)
    laps.end("plan and calibrate")
    import tokenizers

    tokenizers.Tokenizer.from_file(str(checkpoint.tokenizer_path(path)))
    laps.end("load the tokenizer")
    parameters = checkpoint.load_params(path, spec)
    laps.end("load the parameters")
    kernels = planned.kernels
    place = (model, parameters, planned.devices[:1], planned.dtype)
    replica = Replica(*place, attention=kernels.implementation, native_layout=kernels.native_layout)
    laps.end("parameters to the device")
    covering, use = planned.grid.covering, planned.grid.by_use
    for bucket in covering:
        replica.compile(bucket)
    laps.end(f"compile {len(covering)} covering buckets in turn")
    for bucket in use[len(covering) :]:
        replica.compile(bucket)
    laps.end("compile the other buckets in turn")


if __name__ == "__main__":
    main()
