"""The command line: parses, configures JAX, calls. Only this module reads the environment."""

import ipaddress
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from jaxembed import __version__, memory
from jaxembed.cache_folder import make_private, refuse_shared
from jaxembed.config import EngineConfig, ServerConfig, TextConfig
from jaxembed.errors import ConfigError, JaxembedError, Unanswered, WrongTask
from jaxembed.memory import MIB
from jaxembed.signals import end_at_signals

# JAX, the engine and the server are imported inside the commands, so that --help is quick.

logger = logging.getLogger("jaxembed")

EXIT_AGREES, EXIT_DISAGREES = 0, 1  # of `verify`
EXIT_HEALTHY, EXIT_FINDINGS = 0, 1  # of `doctor`
EXIT_REFUSED = 2
IN_XLA = ("compile-", "seat-", "time-buckets", "timing-")  # names of threads


class FiniteRange(click.FloatRange):
    """Finite numbers within bounds. nan would pass any of them."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def _option(flag: str, **attributes: Any) -> Callable:
    """An option that also has TEI's environment variable: its name in capitals."""
    name = flag.removeprefix("--").split("/")[0]
    return click.option(flag, envvar=name.upper().replace("-", "_"), show_envvar=True, **attributes)


def _options(*options: Callable) -> Callable:
    return lambda command: reduce(lambda wrapped, option: option(wrapped), options[::-1], command)


MODEL_OPTIONS = _options(
    _option("--revision", help="Branch, tag or commit of a hub model."),
    click.option("--offline", is_flag=True, help="Use only what is downloaded already."),
    _option("--hf-token", help="Token for the hub."),
    _option("--dense-path", help="Use this Dense module instead of the one in modules.json."),
    click.option(
        "--cache-dir",
        envvar="JAXEMBED_CACHE",
        show_envvar=True,
        type=click.Path(path_type=Path),
        default=lambda: Path.home() / ".cache" / "jaxembed",
        show_default="~/.cache/jaxembed",
        help="Converted models and compiled programs. Refused where others can write.",
    ),
    _option(
        "--huggingface-hub-cache",
        type=click.Path(path_type=Path),
        help="Where hub downloads are kept.",
    ),
)

ENGINE_OPTIONS = _options(
    _option(
        "--pooling",
        type=click.Choice(["cls", "mean", "last-token"]),
        help="Pool this way instead of as the checkpoint says.",
    ),
    _option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        help="Default: bfloat16 where the device multiplies it natively, else float32.",
    ),
    click.option("--devices", type=click.IntRange(1), help="Use this many. Default: all."),
    click.option(
        "--parallel",
        type=click.Choice(["replicas", "sharded"]),
        default="replicas",
        show_default=True,
        help="One replica a device, or every batch over all devices.",
    ),
    click.option(
        "--warmup",
        type=click.Choice(["minimal", "full"]),
        help="Buckets compiled before ready. Default: full on a GPU, else minimal.",
    ),
    click.option(
        "--kernels",
        default=EngineConfig.kernels,
        show_default=True,
        help="The fastest that are right; xla; native (CPU); flash or triton (GPU); splash (TPU).",
    ),
    _option("--max-batch-tokens", type=click.IntRange(1), help="Of a batch, padding counted."),
    _option("--max-batch-requests", type=click.IntRange(1), help="Sequences in a batch."),
    click.option(
        "--buckets",
        type=click.Path(path_type=Path),
        help="JSON file with the grid of shapes; `jaxembed tune` writes one.",
    ),
    click.option(
        "--max-input-length",
        envvar="MAX_INPUT_LENGTH",
        show_envvar=True,
        type=click.IntRange(1),
        help="Tokens of an input. Default: what the model says.",
    ),
    click.option(
        "--device-memory-fraction",
        type=FiniteRange(0, 1, min_open=True),
        help="Share of a GPU's memory to take; taken as needed, not at once.",
    ),
    click.option("--null-model", is_flag=True, hidden=True, help="Constants: measures the host."),
)

