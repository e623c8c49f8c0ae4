"""`jaxembed doctor`: explains why queries to a server, or on this machine, are slow."""

from typing import Any

import click

from jaxembed.cli.loading import configure_jax, engine_config, model_source
from jaxembed.cli.options import (
    ENGINE_OPTIONS,
    EXIT_FINDINGS,
    EXIT_HEALTHY,
    EXIT_REFUSED,
    MODEL_OPTIONS,
    Command,
    echo_json,
    tei_option,
)
from jaxembed.config import ServerConfig
from jaxembed.errors import Unanswered

DEFAULT_URL = f"http://127.0.0.1:{ServerConfig.port}"


@click.command("doctor", cls=Command, example="jaxembed doctor http://127.0.0.1:8080 --probe")
@click.argument("url", required=False)
@tei_option(
    "--api-key",
    multiple=True,
    help="Key to send to the server (default: none). Only the first of several is sent.",
)
@click.option(
    "--model",
    "-m",
    help="Model, a directory or a hub id, to examine on this machine instead of asking a server.",
)
@click.option(
    "--probe", is_flag=True, help="Send a few single queries to each model and measure their times."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
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
    """Explain why queries to a server are slow, and what would help.

    URL is that of a jaxembed server. The report covers the last minute: the device, where the time
    goes, what waits and what limits the throughput. Then it lists the problems, the worst first,
    each with the flag or the command that helps.

    Without URL the server at http://127.0.0.1:8080 is asked. If none answers there, or with
    --model, the report covers this machine; the options for the model and the engine apply to that.

    The exit status is 0 if no problem is found, 1 if there are problems, and 2 if the server could
    not be asked.
    """
    if url is not None and model is not None:
        raise click.UsageError(
            "give URL or --model, not both: a server reports the models that it has"
        )
    if model is None:
        key = api_key[0] if api_key else None
        try:
            has_findings = _ask_doctor(url or DEFAULT_URL, key, probe, as_json)
        except Unanswered as error:
            if url is not None:
                raise
            click.echo(f"jaxembed: {error}", err=True)
        else:
            click.get_current_context().exit(EXIT_FINDINGS if has_findings else EXIT_HEALTHY)
    status = EXIT_FINDINGS if _examine_here(model, flags, as_json) else EXIT_HEALTHY
    # if there is no --model, a server was asked first and did not answer
    click.get_current_context().exit(EXIT_REFUSED if model is None else status)


def _ask_doctor(url: str, key: str | None, probe: bool, as_json: bool) -> bool:
    """Print what a server reports about itself. Returns whether the report has findings. With
    `probe`, a few queries are sent and timed first.

    Raises Unanswered if nothing answers at the URL, and ConfigError if what answers is not a
    jaxembed server.
    """
    from jaxembed.tools.doctor.page import model_page
    from jaxembed.tools.doctor.probe import ask, probe_model

    examinations = ask(url, key)
    probes = {}
    if probe:
        probes = {
            name: probe_model(url, key, report.facts) for name, report in examinations.items()
        }
        examinations = ask(url, key)  # again, for the times of the probes
    if as_json:
        echo_json({"models": examinations, "probes": probes})
    else:
        pages = [model_page(url, report, probes.get(name)) for name, report in examinations.items()]
        click.echo("\n\n".join(pages))
    return any(report.findings for report in examinations.values())


def _examine_here(model: str | None, flags: dict[str, Any], as_json: bool) -> bool:
    """Print what a model would use on this machine: the device, the kernels and the buckets.
    Returns whether there are findings. Raises CheckpointError, ConfigError and BackendError."""
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    from jaxembed.checkpoints import hub
    from jaxembed.tools.doctor.local import examine_here
    from jaxembed.tools.doctor.page import local_page

    source = model_source(model, flags)
    spec = hub.describe_model(source).main
    examination = examine_here(source.name, spec, engine_config(flags), source.cache_dir)
    if as_json:
        echo_json(examination)
    else:
        click.echo(local_page(examination))
    return bool(examination.findings)
