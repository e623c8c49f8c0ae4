"""What a job does, as JSON beside its results: a job goes on only as what it was begun as."""

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from jaxembed.bulk.destination import Destination
from jaxembed.bulk.parts import finished_parts
from jaxembed.bulk.sources import InputFile
from jaxembed.errors import ConfigError
from jaxembed.json_file import shown

JOB = "_job.json"
FORMAT = 1
MOST_DIFFERENCES = 10  # in a message


class BulkJob(msgspec.Struct, frozen=True):
    """Everything that the rows of the parts depend on."""

    inputs: list[InputFile]
    part_rows: int
    columns: dict[str, str]  # those kept, each with its Arrow type
    id_column: str | None
    computation: dict[str, Any]  # as a Computation describes itself
    text_columns: list[str]  # or the column of images
    format: int = FORMAT
    pdf_dpi: int | msgspec.UnsetType = msgspec.UNSET  # of image files with PDF files among them

    @property
    def digest(self) -> str:
        """SHA-256 of the job, by which its parts are known."""
        return _digest(self)

    @property
    def of_texts(self) -> str:
        """SHA-256 of what the result of a text depends on, whichever job it is of."""
        return _digest(self.computation)


def refuse_others(folder: Destination) -> None:
    """Raise ConfigError if a folder has files, and none of a job."""
    names = folder.names()
    if names and JOB not in names:
        raise ConfigError(
            f"--output {folder}: this folder has files and no {JOB}: it is of no job to go on "
            f"with. Choose a new one. Found: {', '.join(names[:3])}"
        )


def begin(job: BulkJob, folder: Destination) -> None:
    """Write the job into its folder, unless it is there; one that has no part yet is replaced.

    Raises ConfigError if another job is there, which says in what it differs.
    """
    if JOB in folder.names():
        differences = list(_differences(_builtins(read_job(folder)), _builtins(job)))
        if not differences:
            return
        if finished_parts(folder):
            more = len(differences) - MOST_DIFFERENCES
            lines = differences[:MOST_DIFFERENCES] + [f"and {more} more"] * (more > 0)
            raise ConfigError(
                f"--output {folder}: a job was begun there with another input or other options. "
                f"Go on with those, or choose another folder:\n  " + "\n  ".join(lines)
            )
    try:
        content = msgspec.json.format(msgspec.json.encode(job, order="sorted"), indent=1)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the name of an input is not UTF-8: {error.object!r}; rename it"
        ) from error
    with folder.writing(JOB) as path:
        path.write_bytes(content)


def read_job(folder: Destination) -> BulkJob:
    """The job of a folder. Raises ConfigError if there is none that can be read."""
    try:
        with folder.opened(JOB) as file:
            return msgspec.json.decode(file.read(), type=BulkJob)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{folder}: {JOB} is not that of a job: {error}") from error


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def _builtins(job: BulkJob) -> dict[str, Any]:
    described = msgspec.json.decode(msgspec.json.encode(job))
    return described | {"inputs": {one["name"]: one for one in described["inputs"]}}


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """A line for each value that differs, by where it is."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            place = f"{path}.{name}" if path else str(name)
            if name not in before:
                yield f"{place}: not there before, now {shown(now[name])}"
            elif name not in now:
                yield f"{place}: {shown(before[name])} before, not there now"
            else:
                yield from _differences(before[name], now[name], place)
    elif before != now:
        yield f"{path}: {shown(before)} before, now {shown(now)}"
