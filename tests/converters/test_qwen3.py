"""Qwen3 and Qwen2: what their configs ask for, which of them rerank, and how they are asked."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sources
from sources import converted
from test_families import config_of, golden
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from converters import heads, outline
from converters.families import qwen3
from jaxembed.checkpoints import checkpoint
from jaxembed.data.spec import DenseLayer
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.preprocessing.pairs import template_frame

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "no", "ye", "yes", END, START, STOP]
YES, NO = TOKENS.index("yes"), TOKENS.index("no")

HIDDEN = 16


def of_golden(name: str, **said: Any) -> dict[str, Any]:
    """The config of a golden with the tokens here, as a language model."""
    sizes = {"vocab_size": len(TOKENS), "tie_word_embeddings": True}
    return config_of(name) | sizes | said


QWEN3 = of_golden("qwen3_lasttoken")
QWEN2 = of_golden("qwen2_lasttoken", architectures=["Qwen2ForCausalLM"])
OWN_CODE: dict[str, Any] = {"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}

LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"

KERNEL = "heads.logits.modules.0.kernel"
QUESTION = qwen3.FAMILY.reranker.template
CHAT = (
    "<|im_start|>system\nIs it so?<|im_end|>\n<|im_start|>user\n"
    "Task: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first"
    " | default('search') }}\n"
    "Query = {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    "\nDocument = "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    "<|im_end|>\n"
)
TALK = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


def byte_tokenizer(end: str | None = None) -> Tokenizer:
    """Bytes, "yes" and "no" and three special tokens, as Qwen's; `end` is put after each text."""
    vocabulary = {token: number for number, token in enumerate(TOKENS[:-3])}
    merges = [("n", "o"), ("y", "e"), ("ye", "s")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.add_special_tokens([END, START, STOP])
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)]
    if end is not None:
        texts = f"$A {end}", f"$A {end} $B {end}"
        steps.append(processors.TemplateProcessing(*texts, [(end, TOKENS.index(end))]))
    tokenizer.post_processor = processors.Sequence(steps)  # pyright: ignore
    return tokenizer


def tensors(config: dict[str, Any]) -> sources.Tensors:
    """Every tensor of the language model but its head."""
    named = {}
    for key, array in golden(f"{config['model_type']}_lasttoken").items():
        kind, _, name = key.partition(":")
        if kind == "tensors/model.safetensors" and name != "lm_head.weight":
            rows = array[: len(TOKENS)] if "embed_tokens" in name else array
            named[f"model.{name.removeprefix('model.')}"] = rows.copy()
    return named


