"""Which outputs a body asks for, and their form in JSON. Knows no route."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxembed.data.outputs import REPRESENTATIONS, OutputName
from jaxembed.data.spec import ModelSpec
from jaxembed.errors import InvalidInput
from jaxembed.runtime.options import Embeddings
from jaxembed.server.pipeline.body import check_listed

NO_VECTOR = np.zeros(0, np.float32)

TermNames = Callable[[Sequence[int]], list[str]]


class SparseEmbedding(msgspec.Struct, omit_defaults=True):
    """The weights of a text's terms by their numbers in the vocabulary, which ascend; all others
    are 0. `tokens` are the terms themselves, where asked for."""

    indices: list[int]
    values: list[float]
    tokens: list[str] | msgspec.UnsetType = msgspec.UNSET


def wanted_outputs(
    outputs: list[str] | None, return_multivector: bool | None
) -> Collection[OutputName]:
    """The outputs that the fields name, by which a model is chosen that is not named; without any
    the dense one."""
    named = {*(outputs or ()), *(("multi_vector",) if return_multivector else ())}
    return [name for name in REPRESENTATIONS if name in named] or ["dense"]


def asked_outputs(
    outputs: list[str] | None, return_multivector: bool | None, spec: ModelSpec
) -> frozenset[OutputName]:
    """The outputs that the fields ask for: without any the dense one, or of a model without it all
    that it has. Raises InvalidInput for unknown outputs, and for fields that contradict each
    other."""
    offered = spec.representations
    if outputs:
        check_listed("outputs", len(outputs))
        if unknown := [name for name in outputs if name not in offered]:
            raise InvalidInput(
                f"`outputs` must be some of {', '.join(offered)}, which the model gives. "
                f"Given: {', '.join(unknown)}",
                field="outputs",
            )
        asked: frozenset[OutputName] = frozenset(n for n in REPRESENTATIONS if n in outputs)
        if return_multivector and "multi_vector" not in asked:
            raise InvalidInput(
                "`return_multivector` of true contradicts `outputs` without multi_vector; send one "
                "of them",
                field="return_multivector",
            )
        return asked
    if return_multivector:
        if "multi_vector" not in offered:
            raise InvalidInput(
                "`return_multivector` of true is not supported by this model, which gives "
                f"{' and '.join(offered)}",
                field="return_multivector",
            )
        return frozenset({"multi_vector"})
    return frozenset({"dense"} if "dense" in offered else offered)


def width_of(answer: Embeddings) -> int:
    """About how many numbers the outputs of one input have."""
    count, width = max(len(answer.num_tokens), 1), 0
    if "dense" in answer.values:
        width += answer.dense.shape[1]
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
        fields["embedding"] = encoded(answer.dense[number])
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
