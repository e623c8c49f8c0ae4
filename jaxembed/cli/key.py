"""`jaxembed key`: makes API keys for the file of `serve --api-key-file`."""

import json
import secrets
import tomllib
from typing import Any

import click

from jaxembed.cli.options import together

KEY_BYTES = 32  # 256 random bits
KEY_PREFIX = "jx-"  # by which people and scanners of secrets know a key

KEY_OPTIONS = together(
    click.option(
        "--models", multiple=True, help="Name of a model that the key may use; repeat for several."
    ),
    click.option(
        "--routes",
        multiple=True,
        help="Path that the key may use, or its beginning and *; repeat for several.",
    ),
    click.option("--requests-per-minute", type=int, help="Requests that the key has a minute."),
    click.option("--tokens-per-minute", type=int, help="Tokens that the key has a minute."),
    click.option(
        "--max-inputs-waiting", type=int, help="Inputs of the key admitted and not yet answered."
    ),
    click.option("--expires", help="Last day of the key, or date and time at which it ends."),
)


@click.group("key")
def key_command() -> None:
    """Make API keys for the file of `serve --api-key-file`."""


@key_command.command("new")
@click.argument("name")
@KEY_OPTIONS
def new_key(name: str, **fields: Any) -> None:
    """Make a key NAME. Its table goes to standard output, to be appended to the key file, and the
    key itself to standard error: it is shown this once, and kept nowhere."""
    from jaxembed.server.key_file import digest_of, parse_keys

    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    table = _table({"name": name, "sha256": digest_of(key.encode()).hex(), **fields})
    parse_keys(table, "the key", {})  # refuses what a server would refuse
    click.echo(table, nl=False)
    click.echo(f"the key of {name}, shown only now: {key}", err=True)


def _table(fields: dict[str, Any]) -> str:
    """The table of a key in TOML. An `expires` is a date there, without quotes."""
    lines = ["[[key]]"]
    for field, value in fields.items():
        if value is None or value == ():
            continue
        is_date = field == "expires" and _is_toml(value)
        shown = value if is_date else json.dumps(value, ensure_ascii=False)
        lines.append(f"{field} = {shown}")
    return "\n".join([*lines, "", ""])


def _is_toml(value: str) -> bool:
    """Whether a value can stand without quotes. If not, the reader of keys says what it wanted."""
    try:
        return bool(tomllib.loads(f"value = {value}"))
    except tomllib.TOMLDecodeError:
        return False
