"""Reads what a body says of chunks (late chunking): its texts, each with the places of its chunks.
Knows no route and no answer."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxembed.data.inputs import ChunkedText, ChunkSize, OffsetUnit, Text, Tokens
from jaxembed.errors import InvalidInput
from jaxembed.preprocessing.late import join_texts
from jaxembed.server.meter import RequestSize
from jaxembed.server.pipeline.body import RequestInputs, check_batch
from jaxembed.server.pipeline.vectors import FormattedRequest

ChunkLists = list[list[int | list[int]]]  # of one text, or lists of such

WINDOWS = "x-late-windows"  # response header: the number of windows that all texts were run in


class ChunksRequest(FormattedRequest, kw_only=True):
    """The base of bodies whose texts may have chunks with vectors of their own.

    `late_chunking` takes the inputs for the chunks of one text, as Jina. `chunks` has the places of
    each text's chunks, in the `offset_unit`; `chunk_size` divides each text by its tokens.
    """

    late_chunking: bool | None = None
    chunks: ChunkLists | None = None
    chunk_size: int | None = None
    chunk_overlap: int | None = None
    offset_unit: OffsetUnit | None = None


@dataclass(frozen=True)
class RequestChunks(RequestSize):
    """The texts of one request, in order. `chunk_place` gives the path of a chunk in the body, from
    the numbers of its text and of the chunk in it."""

    items: list[ChunkedText]
    chunk_place: Callable[[int, int], str]


def asks_for_chunks(body: ChunksRequest) -> bool:
    """Whether a body asks for vectors of chunks. Raises InvalidInput for fields about chunks that
    go with none of those that ask for them, and for several of these."""
    asked = ["late_chunking"] if body.late_chunking else []
    asked += ["chunks"] if body.chunks else []
    asked += ["chunk_size"] if body.chunk_size is not None else []
    if len(asked) > 1:
        raise InvalidInput(
            f"`{asked[0]}` and `{asked[1]}` both say what the chunks are; send one of them",
            field=asked[1],
        )
    if body.chunk_overlap and "chunk_size" not in asked:
        raise InvalidInput("`chunk_overlap` goes with `chunk_size`", field="chunk_overlap")
    if body.offset_unit is not None and asked in ([], ["late_chunking"]):
        raise InvalidInput("`offset_unit` goes with `chunks` or `chunk_size`", field="offset_unit")
    return bool(asked)


def read_chunks(body: ChunksRequest, inputs: RequestInputs) -> RequestChunks:
    """The texts of a body and their chunks. Raises InvalidInput for token ids, for places that are
    not pairs, or not of as many texts as there are, and BatchTooLarge for too many chunks."""
    texts = _texts(inputs)
    unit = body.offset_unit or "code-points"
    if body.late_chunking:
        return RequestChunks(
            "single",
            inputs.characters,
            inputs.field,
            [join_texts(texts)],
            lambda _, chunk: inputs.place(chunk),
        )
    if body.chunk_size is not None:
        size = ChunkSize(body.chunk_size, body.chunk_overlap or 0)
        items = [ChunkedText(text, size, unit) for text in texts]
        return RequestChunks(
            inputs.method,
            inputs.characters,
            inputs.field,
            items,
            lambda text, _: inputs.place(text),
        )
    chunks = body.chunks or []
    is_flat = isinstance(next(iter(chunks[0]), None), int)  # the chunks of one text
    lists = [chunks] if is_flat else chunks

    def place_of(text: int, chunk: int) -> str:
        return f"chunks[{chunk}]" if is_flat else f"chunks[{text}][{chunk}]"

    if len(lists) != len(texts):
        raise InvalidInput(
            "`chunks` must hold a list of [start, end] for each text. "
            f"Wanted: {len(texts)} of them. Given: {len(lists)}",
            field="chunks",
        )
    if [] in lists:
        place = f"chunks[{lists.index([])}]"
        raise InvalidInput(
            f"`{place}` is empty; wanted one [start, end] or more for each text", field=place
        )
    check_batch(sum(map(len, lists)))
    items = [
        ChunkedText(text, [_range(one, place_of(i, k)) for k, one in enumerate(lists[i])], unit)
        for i, text in enumerate(texts)
    ]
    return RequestChunks(inputs.method, inputs.characters, inputs.field, items, place_of)


def _texts(inputs: RequestInputs) -> list[str]:
    texts = []
    for index, item in enumerate(inputs.items):
        if not isinstance(item, Text):
            kind = "token ids" if isinstance(item, Tokens) else "an image"
            raise InvalidInput(
                f"`{inputs.place(index)}` holds {kind}, and only texts have chunks",
                field=inputs.place(index),
            )
        texts.append(item.text)
    return texts


def _range(given: object, place: str) -> tuple[int, int]:
    """A chunk's start and end. Raises InvalidInput, which names its place in the body."""
    match given:
        case [int() as start, int() as end]:
            return start, end
    raise InvalidInput(f"`{place}` must be [start, end], two whole numbers", field=place)
