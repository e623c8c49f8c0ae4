"""Chooses one of a checkpoint's prompts: by its name, by the purpose of a text, or the default.

A purpose is how an API names the use of a text, such as "search_query". Its role is the use itself,
such as "query"; several purposes have the same role.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from jaxembed.config import TextConfig
from jaxembed.data.spec import ModelSpec
from jaxembed.errors import ConfigError, InvalidInput, UnknownPrompt, UnknownPurpose

Role = Literal["query", "document", "classification", "clustering", "text-matching", "separation"]

PURPOSES: dict[str, Role] = {  # keys are the names in the APIs of Cohere, Voyage, NVIDIA and Jina
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
SUFFIXES: dict[str, Role] = {".query": "query", ".passage": "document"}  # as in `retrieval.query`
PROMPTS: dict[Role, tuple[str, ...]] = {  # names that sentence-transformers tries, in this order
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
}


def default_prompt(config: TextConfig, spec: ModelSpec) -> str:
    """Return the text of the prompt for inputs of requests without a prompt: that of the flags,
    else the checkpoint's default, else "".

    Raises ConfigError if the flags give two prompts or the checkpoint has none with the name.
    """
    if config.default_prompt is not None:
        if config.default_prompt_name is not None:
            raise ConfigError("set --default-prompt or --default-prompt-name, not both")
        return config.default_prompt
    name = default_prompt_name(config, spec)
    if name is None:
        return ""
    try:
        return named_prompt(name, spec.prompts)
    except InvalidInput as error:
        raise ConfigError(f"--default-prompt-name {name}: {error}") from error


def default_prompt_name(config: TextConfig, spec: ModelSpec) -> str | None:
    """Return the name of the prompt that `default_prompt` returns; None if it has no name."""
    if config.default_prompt is not None:
        return None
    return config.default_prompt_name or spec.default_prompt_name


def named_prompt(name: str, prompts: Mapping[str, str]) -> str:
    """Return the text of the prompt with this name. `prompts` are texts by name. Raises
    UnknownPrompt if there is none."""
    if name in prompts:
        return prompts[name]
    raise UnknownPrompt(name, sorted(prompts))


def role_of(purpose: str) -> Role | None:
    """Return the role of texts with this purpose; None if no known API has the purpose."""
    return PURPOSES.get(purpose) or next(
        (role for suffix, role in SUFFIXES.items() if purpose.endswith(suffix)), None
    )


def prompt_of_role(role: Role, prompts: Collection[str]) -> str | None:
    """Return the name of the prompt that sentence-transformers chooses for a role; None if it finds
    none in `prompts`, the checkpoint's names."""
    return next((name for name in PROMPTS.get(role, ()) if name in prompts), None)


def prompt_for(purpose: str, prompts: Collection[str], field: str | None = None) -> str | None:
    """Return the name of the prompt for a purpose; None if the checkpoint has none for it.

    The first of these is chosen: the prompt with the name of the purpose, the prompt that
    sentence-transformers chooses for its role, another prompt with the same role. `prompts` are the
    checkpoint's names. Raises UnknownPurpose, for the request's `field`, if the purpose has no
    role.
    """
    role = role_of(purpose)
    if role is None:
        known = [*PURPOSES, *(f"*{suffix}" for suffix in SUFFIXES)]
        raise UnknownPurpose(purpose, known, field)
    if purpose in prompts:
        return purpose
    return prompt_of_role(role, prompts) or same_purpose(purpose, prompts)


def same_purpose(purpose: str, names: Iterable[str]) -> str | None:
    """Return the first of the names that has the role of the purpose; None if there is none."""
    role = role_of(purpose)
    return next((name for name in names if role is not None and role_of(name) == role), None)
