"""Conversion from tiny Hugging Face directories: what goes where, and what is refused."""

import logging
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import sources
from safetensors.numpy import save_file

import converters
from converters import bert, convert, heads, outline, tokenizer, weights
from converters.weights import Rule
from jaxembed import checkpoint
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel
from jaxembed.models import parameter_shapes
from jaxembed.spec import DenseLayer, ModelSpec, NormalizeLayer


def silent(steps):
    return steps


def converted(source: Path, **options: Any) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    out = source.parent / f"{source.name}-out"
    spec = convert(source, out, progress=silent, **options)
    return spec, checkpoint.load_params(out, spec)


@pytest.fixture(name="source")
def _source(tmp_path) -> Path:
    return sources.write_sentence_bert(tmp_path / "source")


def test_a_sentence_bert_becomes_a_checkpoint(source):
    spec, params = converted(source, name="me/tiny", revision="abc")
    assert (spec.source, spec.revision, spec.architecture) == ("me/tiny", "abc", "bert")
    assert spec.head.pooling == ("mean",)
    assert spec.head.modules == (NormalizeLayer(),)
    assert spec.max_input_tokens == 16
    assert spec.hidden_size == spec.dim == sources.HIDDEN
    assert len(spec.content_hash) == 64
    out = source.parent / "source-out"
    assert checkpoint.load_spec(out) == spec
    assert checkpoint.tokenizer_path(out).read_bytes() == (source / "tokenizer.json").read_bytes()
    shapes = {name: leaf.shape for name, leaf in parameter_shapes(spec).items()}
    assert {name: array.shape for name, array in params.items()} == shapes


def test_each_tensor_lands_where_it_belongs(source):
    _, params = converted(source)
    tensors = sources.bert_tensors()
    layer, tower = "encoder.layer.1", "tower.layers.1"
    qkv = [f"{layer}.attention.self.{name}" for name in ("query", "key", "value")]
    wanted = {
        "tower.embeddings.word.embedding": tensors["embeddings.word_embeddings.weight"],
        "tower.embeddings.type.embedding": tensors["embeddings.token_type_embeddings.weight"],
        "tower.embeddings.norm.scale": tensors["embeddings.LayerNorm.weight"],
        f"{tower}.attention.qkv.kernel": np.hstack([tensors[f"{q}.weight"].T for q in qkv]),
        f"{tower}.attention.qkv.bias": np.hstack([tensors[f"{q}.bias"] for q in qkv]),
        f"{tower}.attention_norm.bias": tensors[f"{layer}.attention.output.LayerNorm.bias"],
        f"{tower}.mlp.up.kernel": tensors[f"{layer}.intermediate.dense.weight"].T,
        f"{tower}.mlp.down.bias": tensors[f"{layer}.output.dense.bias"],
        f"{tower}.mlp_norm.scale": tensors[f"{layer}.output.LayerNorm.weight"],
    }
    for name, array in wanted.items():
        np.testing.assert_array_equal(params[name], array, err_msg=name)


def _old_norms(name: str) -> str:
    renamed = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    return renamed.replace("LayerNorm.bias", "LayerNorm.beta")


@pytest.mark.parametrize(
    "options",
    [
        {"rename": lambda name: f"bert.{name}"},
        {"rename": _old_norms},
        {"rename": lambda name: f"bert.{_old_norms(name)}", "shards": 2},
    ],
    ids=["prefix", "gamma and beta", "both, sharded"],
)
def test_spellings_give_the_same_checkpoint(source, tmp_path, options):
    other = sources.write_sentence_bert(tmp_path / "other", **options)
    assert converted(other)[0].content_hash == converted(source)[0].content_hash


def test_named_tensors_are_ignored(tmp_path):
    extra = {
        "embeddings.position_ids": np.arange(sources.POSITIONS)[None],
        "pooler.dense.weight": np.ones((8, 8), np.float32),
        "cls.predictions.bias": np.ones(11, np.float32),
    }
    tensors = sources.bert_tensors() | extra
    converted(sources.write_sentence_bert(tmp_path / "source", tensors=tensors))


