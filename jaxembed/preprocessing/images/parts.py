"""Joins the texts and images of an input into one sequence, in the template of the model."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from jaxembed.data.spec import ImageRules
from jaxembed.data.work import Encoding
from jaxembed.errors import EmptyInput, InputTooLong, WrongParts, counted
from jaxembed.preprocessing.pairs import NO_IDS, Frame
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions

POSITION_NUMBERS = 3  # of `mrope_positions`; they count the positions of images before a token
Ids = Sequence[int] | np.ndarray
WORD = np.dtype("<i4")  # the bytes of patches are moved to the device four at a time, as int32


class TextTokens(NamedTuple):
    """The tokens of neighbouring texts: their ids, int32 `[tokens]`; whether these are of the whole
    text; how many at the start are not truncated; the ids that end a truncated text; and whether it
    is truncated only after others."""

    ids: np.ndarray
    is_whole: bool = True
    head: int = 0
    end: np.ndarray = NO_IDS
    is_later: bool = False

    @property
    def room(self) -> int:
        """The number of tokens that may be truncated, which leaves one of the text."""
        return max(len(self.ids) - self.head - len(self.end) - 1, 0)

    def cut(self, count: int) -> np.ndarray:
        """Return the ids without the last `count` of those that may be truncated."""
        if not count:
            return self.ids
        return np.concatenate([self.ids[: len(self.ids) - len(self.end) - count], self.end])


Segment = TextTokens | Encoding  # a part of a sequence; an Encoding is an image


class PartsTokenizer:
    """Tokenizes inputs of texts and images, whose images are encoded already."""

    def __init__(self, texts: TextProcessor, rules: ImageRules):
        """`texts` tokenizes the texts of the model, whose images become tokens as `rules` say."""
        self._texts = texts
        self._words = words_of(rules)
        self._moved = 0 if rules.area is None else POSITION_NUMBERS
        self.limit = texts.limit  # maximum tokens of an input

    @cached_property
    def template_length(self) -> int:
        """The number of tokens that the template puts around an input."""
        if self._texts.template_frame is not None:
            return self._frame.length
        prompt = self._texts.prompt(None, None)
        around = TokenizationOptions(prompt, truncate=True, side="right")
        return len(self.encode([], around)[0].ids)

    def encode(
        self, parts: Sequence[str | Encoding], tokenization: TokenizationOptions
    ) -> tuple[Encoding, bool]:
        """Return the sequence of an input, and whether its texts were truncated. Raises EmptyInput,
        InputTooLong, InvalidInput or TokenizerError."""
        segments = self._segments((tokenization.prompt, ""), parts, tokenization)
        return self._joined(self._texts.ids_around, segments, tokenization)

    def query(
        self, parts: Sequence[str | Encoding], tokenization: TokenizationOptions
    ) -> list[Segment]:
        """Return the part of pairs that holds the query, for several calls of `pair`. Raises
        EmptyInput, InvalidInput or TokenizerError."""
        around = self._frame.around_first(tokenization.instruction)
        segments = self._segments(around, parts, tokenization)
        return [s if isinstance(s, Encoding) else s._replace(is_later=True) for s in segments]

    def pair(
        self,
        query: Sequence[Segment],
        document: Sequence[str | Encoding],
        tokenization: TokenizationOptions,
    ) -> tuple[Encoding, bool]:
        """Return the sequence of a pair, and whether texts were truncated, those of the document
        before those of the query. `query` is a result of the method of that name. Raises
        EmptyInput, InputTooLong, InvalidInput or TokenizerError."""
        frame = self._frame
        parts = document if any(document) else [*filter(None, [frame.empty])]
        second = self._segments(frame.around_second, parts, tokenization)
        earlier, later = frame.in_order(query, second)
        between = TextTokens(frame.between, end=frame.between)
        segments = [*earlier, between, *later]
        return self._joined((frame.before, frame.after), segments, tokenization)

    @property
    def _frame(self) -> Frame:
        assert self._texts.template_frame is not None
        return self._texts.template_frame

    def _segments(
        self,
        around: tuple[str, str],
        parts: Sequence[str | Encoding],
        tokenization: TokenizationOptions,
    ) -> list[Segment]:
        """Tokenize the texts of an input, with the two texts `around` them, between its images."""
        texts, images, follows_text = [around[0]], [], False
        for number, part in enumerate(parts):
            if not part:
                raise EmptyInput().at(None, part=number)
            if isinstance(part, Encoding):
                images.append(part)
                texts.append("")
            else:
                texts[-1] += "\n" * follows_text + part
            follows_text = isinstance(part, str)
        texts[-1] += around[1]
        *rows, (start, _), (end, _) = self._texts.rows([*texts, *around], tokenization)
        tokens = [TextTokens(self._texts.checked_text_ids(ids), whole) for ids, whole in rows]
        tokens[0] = tokens[0]._replace(head=len(start))
        last = tokens[-1]
        if not last.is_whole:  # what was not read ends with `around[1]`
            last = last._replace(ids=np.concatenate([last.ids, end]))
        tokens[-1] = last._replace(end=end)
        segments: list[Segment] = [tokens[0]]
        for image, text in zip(images, tokens[1:], strict=True):
            segments += [image, text]
        return segments

    def _joined(
        self,
        around: tuple[Ids, Ids],
        segments: Sequence[Segment],
        tokenization: TokenizationOptions,
    ) -> tuple[Encoding, bool]:
        """Join segments, with the ids `around` them. Returns the sequence, and whether texts were
        truncated."""
        length = sum(map(len, around)) + sum(len(segment.ids) for segment in segments)
        rows = self._truncated(segments, length - self.limit, tokenization)
        ids = np.concatenate([around[0], *rows, around[1]]).astype(np.int32)
        pixels, moved = np.zeros((len(ids), self._words), np.int32), np.zeros(self._moved, np.int32)
        starts = accumulate(map(len, rows), initial=len(around[0]))
        for segment, row, start in zip(segments, rows, starts, strict=False):
            place = pixels[start : start + len(row)]
            if isinstance(segment, Encoding):
                assert segment.pixels is not None
                place[:] = segment.pixels
            place[:, : self._moved] += moved
            if isinstance(segment, Encoding):  # positions go on from those of its last token
                moved = place[-1, : self._moved].copy()
        pixels[len(ids) - len(around[1]) :, : self._moved] = moved
        return Encoding(ids, pixels=pixels), length > self.limit

    def _truncated(
        self, segments: Sequence[Segment], excess: int, tokenization: TokenizationOptions
    ) -> list[np.ndarray]:
        """Return the ids of segments without `excess` tokens, which are cut from the ends of texts:
        the last text first, those of a query after all others. One token of each stays. Raises
        InputTooLong, and WrongParts if that is not enough."""
        rows = [segment.ids for segment in segments]
        if excess <= 0:
            return rows
        if not tokenization.truncate:
            is_exact = all(isinstance(s, Encoding) or s.is_whole for s in segments)
            raise InputTooLong(self.limit, self.limit + (excess if is_exact else 1), exact=is_exact)
        if tokenization.side == "right":
            texts = [(k, s) for k, s in enumerate(segments) if isinstance(s, TextTokens)]
            for number, text in sorted(reversed(texts), key=lambda pair: pair[1].is_later):
                count = min(text.room, max(excess, 0))
                rows[number] = text.cut(count)
                excess -= count
        if excess > 0:
            raise WrongParts(
                f"the input is {counted(excess, 'token')} over the limit of {self.limit}, and "
                "beside images only texts are truncated, at their ends; send fewer or smaller "
                "images, or less text"
            )
        return rows


def words_of(rules: ImageRules) -> int:
    """Return the number of words of a token's row of pixels."""
    return rules.place_numbers + rules.token_bytes // WORD.itemsize
