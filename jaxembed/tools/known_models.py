"""Reads the table of published models that jaxembed serves, and searches it by words."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from jaxembed.data.spec import DOCUMENT_PROMPTS

TABLE = Path(__file__).with_suffix(".json")

Fact = Literal[
    "type",
    "task",
    "outputs",
    "parameters",
    "dimensions",
    "max_tokens",
    "languages",
    "prompts",
    "licence",
]
Kind = Literal["embedder", "reranker", "sparse", "colbert", "static", "images", "pages"]

KIND_OF_TYPE: dict[str, Kind] = {
    **dict.fromkeys(("colpali", "colqwen2", "colmodernvbert", "qwen2_5_vl"), "pages"),
    **dict.fromkeys(
        ("clip", "metaclip_2", "siglip", "siglip2", "jina_clip", "qwen2_vl", "qwen3_vl"), "images"
    ),
    "static": "static",
}
KIND_OF_OUTPUT: dict[str, Kind] = {"sparse": "sparse", "multi_vector": "colbert"}
VERIFIED = {
    "weights": "the model's own weights, compared with sentence-transformers",
    "size": "random weights of its size and family, compared with a reference",
    "family": "smaller models of its family with random weights, compared with a reference",
}
SHORT = 2  # a word of at most this many letters, such as `de`, only matches whole words


class KnownModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published model. A fact that no source states is None, or empty.

    `type` is the `model_type` of its config.json, or `static` for static embeddings. `languages`
    are codes of ISO 639. `prompts` are the texts that the authors put before a query or a document,
    or the default instruction of a reranker. `verified` is a key of VERIFIED. `sources` holds the
    names of the facts that each source states.
    """

    name: str
    type: str
    task: Literal["embed", "rerank"]
    outputs: tuple[str, ...]
    parameters: int | None = None
    dimensions: int | None = None
    max_tokens: int | None = None
    languages: tuple[str, ...] = ()
    prompts: dict[str, str] = {}
    licence: str | None = None
    verified: Literal["weights", "size", "family"]
    note: str | None = None
    sources: dict[str, tuple[Fact, ...]]

    @property
    def kind(self) -> Kind:
        """The group of models in the table that the model belongs to."""
        if self.task == "rerank":
            return "reranker"
        kind = KIND_OF_TYPE.get(self.type) or KIND_OF_OUTPUT.get(self.outputs[0], "embedder")
        # with a prompt for documents, these are texts too
        return "images" if kind == "pages" and {*DOCUMENT_PROMPTS} & {*self.prompts} else kind


class KnownModels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole table. `sources` describes each source, `languages` names each code."""

    sources: dict[str, str]
    languages: dict[str, str]
    models: tuple[KnownModel, ...]

    def search(self, words: Sequence[str]) -> list[KnownModel]:
        """Return the models to which every word applies, in the order of the table.

        If the words are the name of a model, with or without its owner, return that model alone.
        Otherwise a word of up to two letters must be a language code or another whole word. A
        longer word may also be a part of the name, or the beginning of another fact: a language,
        the `model_type`, the task, an output, the kind or the licence.
        """
        full_name = " ".join(words).lower()
        for model in self.models:
            if full_name in (model.name.lower(), model.name.lower().split("/")[-1]):
                return [model]
        return [model for model in self.models if all(self._applies(word, model) for word in words)]

    def _applies(self, word: str, model: KnownModel) -> bool:
        """Return whether a word matches a fact of the model, by the rules of `search`."""
        names = (self.languages[code] for code in model.languages)
        facts = (model.type, model.task, *model.outputs, model.kind, model.licence or "", *names)
        texts = [text.lower() for text in (model.name, *facts)]
        terms = {*model.languages, *texts, *re.findall(r"\w+", " ".join(texts))}
        sought = word.lower()
        if len(sought) <= SHORT:
            return sought in terms
        return sought in model.name.lower() or any(term.startswith(sought) for term in terms)


@cache
def known_models() -> KnownModels:
    """Read the table that is part of the package."""
    return msgspec.json.decode(TABLE.read_bytes(), type=KnownModels)
