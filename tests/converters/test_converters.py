"""Conversion from tiny Hugging Face directories: what goes where, and what is refused."""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import sources
from safetensors.numpy import save_file
from sources import converted

import converters
from converters import convert, heads, outline, weights
from converters.tokenizers import tokenizer
from jaxembed.checkpoints import checkpoint
from jaxembed.data.spec import NormalizeLayer
from jaxembed.errors import CheckpointError, ConversionError, UnsupportedModel
from jaxembed.models import parameter_shapes


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


IGNORED = {
    "embeddings.position_ids": np.arange(sources.POSITIONS)[None],
    "pooler.dense.weight": np.ones((8, 8), np.float32),
    "cls.predictions.bias": np.ones(11, np.float32),
}


def _old_norms(name: str) -> str:
    renamed = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    return renamed.replace("LayerNorm.bias", "LayerNorm.beta")


@pytest.mark.parametrize(
    "options",
    [
        {"rename": lambda name: f"bert.{name}"},
        {"rename": _old_norms},
        {"rename": lambda name: f"bert.{_old_norms(name)}", "shards": 2},
        {"tensors": sources.bert_tensors() | IGNORED},
    ],
    ids=["prefix", "gamma and beta", "both, sharded", "with tensors that have no use"],
)
def test_spellings_give_the_same_checkpoint(source, tmp_path, options):
    other = sources.write_sentence_bert(tmp_path / "other", **options)
    assert converted(other)[0].content_hash == converted(source)[0].content_hash


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


def test_a_parameter_without_a_rule_is_our_bug():
    with pytest.raises(ConversionError, match=r"no rule fills b\. This is a bug in jaxembed"):
        weights.plan_steps("model", [weights.Rule("x", "a")], [], {}, {"a": (1,), "b": (1,)})


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_sources_keep_their_bits(tmp_path, dtype):
    tensors = {name: array.astype(dtype) for name, array in sources.bert_tensors().items()}
    spec, params = converted(sources.write_sentence_bert(tmp_path / "source", tensors=tensors))
    assert spec.dtype == np.dtype(dtype).name
    assert {array.dtype for array in params.values()} == {np.dtype(dtype)}
    name = "encoder.layer.0.output.dense.weight"
    got = params["tower.layers.0.mlp.down.kernel"].T
    np.testing.assert_array_equal(got.view(np.uint16), tensors[name].view(np.uint16))


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


def test_dense_path_takes_the_place_of_the_only_dense(source):
    with pytest.raises(CheckpointError, match="has 0; leave it out"):
        converted(source, dense_path="2_Dense")
    modules = (sources.TRANSFORMER, ""), (sources.POOLING, "1_Pooling"), (sources.DENSE, "2_Dense")
    sources.write_modules(source, *modules)
    sources.write_dense(source / "2_Dense", 8, 4)
    sources.write_dense(source / "2_Dense_12", 8, 12)
    assert converters.weight_folders(source, "2_Dense_12") == ["", "2_Dense_12"]
    assert outline(source, dense_path="2_Dense_12").spec.dim == 12
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


def test_without_modules_json_mean_pooling_and_a_warning(tmp_path, caplog):
    source = sources.write_bert(tmp_path / "plain")
    with caplog.at_level(logging.WARNING):
        spec = outline(source).spec
    assert (spec.head.pooling, spec.head.modules) == (("mean",), ())
    (line,) = (one.message for one in caplog.records if one.name.startswith("converters"))
    assert line.startswith(f"{source} has no modules.json: its vectors are pooled by the mean")


def test_the_transformer_may_lie_in_a_folder(tmp_path):
    source = tmp_path / "source"
    sources.write_bert(source / "0_Transformer")
    modules = (sources.TRANSFORMER, "0_Transformer"), (sources.POOLING, "1_Pooling")
    sources.write_modules(source, *modules)
    _pooling(source, pooling_mode_cls_token=True)
    assert outline(source).spec.head.pooling == ("cls",)


def _limit(backbone: Path, st: int | None, tok: float | None, positions: int | None) -> int:
    sources.write_json(backbone / "sentence_xlnet_config.json", {"max_seq_length": st})
    sources.write_json(backbone / "tokenizer_config.json", {"model_max_length": tok})
    return heads.token_limit(backbone, positions)


