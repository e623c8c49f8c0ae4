"""The table of what a model can give for a sequence. Imports no JAX, so that any process may."""

from dataclasses import dataclass
from typing import Literal

OutputName = Literal["dense", "logits", "tokens"]


@dataclass(frozen=True)
class OutputKind:
    """The form of an output: one array for each slot (a sequence, or a span of one), or one row
    for each token. Every output is float32 and unnormalised."""

    per: Literal["slot", "token"]


OUTPUTS: dict[OutputName, OutputKind] = {
    "dense": OutputKind("slot"),  # the pooled vector, after the modules of its head
    "logits": OutputKind("slot"),  # of a classifier or a reranker
    "tokens": OutputKind("token"),  # the last hidden states
}