def test_every_missing_unused_and_wrongly_shaped_tensor_is_listed(tmp_path):
    tensors = sources.bert_tensors()
    del tensors["embeddings.LayerNorm.bias"]
    del tensors["encoder.layer.0.attention.self.key.weight"]
    tensors["adapter.weight"] = np.ones(3, np.float32)
    tensors["encoder.layer.2.output.dense.bias"] = np.ones(8, np.float32)
    tensors["encoder.layer.1.attention.self.query.weight"] = np.ones((4, 8), np.float32)
    tensors["embeddings.word_embeddings.weight"] = np.ones((8, 10), np.float32)
    tensors["encoder.layer.0.output.dense.bias"] = np.ones(8, np.float64)
    source = sources.write_sentence_bert(tmp_path / "source", tensors=tensors)
    with pytest.raises(ConversionError) as caught:
        convert(source, tmp_path / "out")
    assert sorted(caught.value.problems) == [
        "embeddings.word_embeddings.weight: wanted shape (11, 8), got (8, 10)",
        "encoder.layer.0.output.dense.bias: wanted one of float32, float16, bfloat16, got float64",
        "encoder.layer.1.attention.self.query.weight (4, 8), "
        "encoder.layer.1.attention.self.key.weight (8, 8), "
        "encoder.layer.1.attention.self.value.weight (8, 8): wanted shape (24, 8) together",
        "missing: embeddings.LayerNorm.bias",
        "missing: encoder.layer.0.attention.self.key.weight",
        "unused: adapter.weight",
        "unused: encoder.layer.2.output.dense.bias",
    ]


def test_two_tensors_of_one_name_are_listed(tmp_path):
    tensors = sources.bert_tensors()
    tensors["bert.embeddings.LayerNorm.gamma"] = tensors["embeddings.LayerNorm.weight"].copy()
    source = sources.write_sentence_bert(tmp_path / "source", tensors=tensors)
    with pytest.raises(ConversionError, match=r"both .* and .* stand for embeddings.LayerNorm.wei"):
        convert(source, tmp_path / "out")


def test_a_parameter_without_a_rule_is_our_bug():
    with pytest.raises(ConversionError, match=r"no rule fills b\. This is a bug in jaxembed"):
        weights.plan_steps("model", [Rule("x", "a")], [], {}, {"a": (1,), "b": (1,)})


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_sources_keep_their_bits(tmp_path, dtype):
    tensors = {name: array.astype(dtype) for name, array in sources.bert_tensors().items()}
    source = sources.write_sentence_bert(tmp_path / "source", tensors=tensors)
    spec, params = converted(source)
    assert spec.dtype == np.dtype(dtype).name
    assert {array.dtype for array in params.values()} == {np.dtype(dtype)}
    name = "encoder.layer.0.output.dense.weight"
    got = params["tower.layers.0.mlp.down.kernel"].T
    np.testing.assert_array_equal(got.view(np.uint16), tensors[name].view(np.uint16))


def test_parts_of_one_parameter_must_share_a_dtype(tmp_path):
    tensors = sources.bert_tensors()
    name = "encoder.layer.0.attention.self.key.bias"
    tensors[name] = tensors[name].astype(np.float16)
    source = sources.write_sentence_bert(tmp_path / "source", tensors=tensors)
    with pytest.raises(ConversionError, match="must share a dtype"):
        convert(source, tmp_path / "out")


def _with_dense(source: Path) -> dict[str, dict[str, np.ndarray]]:
    sources.write_modules(
        source,
        (sources.TRANSFORMER, ""),
        (sources.POOLING, "1_Pooling"),
        (sources.DENSE, "2_Dense"),
        ("sentence_transformers.base.modules.dense.Dense", "3_Dense"),
        ("sentence_transformers.base.modules.normalize.Normalize", "4_Normalize"),
    )
    gelu = "torch.nn.modules.activation.GELU"
    return {
        "2_Dense": sources.write_dense(source / "2_Dense", 8, 6, bias=False),
        "3_Dense": sources.write_dense(source / "3_Dense", 6, 4, activation_function=gelu),
    }


def test_dense_modules_are_part_of_the_checkpoint(source):
    tensors = _with_dense(source)
    spec, params = converted(source)
    assert spec.head.modules == (
        DenseLayer(in_features=8, out_features=6, bias=False, activation="tanh"),
        DenseLayer(in_features=6, out_features=4, activation="gelu"),
        NormalizeLayer(),
    )
    assert spec.dim == 4
    kernel = tensors["2_Dense"]["linear.weight"].T
    np.testing.assert_array_equal(params["heads.dense.modules.0.kernel"], kernel)
    assert "heads.dense.modules.0.bias" not in params
    np.testing.assert_array_equal(
        params["heads.dense.modules.1.bias"], tensors["3_Dense"]["linear.bias"]
    )


