"""Reads chat templates, and embedders whose texts are put into one with the prompt as the system
message, as sentence-transformers does it."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from converters.heads import read_optional_json
from converters.tokenizers.framed import FramedTokenizer
from jaxembed.data.spec import Chat, ModelSpec
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.preprocessing.images.prepare import max_tokens

DEFAULT = "default"  # name of the prompt of texts without one
PROMPT, TEXT = "{prompt}", "{text}"


def chat_template(backbone: Path) -> str | None:
    """Return the chat template of a model's directory, or None if it has none."""
    path = backbone / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        source = read_optional_json(backbone / name).get("chat_template")
        if isinstance(source, str):
            return source
    return None


def render(source: str, messages: Mapping[str, str], *, generation: bool) -> str:
    """Render the chat template `source` with `messages`, texts by role; empty if that fails.
    `generation` asks for the beginning of an answer."""
    environment = ImmutableSandboxedEnvironment(  # with the settings of transformers
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    listed = [{"role": role, "content": text} for role, text in messages.items()]
    try:
        return environment.from_string(source).render(
            messages=listed, add_generation_prompt=generation
        )
    except (TemplateError, TypeError, AttributeError, ValueError):
        return ""


def with_chat(
    spec: ModelSpec,
    tokenizer: FramedTokenizer,
    backbone: Path,
    prompt: str,
    empty: str,
    rendered: str | None = None,
) -> tuple[ModelSpec, bytes]:
    """Return the spec of an embedder whose texts are put into its chat template, and the
    tokenizer.json that puts the end of the template after each text.

    `prompt` is the system message if the files have no default prompt, and `empty` stands for an
    empty text. `rendered` is the template with PROMPT and TEXT in it, into which instructions are
    put as they are; None: the one in the folder `backbone`. Raises UnsupportedModel if the chat
    template does not have a system message, and then a text.
    """
    completes = rendered is None
    if rendered is None:
        messages = {"system": PROMPT, "user": TEXT}
        rendered = render(chat_template(backbone) or "", messages, generation=True)
    before, _, after = rendered.partition(TEXT)
    if rendered.count(PROMPT) != 1 or rendered.count(TEXT) != 1 or PROMPT not in before:
        raise UnsupportedModel(
            f"{backbone}: a chat template with a system message and then the text of a user is "
            "needed, in chat_template.jinja, chat_template.json or tokenizer_config.json"
        )
    prompts, name = spec.prompts, spec.default_prompt_name
    if name is None:
        prompts, name = {DEFAULT: prompt} | prompts, DEFAULT
    spec = msgspec.structs.replace(
        spec, chat=Chat(before, empty, completes), prompts=prompts, default_prompt_name=name
    )
    start = before.replace(PROMPT, prompts[name])
    return spec, tokenizer.framed("", after, start)


def check_image_tokens(spec: ModelSpec) -> None:
    """Raise CheckpointError if an image can have more tokens than an input."""
    assert spec.image is not None
    if (most := max_tokens(spec.image)) > spec.max_input_tokens:
        raise CheckpointError(
            f"an image has up to {most} tokens, and an input {spec.max_input_tokens}, as the files "
            "of the model or its tokenizer say; lower max_pixels in preprocessor_config.json, or "
            "max_image_tokens in config.json"
        )