TEXT_OPTIONS = _options(
    _option(
        "--auto-truncate",
        type=bool,
        is_flag=False,
        flag_value=True,
        default=True,
        show_default=True,
        help="Cut inputs over the limit unless the request says otherwise.",
    ),
    _option("--default-prompt", help="Text put before every input."),
    _option("--default-prompt-name", help="The same, by its name in the model's prompts."),
    _option(
        "--tokenization-workers",
        type=click.IntRange(1),
        help="Tokenizer threads. Default: cores less one, at least 4.",
    ),
)

SERVER_OPTIONS = _options(
    _option("--model-id", multiple=True, help="The same as MODEL; repeat for several."),
    _option(
        "--served-model-name",
        multiple=True,
        metavar="NAME[=MODEL]",
        help="Name in requests and answers, in place of MODEL; repeat for aliases. Of several "
        "models, say which.",
    ),
    click.option(
        "--host",
        "--hostname",
        "host",
        default=lambda: _ip_address(os.environ.get("HOSTNAME", "")) or "127.0.0.1",
        show_default="127.0.0.1",
        help="Address to listen on.  [env var: HOSTNAME, if an IP address]",
    ),
    click.option(
        "-p",
        "--port",
        envvar="PORT",
        show_envvar=True,
        type=click.IntRange(0, 65535),
        default=8080,
        show_default=True,
        help="0 is any free port.",
    ),
    _option("--api-key", multiple=True, help="Key that clients must send; repeat for several."),
    _option(
        "--cors-allow-origin",
        multiple=True,
        help="Repeat for several. Default: any (*) with --api-key, else none.",
    ),
    _option(
        "--max-concurrent-requests",
        type=click.IntRange(1),
        default=EngineConfig.max_concurrent_requests,
        show_default=True,
        help="Inputs admitted and not yet answered.",
    ),
    click.option(
        "--max-queue-bytes",
        type=click.IntRange(MIB),
        default=EngineConfig.max_queue_bytes,
        show_default=True,
        help="Memory that requests hold until they are answered.",
    ),
    click.option(
        "--max-queue-tokens", type=click.IntRange(1), help="Tokens admitted and not yet answered."
    ),
    _option(
        "--max-client-batch-size",
        type=click.IntRange(0),
        default=ServerConfig.max_client_batch_size,
        show_default=True,
        help="Inputs in one request; 0 is unlimited.",
    ),
    _option(
        "--payload-limit",
        type=click.IntRange(1),
        default=32 * MIB,
        show_default=True,
        help="Bytes in one request.",
    ),
    click.option(
        "--accept-bare-token-ids",
        is_flag=True,
        help="Run token ids on /v1/embeddings that lack the tokenizer's special tokens.",
    ),
    click.option(
        "--drain-timeout",
        type=FiniteRange(0),
        default=ServerConfig.drain_timeout_s,
        show_default=True,
        help="Seconds to finish admitted requests after SIGTERM.",
    ),
    _option(
        "--prometheus-port",
        type=click.IntRange(0, 65535),
        help="Serve /metrics on a second port too.",
    ),
    _option("--json-output", is_flag=True, help="Log lines as JSON."),
    # TEI's, with nothing here to act on: there is no backend process and no trace to hold spans
    _option("--uds-path", hidden=True),
    _option("--disable-spans", is_flag=True, hidden=True),
    _option("--otlp-service-name", hidden=True),
    _option("--otlp-endpoint", hidden=True),
)

