"""The steps of a server's start one after the other, timed: bench_start runs it in new processes.

    python -m benchmarks.start_stages CACHE_DIR [MODEL]

Prints one JSON object: seconds by stage. The order is that of `jaxembed serve`.
"""

import os
import sys
import time

ENTERED_AT = time.time()  # before any other import: what came before is the interpreter's


def main() -> None:
    import json
    from pathlib import Path

    cache_dir, model_name = Path(sys.argv[1]), (sys.argv[2:] or [None])[0]
    began_at = float(os.environ.get("STARTED_AT", ENTERED_AT))
    seconds = {"interpreter": ENTERED_AT - began_at}
    last = ENTERED_AT

    def lap(stage: str) -> None:
        nonlocal last
        now = time.time()
        seconds[stage] = now - last
        last = now

    import jax

    lap("import jax")
    from jaxembed import checkpoint, hub

    lap("import hub and checkpoint")
    import jaxembed.server.run  # noqa: F401

    lap("import server")
    from jaxembed.cli import configure_jax
    from jaxembed.config import EngineConfig
    from jaxembed.embedder import Embedder  # noqa: F401
    from jaxembed.engine.build import make_plan
    from jaxembed.engine.replica import Replica
    from jaxembed.models import program

    configure_jax(cache_dir, None)
    lap("import embedder")
    path = hub.resolve(model_name, cache_dir=cache_dir)
    lap("resolve and convert")
    spec = checkpoint.load_spec(path)
    model = program(spec)
    lap("build the model")
    jax.local_devices()
    lap("start the device")
    planned = make_plan(spec, model, EngineConfig(), cache_dir)
    lap("plan and calibrate")
    import tokenizers

    tokenizers.Tokenizer.from_file(str(checkpoint.tokenizer_path(path)))
    lap("load the tokenizer")
    parameters = checkpoint.load_params(path, spec)
    lap("load the parameters")
    replica = Replica(
        model,
        parameters,
        planned.devices[:1],
        planned.dtype,
        attention=planned.kernels.implementation,
        native_layout=planned.kernels.native_layout,
    )
    lap("parameters to the device")
    for bucket in planned.grid.covering:
        replica.compile(bucket)
    lap(f"compile {len(planned.grid.covering)} covering buckets in turn")
    for bucket in planned.grid.by_use[len(planned.grid.covering) :]:
        replica.compile(bucket)
    lap("compile the other buckets in turn")
    seconds["total"] = last - began_at
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
