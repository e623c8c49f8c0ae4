"""Keeps the token ids of words, because a lookup takes a fifth of the time that a tokenizer needs
for a short text."""

import re
from collections.abc import Iterable

import tokenizers

ASCII_WORD = r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]"  # a word, or a punctuation mark
MAX_WORDS = 2**14  # 5 MB; then the cache begins again
MAX_CHARACTERS = 32  # of a word that is kept

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

    def split(self, text: str) -> list[str] | None:
        """Return the words of a text of plain ASCII; None if it may spell an added token."""
        if not self._begins.isdisjoint(text):
            return None
        return _words_of(text.lower() if self._lowercases else text)

    def ids(self, words: list[str]) -> list[int] | None:
        """Return the token ids of words; None if a word is not in the cache."""
        ids_of = self._ids
        try:
            return [token_id for word in words for token_id in ids_of[word]]
        except KeyError:
            return None

    def learn(self, words: list[str], encoding: tokenizers.Encoding) -> None:
        """Keep the token ids of the words of a text. `encoding` has no special tokens."""
        by_word: list[list[int]] = [[] for _ in words]
        for word, token_id in zip(encoding.word_ids, encoding.ids, strict=True):
            if word is not None:
                by_word[word].append(token_id)
        if len(self._ids) + len(words) > MAX_WORDS:
            self._ids = {}
        kept = zip(words, by_word, strict=True)
        self._ids |= {word: ids for word, ids in kept if len(word) <= MAX_CHARACTERS}
