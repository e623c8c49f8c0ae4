"""`jaxembed info`: describes a model without loading it."""

import os
from collections.abc import Iterator
from typing import Any

import click

from jaxembed.cli.loading import model_source
from jaxembed.cli.options import MODEL_OPTIONS, SPLADE_FLAG, Command, echo_json
from jaxembed.errors import counted
from jaxembed.memory import MIB

TASKS = {
    "embed": "embed (turns texts into vectors)",
    "rerank": "rerank (scores documents for a query)",
    "classify": "classify (assigns labels to texts)",
    "token_classify": "token_classify (finds entities in texts)",
}
MAX_LABELS = 20  # maximum labels that are shown without --json
LONGEST_PROMPT = 70  # maximum characters of a prompt that are shown without --json


@click.command("info", cls=Command, example="jaxembed info BAAI/bge-small-en-v1.5")
@click.argument("model", required=False)
@click.option(
    "--verify",
    is_flag=True,
    help="Compare the files of a converted model with their stored digests first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all facts as JSON, for programs.")
@MODEL_OPTIONS
@SPLADE_FLAG
def info_command(model: str | None, verify: bool, as_json: bool, **flags: Any) -> None:
    """Describe a model before it is served: task, outputs, limits, prompts and size.

    MODEL is a directory or a hub id (default: all-MiniLM-L6-v2). Nothing is converted, and no
    weights are read.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # no other device is needed
    from jaxembed.checkpoints import hub
    from jaxembed.runtime.summary import summary_of_routes

    source = model_source(model, flags)
    if verify:  # before reading the manifest, which may be damaged
        click.echo(f"{counted(hub.verify_files(source), 'file')} verified", err=True)
    facts = summary_of_routes(hub.describe_model(source))
    if as_json:
        echo_json(facts)
    else:
        click.echo("\n".join(_page(facts)))


def _page(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that describe a model to people. A model with several routes has lines for
    each route."""
    revision = f", revision {facts['revision']}" if facts["revision"] else ""
    yield f"{facts['source']}{revision}"
    yield from map(_line, _rows(facts))
    for route, route_facts in facts.get("routes", {}).items():
        yield f"\nRoute {route}"
        yield from map(_line, _rows(route_facts))
    is_converted, digest = facts["converted"], facts["content_hash"]
    state = f"yes, content hash {digest}" if is_converted else "no: the first load converts it"
    yield _line(("converted", state))


def _line(row: tuple[str, str]) -> str:
    title, value = row
    return f"  {title:<16}{value}"


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the titles and the values to show for a model or a route, without empty values.
    `facts` is what `summary_of_routes` returns, or its entry for a route."""
    outputs = (f"{name} ({width} dimensions)" for name, width in facts["outputs"].items())
    sizes = (f"{size / MIB:,.0f} MiB in {kind}" for kind, size in facts["parameter_bytes"].items())
    limits = facts["limits"]
    default_limit, max_limit = limits["served_by_default"], limits["max_input_tokens"]
    hint = "" if default_limit == max_limit else f"; up to {max_limit} with --max-input-length"
    rows = [
        ("task", TASKS[facts["task"]]),
        ("architecture", f"{facts['architecture']}, {facts['parameters']:,} parameters"),
        ("memory", ", ".join(sizes)),
        ("outputs", ", ".join(outputs)),
        ("pooling", ", ".join(facts["pooling"])),
        ("input limit", f"{default_limit} tokens{hint}"),
    ]
    if facts["task"] == "embed":
        rows.append(("normalized", "to length 1" if facts["normalized"] else "no"))
        for name, prompt in facts["prompts"].items():
            short = prompt if len(prompt) <= LONGEST_PROMPT else f"{prompt[: LONGEST_PROMPT - 1]}…"
            mark = " (default)" if name == facts["default_prompt_name"] else ""
            rows.append(("prompt", f"{name}{mark}: {short!r}"))
    else:
        labels = facts["labels"]
        more = f" and {len(labels) - MAX_LABELS} more" if len(labels) > MAX_LABELS else ""
        rows.append(("labels", ", ".join(labels[:MAX_LABELS]) + more))
        rows.append(("scores", facts["score_function"]))
        if facts["template"] and facts["template"]["instruction"]:
            rows.append(("instruction", repr(facts["template"]["instruction"])))
    rows.append(("adapters", ", ".join(facts["adapters"])))
    return [(title, value) for title, value in rows if value]
