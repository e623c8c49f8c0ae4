"""Measures the ranges of a model's vectors, in bounded memory."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from jaxembed.bulk.ahead import ahead, divided
from jaxembed.bulk.row_source import ROWS_A_CALL
from jaxembed.checkpoints.ranges import KeptRanges
from jaxembed.embedder import Embedder
from jaxembed.errors import ConfigError
from jaxembed.runtime.options import EncodeOptions
from jaxembed.runtime.requests import shape_vectors
from jaxembed.runtime.tasks import check_dimensions

FEWEST_TEXTS = 2  # that have a range; as in sentence-transformers
ENOUGH_TEXTS = 100  # for ranges that other texts keep to; fewer warn in sentence-transformers too


def measure_ranges(
    embedder: Embedder,
    texts: Iterator[str],
    dimensions: Sequence[int] = (),
    *,
    on_progress: Callable[[int], object] = lambda count: None,
    **options,
) -> list[KeptRanges]:
    """The ranges of the vectors of these texts: of whole ones, and of those cut to each of the
    `dimensions`; all are normalised after that.

    `options` are prompt_name and adapter, as of EncodeOptions. Raises ConfigError for fewer than
    two texts, and the errors of `texts` and of `Embedder.encode`.
    """
    asked = [EncodeOptions(**options, dimensions=width) for width in (None, *dimensions)]
    for one in asked:
        check_dimensions(embedder.spec.dim, one.dimensions)
    kinds = list(dict.fromkeys(embedder.model.tasks.kind(one) for one in asked))
    low = [np.full(kind.dimensions, np.inf, np.float32) for kind in kinds]
    high = [np.full(kind.dimensions, -np.inf, np.float32) for kind in kinds]
    count = 0
    encode = partial(embedder.encode, **options, normalize=False)
    for vectors in ahead(encode, divided(texts, ROWS_A_CALL)):
        for kind, lowest, highest in zip(kinds, low, high, strict=True):
            shaped = shape_vectors(vectors, dimensions=kind.dimensions, normalize=True)
            np.minimum(lowest, shaped.min(axis=0), out=lowest)
            np.maximum(highest, shaped.max(axis=0), out=highest)
        count += len(vectors)
        on_progress(len(vectors))
    if count < FEWEST_TEXTS:
        raise ConfigError(
            f"ranges need {FEWEST_TEXTS} texts, better {ENOUGH_TEXTS}. Given: {count}"
        )
    content_hash = embedder.model.routes[kinds[0].route].spec.content_hash
    return [
        KeptRanges(kind, content_hash, count, lowest.tolist(), highest.tolist())
        for kind, lowest, highest in zip(kinds, low, high, strict=True)
    ]
