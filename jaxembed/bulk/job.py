"""What a job does, as JSON beside its results: a job goes on only as what it was begun as."""

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from jaxembed.bulk.destination import Destination
from jaxembed.bulk.parts import finished_parts
from jaxembed.bulk.sources import InputFile
from jaxembed.errors import ConfigError, JaxembedError
from jaxembed.platform.files import shown

JOB = "_job.json"
FORMAT = 1
MOST_DIFFERENCES = 10  # in a message
OPTIONS = {  # what sets a value of a job, by the beginning of its path; the first that fits counts
    "inputs": "INPUTS",
    "part_rows": "--part-rows",
    "columns": "--keep or --id-column",
    "id_column": "--id-column",
    "text_columns": "--text-column, --query-column, --second-column or --image-column",
    "pdf_dpi": "--pdf-dpi",
    "computation.task": "the command",
    "computation.of": "--image-column or INPUTS",
    "computation.outputs": "--outputs",
    "computation.raw_scores": "--raw-scores",
    "computation.ranges": "the calibration of the model",
    "computation.options.adapter": "--adapter-name",
    "computation.options.dimensions": "--dimensions",
    "computation.options.output_dtype": "--output-dtype",
    "computation.options.prompt_name": "--prompt-name",
    "computation.options.role": "--role",
    "computation.model.adapters": "--adapter",
    "computation.model.dtype": "--dtype",
    "computation.model.max_input_tokens": "--max-input-length",
    "computation.model.pooling": "--pooling",
    "computation.model.text.auto_truncate": "--auto-truncate",
    "computation.model.text.default_prompt_name": "--default-prompt-name",
    "computation.model.text.default_prompt": "--default-prompt",
    "computation.model": "--model or --revision",
    "format": "the version of jaxembed",
}


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
    """Write the job into its folder, unless it is there.

    Raises ConfigError if another job was begun there, even if no part of it is finished. The
    message names the options that differ, each with both values.
    """
    if JOB in folder.names():
        differences = list(_differences(_builtins(read_job(folder)), _builtins(job)))
        if not differences:
            return
        more = len(differences) - MOST_DIFFERENCES
        lines = differences[:MOST_DIFFERENCES] + [f"and {more} more"] * (more > 0)
        anew = (
            ""
            if finished_parts(folder)
            else (f", or remove {JOB} to begin anew: no part of that job is finished")
        )
        raise ConfigError(
            f"--output {folder}: a job was begun there with another input or other options. "
            f"Go on with those, or choose another folder{anew}:\n  " + "\n  ".join(lines)
        )
    try:
        content = msgspec.json.format(msgspec.json.encode(job, order="sorted"), indent=1)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the name of an input is not UTF-8: {error.object!r}; rename it"
        ) from error
    with folder.writing(JOB) as path:
        path.write_bytes(content)


def withdraw(folder: Destination) -> None:
    """Remove the job from its folder if no part of it is finished, so that a corrected command may
    begin there. Stores may forbid it; then the job stays."""
    if not finished_parts(folder):
        with suppress(JaxembedError, OSError):
            folder.remove(JOB)


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
    """A line for each value that differs, by its path and the option that sets it."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            place = f"{path}.{name}" if path else str(name)
            if name not in before:
                yield f"{_named(place)}: not there before, now {shown(now[name])}"
            elif name not in now:
                yield f"{_named(place)}: {shown(before[name])} before, not there now"
            else:
                yield from _differences(before[name], now[name], place)
    elif before != now:
        yield f"{_named(path)}: {shown(before)} before, now {shown(now)}"


def _named(path: str) -> str:
    """The option that sets the value at a path of a job, and the path; the path alone for a value
    that no option sets."""
    for beginning, option in OPTIONS.items():
        if path == beginning or path.startswith(f"{beginning}."):
            return f"{option} ({path})"
    return path