_ALONE = "serve that model in a process of its own"
_CONVERT = "convert that model with `jaxembed convert {flag}`, and serve what comes out"
OF_ONE_MODEL = {  # and what to do instead where there are several
    "revision": _CONVERT,
    "dense_path": _CONVERT,
    "pooling": _ALONE,
    "buckets": _ALONE,
    "max_input_length": _ALONE,
    "default_prompt": _ALONE,
    "default_prompt_name": _ALONE,
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", prog_name="jaxembed")
def cli() -> None:
    """Embed, rerank and classify texts on JAX: CPU, GPU and TPU."""


@cli.command("serve")
@click.argument("model", nargs=-1)
@SERVER_OPTIONS
@MODEL_OPTIONS
@ENGINE_OPTIONS
@TEXT_OPTIONS
def serve_command(
    model: tuple[str, ...],
    model_id: tuple[str, ...],
    served_model_name: tuple[str, ...],
    json_output: bool,
    **flags: Any,
) -> None:
    """Serve MODEL over HTTP with the APIs of OpenAI, TEI, Jina and Cohere.

    MODEL is a directory or a hub id; without one it is all-MiniLM-L6-v2. Several models share the
    devices and the limits on waiting work; a request says in `model` which one it wants.
    """
    models = _models_given(model, model_id)
    if len(models) > 1:
        _refuse_flags_of_one_model(flags, models)
    _refuse_blank_keys(flags["api_key"])
    if flags["otlp_endpoint"]:
        raise click.UsageError("--otlp-endpoint: traces are not exported; use /metrics")
    configure_logging(json_output)
    end_at_signals()
    from jaxembed.hub import DEFAULT_MODEL
    from jaxembed.server.models import Models, served_names
    from jaxembed.server.run import listen, run

    models = models or (DEFAULT_MODEL,)
    aliases = _aliases(served_model_name, models)
    served_names(models, aliases)  # two of one name are known before a long load, and
    config = _server_config(flags)
    listener = listen(config.host, config.port)  # so is a port in use
    logger.info(_access(config.api_keys))
    run(Models(_embedders(models, flags), aliases), config, listener)


@cli.command("convert")
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@MODEL_OPTIONS
def convert_command(model: str, out: Path, **flags: Any) -> None:
    """Convert MODEL, a Hugging Face directory or a hub id, to the checkpoint directory OUT."""
    configure_logging()
    os.environ["JAX_PLATFORMS"] = "cpu"  # saving starts a backend: not one that others want
    from jaxembed import hub

    source = _source(flags)
    del source["cache_dir"]
    spec = hub.convert_model(model, out, **source)
    gives = f"{spec.dim} dimensions" if spec.task == "embed" else f"labels {', '.join(spec.labels)}"
    click.echo(f"{out}: {spec.architecture}, {spec.task}, {gives}, {spec.max_input_tokens} tokens")


@cli.command("embed")
@click.argument("texts")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), required=True, help=".npy or .jsonl."
)
@click.option("--model", "-m", help="A directory or a hub id. Default: all-MiniLM-L6-v2.")
@click.option("--field", default="text", show_default=True, help="Of objects in a .jsonl file.")
@click.option("--prompt-name", help="Prompt of the model to put before every text.")
@click.option("--dimensions", type=click.IntRange(1), help="Cut the vectors to this many.")
@MODEL_OPTIONS
@ENGINE_OPTIONS
@TEXT_OPTIONS
def embed_command(
    texts: str,
    output: Path,
    model: str | None,
    field: str,
    prompt_name: str | None,
    dimensions: int | None,
    **flags: Any,
) -> None:
    """Embed the TEXTS of a .txt file (a line each), a .jsonl file or standard input (-)."""
    configure_logging()
    from tqdm import tqdm

    from jaxembed.bulk import check_vectors_path, embed_file, read_text_file

    lines = read_text_file(texts, field)  # a file that isn't there is known before a long load
    check_vectors_path(output)
    embedder = _embedder(_embedding_model(model, flags), flags)
    started_at = time.monotonic()
    with tqdm(unit=" texts", desc="embed", disable=None) as bar:
        count = embed_file(
            embedder,
            lines,
            output,
            on_progress=bar.update,
            prompt_name=prompt_name,
            dimensions=dimensions,
        )
    seconds = time.monotonic() - started_at
    embedder.close()
    logger.info("%d texts to %s in %.1f s, %.0f a second", count, output, seconds, count / seconds)


