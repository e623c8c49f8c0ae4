"""Chooses one of a checkpoint's prompts: by its name, by the purpose of a text, or the default.

A purpose is the name by which an API calls the use of a text, such as "search_query". A role is the
use itself, such as "query". Several purposes may have the same role.
"""

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from jaxembed.config import TextConfig
from jaxembed.data.spec import DOCUMENT_PROMPTS, Chat, ModelSpec
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
# The forms of published prompts for queries with an instruction: what is before and after it
INSTRUCTED = (
    re.compile(r"(Instruct: ).+(\n ?Query:\s?)", re.DOTALL),  # E5, Qwen3-Embedding, gte-Qwen2
    re.compile(r"(<instruct>).+(\n<query>)", re.DOTALL),  # bge-multilingual-gemma2
    re.compile(r"(task: ).+( \| query: )", re.DOTALL),  # EmbeddingGemma
)
# The names of prompts that sentence-transformers looks for, in this order.
PROMPTS: dict[Role, tuple[str, ...]] = {
    "query": ("query",),
    "document": DOCUMENT_PROMPTS,
}


def default_prompt(config: TextConfig, spec: ModelSpec) -> str:
    """Return the text of the prompt for requests that name no prompt: the prompt of the flags, else
    the checkpoint's default prompt, else "".

    Raises ConfigError if the flags give two prompts, or if the checkpoint has no prompt with the
    name.
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
    """Return the text of the prompt with this name in `prompts`, which are texts by name. Raises
    UnknownPrompt if there is no such prompt."""
    if name in prompts:
        return prompts[name]
    raise UnknownPrompt(name, sorted(prompts))


def with_instruction(
    instruction: str, prompts: Mapping[str, str], chat: Chat | None = None
) -> tuple[str, bool]:
    """Return the prompt that gives an instruction in words, and whether it is only for queries.

    In a `chat` template the prompt is the system message, which is the instruction, completed as in
    Qwen3-VL-Embedding's code if the template says so. If a prompt of the checkpoint contains an
    instruction in one of INSTRUCTED's forms, it replaces that one; the prompt of queries is looked
    at first. Otherwise it is the prompt itself.
    """
    if chat is not None:
        if not chat.completes:
            return instruction, False
        message = instruction.strip()
        ends = unicodedata.category(message[-1:] or ".").startswith("P")
        return message if ends else f"{message}.", False
    names = sorted(prompts, key=lambda name: role_of(name) != "query")
    for prompt in (prompts[name] for name in names):
        for form in INSTRUCTED:
            if match := form.fullmatch(prompt):
                return match[1] + instruction + match[2], True
    return instruction, False


def role_of(purpose: str) -> Role | None:
    """Return the role of texts with this purpose; None if no known API has the purpose."""
    return PURPOSES.get(purpose) or next(
        (role for suffix, role in SUFFIXES.items() if purpose.endswith(suffix)), None
    )


def prompt_of_role(role: Role, prompts: Collection[str]) -> str | None:
    """Return the name of the prompt that sentence-transformers chooses for a role among `prompts`,
    the names of the checkpoint's prompts. Returns None if there is none for the role."""
    return next((name for name in PROMPTS.get(role, ()) if name in prompts), None)


def prompt_for(purpose: str, prompts: Collection[str], field: str | None = None) -> str | None:
    """Return the name of the prompt for a purpose, or None if the checkpoint has none for it.

    `prompts` are the names of the checkpoint's prompts. The first of these is chosen: the prompt
    with the name of the purpose, the prompt that sentence-transformers chooses for the purpose's
    role, any other prompt with the same role. Raises UnknownPurpose if the purpose has no role;
    `field` is the field of the request that the message names.
    """
    role = role_of(purpose)
    if role is None:
        known = [*PURPOSES, *(f"*{suffix}" for suffix in SUFFIXES)]
        raise UnknownPurpose(purpose, known, field)
    if purpose in prompts:
        return purpose
    return prompt_of_role(role, prompts) or same_purpose(purpose, prompts)


def same_purpose(purpose: str, names: Iterable[str]) -> str | None:
    """Return the first of the names that has the same role as the purpose, or None."""
    role = role_of(purpose)
    return next((name for name in names if role is not None and role_of(name) == role), None)
