"""Which outputs a body asks for, and their form in JSON. Knows no route."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from jaxembed.data.outputs import REPRESENTATIONS, OutputName
from jaxembed.runtime.options import Embeddings

DENSE: frozenset[OutputName] = frozenset({"dense"})
NO_VECTOR = np.zeros(0, np.float32)

TermNames = Callable[[Sequence[int]], list[str]]


class SparseEmbedding(msgspec.Struct, omit_defaults=True):
    """The weights of a text's terms by their numbers in the vocabulary, which ascend; all others
    are 0. `tokens` are the terms themselves, where asked for."""

    indices: list[int]
    values: list[float]
    tokens: list[str] | msgspec.UnsetType = msgspec.UNSET


class OutputsRequest(Protocol):
    """The fields of a body that name outputs."""

    outputs: list[str] | None
    return_multivector: bool | None


def wanted_outputs(body: OutputsRequest) -> Collection[OutputName]:
    """The outputs that a body names, by which a model is chosen that is not named; without any the
    dense one."""
    if not body.outputs and not body.return_multivector:
        return DENSE
    named = {*(body.outputs or ()), *(("multi_vector",) if body.return_multivector else ())}
    return [name for name in REPRESENTATIONS if name in named] or DENSE


def width_of(answer: Embeddings) -> int:
    """About how many numbers the outputs of one input have."""
    count, width = max(len(answer.num_tokens), 1), 0
    if "dense" in answer.values:
        width += answer.values["dense"].shape[1]
    if "sparse" in answer.values:
        width += 2 * sum(map(len, answer.sparse.values)) // count
    if "multi_vector" in answer.values:
        width += answer.multi_vector.values.size // count
    return width


def fields_of(
    answer: Embeddings,
    number: int,
    encoded: Callable[[np.ndarray], np.ndarray | str],
    names: TermNames | None,
) -> dict[str, Any]:
    """The fields of one input's outputs in an answer in OpenAI's form. Its clients want an
    `embedding`, which is null where it was not asked for, or base64 of no bytes, because the client
    for Node decodes it. `encoded` makes numbers or base64 of vectors; `names` gives terms, and the
    token of each of several vectors, if they are asked for."""
    nothing = encoded(NO_VECTOR)
    fields: dict[str, Any] = {"embedding": nothing if isinstance(nothing, str) else None}
    if "dense" in answer.values:
        fields["embedding"] = encoded(answer.values["dense"][number])
    if "sparse" in answer.values:
        fields["sparse_embedding"] = sparse_fields(answer, number, names)
    if "multi_vector" in answer.values:
        vectors = answer.multi_vector[number]
        fields["embeddings"] = encoded(vectors)
        if isinstance(fields["embeddings"], str):
            fields["shape"] = vectors.shape
        if names is not None and answer.vector_ids is not None:
            part = slice(*answer.multi_vector.offsets[number : number + 2])
            fields["tokens"] = names(answer.vector_ids[part].tolist())
    return fields


def sparse_fields(answer: Embeddings, number: int, names: TermNames | None) -> dict[str, Any]:
    """The fields of a SparseEmbedding; `names` gives the terms, if they are asked for."""
    indices, values = answer.sparse.indices[number], answer.sparse.values[number]
    fields: dict[str, Any] = {"indices": indices, "values": values}
    if names is not None:
        fields["tokens"] = names(indices.tolist())
    return fields
