"""`jaxembed key`: makes API keys for the file of `serve --api-key-file`."""

import json
import secrets
import tomllib
from contextlib import suppress
from typing import Any

import click

from jaxembed.cli.options import OWN, Group, section

KEY_BYTES = 32  # 256 random bits
KEY_PREFIX = "jx-"  # by which people and programs that search for secrets recognise a key

KEY_OPTIONS = section(
    OWN,
    click.option(
        "--models",
        multiple=True,
        help="Model that the key may use (default: all). Repeat for several.",
    ),
    click.option(
        "--routes",
        multiple=True,
        help="Path that the key may use, such as /v1/embeddings or /v1/* (default: all). Repeat "
        "for several.",
    ),
    click.option(
        "--requests-per-minute",
        type=int,
        help="Maximum requests per minute with the key (default: no limit).",
    ),
    click.option(
        "--tokens-per-minute",
        type=int,
        help="Maximum tokens per minute with the key (default: no limit).",
    ),
    click.option(
        "--max-inputs-waiting",
        type=int,
        help="Maximum inputs of the key that are admitted and not yet answered (default: no "
        "limit).",
    ),
    click.option(
        "--expires",
        help="Last day of the key, such as 2027-01-31, or its last moment, such as "
        "2027-01-31T12:00:00Z (default: never).",
    ),
)


@click.group("key", cls=Group)
def key_command() -> None:
    """Make API keys for `jaxembed serve --api-key-file`."""


@key_command.command("new", example="jaxembed key new search-team --models my-model >> keys.toml")
@click.argument("name")
@KEY_OPTIONS
def new_key(name: str, **fields: Any) -> None:
    """Make an API key and its entry for the key file.

    The entry, which holds the key's digest, goes to standard output, so that it can be appended to
    the key file. The key itself goes to standard error. It is shown this once and stored nowhere.
    """
    from jaxembed.server.auth.keyring import digest_of, parse_keys

    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    lines = ["[[key]]"]
    given = {field: value for field, value in fields.items() if value not in (None, ())}
    entry = {"name": name, "sha256": digest_of(key.encode()).hex(), **given}
    for field, value in entry.items():
        shown = json.dumps(value, ensure_ascii=False)
        if field == "expires":  # a TOML date has no quotes; `parse_keys` refuses other values
            with suppress(tomllib.TOMLDecodeError):
                tomllib.loads(f"value = {value}")
                shown = value
        lines.append(f"{field} = {shown}")
    table = "\n".join([*lines, "", ""])
    parse_keys(table, file="the key", taken={})  # refuses what a server would refuse
    click.echo(table, nl=False)
    click.echo(f"the key of {name}, which is shown only once: {key}", err=True)
