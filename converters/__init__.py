"""Converts a Hugging Face directory to a checkpoint, without network and without model code."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from converters import chains
from converters.family import CONVERTERS
from converters.features import merged
from converters.features.merged import base_of
from converters.outline import Options, Outline, Reader
from converters.steps import ConversionProgress, contents, show_progress
from converters.vision import dual, jina_clip, pages
from jaxembed.checkpoints import checkpoint
from jaxembed.checkpoints.source import adapter_folders
from jaxembed.data.spec import ModelSpec
from jaxembed.errors import INTERRUPTS, CheckpointError, JaxembedError

__all__ = [
    "CONVERTERS",
    "Outline",
    "base_of",
    "convert",
    "folders_read",
    "outline",
    "outline_routes",
    "weight_files",
    "weight_folders",
]

# the first that recognises a folder reads it
READERS = (
    dual.OPEN_CLIP_READER,
    jina_clip.READER,
    dual.READER,
    pages.READER,
    chains.READER,
)


def convert(
    source: Path,
    out: Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    dense_path: str | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    splade: bool = False,
    cutoff_layer: int | None = None,
    base: Path | None = None,
    progress: ConversionProgress = show_progress,
) -> ModelSpec:
    """Convert the model in the directory `source` to a checkpoint at `out`, and return the spec of
    its main route.

    `name` and `revision` are stored in the checkpoint as its source. `dense_path` is the folder of
    a Dense module that replaces the one in modules.json. `adapters` are folders of low-rank
    adapters by the names that they get. With `splade` a masked language model without modules.json
    becomes a sparse encoder. `cutoff_layer` is the last layer to run, of a model with a head after
    each of several layers; None: all layers. If `source` holds only an adapter of PEFT, `base` is
    the folder of the model into whose weights it is merged. `progress` gets the steps and yields
    them, to show progress. Raises UnsupportedModel for a model that jaxembed cannot run,
    ConversionError for tensors that do not fit, and CheckpointError for other problems. If it
    raises, nothing is written.
    """
    checkpoint.refuse_occupied(out)
    folders = adapter_folders(adapters)
    options = Options(name or str(source), revision, dense_path, folders, splade, cutoff_layer)
    with _whole(source, base, options) as folder:
        routes, default = _outlines(folder, options, source if base else None)
        if routes.keys() == {""}:  # the one route of a model without a Router
            return checkpoint.save(out, *contents(routes[""], progress))
        parts = {route: contents(model, progress) for route, model in routes.items()}
        return checkpoint.save_routes(out, parts, default).main


def outline_routes(
    source: Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    dense_path: str | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    splade: bool = False,
    cutoff_layer: int | None = None,
    base: Path | None = None,
) -> tuple[dict[str, Outline], str | None]:
    """Describe the checkpoint that `convert` would write, without reading weights. Return the
    outline of each route, and the name of the default route or None, as in `Routes`.

    `source` needs no weights, unless it holds static embeddings, whose shape no config has. The
    folders of adapters need their weights. The arguments and errors are those of `convert`, but
    problems of weights that are not read raise nothing.
    """
    folders = adapter_folders(adapters)
    options = Options(name or str(source), revision, dense_path, folders, splade, cutoff_layer)
    with _whole(source, base, options) as folder:
        return _outlines(folder, options, source if base else None)


def _whole(source: Path, base: Path | None, options: Options) -> AbstractContextManager[Path]:
    """Return a context with the folder that holds all files of a model."""
    return nullcontext(source) if base is None else merged.joined(options.name, source, base)


def _outlines(
    source: Path, options: Options, adapter: Path | None
) -> tuple[dict[str, Outline], str | None]:
    """Describe the model in `source`, into which the `adapter` is merged, as `outline_routes`."""
    try:
        if not source.is_dir():
            raise CheckpointError(f"{source} is not a directory")
        routes, default = _reader_of(source).outlines(source, options)
    except (*INTERRUPTS, JaxembedError, MemoryError):
        raise
    except BaseException as error:  # BaseException, because a panic of a library is one
        raise CheckpointError(
            f"{source} is damaged, or has an unexpected form: {type(error).__name__}: {error}"
        ) from error
    return {name: replace(model, merged=adapter) for name, model in routes.items()}, default


def outline(source: Path, **options: Any) -> Outline:
    """Describe a model that has one route. `options` are keyword arguments of `outline_routes`."""
    (model,) = outline_routes(source, **options)[0].values()
    return model


def weight_folders(source: Path, dense_path: str | None = None) -> list[str]:
    """Return the folders within `source` that hold weights. Reads only JSON files."""
    return _reader_of(source).weight_folders(source, dense_path)


def weight_files(source: Path) -> tuple[str, ...]:
    """Return the patterns of weight files of a model. Files of each are needed if there are none of
    those before. Reads only JSON files."""
    return _reader_of(source).weight_files


def folders_read(source: Path) -> list[str]:
    """Return the folders whose weights `outline_routes` reads: those of static models. Reads only
    JSON files."""
    return _reader_of(source).folders_read(source)


def _reader_of(source: Path) -> Reader:
    return next(reader for reader in READERS if reader.recognises(source))