def test_a_dense_bias_that_its_config_denies_is_listed(source):
    _with_dense(source)
    sources.change_json(source / "3_Dense" / "config.json", bias=False)
    with pytest.raises(ConversionError, match=r"unused: 3_Dense/linear\.bias"):
        converted(source)


def test_dense_widths_must_follow_each_other(source):
    _with_dense(source)
    sources.write_dense(source / "3_Dense", 8, 4)
    with pytest.raises(CheckpointError, match="wants 8 features and is given 6"):
        converted(source)


def test_dense_path_takes_the_place_of_the_only_dense(source):
    sources.write_modules(
        source,
        (sources.TRANSFORMER, ""),
        (sources.POOLING, "1_Pooling"),
        (sources.DENSE, "2_Dense"),
    )
    sources.write_dense(source / "2_Dense", 8, 4)
    sources.write_dense(source / "2_Dense_12", 8, 12)
    assert converters.weight_folders(source, "2_Dense_12") == ["", "2_Dense_12"]
    assert outline(source, dense_path="2_Dense_12").spec.dim == 12


def test_dense_path_without_one_dense_is_refused(source):
    with pytest.raises(CheckpointError, match="has 0; leave it out"):
        converted(source, dense_path="2_Dense")
    _with_dense(source)
    with pytest.raises(CheckpointError, match="has 2; leave it out"):
        converted(source, dense_path="2_Dense")


def _pooling(source: Path, **config: Any) -> None:
    sources.write_json(source / "1_Pooling" / "config.json", config)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True}, ("max", "lasttoken")),
        ({"pooling_mode_mean_tokens": False}, ("mean",)),
        ({"pooling_mode": "weightedmean", "embedding_dimension": 8}, ("weightedmean",)),
        ({"pooling_mode": ["mean", "cls"]}, ("mean", "cls")),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, ("mean_sqrt_len",)),
    ],
)
def test_poolings_in_both_spellings(source, config, wanted):
    _pooling(source, **config)
    spec = outline(source).spec
    assert spec.head.pooling == wanted
    assert spec.dim == 8 * len(wanted)
    assert spec.include_prompt


def test_prompts_and_their_defaults(source):
    _pooling(source, pooling_mode_mean_tokens=True, include_prompt=False)
    prompts = {"query": "find: ", "document": None}
    path = source / "config_sentence_transformers.json"
    sources.write_json(path, {"prompts": prompts, "default_prompt_name": "query"})
    spec = outline(source).spec
    assert spec.prompts == {"query": "find: ", "document": ""}
    assert spec.default_prompt_name == "query"
    assert not spec.include_prompt


def test_a_default_prompt_must_exist(source):
    path = source / "config_sentence_transformers.json"
    sources.write_json(path, {"prompts": {"a": "b"}, "default_prompt_name": "c"})
    with pytest.raises(CheckpointError, match="default prompt 'c' is not among the prompts: a"):
        converted(source)


def test_without_modules_json_mean_pooling_and_a_warning(tmp_path, caplog):
    source = sources.write_bert(tmp_path / "plain")
    with caplog.at_level(logging.WARNING):
        spec = outline(source).spec
    assert (spec.head.pooling, spec.head.modules) == (("mean",), ())
    ours = [
        record for record in caplog.records if record.name.startswith("converters")
    ]  # not Orbax's
    assert [record.message for record in ours] == [
        f"{source} has no modules.json: mean pooling, not normalised"
    ]


def test_the_transformer_may_lie_in_a_folder(tmp_path):
    source = tmp_path / "source"
    sources.write_bert(source / "0_Transformer")
    sources.write_modules(
        source, (sources.TRANSFORMER, "0_Transformer"), (sources.POOLING, "1_Pooling")
    )
    _pooling(source, pooling_mode_cls_token=True)
    assert outline(source).spec.head.pooling == ("cls",)


def _limit(tower: Path, st: int | None, tok: float | None, positions: int | None) -> int:
    sources.write_json(tower / "sentence_xlnet_config.json", {"max_seq_length": st})
    sources.write_json(tower / "tokenizer_config.json", {"model_max_length": tok})
    return heads.token_limit(tower, positions)