def write(
    folder: Path,
    config: dict[str, Any] = QWEN3,
    *,
    tokenizer: Tokenizer | None = None,
    extra: sources.Tensors | None = None,
    **fields: Any,
) -> Path:
    """A plain transformers directory, as published."""
    sources.write_json(folder / "config.json", config | fields)
    (tokenizer or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    sources.write_json(folder / "tokenizer_config.json", {"model_max_length": 131072})
    sources.write_weights(folder, tensors(config | fields) | (extra or {}))
    return folder


def write_embedder(folder: Path, *args: Any, **options: Any) -> Path:
    write(folder, *args, **options)
    entries = (sources.TRANSFORMER, ""), (sources.POOLING, "1_Pooling"), (sources.NORMALIZE, "2_N")
    sources.write_modules(folder, *entries)
    said = {"word_embedding_dimension": HIDDEN, "pooling_mode_lasttoken": True}
    sources.write_json(folder / "1_Pooling" / "config.json", said)
    return folder


def write_logit_score(folder: Path, true_id: int | None = YES, false_id: int | None = NO) -> None:
    sources.write_modules(folder, (TRANSFORMER, ""), (LOGIT_SCORE, "1_LogitScore"))
    ids = {"true_token_id": true_id, "false_token_id": false_id}
    sources.write_json(folder / "1_LogitScore" / "config.json", ids)


@pytest.mark.parametrize(
    ("use", "whole"), [("SequenceClassification", True), ("CausalLM", True), ("CausalLM", False)]
)
def test_own_code_is_known_for_embedders_only(tmp_path, use, whole):
    """As gte-Qwen2's, which names every class of its file."""
    entry = {f"AutoModelFor{use}": f"modeling_qwen.Qwen2For{use}"}
    code: dict[str, Any] = {"auto_map": OWN_CODE["auto_map"] | entry if whole else entry}
    source = write(tmp_path / "scorer", QWEN2, **code, architectures=[f"Qwen2For{use}"])
    if use == "CausalLM":
        write_logit_score(source)
    with pytest.raises(UnsupportedModel, match=r"own code .*modeling_qwen\.Qwen2"):
        outline(source)
    source = write_embedder(tmp_path / "embedder", QWEN2, **code)
    assert outline(source).spec.config["causal"] != whole


@pytest.mark.parametrize("end", [None, END])
def test_the_end_that_a_config_adds_is_added_once(tmp_path, end):
    tokenizer = byte_tokenizer(end)
    source = write_embedder(tmp_path / "source", QWEN2, tokenizer=tokenizer)
    options = {"add_eos_token": True, "eos_token": {"content": END}}
    sources.change_json(source / "tokenizer_config.json", **options)
    converted(source)
    read = Tokenizer.from_file(str(checkpoint.tokenizer_path(tmp_path / "source-out")))
    ended = byte_tokenizer(END)
    for text in ("yes and no", "", "é🙂"):
        assert read.encode(text).ids == ended.encode(text).ids
        plain = read.encode(text, add_special_tokens=False).ids
        assert plain == ended.encode(text, add_special_tokens=False).ids
    assert read.encode("yes", "no").ids == [YES, TOKENS.index(END), NO, TOKENS.index(END)]


def test_an_end_that_is_no_token_is_an_error(tmp_path):
    source = write_embedder(tmp_path / "source", QWEN2)
    path = source / "tokenizer_config.json"
    sources.change_json(path, add_eos_token=True, eos_token="</s>")
    with pytest.raises(CheckpointError, match="the tokenizer has no token '</s>'"):
        converted(source)


@pytest.mark.parametrize(
    ("folder", "name", "readme"),
    [
        ("my-Qwen3-Reranker-copy", None, None),
        ("abc123", "Qwen/Qwen3-Reranker-0.6B", None),
        ("copy", None, f'prefix = "{qwen3.FAMILY.reranker.quote} Note that"'),
    ],
)
def test_a_qwen3_reranker_is_told_by_its_name_or_its_readme(tmp_path, caplog, folder, name, readme):
    source = write(tmp_path / folder)
    if readme is not None:
        (source / "README.md").write_text(readme)
    with caplog.at_level(logging.INFO):
        spec, params = converted(source, name=name)
    assert "pairs are put into the template of qwen3-reranker" in caplog.text
    assert (spec.task, spec.labels, spec.score_function) == ("rerank", ("yes",), "sigmoid")
    assert spec.template == QUESTION
    assert spec.head.pooling == ("lasttoken",)
    plain = DenseLayer(in_features=HIDDEN, out_features=1, bias=False, activation="identity")
    assert spec.head.modules == (plain,)
    table = tensors(QWEN3)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(params[KERNEL][:, 0], table[YES] - table[NO])
    np.testing.assert_array_equal(params["tower.embeddings.word.embedding"], table)


def test_an_untied_head_gives_the_rows(tmp_path):
    head = np.random.default_rng(3).standard_normal((len(TOKENS), HIDDEN), np.float32)
    extra = {"lm_head.weight": head}
    source = write(tmp_path / "Qwen3-Reranker", extra=extra, tie_word_embeddings=False)
    _, params = converted(source)
    np.testing.assert_array_equal(params[KERNEL][:, 0], head[YES] - head[NO])


def test_mxbai_reranks_as_its_authors_ask_also_where_a_chat_template_cannot_be_cut(tmp_path):
    """Its parts, as its library joins their ids."""
    source = write(tmp_path / "mxbai-rerank-large-v2", QWEN2)
    uncut = CHAT.replace("<|im_end|>", "\nIs it?<|im_end|>", 2)
    (source / "chat_template.jinja").write_text(uncut)
    spec, params = converted(source)
    assert spec.template is not None
    assert spec.template.query_share == 0.75
    table = tensors(QWEN2)["model.embed_tokens.weight"]
    answers = table[TOKENS.index("1")] - table[TOKENS.index("0")]
    np.testing.assert_array_equal(params[KERNEL][:, 0], answers)
    tokenizer = byte_tokenizer()
    frame = template_frame(spec.template, lambda text: tokenizer.encode(text).ids)
    parts = [frame.first("what?", None), frame.second("The end.")]
    got, _ = frame.join(*(np.array(tokenizer.encode(part).ids, np.int32) for part in parts))
    parts = [
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\n",
        *("query: what?", "\n", "document: The end.", "\n"),
        "You are a search relevance expert who evaluates how well documents match search queries. "
        "For each query-document pair, carefully analyze the semantic relationship between them, "
        "then provide your binary relevance judgment (0 for not relevant, 1 for relevant).\n"
        "Relevance:",
        "<|im_end|>\n<|im_start|>assistant\n",
    ]
    wanted = [number for part in parts for number in tokenizer.encode(part).ids]
    assert got.tolist() == wanted
    assert not spec.template.takes_instruction


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (QWEN3, "Qwen/Qwen3-0.6B"),
        (QWEN3, "someone/other-reranker"),  # asked in a way of its own, which nothing tells
        (QWEN2, "someone/Qwen3-Reranker"),  # not of that family
    ],
)
def test_a_language_model_that_nothing_calls_a_reranker_is_refused(tmp_path, config, name):
    (tmp_path / "abc").mkdir()
    source = write(tmp_path / "abc", config)
    (source / "model.safetensors").unlink()
    (source / "README.md").write_text("---\npipeline_tag: text-ranking\n---\n")
    (source / "chat_template.jinja").write_text(CHAT)  # says how it is asked, not how it answers
    with pytest.raises(UnsupportedModel, match=f"{name} is a language model, and nothing says"):
        converted(source, name=name)


