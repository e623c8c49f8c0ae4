"""Models that read pages, whose texts and images give a vector for each token: finds them, and has
what their converters share, their spec and the words around inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from converters.family import TensorRules
from converters.fields import (
    CONFIG_FIELDS,
    check_fields,
    given,
    refuse_unknown,
)
from converters.heads import Layout, dense_rules, read_optional_json
from converters.outline import Options, Outline, Reader, spec_of
from converters.tokenizers.tokenizer import read_tokenizer, special_token
from converters.vision.dual import refuse_options
from jaxembed.data.spec import DenseLayer, ImageRules, NormalizeLayer, PerToken
from jaxembed.errors import CheckpointError, UnsupportedModel

COLPALI, COLQWEN = "colpali", "colqwen2"
CLASSES = {COLPALI: ("ColPaliForRetrieval",), COLQWEN: ("ColQwen2ForRetrieval",)}
JOINED = {  # a published model, by what the names of the bases of adapters hold
    "colpali": "vidore/colpali-v1.3-hf",
    "colqwen2": "vidore/colqwen2-v1.0-hf",
}
# The module of each; its `outline(source, hf, options)` describes a model.
PAGE_READERS = {COLPALI: "converters.vision.colpali", COLQWEN: "converters.vision.colqwen"}

QUERY = "query"
FILLERS = 10  # tokens after a query, in which the model goes on thinking
VECTOR_WIDTH = 128  # of a vector, where config.json does not say
SAMPLES = ("a", "How much, in 2024?", "Größe\tund  Gewicht")  # texts with which a template is tried


def is_pages(source: Path) -> bool:
    """Whether a directory holds a model that reads pages."""
    hf = read_optional_json(source / "config.json")
    return hf.get("model_type") in list(CLASSES)  # a list: it may be of any type


def refuse_adapter(folder: Path, base: str) -> None:
    """Raise UnsupportedModel for an adapter whose base, by its name, is a model that reads pages:
    these are served with their adapter joined."""
    known = next((one for kind, one in JOINED.items() if kind in base.lower()), None)
    if known is not None:
        raise UnsupportedModel(
            f"{folder} is an adapter of {base}, which reads pages with its adapter joined; serve "
            f"one that is, as {known}"
        )


def _outlines(source: Path, options: Options) -> tuple[dict[str, Outline], str | None]:
    refuse_options(source, options)
    hf = read_optional_json(source / "config.json", CONFIG_FIELDS)
    kind = hf["model_type"]
    for architecture in hf.get("architectures") or ():
        if architecture not in CLASSES[kind]:
            raise UnsupportedModel(
                f"architecture {architecture!r} of a {kind} model is not supported; known: "
                f"{', '.join(CLASSES[kind])}"
            )
    return {"": import_module(PAGE_READERS[kind]).outline(source, hf, options)}, ""


READER = Reader(is_pages, _outlines)


def page_outline(
    source: Path,
    options: Options,
    hf: Mapping[str, Any],
    config: dict[str, Any],
    *,
    image: ImageRules,
    prompt: str,
    limit: int,
    tensors: TensorRules,
    tokenizer: bytes,
) -> Outline:
    """The outline of the model in the folder `source`, whose tower has this `config`. `image` says
    how pages become tokens, of which `limit` are the most. `tensors` has no rules for the
    projection, the layer that makes a vector of each token."""
    width = hf.get("embedding_dim") or VECTOR_WIDTH
    projection = DenseLayer(config["hidden_size"], width, activation="identity")
    rules = dense_rules("multi_vector", 0, projection, "embedding_proj_layer")
    tensors = replace(tensors, rules=(*tensors.rules, *rules))
    head = PerToken((projection, NormalizeLayer()))
    layout = Layout("", {"multi_vector": head}, prompts={QUERY: prompt}, default_prompt_name=QUERY)
    spec = spec_of(
        options,
        layout,
        config,
        hf,
        architecture="pages",
        image=image,
        token_types=False,
        max_input_tokens=limit,
    )
    return Outline(source, tensors, layout, spec, tokenizer)


def read_part(
    source: Path, key: str, fields: Mapping[str, Any], known: Sequence[str]
) -> dict[str, Any]:
    """The fields of one part of config.json that are not null. Raises UnsupportedModel for a part
    whose model_type is none of those known, the first of which is the default."""
    part = given(fields)
    check_fields(f"{source / 'config.json'}, {key}", part, CONFIG_FIELDS)
    refuse_unknown(f"{key} of model_type", part.get("model_type", known[0]), known)
    return part


class PageWords:
    """A model's tokenizer, with which the texts around inputs become ids."""

    def __init__(self, folder: Path, vocab_size: int):
        stored = read_tokenizer(folder, lowercase=False, vocab_size=vocab_size)
        self._folder, self._tokenizer = folder, Tokenizer.from_str(stored.decode())

    def special(self, key: str) -> str:
        """A special token. Raises CheckpointError if tokenizer_config.json names none."""
        token = special_token(self._folder, key)
        if token is None or self._tokenizer.token_to_id(token) is None:
            raise CheckpointError(
                f"tokenizer_config.json in {self._folder} names no {key} of the vocabulary"
            )
        return token

    def ids(self, text: str) -> list[int]:
        """The ids of a text in which special tokens are written out."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def framed(self, before: str, after: str, prompt: str) -> bytes:
        """The tokenizer.json that puts these texts around each. Raises CheckpointError unless texts
        with the prompt are tokenized alike with them and without."""
        for sample in SAMPLES:
            text = prompt + sample
            if self.ids(before + text + after) != [
                one for part in (before, text, after) for one in self.ids(part)
            ]:
                raise CheckpointError(
                    f"the tokenizer in {self._folder} joins texts with what stands around them"
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
