"""The outputs that a model can compute for a sequence. Imports no JAX, so that any process may."""

from dataclasses import dataclass
from typing import Literal

OutputName = Literal["dense", "logits", "sparse", "token_weights", "multi_vector", "tokens"]


@dataclass(frozen=True)
class OutputKind:
    """The form of an output, which is float32 and not normalized.

    It has one array for each slot (a sequence, or a span of it), or one row for each token. Of a
    `sparse` output only the columns that are not zero are kept.
    """

    per: Literal["slot", "token"]
    sparse: bool = False


OUTPUTS: dict[OutputName, OutputKind] = {
    "dense": OutputKind("slot"),  # the pooled vector, after its head's modules
    "logits": OutputKind("slot"),  # the logits of a classifier or reranker
    "sparse": OutputKind("slot", sparse=True),  # the weights of the vocabulary's terms
    "token_weights": OutputKind("token"),  # one weight, from which the terms' weights are made
    "multi_vector": OutputKind("token"),  # a vector; vectors are compared token by token
    "tokens": OutputKind("token"),  # the last hidden states
}

# The outputs that texts are compared by. "sparse" may be made from "token_weights".
REPRESENTATIONS: tuple[OutputName, ...] = ("dense", "sparse", "multi_vector")
