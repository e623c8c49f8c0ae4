"""Joins a query and its documents into one sequence, for a reranker that reads them together."""

from collections.abc import Iterator, Sequence
from itertools import chain
from math import ceil, inf
from typing import TYPE_CHECKING

import numpy as np

from jaxembed.data.spec import Listwise
from jaxembed.data.work import Encoding
from jaxembed.errors import EmptyInput, InputTooLong, InvalidInput
from jaxembed.preprocessing.job_threads import restart_if_small
from jaxembed.preprocessing.pairs import fill
from jaxembed.preprocessing.tokenizer import SMALL_TEXT, Tokenizer, cut_tokens

if TYPE_CHECKING:
    from jaxembed.preprocessing.text import TokenizationOptions

# Tokens of a sequence that are kept free: within the prompt, or decoded after a cut, a text may
# have a few tokens more than alone.
MARGIN = 16
DIGITS = 2  # tokens that the number of a document may need besides its first


class ListTokenizer:
    """Tokenizes a query with its documents in the prompt of a model. All threads share it.

    `limit` is the maximum number of tokens of a sequence.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Listwise, limit: int):
        self._tokenizer, self._prompt, self._limit = tokenizer, prompt, limit
        self._names = prompt.query_token, prompt.document_token
        ids = [tokenizer.file.token_to_id(name) for name in self._names]
        self._query_id, self._document_id = (np.array([token_id], np.int32) for token_id in ids)
        # tokens of a sequence besides texts and instruction: of one document, and of each more
        one, two = (self._join("", "", [""] * count).length for count in (1, 2))
        self._around, self._each = one + MARGIN, two - one + DIGITS
        # tokens that a sequence may need besides its documents: the query is in it twice
        self.reserved = self._around + 2 * prompt.query_length

    def encode(
        self, query: str, documents: Sequence[str], tokenization: "TokenizationOptions", slots: int
    ) -> tuple[list[Encoding], int]:
        """Tokenize a query with its documents, in blocks of documents that are read together.

        Returns a sequence for each block, and the number of truncated documents, which is all of
        them if the query was truncated. Each slot of a sequence is one token: one for each document
        of the block, in order, and a last one for the query. A sequence has at most `slots` slots.

        Texts are truncated and blocks end as in `rerank` of jina-reranker-v3's modeling.py, with
        the limit of a sequence as model_max_length; a document has at most the room beside query
        and instruction, and a block also ends before the sequence is over the limit. Raises
        EmptyInput for an empty query, InputTooLong, InvalidInput if the query and the instruction
        leave no room for a document, and TokenizerError. The index of an error is the document's.
        """
        if len(query) + sum(map(len, documents)) > SMALL_TEXT:
            restart_if_small()
        prompt, truncate = self._prompt, tokenization.truncate
        instruction = self._without_names(tokenization.instruction or "")
        instructed = fill(prompt.instructed, instruction=instruction) if instruction else ""
        if not self._without_names(query):
            raise EmptyInput("query")
        try:
            ((query, query_tokens, is_query_cut),) = self._shortened(
                [query], prompt.query_length, tokenization, truncate=truncate
            )
        except InvalidInput as error:
            raise error.at(None, "query") from error
        ((wrapped, _),) = self._tokenizer.rows([instructed], self._limit, "right")
        frame = self._around + 2 * query_tokens + len(wrapped)
        if frame >= self._limit:
            raise InvalidInput(
                "the query and the `instruction` leave no room for a document; the limit of the "
                f"prompt, which has the query twice, is {self._limit} tokens: shorten them",
                field="instruction",
            )
        longest = min(prompt.document_length, self._limit - frame)
        asked = tokenization.max_second_tokens or inf  # to this limit documents are always cut
        max_tokens = int(min(longest, asked))
        texts: list[tuple[str, int, bool]] = []
        try:
            texts.extend(
                self._shortened(
                    documents, max_tokens, tokenization, truncate=truncate or asked <= longest
                )
            )
        except InvalidInput as error:
            raise error.at(len(texts)) from error
        most = min(prompt.block_documents, slots - 1)
        blocks: list[list[str]] = [[]]
        size, left = frame, self._limit - 2 * query_tokens  # `left` as in modeling.py
        for text, tokens, _ in texts:
            block, size = blocks[-1], size + self._each + tokens
            if block and (len(block) == most or left <= max_tokens or size > self._limit):
                blocks.append([])
                size, left = frame + self._each + tokens, self._limit - 2 * query_tokens
            blocks[-1].append(text)
            left -= tokens
        sequences = [self._sequences(query, instructed, block) for block in blocks]
        cut = len(texts) if is_query_cut else sum(is_cut for _, _, is_cut in texts)
        return list(chain.from_iterable(sequences)), cut

    def estimate(
        self, characters: Sequence[int], tokenization: "TokenizationOptions"
    ) -> tuple[int, int]:
        """Estimate the numbers of sequences and of tokens of a query and its documents, from their
        numbers of characters. A text counts as a token for each 4 characters plus 2 tokens."""
        prompt = self._prompt
        query, *documents = ((count + 8) // 4 for count in characters)
        frame = self._around + 2 * min(query, prompt.query_length)
        frame += len(tokenization.instruction or "") // 4
        tokens = sum(self._each + min(document, prompt.document_length) for document in documents)
        room = max(self._limit - frame, 1)
        blocks = max(ceil(tokens / room), ceil(len(documents) / prompt.block_documents))
        return blocks, blocks * frame + tokens

    def _without_names(self, text: str) -> str:
        """Return a text without the names of the prompt's two tokens, which the text may spell."""
        for put in ("", " "):  # a space joins no parts of a name that are left
            for name in self._names:
                text = text.replace(name, put)
        return text

    def _shortened(
        self,
        texts: Sequence[str],
        max_tokens: int,
        tokenization: "TokenizationOptions",
        *,
        truncate: bool,
    ) -> Iterator[tuple[str, int, bool]]:
        """Yield for each text what is left of it without the names of tokens and within
        `max_tokens` tokens, the number of its tokens, and whether it was cut. Raises InputTooLong
        for a text that must be cut if `truncate` is False, InvalidInput and TokenizerError."""
        side = tokenization.side
        cleaned = list(map(self._without_names, texts))
        rows = self._tokenizer.rows(cleaned, max_tokens, side)
        for text, (row, whole) in zip(cleaned, rows, strict=True):
            if len(row) <= max_tokens:
                yield text, len(row), False
            elif not truncate:
                raise InputTooLong(max_tokens, len(row), exact=whole)
            else:
                kept = cut_tokens(row, max_tokens, side).tolist()
                decoded = self._tokenizer.file.decode(kept, skip_special_tokens=False)
                yield decoded, max_tokens, True

    def _sequences(self, query: str, instructed: str, block: Sequence[str]) -> list[Encoding]:
        """Return the sequence of a block, or those of its halves if it is over the limit."""
        sequence = self._join(query, instructed, block)
        if sequence.length <= self._limit:
            return [sequence]
        if len(block) == 1:
            raise InputTooLong(self._limit, sequence.length)
        half = len(block) // 2
        return [
            *self._sequences(query, instructed, block[:half]),
            *self._sequences(query, instructed, block[half:]),
        ]

    def _join(self, query: str, instructed: str, block: Sequence[str]) -> Encoding:
        """Return the sequence of a block.

        What is between two special tokens is tokenized as one text, so that the ids are those of
        the whole prompt."""
        prompt = self._prompt
        texts = [
            prompt.between + fill(prompt.document, index=str(index), document=document)
            for index, document in enumerate(block)
        ]
        head = fill(prompt.head, count=str(len(block)), query=query) + instructed
        texts[0] = head + texts[0].removeprefix(prompt.between)
        texts += [fill(prompt.query, query=query), prompt.tail]
        *rows, tail = (row for row, _ in self._tokenizer.rows(texts, self._limit, "right"))
        tokens = [*[self._document_id] * len(block), self._query_id]
        parts = [part for pair in zip(rows, tokens, strict=True) for part in pair]
        ends = np.cumsum([len(row) + 1 for row in rows]).tolist()
        return Encoding(np.concatenate([*parts, tail]), spans=tuple((end - 1, end) for end in ends))