@cli.command("tune")
@click.argument("traffic")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("buckets.json"),
    show_default=True,
    help="The grid, for `jaxembed serve --buckets`.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="A .png or .svg of lengths and buckets. Needs matplotlib.",
)
@click.option("--model", "-m", help="A directory or a hub id. Default: all-MiniLM-L6-v2.")
@click.option("--field", default="text", show_default=True, help="Of objects in a .jsonl file.")
@click.option("--served-model-name", help="Of a server with several models, the one to read.")
@click.option(
    "--seconds",
    type=FiniteRange(1),
    default=120.0,
    show_default=True,
    help="Of the search, about. Both grids are tried on the engine after it.",
)
@click.option(
    "--max-buckets",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="At most, of the new grid.",
)
@click.option(
    "--compile-seconds",
    type=FiniteRange(0, min_open=True),
    help="At most, for all of its buckets one by one, nothing cached.",
)
@MODEL_OPTIONS
@ENGINE_OPTIONS
@TEXT_OPTIONS
def tune_command(
    traffic: str,
    output: Path,
    picture: Path | None,
    model: str | None,
    field: str,
    served_model_name: str | None,
    seconds: float,
    max_buckets: int,
    compile_seconds: float | None,
    **flags: Any,
) -> None:
    """Find the buckets that serve TRAFFIC at least cost on this device.

    TRAFFIC is a .txt or .jsonl file of texts, standard input (-), a .json file of lengths in tokens
    ([9, 12] or {"9": 120}), or the URL of a server of ours, whose metrics say how long its inputs
    are. The grid found is tried beside the one in use, that of --buckets or the default one, and
    the better of them is written. The device must have nothing else to do meanwhile.
    """
    configure_logging()
    from jaxembed.bulk import read_text_file
    from jaxembed.tune import lengths, report
    from jaxembed.tune.model import load_measured
    from jaxembed.tune.tuning import Budget, check_grid_path
    from jaxembed.tune.tuning import tune as find

    check_grid_path(output)  # what cannot be read or written is known before a long load
    if picture is not None:
        report.check_picture(picture)
    texts = known = None
    if traffic.startswith(("http://", "https://")):
        known = lengths.of_server(traffic, served_model_name)
    elif traffic.endswith(".json"):
        known = lengths.of_file(Path(traffic))
    else:
        texts = read_text_file(traffic, field)
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    import jax

    jax.config.update("jax_enable_compilation_cache", False)  # compiling is measured, too
    loaded = load_measured(
        model, config=_engine_config(flags), text=_text_config(flags), **_source(flags)
    )
    if texts is not None:
        known = lengths.of_texts(texts, loaded.count_tokens, traffic)
    assert known is not None
    budget = Budget(seconds, max_buckets, compile_seconds)
    tuning = find(loaded, known, budget, _steps())
    tuning.write(output)
    click.echo(report.table(tuning))
    if picture is not None:
        report.draw(tuning, picture)
    loaded.close()
    outcome = "is better" if tuning.is_better else "is not better: the one before was kept"
    click.echo(f"\nThe grid found {outcome}. Use it: jaxembed serve --buckets {output}")


@cli.command("verify")
@click.argument("model", required=False)
@click.option(
    "--against",
    type=click.Choice(["sentence-transformers"]),
    default="sentence-transformers",
    show_default=True,
    help="The reference; it must be installed.",
)
@click.option("--texts", help="Compare these too: a .txt file (a line each), .jsonl, or - (lines).")
@click.option("--field", default="text", show_default=True, help="Of objects in a .jsonl file.")
@MODEL_OPTIONS
@ENGINE_OPTIONS
def verify_command(
    model: str | None, against: str, texts: str | None, field: str, **flags: Any
) -> None:
    """Compare MODEL with a reference, in float32 and in the dtype that would be served.

    Token ids and vectors, or logits, of a fixed list of texts, with each prompt of the checkpoint.
    Of a long-context model inputs are cut at 2048 tokens unless --max-input-length says otherwise.
    Ends with a row for the table of verified models. Exit status: 0 if all is within the bounds,
    1 if not, 2 if it could not be compared.
    """
    for flag in ("pooling", "dense_path"):
        if flags[flag] is not None:
            name = "--" + flag.replace("_", "-")
            raise click.UsageError(f"{name}: {against} computes what the checkpoint says")
    configure_logging()
    from jaxembed.bulk import read_text_file
    from jaxembed.verify.report import HEADER, markdown_row, report_lines
    from jaxembed.verify.verification import verify_model

    more = list(read_text_file(texts, field)) if texts is not None else []
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    found = verify_model(
        model,
        more,
        source=_source(flags),
        config=_engine_config(flags),
        on_progress=_compile_bar(),
    )
    click.echo("\n".join(report_lines(found)))
    click.echo(f"\n{HEADER}\n{markdown_row(found)}")
    click.get_current_context().exit(EXIT_AGREES if found.agrees else EXIT_DISAGREES)


