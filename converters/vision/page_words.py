"""What the converters of models that read pages share: their spec, and the words around inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from converters.family import TensorRules
from converters.field_types import CONFIG_FIELDS, check_fields
from converters.heads import Layout, dense_rules, read_optional_json
from converters.outline import Options, Outline, spec_of
from converters.weights import Rule
from jaxembed.data.spec import DenseLayer, ImageRules, NormalizeLayer, PerToken
from jaxembed.errors import CheckpointError, UnsupportedModel

QUERY = "query"
FILLERS = 10  # tokens after a query, in which the model goes on thinking
VECTOR_WIDTH = 128  # of a vector, where config.json does not say
SAMPLES = ("a", "How much, in 2024?", "Größe\tund  Gewicht")  # texts with which a template is tried


@dataclass(frozen=True)
class PageModel:
    """A model as its converter read it: the config of its tower, how its pages become tokens, and
    the most tokens of a page."""

    hf: Mapping[str, Any]
    config: dict[str, Any]
    rules: ImageRules
    prompt: str
    limit: int

    @property
    def projection(self) -> DenseLayer:
        """The layer that makes a vector of each token."""
        width = self.hf.get("embedding_dim") or VECTOR_WIDTH
        return DenseLayer(self.config["hidden_size"], width, activation="identity")

    @property
    def projection_rules(self) -> list[Rule]:
        """Where the tensors of the projection are."""
        return dense_rules("multi_vector", 0, self.projection, "embedding_proj_layer")

    def outline(
        self, source: Path, options: Options, tensors: TensorRules, tokenizer: bytes
    ) -> Outline:
        """The outline of the model in the folder `source`."""
        head = PerToken((self.projection, NormalizeLayer()))
        layout = Layout(
            "", {"multi_vector": head}, prompts={QUERY: self.prompt}, default_prompt_name=QUERY
        )
        spec = spec_of(
            options,
            layout,
            self.config,
            self.hf,
            architecture="pages",
            image=self.rules,
            token_types=False,
            max_input_tokens=self.limit,
        )
        return Outline(source, tensors, layout, spec, tokenizer)


def read_part(
    source: Path, key: str, fields: Mapping[str, Any], known: Sequence[str]
) -> dict[str, Any]:
    """The fields of one part of config.json that are not null. Raises UnsupportedModel for a part
    whose model_type is none of those known, the first of which is the default."""
    given = {name: value for name, value in fields.items() if value is not None}
    check_fields(f"{source / 'config.json'}, {key}", given, CONFIG_FIELDS)
    if given.get("model_type", known[0]) not in known:
        raise UnsupportedModel(
            f"{key} of model_type {given['model_type']!r} is not supported; known: "
            f"{', '.join(known)}"
        )
    return given


class PageWords:
    """A model's tokenizer, with which the texts around inputs become ids."""

    def __init__(self, folder: Path, stored: bytes):
        self._folder = folder
        self._tokenizer = Tokenizer.from_str(stored.decode())
        self._special = read_optional_json(folder / "tokenizer_config.json")

    def special(self, key: str) -> str:
        """A special token. Raises CheckpointError if tokenizer_config.json names none."""
        token = self._special.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str) or self._tokenizer.token_to_id(token) is None:
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
        parts = {"before": before, "after": after}
        framed = Tokenizer.from_str(self._tokenizer.to_str())
        framed.post_processor = TemplateProcessing(  # pyright: ignore
            single=[*(["before"] if before else []), "$A", *(["after"] if after else [])],
            special_tokens=[
                {"id": name, "ids": self.ids(part), "tokens": [name] * len(self.ids(part))}
                for name, part in parts.items()
                if part
            ],
        )
        return framed.to_str().encode()
