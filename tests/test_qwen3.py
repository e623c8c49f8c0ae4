"""Qwen3 and Qwen2: what their configs ask for, which of them rerank, and how they are asked."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import msgspec
import numpy as np
import pytest
import sources
from test_families import damaged, unsupported
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from converters import convert, heads, outline, qwen2, qwen3
from jaxembed import checkpoint
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models import parameter_shapes, program
from jaxembed.models.tokens import PackedTokens
from jaxembed.processors.pairs import template_frame
from jaxembed.spec import DenseLayer, ModelSpec, NormalizeLayer, Pooled

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "no", "ye", "yes", END, START, STOP]
YES, NO = TOKENS.index("yes"), TOKENS.index("no")

HIDDEN, HEADS, KEY_HEADS, WIDTH, WIDE, LAYERS = 16, 4, 2, 6, 20, 2

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": len(TOKENS),
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": WIDTH,
    "intermediate_size": WIDE,
    "max_position_embeddings": 48,
    "max_window_layers": LAYERS,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
}
QWEN2 = {key: value for key, value in QWEN3.items() if key not in ("head_dim", "attention_bias")}
QWEN2 |= {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "sliding_window": 48,
    "max_window_layers": 1,
}
OWN_CODE: dict[str, Any] = {"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}

LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"

QUESTION = qwen3.RERANKER.template
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
        steps.append(
            processors.TemplateProcessing(
                single=f"$A {end}",
                pair=f"$A {end} $B {end}",
                special_tokens=[(end, TOKENS.index(end))],
            )
        )
    tokenizer.post_processor = processors.Sequence(steps)  # pyright: ignore
    return tokenizer


def tensors(config: dict[str, Any], prefix: str = "model.") -> sources.Tensors:
    """Every tensor of the language model but its head, drawn at random."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = (config[f"num_{kind}_heads"] * width for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config["vocab_size"], hidden),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            shapes[f"layers.{i}.self_attn.{name}.weight"] = (size, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"layers.{i}.self_attn.{name}.bias"] = (size,)
        if config["model_type"] == "qwen3":
            shapes |= {f"layers.{i}.self_attn.{n}_norm.weight": (width,) for n in "qk"}
        shapes[f"layers.{i}.self_attn.o_proj.weight"] = (hidden, queries)
        shapes[f"layers.{i}.mlp.gate_proj.weight"] = (wide, hidden)
        shapes[f"layers.{i}.mlp.up_proj.weight"] = (wide, hidden)
        shapes[f"layers.{i}.mlp.down_proj.weight"] = (hidden, wide)
        shapes[f"layers.{i}.input_layernorm.weight"] = (hidden,)
        shapes[f"layers.{i}.post_attention_layernorm.weight"] = (hidden,)
    draw = np.random.default_rng(0)
    return {prefix + n: draw.standard_normal(shape, np.float32) for n, shape in shapes.items()}


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


def write_embedder(folder: Path, *args: Any, pooling: str = "lasttoken", **options: Any) -> Path:
    write(folder, *args, **options)
    entries = (sources.TRANSFORMER, ""), (sources.POOLING, "1_Pooling"), (sources.NORMALIZE, "2_N")
    sources.write_modules(folder, *entries)
    sources.write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": HIDDEN, f"pooling_mode_{pooling}": True},
    )
    return folder


def write_logit_score(folder: Path, true_id: int | None = YES, false_id: int | None = NO) -> None:
    sources.write_modules(folder, (TRANSFORMER, ""), (LOGIT_SCORE, "1_LogitScore"))
    ids = {"true_token_id": true_id, "false_token_id": false_id}
    sources.write_json(folder / "1_LogitScore" / "config.json", ids)


def converted(source: Path, **options: Any) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    out = source.parent / f"{source.name}-out"
    spec = convert(source, out, progress=lambda steps: steps, **options)
    return spec, checkpoint.load_params(out, spec)


def test_an_embedder_becomes_a_checkpoint_and_its_unused_head_is_left_out(tmp_path):
    head = {"lm_head.weight": np.zeros((len(TOKENS), HIDDEN), np.float32)}
    specs = []
    for name, extra in (("with", head), ("without", {})):
        spec, params = converted(write_embedder(tmp_path / name, extra=extra))
        specs.append(spec)
        assert set(params) == set(parameter_shapes(spec))
    assert specs[0].content_hash == specs[1].content_hash
    spec = specs[0]
    assert (spec.task, spec.architecture) == ("embed", "qwen3")
    assert (spec.head.pooling, spec.head.modules) == (("lasttoken",), (NormalizeLayer(),))
    assert spec.max_input_tokens == 48
    assert spec.config["causal"]


