"""`jaxembed cache`: copies compiled programs between machines."""

from pathlib import Path

import click

from jaxembed.cli.options import CACHE_DIR, Group
from jaxembed.errors import ConfigError, counted


@click.group("cache", cls=Group)
def cache_command() -> None:
    """Copy compiled programs to machines of the same kind, which then start faster."""


@cache_command.command("pack", example="jaxembed cache pack h100.tar")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@CACHE_DIR
def pack_cache(file: Path, cache_dir: Path) -> None:
    """Write the compiled programs and measurements of this machine to FILE.

    Standard output gets the SHA-256 of FILE, which `jaxembed cache unpack` requires.
    """
    from jaxembed.tools.cache_pack import pack

    try:
        packed = pack(cache_dir, file)
    except OSError as error:
        raise ConfigError(f"cannot pack {cache_dir} into {file}: {error.strerror}") from error
    click.echo(f"{counted(packed.files, 'file')} packed into {file}", err=True)
    click.echo(packed.sha256)


@cache_command.command("unpack", example="jaxembed cache unpack h100.tar --sha256 DIGEST")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--sha256",
    required=True,
    help="Digest that `jaxembed cache pack` has shown. Programs are code: get it from a source "
    "that you trust.",
)
@CACHE_DIR
def unpack_cache(file: Path, sha256: str, cache_dir: Path) -> None:
    """Copy the programs and measurements of FILE to the cache directory of this machine.

    Files that exist there are kept. Only machines with the same kind of device, the same versions
    and, for a CPU, the same CPU use them.
    """
    from jaxembed.tools.cache_pack import unpack

    try:
        count = unpack(file, cache_dir, sha256)
    except OSError as error:
        raise ConfigError(f"cannot unpack {file} into {cache_dir}: {error.strerror}") from error
    click.echo(f"{counted(count, 'new file')} in {cache_dir}", err=True)
