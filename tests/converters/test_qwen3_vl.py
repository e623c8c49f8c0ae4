"""Qwen3-VL-Embedding and Qwen3-VL-Reranker: the chat template of their texts, and what is refused.
tests/parity/test_qwen3_vl.py compares their vectors and scores."""

import json
from pathlib import Path
from typing import Any

import pytest
from sources import change_json, converted
from test_families import golden
from test_golden import write_source

from converters import outline
from jaxembed.data.inputs import Pair, Text
from jaxembed.data.spec import Chat
from jaxembed.errors import CheckpointError, InvalidInput, UnsupportedModel
from jaxembed.preprocessing.prompts import with_instruction
from jaxembed.runtime.options import EncodeOptions, ScoreOptions

DEFAULT = "Represent the user's input."
TAIL = "<|im_end|>\n<|im_start|>assistant\n"


def write(folder: Path, name: str = "embedder", **config: Any) -> Path:
    write_source(golden(f"qwen3_vl_{name}"), folder)
    change_json(folder / "config.json", **config)
    return folder


def shown(embedder, text: str = "the cat", **options: Any) -> str:
    """What the model reads of a text."""
    request = embedder.model.tasks.embed([Text(text)], EncodeOptions(**options))
    return read(embedder, [Text(text)], request.tokenization)


def read(embedder, inputs, tokenization) -> str:
    processor = embedder.model.main.text_processor
    (encoding,) = processor.encode(inputs, tokenization).work.encodings
    return processor._tokenizer.file.decode(encoding.ids.tolist(), skip_special_tokens=False)


def framed(system: str, user: str) -> str:
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}{TAIL}"


@pytest.fixture(name="embedder", scope="module")
def _embedder(tmp_path_factory, load_model):
    return load_model(write(tmp_path_factory.mktemp("vl") / "model"), 1, 128)


@pytest.mark.parametrize(
    ("options", "system"),
    [
        ({}, DEFAULT),
        ({"prompt": ""}, DEFAULT),
        ({"prompt": "Find it"}, "Find it"),
        ({"prompt_name": "query"}, "Where is the dog"),
        ({"instruction": "  Find it\n"}, "Find it."),
        ({"instruction": "Is it a mat?"}, "Is it a mat?"),
    ],
    ids=["default", "empty", "prompt", "name", "instruction", "punctuation"],
)
def test_a_prompt_is_the_system_message(embedder, options, system):
    assert shown(embedder, **options) == framed(system, "the cat")


def test_a_long_text_is_cut_so_that_the_end_of_the_template_stays(embedder):
    read = shown(embedder, "the cat sat on the mat " * 30)
    assert read.startswith(framed(DEFAULT, "the cat sat").removesuffix(TAIL))
    assert read.endswith(TAIL)


def test_an_empty_document_is_read_as_null(embedder):
    _, compared, _ = embedder.model.tasks.compare("the cat", [""], ScoreOptions())
    assert read(embedder, [Text("")], compared.tokenization) == framed(DEFAULT, "NULL")


@pytest.mark.parametrize("field", ["instruction", "prompt"])
def test_a_special_token_in_words_is_refused(embedder, field):
    with pytest.raises(InvalidInput, match=f"`{field}` contains the name of a special token"):
        shown(embedder, **{field: "one<|im_end|>two"}, special_names=False)


def test_an_instruction_without_punctuation_gets_a_full_stop():
    found = [
        with_instruction(one, {}, Chat("{prompt}"))[0] for one in ("a", "a ", "a。", "a$", "(a)")
    ]
    assert found == ["a.", "a.", "a。", "a$.", "(a)"]


def test_a_reranker_is_asked_in_the_authors_words(tmp_path, load_model):
    reranker = load_model(write(tmp_path / "Qwen3-VL-Reranker-2B", "reranker"), 1, 512)
    template = reranker.spec.template
    tokenization = reranker.model.tasks.score([], ScoreOptions()).tokenization
    wanted = f"{template.prefix}<Instruct>: {template.instruction}<Query>:a\n<Document>:"
    for document, said in (('"b', '"b'), ("", "NULL")):
        found = read(reranker, [Pair("a", document)], tokenization)
        assert found == wanted + said + TAIL


def test_a_config_of_transformers_4_names_the_image_encoder_as_the_model(tmp_path):
    source = write(tmp_path / "source")
    wanted, vision = outline(source).spec, {"model_type": "qwen3_vl"}
    vision = json.loads((source / "config.json").read_text())["vision_config"] | vision
    change_json(source / "config.json", vision_config=vision)
    assert outline(source).spec.config == wanted.config


def test_prompts_get_a_default(tmp_path):
    source = write(tmp_path / "source")
    (source / "config_sentence_transformers.json").unlink()
    spec, _ = converted(source)
    assert (spec.prompts, spec.default_prompt_name) == ({"default": DEFAULT}, "default")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "a chat template with a system message"),
        ("{{ messages[1].content }}", "a chat template with a system message"),
        ("{{ messages[1].content }} {{ messages[0].content }}", "a chat template with a system"),
    ],
    ids=["none", "no-system", "order"],
)
def test_other_chat_templates_are_refused(tmp_path, template, message):
    source = write(tmp_path / "source")
    (source / "chat_template.jinja").unlink()
    if template is not None:
        (source / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(UnsupportedModel, match=message):
        outline(source)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"model_type": "qwen3_vl_moe"}, UnsupportedModel, "'qwen3_vl_moe' is not supported"),
        (
            {"text_config": {"model_type": "qwen3_vl_moe_text"}},
            UnsupportedModel,
            "text_config of model_type 'qwen3_vl_moe_text' is not supported",
        ),
        ({"text_config": None}, CheckpointError, "lacks"),
        ({"text_config": {"hidden_size": "wide"}}, CheckpointError, "text_config.*hidden_size"),
    ],
    ids=["moe", "moe-text", "no-text", "damaged"],
)
def test_other_language_models_are_refused(tmp_path, config, error, message):
    with pytest.raises(error, match=message):
        outline(write(tmp_path / "source", **config))


def test_other_arguments_of_the_chat_template_are_refused(tmp_path):
    source = write(tmp_path / "source")
    kwargs = {"chat_template": {"add_vision_id": True}}
    change_json(source / "sentence_bert_config.json", processing_kwargs=kwargs)
    with pytest.raises(UnsupportedModel, match="not supported: processing_kwargs"):
        outline(source)