def test_queries_keys_and_values_of_unequal_width_lie_side_by_side(tmp_path):
    source = write_embedder(tmp_path / "source")
    _, params = converted(source)
    stored = tensors(QWEN3)
    parts = [stored[f"model.layers.1.self_attn.{n}_proj.weight"].T for n in "qkv"]
    assert [part.shape[1] for part in parts] == [
        HEADS * WIDTH,
        KEY_HEADS * WIDTH,
        KEY_HEADS * WIDTH,
    ]
    qkv = params["tower.layers.1.attention.qkv.kernel"]
    np.testing.assert_array_equal(qkv, np.concatenate(parts, axis=1))


def test_the_full_size_has_as_many_parameters_as_published():
    published = {"vocab_size": 151669, "hidden_size": 1024, "num_hidden_layers": 28}
    published |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    published |= {"intermediate_size": 3072, "max_position_embeddings": 32768}
    spec = ModelSpec(
        architecture="qwen3",
        config=qwen3.config(QWEN3 | published),
        heads={"dense": Pooled(("lasttoken",))},
        max_input_tokens=32768,
        hidden_size=1024,
        dtype="bfloat16",
        source="",
        content_hash="",
    )
    count = sum(leaf.size for leaf in parameter_shapes(spec).values())
    # model.safetensors is 1191586416 bytes long, 2 to a parameter, less a header of some 30 KB
    assert 1_191_500_000 < 2 * count < 1_191_586_416


def test_configs_of_transformers_4_and_5_say_the_same():
    old = {key: value for key, value in QWEN3.items() if key not in ("rope_theta", "rope_scaling")}
    new = old | {"rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"}}
    new |= {"layer_types": ["full_attention"] * LAYERS, "dtype": "float32"}
    assert qwen3.config(new) == qwen3.config(QWEN3)
    assert qwen3.config(QWEN3 | {"rope_scaling": {"type": "default"}}) == qwen3.config(QWEN3)
    assert qwen3.config(old)["rope_theta"] == 10_000.0


