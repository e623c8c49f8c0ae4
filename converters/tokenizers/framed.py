"""Makes tokenizers that put a fixed text around each text, such as the end of a chat template."""

import re
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from converters.tokenizers.tokenizer import read_tokenizer, special_token
from jaxembed.errors import CheckpointError

SPECIAL = re.compile(r"<\|\w+\|>")  # names of special tokens
SAMPLES = ("a", "How much, in 2024?", "Größe\tund  Gewicht")  # texts to try a template on


class FramedTokenizer:
    """A model's tokenizer, which gives the ids of the texts around queries and pages."""

    def __init__(self, folder: Path, vocab_size: int):
        stored = read_tokenizer(folder, lowercase=False, vocab_size=vocab_size)
        self._folder, self._tokenizer = folder, Tokenizer.from_str(stored.decode())

    def special(self, key: str) -> str:
        """Return the special token that tokenizer_config.json names under `key`. Raises
        CheckpointError if it is missing or not in the vocabulary."""
        token = special_token(self._folder, key)
        if token is None or self._tokenizer.token_to_id(token) is None:
            raise CheckpointError(
                f"tokenizer_config.json in {self._folder} names no {key} of the vocabulary"
            )
        return token

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens are written out. Raises CheckpointError
        if the vocabulary lacks one of the form `<|name|>`."""
        for name in SPECIAL.findall(text):
            if self._tokenizer.token_to_id(name) is None:
                raise CheckpointError(f"the tokenizer in {self._folder} has no token {name}")
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def own_frame(self) -> tuple[str, str]:
        """Return the special tokens that the tokenizer itself puts before and after a text."""
        tokens = self._tokenizer.encode(SAMPLES[0]).tokens
        inner = self._tokenizer.encode(SAMPLES[0], add_special_tokens=False).tokens
        at = tokens.index(inner[0])
        return "".join(tokens[:at]), "".join(tokens[at + len(inner) :])

    def framed(self, before: str, after: str, prompt: str) -> bytes:
        """Return a tokenizer.json that puts `before` and `after` around each text. Raises
        CheckpointError if a token spans a text and what is around it, tried with `prompt` and
        each of SAMPLES as the text."""
        for sample in SAMPLES:
            text = prompt + sample
            if self.ids(before + text + after) != [
                token_id for part in (before, text, after) for token_id in self.ids(part)
            ]:
                raise CheckpointError(
                    f"the tokenizer in {self._folder} has tokens that span a text and the text "
                    "around it"
                )
        framed = Tokenizer.from_str(self._tokenizer.to_str())
        framed.post_processor = TemplateProcessing(  # pyright: ignore
            single=[*(["before"] if before else []), "$A", *(["after"] if after else [])],
            special_tokens=[
                {"id": name, "ids": self.ids(part), "tokens": [name] * len(self.ids(part))}
                for name, part in (("before", before), ("after", after))
                if part
            ],
        )
        return framed.to_str().encode()