def test_logit_score_and_a_chat_template_say_how_a_pair_is_asked(tmp_path, caplog):
    source = write(tmp_path / "source", QWEN2)
    write_logit_score(source, true_id=7, false_id=9)
    (source / "chat_template.jinja").write_text(CHAT)
    with caplog.at_level(logging.INFO):
        spec, params = converted(source)
    assert "pairs are put into its chat template" in caplog.text
    table = tensors(QWEN2)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(params[KERNEL][:, 0], table[7] - table[9])
    assert spec.template is not None
    assert msgspec.structs.asdict(spec.template) == {
        "prefix": "<|im_start|>system\nIs it so?<|im_end|>\n<|im_start|>user\n",
        "first": "Task: {instruction}\nQuery = {query}\nDocument =",
        "second": " {document}",
        "separator": "",
        "empty": "",
        "suffix": "<|im_end|>",  # jinja2 drops a last newline
        "instruction": "search",
        "query_share": 1.0,
        "document_first": False,
        "end_ids": (),
    }


@pytest.mark.slow
def test_templates_and_readmes_are_utf_8_in_any_locale(tmp_path):
    source = write(tmp_path / "source")
    (source / "README.md").write_text(f"é {qwen3.FAMILY.reranker.quote}", encoding="utf-8")
    (source / "chat_template.jinja").write_text(f"{{# é #}}{TALK}", encoding="utf-8")
    code = (
        "import sys; from pathlib import Path; from converters.families.qwen3 import FAMILY;"
        "from converters.features.scores import template_of;"
        "assert template_of(Path(sys.argv[1]), 'copy', FAMILY) == FAMILY.reranker.template"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source)],
        env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_the_default_prompt_is_the_instruction(tmp_path):
    source = write(tmp_path / "source")
    write_logit_score(source)
    sources.change_json(source / "tokenizer_config.json", chat_template=CHAT)
    prompts = {"prompts": {"law": "find the law"}, "default_prompt_name": "law"}
    sources.write_json(source / "config_sentence_transformers.json", prompts)
    spec = outline(source).spec
    assert spec.template is not None
    assert spec.template.instruction == "find the law"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Document = ", "Document ="),  # may merge with what follows it
        ("<|im_end|>\n", "\nWell?<|im_end|>\n"),  # may merge with what stands before it
        ("Task: ", "{Task}: "),
        ("Task: {{", "{{ messages[1].content }} {{"),  # the query twice
    ],
)
def test_a_chat_template_that_cannot_be_cut_at_tokens_is_refused(tmp_path, old, new):
    source = write(tmp_path / "source")
    write_logit_score(source)
    head, _, tail = CHAT.rpartition(old)
    (source / "chat_template.jinja").write_text(head + new + tail)
    with pytest.raises(UnsupportedModel, match="the chat template is not supported; wanted"):
        converted(source)