def test_limit_comes_from_the_first_that_names_one(tmp_path):
    assert _limit(tmp_path, 16, 20, 24) == 16
    assert _limit(tmp_path, None, 20, 24) == 20
    assert _limit(tmp_path, None, 1e30, 24) == 24
    assert _limit(tmp_path, 16, None, None) == 16


def test_limit_never_exceeds_the_positions(tmp_path, caplog):
    assert _limit(tmp_path, 512, None, 24) == 24
    assert "max_seq_length is 512 but there are 24 positions" in caplog.text
    with pytest.raises(CheckpointError, match="names no limit of tokens"):
        _limit(tmp_path, None, 1e30, None)


POOLING, OF_MODEL = "1_Pooling/config.json", "config_sentence_transformers.json"


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("config.json", {"model_type": "mt5"}, "model_type 'mt5' is not supported; known: albert"),
        ("config.json", {"model_type": None}, "model_type None"),
        ("config.json", {"architectures": ["BertForTokenClassification"]}, "ForTokenClassificatio"),
        ("config.json", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported; known: gelu"),
        ("config.json", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("config.json", {"is_decoder": True}, "is_decoder=True"),
        ("config.json", {"add_cross_attention": True}, "add_cross_attention"),
        ("config.json", {"auto_map": {"AutoModel": "m.Model"}}, "own code .*AutoModel: m.Model"),
        ("config.json", {"quantization_config": {"bits": 4}}, "quantised"),
        (POOLING, {"pooling_mode": "median"}, "pooling 'median' is not supported"),
        (POOLING, {"output_key": "query"}, "pooling with output_key"),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "token_embeddings"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "masked_lm, pooling"),
        ("sentence_bert_config.json", {"query_length": 32}, "query_length"),
        ("sentence_bert_config.json", {"tokenizer_args": {"padding_side": "left"}}, "padding_side"),
        (OF_MODEL, {"model_type": "SparseEncoder"}, "a SparseEncoder"),
        (OF_MODEL, {"truncate_dim": 4}, "truncate_dim=4"),
        ("adapter_config.json", {}, "of another model; serve that with --adapter NAME="),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_by_name_before_weights_are_read(source, file, fields, message):
    (source / "model.safetensors").unlink()
    if not (source / file).exists():
        sources.write_json(source / file, {})
    sources.change_json(source / file, **fields)
    with pytest.raises(UnsupportedModel, match=message):
        converted(source)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["Transformer", "Pooling", "LSTM"], r"sentence_transformers.models.LSTM' is not supp"),
        (["Transformer", "Pooling", "Pooling"], "transformer, pooling, pooling are not supported"),
        (["Transformer", "Normalize"], "transformer, normalize are not supported"),
        (["Pooling"], "pooling are not supported"),
        ([], r"\(none\) are not supported"),
    ],
)
def test_modules_are_refused_by_name(source, modules, message):
    entries = [(f"sentence_transformers.models.{m}", "") for m in modules]
    sources.write_modules(source, *entries)
    with pytest.raises(UnsupportedModel, match=message):
        converted(source)


@pytest.mark.parametrize(
    "fields",
    [{"activation_function": "torch.nn.modules.activation.ELU"}, {"use_residual": True}],
)
def test_dense_options_without_code_are_refused(source, fields):
    _with_dense(source)
    sources.change_json(source / "3_Dense" / "config.json", **fields)
    with pytest.raises(UnsupportedModel, match=r"ELU|use_residual"):
        converted(source)


def test_a_transformer_alone_is_no_embedder(tmp_path):
    source = sources.write_bert(tmp_path / "source")
    sources.write_modules(source, (sources.TRANSFORMER, ""))
    with pytest.raises(UnsupportedModel, match=r"modules\.json has no Pooling"):
        converted(source)


@pytest.mark.parametrize("modules", [(), ((sources.TRANSFORMER, ""),)])
def test_without_pooling_and_architectures_nothing_says_what_a_model_is_for(tmp_path, modules):
    source = sources.write_bert(tmp_path / "source", architectures=None)
    if modules:
        sources.write_modules(source, *modules)
    with pytest.raises(UnsupportedModel, match=r"nothing says whether .* embeds or scores"):
        converted(source)


