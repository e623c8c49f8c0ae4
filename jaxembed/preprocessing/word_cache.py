"""Keeps the token ids of words, because to look up the words of a short text takes less time than
to tokenize it."""

import re
from collections.abc import Callable, Iterable

import tokenizers

ASCII_WORD = r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]"  # a word, or a punctuation mark
MAX_WORDS = 2**14  # 5 MB, at worst 12; then the cache begins again
MAX_CHARACTERS = 16  # of a word that is kept

_words_of = re.compile(ASCII_WORD).findall


class WordCache:
    """The token ids of words of plain ASCII, for a tokenizer that divides such texts into the words
    of ASCII_WORD, and tokenizes each by itself. Threads may share it."""

    def __init__(self, added: Iterable[str], *, lowercases: bool):
        """`added` are the added tokens, which are no words. `lowercases` says whether the tokenizer
        makes letters small first, and does nothing else with them."""
        self._lowercases = lowercases
        self._ids: dict[str, list[int]] = {}
        # a text may spell an added token only if it has its first character
        firsts = {content[0] for content in added if content}
        self._begins = firsts | {first.swapcase() for first in firsts}

    def encode(self, text: str, tokenize: Callable[[str], tokenizers.Encoding]) -> list[int] | None:
        """Return the token ids of a text of plain ASCII, without special tokens; None if it may
        spell an added token. `tokenize` does that without the cache, and may raise errors."""
        if not self._begins.isdisjoint(text):
            return None
        words = _words_of(text.lower() if self._lowercases else text)
        known = self._ids
        try:
            return [token_id for word in words for token_id in known[word]]
        except KeyError:
            new = [word for word in dict.fromkeys(words) if word not in known]
        encoding = tokenize(" ".join(new))
        new_ids: dict[str, list[int]] = {word: [] for word in new}
        for index, token_id in zip(encoding.word_ids, encoding.ids, strict=True):
            if index is not None:
                new_ids[new[index]].append(token_id)
        self._keep({word: ids for word, ids in new_ids.items() if len(word) <= MAX_CHARACTERS})
        # `known` stays as it was, but for new words, while other threads change the cache
        by_word = (new_ids[word] if word in new_ids else known[word] for word in words)
        return [token_id for ids in by_word for token_id in ids]

    def _keep(self, ids: dict[str, list[int]]) -> None:
        if len(self._ids) + len(ids) > MAX_WORDS:
            self._ids = ids
        else:
            self._ids.update(ids)