def test_the_limit_is_the_first_that_is_named_and_within_the_positions(tmp_path, caplog):
    assert _limit(tmp_path, 16, 20, 24) == 16
    assert _limit(tmp_path, None, 20, 24) == 20
    assert _limit(tmp_path, None, 1e30, 24) == 24
    assert _limit(tmp_path, 16, None, None) == 16
    assert _limit(tmp_path, 512, None, 24) == 24
    assert "max_seq_length is 512, and the model has 24 positions" in caplog.text
    with pytest.raises(CheckpointError, match="does not limit the tokens of an input; set max_"):
        _limit(tmp_path, None, 1e30, None)


POOLING, OF_MODEL = "1_Pooling/config.json", "config_sentence_transformers.json"


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("config.json", {"model_type": "mt5"}, "model_type 'mt5' is not supported; known: albert"),
        ("config.json", {"model_type": None}, "model_type None"),
        ("config.json", {"architectures": ["BertForMultipleChoice"]}, "BertForMultipleChoice"),
        ("config.json", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported; known: gelu"),
        ("config.json", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("config.json", {"is_decoder": True}, "is_decoder=True"),
        ("config.json", {"add_cross_attention": True}, "add_cross_attention"),
        ("config.json", {"auto_map": {"AutoModel": "m.Model"}}, "own code .*AutoModel: m.Model"),
        ("config.json", {"quantization_config": {"bits": 4}}, "quant_method None is not supported"),
        (POOLING, {"pooling_mode": "median"}, "pooling 'median' is not supported"),
        (POOLING, {"output_key": "query"}, "pooling with output_key"),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "token_embeddings"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "masked_lm, pooling"),
        ("sentence_bert_config.json", {"query_length": 32}, "query_length"),
        ("sentence_bert_config.json", {"tokenizer_args": {"padding_side": "left"}}, "padding_side"),
        (OF_MODEL, {"model_type": "SparseEncoder"}, "a SparseEncoder"),
        (OF_MODEL, {"truncate_dim": 4}, "truncate_dim=4"),
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


def test_pooling_makes_an_embedder_whatever_architectures_say(source):
    wanted = converted(source)[0].content_hash
    sources.change_json(source / "config.json", architectures=None)
    spec, _ = converted(source, source.parent / "other")
    assert (spec.task, spec.content_hash) == ("embed", wanted)


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


# A tokenizer that the tokenizers library panics on, which is no Exception.
PANICS = (
    b'{"version": "1.0", "added_tokens": [], "pre_tokenizer": null, "post_processor": null, '
    b'"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "decoder": null, '
    b'"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
)


ENDLESS = b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0,0]}}'


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
        ("model.safetensors", (67).to_bytes(8, "little") + ENDLESS, "damaged header"),
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


def twice(source: Path) -> None:
    tensors = sources.bert_tensors()
    tensors["bert.embeddings.LayerNorm.gamma"] = tensors["embeddings.LayerNorm.weight"].copy()
    sources.write_weights(source, tensors)


def of_two_dtypes(source: Path) -> None:
    tensors = sources.bert_tensors()
    name = "encoder.layer.0.attention.self.key.bias"
    sources.write_weights(source, tensors | {name: tensors[name].astype(np.float16)})


def dense(source: Path, **fields: Any) -> None:
    _with_dense(source)
    sources.change_json(source / "3_Dense" / "config.json", **fields)


def dense_of_8(source: Path) -> None:
    _with_dense(source)
    sources.write_dense(source / "3_Dense", 8, 4)


def prompt_missing(source: Path) -> None:
    said = {"prompts": {"a": "b"}, "default_prompt_name": "c"}
    sources.write_json(source / "config_sentence_transformers.json", said)


def alone(source: Path, **config: Any) -> None:
    sources.write_modules(source, (sources.TRANSFORMER, ""))
    sources.change_json(source / "config.json", **config)


def nameless(source: Path) -> None:
    (source / "modules.json").unlink()
    sources.change_json(source / "config.json", architectures=None)


def outside(source: Path) -> None:
    sources.write_modules(source, (sources.TRANSFORMER, "../elsewhere"), (sources.POOLING, ""))


