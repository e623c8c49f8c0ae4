"""The outputs that a model can compute for a sequence. Processes without JAX may import this."""

from dataclasses import dataclass
from typing import Literal

OutputName = Literal[
    "dense", "logits", "token_logits", "sparse", "token_weights", "multi_vector", "tokens"
]


@dataclass(frozen=True)
class OutputKind:
    """The form of an output, which is float32 and not normalized.

    `per` says whether there is a row for each slot (a sequence or a part of a sequence that is
    pooled), or for each token. Only the nonzero columns of a `sparse` output are kept.
    """

    per: Literal["slot", "token"]
    sparse: bool = False


OUTPUTS: dict[OutputName, OutputKind] = {
    "dense": OutputKind("slot"),  # the pooled vector, after the modules of the head
    "logits": OutputKind("slot"),  # the logits of a classifier or reranker
    "token_logits": OutputKind("token"),  # the logits of a token classifier
    "sparse": OutputKind("slot", sparse=True),  # the weights of the vocabulary's terms
    "token_weights": OutputKind("token"),  # a weight per token; the host makes term weights of it
    "multi_vector": OutputKind("token"),  # a vector per token, for scores of token pairs
    "tokens": OutputKind("token"),  # the last hidden states
}

# The outputs that texts are compared by. In some models "sparse" is made from "token_weights".
REPRESENTATIONS: tuple[OutputName, ...] = ("dense", "sparse", "multi_vector")
