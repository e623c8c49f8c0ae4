"""Converts a chat template that takes a query and a document to a PairTemplate.

Knows nothing of models. sentence-transformers passes such templates messages with the roles "query"
and "document", and "system" for an instruction that differs from the template's own.
"""

from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from converters.heads import read_optional_json
from jaxembed.data.spec import PairTemplate
from jaxembed.errors import UnsupportedModel

ROLES = {"system": "{instruction}", "query": "{query}", "document": "{document}"}


def pair_template(tower: Path) -> PairTemplate | None:
    """Read the chat template of a model's directory as a PairTemplate.

    Returns None if there is no template, or if it takes no query and document. Raises
    UnsupportedModel if it takes them but cannot be cut at places where tokens always end.
    """
    source = _source(tower)
    if source is None:
        return None
    full, plain = _render(source, *ROLES), _render(source, "query", "document")
    if "{query}" not in plain or "{document}" not in plain:
        return None
    template = _cut(full, plain, _special_tokens(tower))
    if template is None:
        raise UnsupportedModel(
            f"{tower}: the chat template is not supported; wanted lines with the instruction and "
            "the query, then the document after a space, then a special token"
        )
    return template


def _source(tower: Path) -> str | None:
    """The text of the chat template, from its own file or from tokenizer_config.json."""
    path = tower / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    stored = read_optional_json(tower / "tokenizer_config.json").get("chat_template")
    return stored if isinstance(stored, str) else None


def _render(source: str, *roles: str) -> str:
    """Render the template with a message of each role; empty if it does not take them."""
    environment = ImmutableSandboxedEnvironment(  # with the settings of transformers
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    messages = [{"role": role, "content": ROLES[role]} for role in roles]
    try:
        return environment.from_string(source).render(
            messages=messages, add_generation_prompt=False
        )
    except (TemplateError, TypeError, AttributeError, ValueError):
        return ""


def _special_tokens(tower: Path) -> tuple[str, ...]:
    """The added tokens of the tokenizer, which no other token crosses."""
    added = read_optional_json(tower / "tokenizer.json").get("added_tokens") or ()
    return tuple(token["content"] for token in added)


def _cut(full: str, plain: str, specials: tuple[str, ...]) -> PairTemplate | None:
    """Cut a rendered template into the parts of a PairTemplate; None if it is not possible.

    `full` has all three placeholders; `plain` has the template's own instruction instead.
    """
    if any(full.count(placeholder) != 1 for placeholder in ROLES.values()):
        return None
    before, after = full.split("{instruction}")
    head, suffix = full.split("{document}")
    prefix, line, rest = before.rpartition("\n")
    first = (rest + "{instruction}" + head.removeprefix(before + "{instruction}")).removesuffix(" ")
    is_clean = (
        head.startswith(before)
        and head.endswith(" ")
        and first == first.rstrip()
        and rest == rest.lstrip()
        and first.count("{") == 2
        and suffix.startswith(specials)
        and plain.startswith(before)
        and plain.endswith(after)
    )
    if not is_clean:
        return None
    return PairTemplate(
        prefix=prefix + line,
        first=first,
        second=" {document}",
        suffix=suffix,
        instruction=plain.removeprefix(before).removesuffix(after),
    )