@cli.command("doctor")
@click.argument("url", required=False)
@_option("--api-key", multiple=True, help="Key that the server asks for; of several the first.")
@click.option("--model", "-m", help="Ask no server: what MODEL would have on this machine.")
@click.option("--probe", is_flag=True, help="Send some lone queries to each model and time them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@MODEL_OPTIONS
@ENGINE_OPTIONS
def doctor_command(
    url: str | None,
    api_key: tuple[str, ...],
    model: str | None,
    probe: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Ask the server at URL, by default http://127.0.0.1:8080, why a query is slow.

    Prints what it runs on, where time goes, what waits and what bounds it, of the last minute; then
    what is wrong, the worst first, each with the flag or command that helps. Where no server
    answers, or with --model, it says what this machine has. The flags of the model and the engine
    are for that, and as those of `serve`.

    Exit status: 0 if nothing is wrong, 1 if something is, 2 if the server could not be asked.
    """
    if url is not None and model is not None:
        raise click.UsageError("give URL or --model: a server says of itself which models it has")
    configure_logging()
    if model is None:
        url = url or f"http://127.0.0.1:{ServerConfig.port}"
        try:
            has_findings = _ask_doctor(url, api_key[0] if api_key else None, probe, as_json)
        except Unanswered as error:
            click.echo(f"jaxembed: {error}", err=True)
        else:
            click.get_current_context().exit(EXIT_FINDINGS if has_findings else EXIT_HEALTHY)
    has_findings = _examine_here(model, flags, as_json)
    status = EXIT_FINDINGS if has_findings else EXIT_HEALTHY
    click.get_current_context().exit(EXIT_REFUSED if model is None else status)


def _ask_doctor(url: str, key: str | None, probe: bool, as_json: bool) -> bool:
    """Print what a server says of itself; whether something is wrong. Raises ConfigError."""
    import msgspec

    from jaxembed.doctor.page import model_page
    from jaxembed.doctor.probe import ask, probe_model

    examinations = ask(url, key)
    probes = {}
    if probe:
        probes = {name: probe_model(url, key, one.facts) for name, one in examinations.items()}
        examinations = ask(url, key)  # again: what they took is in it
    if as_json:
        answer = {"models": examinations, "probes": probes}
        click.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
    else:
        pages = [model_page(url, one, probes.get(name)) for name, one in examinations.items()]
        click.echo("\n\n".join(pages))
    return any(one.findings for one in examinations.values())


def _examine_here(model: str | None, flags: dict[str, Any], as_json: bool) -> bool:
    """Print what this machine has for a model; whether something is wrong."""
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    import msgspec

    from jaxembed import hub
    from jaxembed.doctor.local import examine_here
    from jaxembed.doctor.page import local_page

    spec = hub.describe_model(model, **_source(flags))
    name = model or hub.DEFAULT_MODEL
    examination = examine_here(name, spec, _engine_config(flags), flags["cache_dir"])
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(examination)).decode())
    else:
        click.echo(local_page(examination))
    return bool(examination.findings)


@cli.command("info")
@click.argument("model", required=False)
@click.option(
    "--verify", is_flag=True, help="Compare the files of a converted model with their digests."
)
@MODEL_OPTIONS
def info_command(model: str | None, verify: bool, **flags: Any) -> None:
    """Say what MODEL is: task, outputs, limits, pooling, prompts, size. Converts nothing."""
    configure_logging()
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing here is worth starting another device for
    import msgspec

    from jaxembed import hub
    from jaxembed.summary import summary

    source = _source(flags)
    if verify:  # first: a damaged manifest says nothing
        click.echo(f"{hub.verify_files(model, **source)} files verified", err=True)
    facts = summary(hub.describe_model(model, **source))
    click.echo(msgspec.json.format(msgspec.json.encode(facts)).decode())


def main() -> None:
    """The entry point: errors of ours are one line and exit status 2."""
    try:
        cli(standalone_mode=True)
    except SystemExit as done:
        _exit(done.code if isinstance(done.code, int) else 1)
    except JaxembedError as error:
        click.echo(f"jaxembed: {error}", err=True)
        _exit(EXIT_REFUSED)


def _exit(status: int) -> NoReturn:
    """Leave, without the interpreter's clean-up if a thread is still inside XLA, compiling or in a
    call that hangs: it cannot be stopped, and unwinding it aborts the process."""
    if any(thread.name.startswith(IN_XLA) for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def configure_logging(json_output: bool = False) -> None:
    """Log lines on standard error: ours at INFO, what is below us at WARNING."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if json_output else logging.Formatter(LINE))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    # Orbax tells a story of each file, and prints tracebacks of errors that it raises as well
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    level = os.environ.get("LOG_LEVEL", "info").upper()
    known = logging.getLevelNamesMapping()
    for name in ("jaxembed", "converters"):
        logging.getLogger(name).setLevel(known.get(level, logging.INFO))


LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        import orjson

        line = {
            "timestamp": self.formatTime(record),
            "level": record.levelname,
            "target": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


def configure_jax(cache_dir: Path, memory_fraction: float | None) -> None:
    """Everything jaxembed sets in JAX for the whole process, before a device is started."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # our threads share the work
    if "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", ""):
        memory.keep()  # unless the user has arranged it
    if memory_fraction is not None:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(memory_fraction)
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # its old name; both are an error
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from jaxembed.engine.calibrate import host_id
    from jaxembed.engine.compiles import replace_unreadable_programs

    programs = cache_dir / "programs" / host_id()
    try:
        for folder in (cache_dir, programs.parent, programs):
            make_private(folder)
            refuse_shared(folder)
    except OSError as error:
        raise ConfigError(
            f"--cache-dir {cache_dir} (JAXEMBED_CACHE) cannot be used: {error.strerror}"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(programs))
    replace_unreadable_programs(programs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # a seat's thread waits for its batch anyway; asynchronous dispatch would oversubscribe cores
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    sys.setswitchinterval(0.0005)  # keeps the event loop responsive beside the engine's threads


def _models_given(model: tuple[str, ...], model_id: tuple[str, ...]) -> tuple[str, ...]:
    """The models of the command line, each once; those of MODEL_ID where it names none."""
    source = click.get_current_context().get_parameter_source("model_id")
    if model and source is ParameterSource.ENVIRONMENT:
        return tuple(dict.fromkeys(model))
    return tuple(dict.fromkeys(model + model_id))


def _refuse_blank_keys(keys: tuple[str, ...]) -> None:
    """A blank variable is none to click, so that the server would be open to everybody."""
    blank = [key for key in keys if not key.strip()]
    if blank:
        raise ConfigError(
            f"--api-key is blank ({blank[0]!r}); give a key that clients can send, or leave the "
            "flag out and unset API_KEY to serve without one"
        )
    variable = os.environ.get("API_KEY")
    if not keys and variable is not None:
        raise ConfigError(
            f"API_KEY is set but blank ({variable!r}); give it a key that clients must send, or "
            "unset it to serve without one"
        )


def _access(keys: tuple[str, ...]) -> str:
    """Whether requests need a key, for the log."""
    if not keys:
        return "no API key is required; set --api-key (API_KEY) to require one"
    return f"requests need {'the API key' if len(keys) == 1 else f'one of {len(keys)} API keys'}"


def _refuse_flags_of_one_model(flags: dict[str, Any], models: Sequence[str]) -> None:
    given = [name for name in OF_ONE_MODEL if flags[name] is not None]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise click.UsageError(
            f"{flag} is for one model, and there are {len(models)}: {', '.join(models)}; "
            + OF_ONE_MODEL[given[0]].format(flag=flag)
        )


def _aliases(names: Sequence[str], models: Sequence[str]) -> dict[str, list[str]]:
    """The names given to each model, from `NAME=MODEL`, or from `NAME` where there is one model."""
    aliases: dict[str, list[str]] = {}
    for given in names:
        name, equals, model = given.partition("=")
        if not equals and len(models) == 1:
            model = models[0]
        if not name or model not in models:
            raise click.UsageError(
                f"--served-model-name {given}: wanted NAME=MODEL, where MODEL is one of "
                + ", ".join(models)
            )
        aliases.setdefault(model, []).append(name)
    return aliases


def _embedders(models: Sequence[str], flags: dict[str, Any]) -> list:
    """The models, loaded one after the other, while those loaded compile."""
    from jaxembed.engine.admission import capacity_of

    config = _engine_config(flags)
    capacity = capacity_of(config)
    loaded: list = []
    for model in models:
        try:
            loaded.append(_embedder(model, flags, capacity=capacity, wait=False))
        except JaxembedError as error:
            for embedder in loaded:
                embedder.close(timeout_s=0.0)
            if len(models) == 1:
                raise
            raise ConfigError(f"{model} cannot be served: {error}") from error
    return loaded


def _embedding_model(model: str | None, flags: dict[str, Any]) -> str | None:
    """The model, if it gives vectors: known before its weights are downloaded."""
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    from jaxembed import hub
    from jaxembed.tasks import KIND

    task = hub.describe_model(model, **_source(flags)).task
    if task != "embed":
        raise WrongTask(f"{model} is {KIND[task]}, which gives no vectors; use `jaxembed serve`")
    return model


def _embedder(model: str | None, flags: dict[str, Any], **options: Any):
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    from jaxembed.embedder import Embedder

    return Embedder(
        model,
        **_source(flags),
        pooling=flags["pooling"].replace("-", "") if flags["pooling"] else None,
        config=_engine_config(flags),
        text=_text_config(flags),
        on_progress=_compile_bar(),
        **options,
    )


def _source(flags: dict[str, Any]) -> dict[str, Any]:
    """Where a model comes from, for the hub."""
    if flags["huggingface_hub_cache"]:
        os.environ["HF_HUB_CACHE"] = str(flags["huggingface_hub_cache"])
    return {
        "revision": flags["revision"],
        "offline": flags["offline"],
        "token": flags["hf_token"],
        "dense_path": flags["dense_path"],
        "cache_dir": flags["cache_dir"],
    }


def _engine_config(flags: dict[str, Any]) -> EngineConfig:
    admission = {
        name: flags[name]
        for name in ("max_concurrent_requests", "max_queue_tokens", "max_queue_bytes")
        if flags.get(name) is not None
    }
    return EngineConfig(
        dtype=flags["dtype"],
        devices=flags["devices"],
        parallel=flags["parallel"],
        warmup=flags["warmup"],
        kernels=flags["kernels"],
        max_batch_tokens=flags["max_batch_tokens"],
        max_batch_requests=flags["max_batch_requests"],
        buckets=flags["buckets"],
        max_input_tokens=flags["max_input_length"],
        null_model=flags["null_model"],
        **admission,
    )


def _text_config(flags: dict[str, Any]) -> TextConfig:
    return TextConfig(
        truncate=flags["auto_truncate"],
        default_prompt=flags["default_prompt"],
        default_prompt_name=flags["default_prompt_name"],
        workers=flags["tokenization_workers"],
    )


def _server_config(flags: dict[str, Any]) -> ServerConfig:
    return ServerConfig(
        host=flags["host"],
        port=flags["port"],
        api_keys=flags["api_key"],
        cors_allow_origins=flags["cors_allow_origin"],
        max_client_batch_size=flags["max_client_batch_size"],
        payload_limit=flags["payload_limit"],
        accept_bare_token_ids=flags["accept_bare_token_ids"],
        drain_timeout_s=flags["drain_timeout"],
        prometheus_port=flags["prometheus_port"],
    )


def _compile_bar() -> Callable[[int, int], None] | None:
    """A progress bar over the buckets on a terminal; log lines tell elsewhere."""
    if not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    bar = tqdm(desc="compile", unit=" buckets", leave=False)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show


def _steps() -> Callable[[str, int, int], None]:
    """What is going on: one line that changes on a terminal, the start of each step elsewhere."""
    terminal = sys.stderr.isatty()

    def show(what: str, done: int, total: int) -> None:
        count = f", {done} of {total}" if total > 1 else ""
        if terminal:
            click.echo(f"\r\033[K{what}{count}", nl=False, err=True)
        elif done == 1:
            logger.info("%s%s", what, f", {total} in all" if total > 1 else "")

    return show


def _ip_address(text: str) -> str | None:
    """The text if it is an IP address. Containers set HOSTNAME to their own name."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


if __name__ == "__main__":
    main()
