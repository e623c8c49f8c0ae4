"""The token counts in the answers of OpenAI and of those who follow it."""

import msgspec

from jaxembed.runtime.options import Embeddings, Scores


class Usage(msgspec.Struct):
    """Tokens really run: after truncation, special tokens and prompt included."""

    prompt_tokens: int
    total_tokens: int


def usage_of(answer: Embeddings | Scores) -> dict[str, int]:
    """The fields of Usage."""
    tokens = int(answer.num_tokens.sum())
    return {"prompt_tokens": tokens, "total_tokens": tokens}
