"""Which of a checkpoint's prompts a text gets by what it is for. Knows no text, no wire format."""

from collections.abc import Collection
from typing import Literal

from jaxembed.errors import UnknownPurpose

Role = Literal["query", "document", "classification", "clustering", "text-matching", "separation"]

PURPOSES: dict[str, Role] = {  # by the names that Cohere, Voyage, NVIDIA and Jina have for them
    "query": "query",
    "search_query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
    "classification": "classification",
    "clustering": "clustering",
    "text-matching": "text-matching",
    "separation": "separation",
}
SUFFIXES: dict[str, Role] = {".query": "query", ".passage": "document"}  # `retrieval.query`
PROMPTS: dict[Role, tuple[str, ...]] = {  # those sentence-transformers looks for, in this order
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
}


def role_of(purpose: str) -> Role | None:
    """What texts of this purpose are; None if it is not one that clients of other servers name."""
    return PURPOSES.get(purpose) or next(
        (role for suffix, role in SUFFIXES.items() if purpose.endswith(suffix)), None
    )


def prompt_of_role(role: Role, prompts: Collection[str]) -> str | None:
    """The name of the prompt that sentence-transformers chooses for a role, if it is there."""
    return next((name for name in PROMPTS.get(role, ()) if name in prompts), None)


def prompt_for(purpose: str, prompts: Collection[str]) -> str | None:
    """The name of the prompt for a purpose: the one of that very name, the one that
    sentence-transformers chooses, or another for the same role. None if there is none.

    Raises UnknownPurpose.
    """
    role = role_of(purpose)
    if role is None:
        raise UnknownPurpose(purpose, [*PURPOSES, *(f"*{suffix}" for suffix in SUFFIXES)])
    if purpose in prompts:
        return purpose
    same_role = (name for name in prompts if role_of(name) == role)
    return prompt_of_role(role, prompts) or next(same_role, None)