@pytest.mark.parametrize("template", [None, CHAT])
def test_logit_score_without_messages_takes_pairs_as_they_are(tmp_path, template):
    source = write(tmp_path / "source")
    write_logit_score(source)
    if template is not None:
        sources.change_json(source / "tokenizer_config.json", chat_template=template)
        modality = {"modality_config": {"text": {"method": "forward"}}}
        sources.write_json(source / "sentence_bert_config.json", modality)
    spec = outline(source).spec
    assert (spec.task, spec.template) == ("rerank", None)


def test_logit_score_with_a_chat_template_for_talk_is_refused(tmp_path):
    source = write(tmp_path / "source")
    write_logit_score(source)
    sources.change_json(source / "tokenizer_config.json", chat_template=TALK)
    modality = {"modality_config": {"text": {}, "message": {"method": "forward"}}}
    sources.write_json(source / "sentence_bert_config.json", modality)
    with pytest.raises(UnsupportedModel, match="does not take a query and a document"):
        converted(source)


def test_an_embedder_that_puts_texts_into_a_chat_template_is_refused(tmp_path):
    source = write_embedder(tmp_path / "source")
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    path = source / "sentence_bert_config.json"
    sources.write_json(path, {"modality_config": {"text": text}})
    assert list(heads.read_layout(source, HIDDEN).heads) == ["dense"]
    sources.write_json(path, {"modality_config": {"text": text, "message": text}})
    with pytest.raises(UnsupportedModel, match="texts are put into a chat template"):
        heads.read_layout(source, HIDDEN)


def test_ids_of_logit_score_are_checked(tmp_path):
    source = write(tmp_path / "source")
    write_logit_score(source, false_id=len(TOKENS))
    with pytest.raises(CheckpointError, match=f"wanted ids below {len(TOKENS)}"):
        converted(source)


def test_without_false_token_id_the_score_is_the_logit_of_one_answer(tmp_path):
    source = write(tmp_path / "source")
    write_logit_score(source, false_id=None)
    _, parameters = converted(source)
    table = parameters["tower.embeddings.word.embedding"]
    np.testing.assert_array_equal(parameters[KERNEL][:, 0], table[YES])


@pytest.mark.parametrize(
    ("name", "labels", "template"),
    [
        ("tomaarsen/Qwen3-Reranker-0.6B-seq-cls", 1, QUESTION),
        ("someone/scorer", 1, None),
        ("someone/Qwen3-Reranker-topics", 3, None),
    ],
)
def test_a_converted_reranker_is_asked_as_the_original_is(tmp_path, caplog, name, labels, template):
    score = np.random.default_rng(3).standard_normal((labels, HIDDEN), np.float32)
    source = write(
        tmp_path / "source",
        architectures=["Qwen3ForSequenceClassification"],
        extra={"score.weight": score},
        id2label={str(n): f"LABEL_{n}" for n in range(labels)},
    )
    spec, params = converted(source, name=name)
    assert spec.template == template
    assert spec.task == ("rerank" if labels == 1 else "classify")
    warning = f"{name} is a language model that scores pairs, and its files have no template"
    assert (warning in caplog.text) == (labels == 1 and template is None)
    assert spec.head.pooling == ("lasttoken",)
    np.testing.assert_array_equal(params[KERNEL], score.T)


def test_a_classifier_that_would_score_the_token_before_the_last_is_refused(tmp_path):
    source = write(
        tmp_path / "source",
        tokenizer=byte_tokenizer(END),
        architectures=["Qwen3ForSequenceClassification"],
        extra={"score.weight": np.zeros((2, HIDDEN), np.float32)},
        pad_token_id=TOKENS.index(END),
    )
    with pytest.raises(UnsupportedModel, match="ends texts with pad_token_id"):
        converted(source)
    (source / "tokenizer.json").unlink()  # one that is to be built is not looked at
    with pytest.raises(CheckpointError, match="no tokenizer in"):
        converted(source)