def cut_short(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def without_shards(source: Path) -> None:
    (source / "model.safetensors").unlink()
    sources.write_weights(source, sources.bert_tensors(), shards=3)
    for shard in (1, 3):
        (source / f"model-0000{shard}-of-00003.safetensors").unlink()


def for_torch(source: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")


def without(file: str, source: Path) -> None:
    (source / file).unlink()


def for_sentencepiece(source: Path) -> None:
    without("tokenizer.json", source)
    (source / "sentencepiece.bpe.model").write_bytes(b"")
    sources.write_json(source / "tokenizer_config.json", {"tokenizer_class": "XLMRobertaTokenizer"})


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (twice, ConversionError, r"both .* and .* stand for embeddings.LayerNorm.wei"),
        (of_two_dtypes, ConversionError, "must share a dtype"),
        (partial(dense, bias=False), ConversionError, r"unused: 3_Dense/linear\.bias"),
        (partial(dense, activation_function="torch.nn.ELU"), UnsupportedModel, "ELU"),
        (partial(dense, use_residual=True), UnsupportedModel, "use_residual"),
        (dense_of_8, CheckpointError, "takes 8 features and gets 6"),
        (prompt_missing, CheckpointError, "default prompt 'c' is not among the prompts: a"),
        (alone, UnsupportedModel, r"modules\.json has no Pooling"),
        (partial(alone, architectures=None), UnsupportedModel, "nothing says whether .* embeds or"),
        (nameless, UnsupportedModel, "nothing says whether .* embeds or scores"),
        (outside, CheckpointError, "leads outside the model"),
        (cut_short, CheckpointError, "may have been cut short"),
        (without_shards, CheckpointError, r"00001-of-00003.safetensors, model-00003-of"),
        (for_torch, CheckpointError, "torch is not installed; install it"),
        (partial(without, "tokenizer.json"), CheckpointError, r"wanted tokenizer.json or a vocab"),
        (partial(without, "model.safetensors"), CheckpointError, "no weights in"),
        (partial(without, "config.json"), CheckpointError, r"no config\.json"),
        (for_sentencepiece, CheckpointError, "pip install sentencepiece protobuf"),
    ],
)
def test_a_broken_source_is_refused_by_what_is_wrong(source, broken, error, message, monkeypatch):
    for package in ("torch", "sentencepiece"):
        monkeypatch.setitem(sys.modules, package, None)
    broken(source)
    with pytest.raises(error, match=message):
        converted(source)


def test_ids_beyond_the_embeddings_are_refused(tmp_path):
    source = sources.write_sentence_bert(tmp_path / "source", vocab_size=9)
    with pytest.raises(CheckpointError, match="ids up to 10, and the model has only 9 embeddings"):
        converted(source)


def test_no_directory_is_said_plainly(tmp_path):
    with pytest.raises(CheckpointError, match="is not a directory"):
        convert(tmp_path / "nowhere", tmp_path / "out")


def test_do_lower_case_lowers_before_all_else(tmp_path):
    stored = sources.wordpiece()
    stored.normalizer = None  # pyright: ignore
    source = sources.write_sentence_bert(tmp_path / "source")
    stored.save(str(source / "tokenizer.json"))
    sources.change_json(source / "sentence_bert_config.json", do_lower_case=True)
    converted(source)
    saved = tmp_path / "source-out" / "tokenizer.json"
    assert sources.Tokenizer.from_file(str(saved)).encode("HELLO").ids == [2, 4, 3]


def test_do_lower_case_changes_nothing_that_lowers_already(source, caplog):
    sources.change_json(source / "sentence_bert_config.json", do_lower_case=True)
    sources.write_json(source / "tokenizer_config.json", {"do_lower_case": False})
    converted(source)
    saved = source.parent / "source-out" / "tokenizer.json"
    assert saved.read_bytes() == (source / "tokenizer.json").read_bytes()
    assert "do_lower_case is False in tokenizer_config.json and True in tok" in caplog.text


def test_a_tokenizer_is_built_from_its_vocabulary(source):
    (source / "tokenizer.json").unlink()
    (source / "vocab.txt").write_text("\n".join(sources.WORDS) + "\n")
    said = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    sources.write_json(source / "tokenizer_config.json", said)
    built = tokenizer.read_tokenizer(source, lowercase=False, vocab_size=len(sources.WORDS))
    encoding = sources.Tokenizer.from_str(built.decode()).encode("Hello unhappy")
    assert encoding.ids == [2, 4, 6, 7, 3]


def test_a_scalar_and_an_empty_tensor_can_be_read(tmp_path):
    tensors = {"one": np.array(3, np.float32), "none": np.ones((0, 2), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = weights.find(tmp_path)
    assert found["one"].read() == 3
    assert found["none"].read().shape == (0, 2)
