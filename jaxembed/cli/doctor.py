"""`jaxembed doctor`: why queries are slow, asked of a server or found on this machine."""

from typing import Any

import click

from jaxembed.cli.jax_setup import configure_jax
from jaxembed.cli.logs import configure_logging
from jaxembed.cli.options import ENGINE_OPTIONS, MODEL_OPTIONS, tei_option
from jaxembed.cli.settings import engine_config, model_source
from jaxembed.cli.status import EXIT_FINDINGS, EXIT_HEALTHY, EXIT_REFUSED
from jaxembed.config import ServerConfig
from jaxembed.errors import Unanswered


@click.command("doctor")
@click.argument("url", required=False)
@tei_option("--api-key", multiple=True, help="Key that the server asks for; of several the first.")
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
    """Print what a server reports about itself, and return whether something is wrong.

    Raises ConfigError if what answers is no server of ours, Unanswered if nothing answers.
    """
    import msgspec

    from jaxembed.doctor.page import model_page
    from jaxembed.doctor.probe import ask, probe_model

    examinations = ask(url, key)
    probes = {}
    if probe:
        probes = {name: probe_model(url, key, one.facts) for name, one in examinations.items()}
        examinations = ask(url, key)  # again, for the times of the probes
    if as_json:
        answer = {"models": examinations, "probes": probes}
        click.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
    else:
        pages = [model_page(url, one, probes.get(name)) for name, one in examinations.items()]
        click.echo("\n\n".join(pages))
    return any(one.findings for one in examinations.values())


def _examine_here(model: str | None, flags: dict[str, Any], as_json: bool) -> bool:
    """Print what this machine has for a model, and return whether something is wrong."""
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    import msgspec

    from jaxembed import hub
    from jaxembed.doctor.local import examine_here
    from jaxembed.doctor.page import local_page

    spec = hub.describe_model(model, **model_source(flags)).main
    name = model or hub.DEFAULT_MODEL
    examination = examine_here(name, spec, engine_config(flags), flags["cache_dir"])
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(examination)).decode())
    else:
        click.echo(local_page(examination))
    return bool(examination.findings)
