"""The table of what a model can give for a sequence. Imports no JAX, so that any process may."""

from dataclasses import dataclass
from typing import Literal

OutputName = Literal["dense", "logits", "sparse", "token_weights", "multi_vector", "tokens"]


@dataclass(frozen=True)
class OutputKind:
    """The form of an output: one array for each slot (a sequence, or a span of one), or one row
    for each token. Every output is float32 and unnormalised. Of a sparse one only the columns that
    are not zero are kept."""

    per: Literal["slot", "token"]
    sparse: bool = False


OUTPUTS: dict[OutputName, OutputKind] = {
    "dense": OutputKind("slot"),  # the pooled vector, after the modules of its head
    "logits": OutputKind("slot"),  # of a classifier or a reranker
    "sparse": OutputKind("slot", sparse=True),  # the weights of the vocabulary's terms
    "token_weights": OutputKind("token"),  # of each token one, of which weights of terms are made
    "multi_vector": OutputKind("token"),  # a vector to compare token by token
    "tokens": OutputKind("token"),  # the last hidden states
}

# Those that texts are compared by. "sparse" may be made of "token_weights".
REPRESENTATIONS: tuple[OutputName, ...] = ("dense", "sparse", "multi_vector")
