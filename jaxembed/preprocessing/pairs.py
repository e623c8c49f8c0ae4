"""Joins two texts, such as a query and a document, into one sequence with special tokens."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import numpy as np
import tokenizers

from jaxembed.data.spec import ModelSpec, PairTemplate
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.preprocessing.tokenizer import Side, Tokenizer, cut_tokens

PLACEHOLDER = re.compile(r"\{(\w+)\}")
NO_IDS = np.zeros(0, np.int32)
Part = TypeVar("Part")


@dataclass(frozen=True)
class Frame:
    """What surrounds the two texts of a pair: token ids (int32) and, for some models, a template.

    `types` are the token types of the five parts of a pair: before, first text, between, second
    text, after. None means that all types are 0. A `template` is put around each text before the
    text is tokenized. `second_end` are the ids of what it puts after the second text.
    """

    before: np.ndarray
    between: np.ndarray
    after: np.ndarray
    types: tuple[int, ...] | None = None
    template: PairTemplate | None = None
    second_end: np.ndarray = field(default_factory=lambda: NO_IDS)

    @property
    def length(self) -> int:
        """The number of tokens of a pair besides the tokens of its texts."""
        return len(self.before) + len(self.between) + len(self.after)

    @property
    def reserved(self) -> int:
        """The number of tokens of a pair that are never truncated."""
        return self.length + len(self.second_end)

    @property
    def empty(self) -> str:
        """What stands for an empty text."""
        return "" if self.template is None else self.template.empty

    def around_first(self, instruction: str | None) -> tuple[str, str]:
        """Return the texts that the template puts before and after the first text of a pair, such
        as a query, with the `instruction` filled in; both are "" if there is no template. If
        `instruction` is None, the template's default instruction is used."""
        if self.template is None:
            return "", ""
        if instruction is None:
            instruction = self.template.instruction
        before, _, after = self.template.first.partition("{query}")
        return fill(before, instruction=instruction), fill(after, instruction=instruction)

    def first(self, text: str, instruction: str | None) -> str:
        """Return what to tokenize for the first text of a pair: the text in the template."""
        before, after = self.around_first(instruction)
        return f"{before}{text or self.empty}{after}"

    @property
    def around_second(self) -> tuple[str, str]:
        """The texts that the template puts before and after the second text of a pair, such as a
        document."""
        if self.template is None:
            return "", ""
        before, _, after = self.template.second.partition("{document}")
        return before, after

    def second(self, text: str) -> str:
        """Return what to tokenize for the second text of a pair: the text in the template."""
        before, after = self.around_second
        return f"{before}{text or self.empty}{after}"

    def cut_second(self, ids: np.ndarray, max_tokens: int, side: Side) -> np.ndarray:
        """Truncate the second text's token ids on `side`, so that at most `max_tokens` are left.
        Those of what the template puts after the text stay."""
        if side == "left" or len(ids) <= max_tokens:
            return cut_tokens(ids, max_tokens, side)
        end = self.second_end
        return np.concatenate([ids[: max(max_tokens - len(end), 0)], end])

    def in_order(self, first: Part, second: Part) -> tuple[Part, Part]:
        """Return the parts of a pair for the two texts in the order in which the model reads
        them."""
        is_reversed = self.template is not None and self.template.document_first
        return (second, first) if is_reversed else (first, second)

    def join(self, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Join the token ids of two texts, int32 `[length]`. Returns the ids of the pair and its
        token types, or the ids and None if all types are 0."""
        earlier, later = self.in_order(first, second)
        parts = (self.before, earlier, self.between, later, self.after)
        ids = np.concatenate(parts)
        if self.types is None:
            return ids, None
        return ids, np.repeat(np.array(self.types, np.int32), [len(part) for part in parts])


def find_frame(tokenizer: Tokenizer, spec: ModelSpec, *, with_types: bool) -> Frame | None:
    """Return the frame of a model's pairs: from the model's template for pairs if it has one, else
    from its tokenizer. `with_types` keeps the token types that the tokenizer gives.

    If no Frame can describe how the tokenizer joins pairs, a reranker raises UnsupportedModel, and
    for other models the result is None. Raises CheckpointError if the template lacks a placeholder.
    """
    if spec.template is not None:
        return template_frame(
            spec.template, lambda text: tokenizer.encode([text], special=False)[0].ids
        )
    try:
        return tokenizer_frame(tokenizer.file, with_types=with_types)
    except UnsupportedModel:
        if spec.task == "rerank":
            raise
        return None


def template_frame(template: PairTemplate, tokenize: Callable[[str], Sequence[int]]) -> Frame:
    """Make the frame for a model with a template. `tokenize` must return the ids of a text without
    special tokens.

    Raises CheckpointError if the template lacks the placeholder of a text.
    """
    for part, placeholder in ((template.first, "{query}"), (template.second, "{document}")):
        if placeholder not in part:
            raise CheckpointError(f"the template for pairs has no {placeholder} in {part!r}")
    separator = tokenize(template.separator)
    return Frame(
        before=np.array(tokenize(template.prefix), np.int32),
        between=np.array(separator, np.int32),
        after=np.array([*separator, *tokenize(template.suffix), *template.end_ids], np.int32),
        template=template,
        second_end=np.array(tokenize(template.second.partition("{document}")[2]), np.int32),
    )


def tokenizer_frame(tokenizer: tokenizers.Tokenizer, *, with_types: bool) -> Frame:
    """Find the special tokens that a tokenizer puts around two texts, by tokenizing a sample pair.

    `with_types` keeps the token types. Raises UnsupportedModel if a Frame cannot describe how the
    tokenizer joins texts: it repeats or reorders them, or changes the type within a part.
    """
    sample = tokenizer.encode("a", "b")
    text_ids = sample.sequence_ids  # for each token: 0 in the first text, 1 in the second, or None
    is_in_order = [text_id for text_id, _ in groupby(text_ids) if text_id is not None] == [0, 1]
    columns = zip(text_ids, sample.special_tokens_mask, strict=True)
    if not is_in_order or any(text_id is None and not special for text_id, special in columns):
        raise UnsupportedModel(
            "the tokenizer's template for pairs does not hold each text once and in order"
        )
    # The indices at which the two texts start and end.
    first, second = text_ids.index(0), text_ids.index(1)
    cuts = [first, first + text_ids.count(0), second, second + text_ids.count(1)]
    before, _, between, _, after = np.split(np.array(sample.ids, np.int32), cuts)
    types = None
    if with_types:
        # an empty part counts as type 0
        type_sets = [{*part.tolist()} or {0} for part in np.split(np.array(sample.type_ids), cuts)]
        if any(len(type_set) > 1 for type_set in type_sets):
            raise UnsupportedModel(
                "the tokenizer's template for pairs changes token types within a part"
            )
        types = tuple(type_set.pop() for type_set in type_sets)
    return Frame(before, between, after, types if types and any(types) else None)


def fill(part: str, **texts: str) -> str:
    """Replace each placeholder `{name}` in `part` by texts[name], if there is such a text.
    Placeholders within the texts themselves, which users send, are not replaced."""
    return PLACEHOLDER.sub(lambda match: texts.get(match[1], match[0]), part)