def test_what_qwen2_and_qwen3_differ_in():
    second, third = qwen2.config(QWEN2), qwen3.config(QWEN3)
    assert {key for key in third if second[key] != third[key]} == {
        "head_width",
        "qkv_bias",
        "qk_norm",
    }
    assert (second["head_width"], third["head_width"]) == (HIDDEN // HEADS, WIDTH)
    assert qwen3.config({k: v for k, v in QWEN3.items() if k != "head_dim"})["head_width"] == 128
    biased = qwen3.config(QWEN3 | {"attention_bias": True})
    assert biased["qkv_bias"]
    assert biased["out_bias"]


@pytest.mark.parametrize(
    ("config", "said", "error", "message"),
    [
        (QWEN3, *unsupported("rope_type 'ntk'", rope_scaling={"rope_type": "ntk", "factor": 4.0})),
        (QWEN3, *unsupported("tial_rotary_fa", rope_parameters={"partial_rotary_factor": 0.5})),
        (QWEN3, *unsupported("layer_types chunked", layer_types=["chunked_attention"] * 2)),
        (QWEN3, *unsupported("ForTokenClass", architectures=["Qwen3ForTokenClassification"])),
        (QWEN3, *unsupported(hidden_act="mish")),
        (QWEN3, *unsupported(model_type="qwen3_moe")),
        (QWEN3, *unsupported("modeling_qwen.Qwen2Model", **OWN_CODE)),
        (QWEN2, *unsupported("its own code .*oth", auto_map={"AutoModel": "other.Qwen2Model"})),
        (QWEN3, *damaged("attention_heads 4 is not a multiple of", num_key_value_heads=3)),
        (QWEN2, *damaged("lacks num_key_value_heads", num_key_value_heads=None)),
        (QWEN2, *damaged("hidden_size 16 is not a multiple", num_attention_heads=6)),
        (QWEN3, *damaged("heads are 7 wide; wanted an even number", head_dim=7)),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_by_name_before_weights_are_read(
    config, said, error, message, tmp_path
):
    sources.write_json(tmp_path / "config.json", config | said)
    with pytest.raises(error, match=message):
        outline(tmp_path)


def hidden_states(spec: ModelSpec, params: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    row = jax.numpy.array([ids])
    zero = jax.numpy.zeros_like(row)
    tokens = PackedTokens(row, jax.numpy.arange(len(ids))[None], zero + 1, zero, zero + 1)
    planes = jax.numpy.stack([tokens.ids, tokens.positions, *(zero + 1, zero, zero + 1)])
    model = program(spec)
    forward = jax.jit(model.forward, static_argnums=(2, 3))
    return np.asarray(forward(model.order(params), planes, 1, ("tokens",))["tokens"][0])


@pytest.mark.parametrize(
    ("config", "fields", "causal"),
    [
        (QWEN3, {}, True),
        (QWEN2, {}, True),
        (QWEN2, {"is_causal": None}, True),
        (QWEN2, {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}, True),
        (QWEN2, {"is_causal": False}, False),
        (QWEN2, OWN_CODE, False),  # stella, whose config says nothing of it
        (QWEN2, OWN_CODE | {"is_causal": False}, False),  # gte-Qwen2
    ],
)
def test_the_config_says_whether_a_model_is_bidirectional(tmp_path, config, fields, causal):
    spec = outline(write_embedder(tmp_path / "source", config, **fields)).spec
    assert spec.config["causal"] == causal


@pytest.mark.parametrize("causal", [True, False])
def test_a_token_sees_those_after_it_only_where_the_model_is_bidirectional(tmp_path, causal):
    spec, params = converted(write_embedder(tmp_path / "source", QWEN2, is_causal=causal))
    first, second = (hidden_states(spec, params, [5, 6, 7, last]) for last in (8, 9))
    assert np.array_equal(first[:3], second[:3]) == causal
    assert not np.allclose(first[3], second[3])


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


def test_dense_path_chooses_the_width_of_stella(tmp_path):
    source = write_embedder(tmp_path / "stella", QWEN2, **OWN_CODE, pooling="mean_tokens")
    entries = (sources.TRANSFORMER, ""), (sources.POOLING, "1_Pooling"), (sources.DENSE, "2_Dense")
    sources.write_modules(source, *entries)
    identity: dict[str, Any] = {"activation_function": "torch.nn.modules.linear.Identity"}
    sources.write_dense(source / "2_Dense", HIDDEN, 30, **identity)
    stored = sources.write_dense(source / "2_Dense_5", HIDDEN, 5, **identity)
    spec, params = converted(source, dense_path="2_Dense_5")
    assert (spec.head.pooling, spec.dim) == (("mean",), 5)
    np.testing.assert_array_equal(params["heads.dense.modules.0.kernel"], stored["linear.weight"].T)


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
        assert (
            read.encode(text, add_special_tokens=False).ids
            == tokenizer.encode(text).ids[: len(ended.encode(text).ids) - 1]
        )
    assert read.encode("yes", "no").ids == [YES, TOKENS.index(END), NO, TOKENS.index(END)]


def test_an_end_that_is_no_token_is_an_error(tmp_path):
    source = write_embedder(tmp_path / "source", QWEN2)
    options = {"add_eos_token": True, "eos_token": "</s>"}
    sources.change_json(source / "tokenizer_config.json", **options)
    with pytest.raises(CheckpointError, match="there is no token '</s>'"):
        converted(source)


def test_without_that_setting_the_tokenizer_is_kept_to_the_byte(tmp_path):
    source = write_embedder(tmp_path / "source")
    converted(source)
    stored = (source / "tokenizer.json").read_bytes()
    assert checkpoint.tokenizer_path(tmp_path / "source-out").read_bytes() == stored


@pytest.mark.parametrize(
    ("folder", "name", "readme"),
    [
        ("my-Qwen3-Reranker-copy", None, None),
        ("abc123", "Qwen/Qwen3-Reranker-0.6B", None),
        ("copy", None, f'prefix = "{qwen3.RERANKER.quote} Note that"'),
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
    np.testing.assert_array_equal(
        params["heads.logits.modules.0.kernel"][:, 0], table[YES] - table[NO]
    )
    np.testing.assert_array_equal(params["tower.embeddings.word.embedding"], table)


def test_the_difference_of_rows_is_not_rounded_to_bfloat16(tmp_path):
    source = write(tmp_path / "Qwen3-Reranker")
    stored = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors(QWEN3).items()}
    sources.write_weights(source, stored)
    spec, params = converted(source)
    assert spec.dtype == "bfloat16"
    table = stored["model.embed_tokens.weight"].astype(np.float32)
    kernel = params["heads.logits.modules.0.kernel"]
    assert kernel.dtype == np.float32
    np.testing.assert_array_equal(kernel[:, 0], table[YES] - table[NO])


def test_an_untied_head_gives_the_rows(tmp_path):
    head = np.random.default_rng(3).standard_normal((len(TOKENS), HIDDEN), np.float32)
    extra = {"lm_head.weight": head}
    source = write(tmp_path / "Qwen3-Reranker", extra=extra, tie_word_embeddings=False)
    _, params = converted(source)
    np.testing.assert_array_equal(
        params["heads.logits.modules.0.kernel"][:, 0], head[YES] - head[NO]
    )


def test_mxbai_rerank_is_told_by_its_name_and_answers_with_a_digit(tmp_path):
    source = write(tmp_path / "mxbai-rerank-base-v2", QWEN2)
    spec, params = converted(source)
    assert spec.template == qwen2.RERANKER.template
    assert spec.template.query_share == 0.75
    table = tensors(QWEN2)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(
        params["heads.logits.modules.0.kernel"][:, 0],
        table[TOKENS.index("1")] - table[TOKENS.index("0")],
    )


def test_mxbai_reranks_as_its_authors_ask_also_where_a_chat_template_cannot_be_cut(tmp_path):
    """Its parts, as its library joins their ids."""
    source = write(tmp_path / "mxbai-rerank-large-v2", QWEN2)
    uncut = CHAT.replace("<|im_end|>", "\nIs it?<|im_end|>", 2)
    (source / "chat_template.jinja").write_text(uncut)
    spec = outline(source).spec
    assert spec.template is not None
    tokenizer = byte_tokenizer()
    frame = template_frame(spec.template, lambda text: tokenizer.encode(text).ids)
    parts = [frame.first("what?", None), frame.second("The end.")]
    got, _ = frame.join(*(np.array(tokenizer.encode(part).ids, np.int32) for part in parts))
    parts = [
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\n",
        "query: what?",
        "\n",
        "document: The end.",
        "\n",
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
    np.testing.assert_array_equal(
        params["heads.logits.modules.0.kernel"][:, 0], table[7] - table[9]
    )
    assert spec.template is not None
    assert msgspec.structs.asdict(spec.template) == {
        "prefix": "<|im_start|>system\nIs it so?<|im_end|>\n<|im_start|>user\n",
        "first": "Task: {instruction}\nQuery = {query}\nDocument =",
        "second": " {document}",
        "suffix": "<|im_end|>",  # jinja2 drops a last newline
        "instruction": "search",
        "query_share": 1.0,
    }


@pytest.mark.slow
def test_templates_and_readmes_are_utf_8_in_any_locale(tmp_path):
    source = write(tmp_path / "source")
    (source / "README.md").write_text(f"é {qwen3.RERANKER.quote}", encoding="utf-8")
    (source / "chat_template.jinja").write_text(f"{{# é #}}{TALK}", encoding="utf-8")
    code = (
        "import sys; from pathlib import Path; from converters import qwen3, rerankers;"
        "assert rerankers.template_of(Path(sys.argv[1]), 'copy', qwen3) == qwen3.RERANKER.template"
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


def test_qwen3_rerankers_may_have_a_chat_template_for_talk(tmp_path):
    source = write(tmp_path / "Qwen3-Reranker-0.6B")
    sources.change_json(source / "tokenizer_config.json", chat_template=TALK)
    assert outline(source).spec.template == QUESTION


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
    with pytest.raises(UnsupportedModel, match="takes no query and document"):
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
    write_logit_score(source, false_id=None)
    with pytest.raises(UnsupportedModel, match="without false_token_id"):
        converted(source)
    write_logit_score(source, false_id=len(TOKENS))
    with pytest.raises(CheckpointError, match=f"wanted two ids below {len(TOKENS)}"):
        converted(source)


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
    warned = f"{name} is a language model that scores pairs, and nothing says how" in caplog.text
    assert warned == (labels == 1 and template is None)
    assert spec.head.pooling == ("lasttoken",)
    np.testing.assert_array_equal(params["heads.logits.modules.0.kernel"], score.T)


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


def test_the_template_for_pairs_has_its_placeholders():
    assert json.dumps(QUESTION.first).count("{") == 2
    filled = QUESTION.first.format(instruction="i", query="q") + QUESTION.second.format(
        document="d"
    )
    assert filled == "<Instruct>: i\n<Query>: q\n<Document>: d"