def test_pooling_makes_an_embedder_whatever_architectures_say(source):
    wanted = converted(source)[0].content_hash
    sources.change_json(source / "config.json", architectures=None)
    spec = convert(source, source.parent / "other", progress=silent)
    assert (spec.task, spec.content_hash) == ("embed", wanted)


@pytest.mark.parametrize(
    "config", [sources.BERT_CONFIG, sources.ROBERTA_CONFIG], ids=["bert", "xlm-roberta"]
)
def test_embedders_without_modules_json_may_hold_the_heads_they_were_trained_with(config, tmp_path):
    bert = config is sources.BERT_CONFIG
    head = {"pooler.dense": (8, 8)} if bert else {"lm_head.dense": (8, 8)}
    named = "BertModel" if bert else "XLMRobertaForMaskedLM"
    tensors = sources.bert_tensors(config=config) | sources.head_tensors(head)
    fields = config | {"architectures": [named]}
    spec, params = converted(sources.write_bert(tmp_path / "source", tensors=tensors, **fields))
    assert (spec.task, spec.head.pooling, set(params)) == (
        "embed",
        ("mean",),
        set(parameter_shapes(spec)),
    )


def test_own_code_for_other_uses_does_not_concern_an_embedder(source):
    code = {"AutoConfig": "x.Config", "AutoModelForMaskedLM": "x.Masked"}
    code |= {"AutoModelForSequenceClassification": "x.Classifier"}
    sources.change_json(source / "config.json", auto_map=code)
    assert outline(source).spec.task == "embed"


TYPES, NO_TYPES = ["input_ids", "token_type_ids", "attention_mask"], ["input_ids", "attention_mask"]


@pytest.mark.parametrize(
    ("said", "given"),
    [
        ({}, True),
        ({"tokenizer_class": "BertTokenizerFast"}, True),
        ({"tokenizer_class": "BertTokenizer", "model_input_names": NO_TYPES}, False),
        ({"tokenizer_class": "DistilBertTokenizerFast"}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": TYPES}, True),
        ({"tokenizer_class": "TokenizersBackend"}, False),
    ],
)
def test_the_tokenizer_config_says_whether_types_are_given(source, said, given):
    sources.write_json(source / "tokenizer_config.json", said)
    assert outline(source).spec.token_types == given


def test_without_a_tokenizer_config_the_model_says_which_tokenizer_it_has(source):
    assert tokenizer.gives_types(source, {"model_type": "bert"})
    assert tokenizer.gives_types(source, {"model_type": "nomic_bert"})
    assert tokenizer.gives_types(source, {"model_type": "deberta-v2"})
    assert not tokenizer.gives_types(source, {"model_type": "roberta"})
    named = {"model_type": "roberta", "tokenizer_class": "BertTokenizer"}
    assert tokenizer.gives_types(source, named)


def test_paths_out_of_the_model_are_refused(source):
    sources.write_modules(source, (sources.TRANSFORMER, "../elsewhere"), (sources.POOLING, ""))
    with pytest.raises(CheckpointError, match="leads outside the model"):
        converted(source)


# A tokenizer that the tokenizers library panics on, which is no Exception.
PANICS = (
    b'{"version": "1.0", "added_tokens": [], "pre_tokenizer": null, "post_processor": null, '
    b'"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "decoder": null, '
    b'"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", "damaged"),
        ("config.json", b"[]", "wanted a JSON object"),
        ("modules.json", b"[1]", "wanted a list of type and path"),
        ("tokenizer.json", b"{}", "tokenizer in .* is damaged"),
        ("tokenizer.json", PANICS, "tokenizer in .* is damaged: Precompiled"),
        ("model.safetensors", b"", "not a safetensors file"),
        ("model.safetensors", b"\x04\0\0\0\0\0\0\0[[]]", "damaged header"),
        (
            "model.safetensors",
            (67).to_bytes(8, "little")
            + b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0,0]}}',
            "damaged header",
        ),
        ("model.safetensors", (90_000).to_bytes(8, "little") + b"[" * 90_000, "damaged header"),
        ("model.safetensors.index.json", b"[" * 90_000, "no readable weight_map"),
    ],
)
def test_damaged_files_are_named(source, file, content, message):
    if file == "model.safetensors.index.json":
        (source / "model.safetensors").unlink()
    (source / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        converted(source)


def test_a_truncated_safetensors_file_is_refused(source):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="may have been cut short"):
        converted(source)


