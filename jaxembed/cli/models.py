"""`jaxembed models`: searches the table of published models that jaxembed serves."""

import click

from jaxembed.cli.options import Command, echo_json
from jaxembed.errors import ConfigError, counted
from jaxembed.tools.known_models import VERIFIED, KnownModel, KnownModels, known_models

HEAD = ("model", "parameters", "dimensions", "tokens", "languages", "licence")
MAX_LANGUAGES = 2  # maximum languages that a line names; for more it gives the number


@click.command("models", cls=Command, example="jaxembed models german reranker")
@click.argument("words", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print all facts and their sources as JSON.")
def models_command(words: tuple[str, ...], as_json: bool) -> None:
    """List published models that jaxembed serves, those to which all WORDS apply.

    WORDS are parts of a name, a language or its code, `embedder`, `reranker`, `sparse`, `colbert`,
    `static`, `images`, `pages`, an architecture or a licence. A single match is shown in full. No
    model is downloaded. Other models of the same architectures are served too.
    """
    table = known_models()
    found = table.search(words)
    if not found:
        raise ConfigError(
            f"no model in the table matches {' '.join(words)!r}; use fewer words, or "
            "`jaxembed info MODEL` for a model that is not in the table"
        )
    if as_json:
        echo_json(found)
    elif len(found) == 1:
        click.echo(_described(found[0], table))
    else:
        click.echo("\n".join(_lines(found, table)))


def _lines(models: list[KnownModel], table: KnownModels) -> list[str]:
    """Return the lines of a plain-text table, with a heading for each kind of model."""
    rows = {}
    for model in models:
        languages = [table.languages[code] for code in model.languages]
        rows[model.name] = (
            model.name,
            size(model.parameters),
            str(model.dimensions or ""),
            str(model.max_tokens or ""),
            ", ".join(languages)
            if len(languages) <= MAX_LANGUAGES
            else counted(len(languages), "language"),
            model.licence or "",
        )
    widths = [max(map(len, column)) for column in zip(HEAD, *rows.values(), strict=True)]
    lines = [_aligned(HEAD, widths)]
    for kind in dict.fromkeys(model.kind for model in models):
        lines.append(f"{kind}:")
        lines += [_aligned(rows[item.name], widths) for item in models if item.kind == kind]
    return lines


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    """Join cells, padded to these widths in characters."""
    return "  ".join(map(str.ljust, cells, widths)).rstrip()


def _described(model: KnownModel, table: KnownModels) -> str:
    """Return the facts of a model as text, each on a line with its source."""
    source_of = {fact: source for source, facts in model.sources.items() for fact in facts}
    values = {
        "type": model.type,
        "task": model.task,
        "outputs": ", ".join(model.outputs),
        "parameters": size(model.parameters),
        "dimensions": str(model.dimensions or ""),
        "max_tokens": str(model.max_tokens or ""),
        "languages": ", ".join(table.languages[code] for code in model.languages),
        "prompts": ", ".join(f"{role} {text!r}" for role, text in model.prompts.items()),
        "licence": model.licence or "",
    }
    lines = [
        f"  {fact:<11} {value}  [{source_of[fact]}]" if value else f"  {fact:<11} unknown"
        for fact, value in values.items()
        if value or fact != "prompts"  # a model without prompts has no line for them
    ]
    lines.append(f"  verified    {VERIFIED[model.verified]}")
    if model.note:
        lines.append(f"  note        {model.note}")
    lines += [f"  [{source}] {table.sources[source]}" for source in model.sources]
    return "\n".join([model.name, *lines])


def size(parameters: int | None) -> str:
    """Format a number of parameters for people: `22.7M`, `7.1B`; an empty string for None."""
    if parameters is None:
        return ""
    billions = parameters >= 1e9
    return f"{parameters / (1e9 if billions else 1e6):.1f}{'B' if billions else 'M'}"