def test_missing_shards_are_all_named(tmp_path):
    source = sources.write_sentence_bert(tmp_path / "source", shards=3)
    for shard in (1, 3):
        (source / f"model-0000{shard}-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00001-of-00003.safetensors, model-00003-of"):
        converted(source)


def test_no_weights_and_no_directory_are_said_plainly(source, tmp_path):
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights in"):
        converted(source)
    with pytest.raises(CheckpointError, match="is not a directory"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        convert(tmp_path / "empty", tmp_path / "out")


def test_a_torch_file_without_torch_is_refused_clearly(source, monkeypatch):
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match="torch is not installed; install it"):
        converted(source)


def test_nothing_is_left_behind_on_failure(source, tmp_path):
    def fail(steps):
        yield steps[0]
        raise RuntimeError("full disk")

    with pytest.raises(RuntimeError, match="full disk"):
        convert(source, tmp_path / "out", progress=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_existing_checkpoint_is_not_overwritten(source, tmp_path):
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", progress=silent)
    with pytest.raises(CheckpointError, match="exists already"):
        convert(source, tmp_path / "out", progress=silent)


def test_do_lower_case_lowers_before_all_else(tmp_path):
    stored = sources.wordpiece()
    stored.normalizer = None  # pyright: ignore
    source = sources.write_sentence_bert(tmp_path / "source")
    stored.save(str(source / "tokenizer.json"))
    sources.change_json(source / "sentence_bert_config.json", do_lower_case=True)
    converted(source)
    saved = tmp_path / "source-out" / "tokenizer.json"
    assert sources.Tokenizer.from_file(str(saved)).encode("HELLO").ids == [2, 4, 3]


def test_do_lower_case_changes_nothing_that_lowers_already(source):
    sources.change_json(source / "sentence_bert_config.json", do_lower_case=True)
    converted(source)
    saved = source.parent / "source-out" / "tokenizer.json"
    assert saved.read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_tokenizer_config_that_disagrees_is_logged(source, caplog):
    sources.write_json(source / "tokenizer_config.json", {"do_lower_case": False})
    converted(source)
    assert "do_lower_case=False, tokenizer.json True; the latter is used" in caplog.text


def test_ids_beyond_the_embeddings_are_refused(tmp_path):
    source = sources.write_sentence_bert(tmp_path / "source", vocab_size=9)
    with pytest.raises(CheckpointError, match="ids up to 10, the model only 9 embeddings"):
        converted(source)


def test_no_tokenizer_at_all_is_said_plainly(source):
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"wanted tokenizer.json or a vocabulary"):
        converted(source)


def test_a_tokenizer_is_built_from_its_vocabulary(source):
    (source / "tokenizer.json").unlink()
    (source / "vocab.txt").write_text("\n".join(sources.WORDS) + "\n")
    sources.write_json(
        source / "tokenizer_config.json",
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True},
    )
    built = tokenizer.read_tokenizer(source, lowercase=False, vocab_size=len(sources.WORDS))
    encoding = sources.Tokenizer.from_str(built.decode()).encode("Hello unhappy")
    assert encoding.ids == [2, 4, 6, 7, 3]


def test_a_sentencepiece_model_alone_is_refused_with_what_to_install(source, monkeypatch):
    (source / "tokenizer.json").unlink()
    (source / "sentencepiece.bpe.model").write_bytes(b"")
    sources.write_json(source / "tokenizer_config.json", {"tokenizer_class": "XLMRobertaTokenizer"})
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(CheckpointError, match="pip install sentencepiece protobuf"):
        converted(source)


def test_bert_needs_its_sizes():
    with pytest.raises(CheckpointError, match=r"config\.json lacks vocab_size, hidden_size"):
        bert.config({})
    with pytest.raises(CheckpointError, match="8 is not a multiple of num_attention_heads 3"):
        bert.config(sources.BERT_CONFIG | {"num_attention_heads": 3})


def test_a_scalar_and_an_empty_tensor_can_be_read(tmp_path):
    tensors = {"one": np.array(3, np.float32), "none": np.ones((0, 2), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = weights.find(tmp_path)
    assert found["one"].read() == 3
    assert found["none"].read().shape == (0, 2)
