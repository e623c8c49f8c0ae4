"""Models that compare texts token by token, as Stanford's code, PyLate and sentence-transformers
save them: what the manifest says of each, and what is refused by its name."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sources
from safetensors.numpy import load_file
from sources import HIDDEN, POSITIONS, TRANSFORMER, WORDS, Tensors, change_json, write_json
from test_jina import JINA_V3, flash_tensors
from tokenizers import AddedToken

from converters import convert, outline, weight_folders
from jaxembed import Embedder
from jaxembed.data.spec import DenseLayer, Expansion, LateInteraction, ModelSpec, PerToken, Routes
from jaxembed.errors import CheckpointError, ConfigError, UnsupportedModel
from jaxembed.tools.verify import verification

WIDTH = 5
MASK, HELLO = WORDS.index("[MASK]"), WORDS.index("hello")
MORE = ["[unused0]", "[unused1]", ".", ","]  # words of the vocabulary
UNUSED0, UNUSED1, STOP, COMMA = range(len(WORDS), len(WORDS) + len(MORE))
Q, D = len(WORDS) + len(MORE), len(WORDS) + len(MORE) + 1  # added tokens
SIZE = D + 1
CONFIG = {"vocab_size": SIZE}
PYLATE_DENSE = "pylate.models.Dense.Dense"
MASK_MODULE = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
TOKEN_POOLING = "sentence_transformers.multi_vector_encoder.modules.token_pooling"


def tokenizer_json() -> str:
    tokenizer = sources.wordpiece()
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {word: len(vocabulary) + k for k, word in enumerate(MORE)}
    tokenizer = type(tokenizer).from_str(json.dumps(content))
    tokenizer.add_tokens([AddedToken("[Q] ", normalized=False), AddedToken("[D] ")])
    return tokenizer.to_str()


def whole_tower() -> Tensors:
    return sources.bert_tensors(config=sources.BERT_CONFIG | CONFIG)


def write_tower(folder: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    sources.write_bert(folder, tensors=tensors or whole_tower(), **CONFIG | config)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    write_json(folder / "tokenizer_config.json", {"mask_token": "[MASK]"})
    return folder


def projection(width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(7).standard_normal((width, HIDDEN), np.float32)


def write_stanford(folder: Path, metadata: dict[str, Any] | None, width: int = WIDTH) -> Path:
    tensors = {f"bert.{name}": array for name, array in whole_tower().items()}
    tensors["linear.weight"] = projection(width)
    write_tower(folder, tensors, architectures=["HF_ColBERT"])
    if metadata is not None:
        write_json(folder / "artifact.metadata", metadata)
    return folder


def write_pylate(folder: Path, settings: dict[str, Any] | None = None, **dense: Any) -> Path:
    write_tower(folder)
    sources.write_modules(folder, (TRANSFORMER, ""), (PYLATE_DENSE, "1_Dense"))
    options = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    sources.write_dense(folder / "1_Dense", HIDDEN, WIDTH, **options | dense)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 7})
    settings = {"model_type": "ColBERT", "document_length": 20} if settings is None else settings
    write_json(folder / "config_sentence_transformers.json", {"query_length": 9} | settings)
    return folder


def write_native(
    folder: Path,
    prompts: dict[str, str | None] | None = None,
    mask: dict[str, Any] | None = None,
    **transformer: Any,
) -> Path:
    write_tower(folder)
    later = (sources.DENSE, "1_Dense"), (MASK_MODULE, "2_Mask"), (sources.NORMALIZE, "3_Normalize")
    sources.write_modules(folder, (TRANSFORMER, ""), *later)
    options = {"module_input_name": "token_embeddings"}
    sources.write_dense(folder / "1_Dense", HIDDEN, WIDTH, **options)
    write_json(folder / "2_Mask" / "config.json", mask or {})
    write_json(folder / "3_Normalize" / "config.json", options)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 22} | transformer)
    settings = {"model_type": "MultiVectorEncoder", "prompts": prompts or {}}
    write_json(folder / "config_sentence_transformers.json", settings)
    return folder


@pytest.fixture(name="source")
def _source(tmp_path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def spec_of(source: Path) -> ModelSpec:
    spec = outline(source).spec
    assert spec.interaction is not None
    return spec


def head_of(spec: ModelSpec) -> PerToken:
    assert list(spec.heads) == ["multi_vector"]
    assert isinstance(spec.head, PerToken)
    return spec.head


def stanford(folder: Path, **metadata: Any) -> None:
    write_stanford(folder, {"query_maxlen": 9, "dim": WIDTH} | metadata)


def stanford_default(folder: Path, metadata: dict[str, Any] | None) -> None:
    write_stanford(folder, metadata, width=128)
    change_json(folder / "config.json", max_position_embeddings=512)


def pylate(folder: Path, **settings: Any) -> None:
    write_pylate(folder, {"model_type": "ColBERT"} | settings)


def pylate_default(folder: Path) -> None:
    pylate(folder, query_length=None)
    change_json(folder / "config.json", max_position_embeddings=512)


def pylate_early(folder: Path, **settings: Any) -> None:
    """Early versions named no model type."""
    write_pylate(folder, settings)


OF_STANFORD = {
    "query_token_id": ".",
    "doc_token_id": "[unused1]",
    "doc_maxlen": 20,
    "attend_to_mask_tokens": True,
    "mask_punctuation": False,
    "similarity": "cosine",
}
OF_PYLATE = {  # max_seq_length, which it writes for itself, does not count
    "query_prefix": "[Q] ",
    "document_prefix": "",
    "document_length": 20,
    "attend_to_expansion_tokens": True,
    "skiplist_words": [".", "lacking", "hello"],
    "prompts": {"query": "hello ", "other": "world "},
    "similarity_fn_name": "MaxSim",
}
OF_NATIVE = {
    "prompts": {"query": "[Q] ", "document": "[D] world "},
    "mask": {"skiplist_words": [",", "?"], "skiplist_tasks": ["document"]},
    "query_expansion": {"strategy": "fixed", "length": 9, "attend": False, "token": "a"},
    "document_length": 20,
}
ATTENDED = Expansion(MASK, 9, attended=True)
PUNCTUATION = (COMMA, STOP)
FILLED, DEFAULT = Expansion(MASK, 9), Expansion(MASK, 32)
WITH_A = Expansion(WORDS.index("a"), 9)
# Fills queries up and does not cut them there.
LEAST = {"query_expansion": {"strategy": "min", "length": 9}}
# Only what was added as a token is one: a word of the vocabulary is text.
UNUSED = {"query": "[unused0] ", "document": "hello "}
# How it is written and what is said; then LateInteraction, skipped ids and prompts.
FORMS: list[tuple[Any, dict[str, Any], tuple[Any, ...], tuple[int, ...], dict[str, str]]] = [
    (stanford, OF_STANFORD, (9, 20, STOP, UNUSED1, ATTENDED), (), {}),
    *(
        (stanford_default, said, (32, 220, UNUSED0, UNUSED1, DEFAULT), PUNCTUATION, {})
        for said in ({"metadata": None}, {"metadata": {}}, {"metadata": {"dim": None}})
    ),
    # lengths end at the last position
    (stanford, {"doc_maxlen": 300}, (9, POSITIONS, UNUSED0, UNUSED1, FILLED), PUNCTUATION, {}),
    (pylate, OF_PYLATE, (9, 20, Q, None, ATTENDED), (STOP, HELLO), OF_PYLATE["prompts"]),
    (pylate_default, {}, (32, 180, Q, D, DEFAULT), PUNCTUATION, {}),
    (pylate_early, {"query_prefix": "[Q] "}, (9, POSITIONS, Q, D, FILLED), PUNCTUATION, {}),
    (pylate_early, {"do_query_expansion": True}, (9, POSITIONS, Q, D, FILLED), PUNCTUATION, {}),
    # without expansion queries are only cut
    (pylate, {"do_query_expansion": False}, (9, POSITIONS, Q, D), PUNCTUATION, {}),
    (write_native, OF_NATIVE, (9, 20, Q, D, WITH_A), (COMMA,), {"document": "world "}),
    (write_native, {"prompts": {"query": None}}, (22, 22), (), {}),
    (write_native, LEAST, (22, 22, None, None, FILLED), (), {}),
    (write_native, LEAST | {"query_length": 12}, (12, 22, None, None, FILLED), (), {}),
    (write_native, {"prompts": UNUSED}, (22, 22), (), UNUSED),
]


@pytest.mark.parametrize(("write", "said", "interaction", "skipped", "prompts"), FORMS)
def test_its_files_say_all_or_it_is_the_default_of_their_library(
    source, write, said, interaction, skipped, prompts
):
    write(source, **said)
    spec = spec_of(source)
    assert spec.interaction == LateInteraction(*interaction)
    assert head_of(spec).skipped_ids == skipped
    assert spec.prompts == {"query": "", "document": ""} | prompts
    assert (spec.max_input_tokens, spec.token_types) == (interaction[1], False)
    assert spec.pooling == ("multi_vector",)


def test_jina_colbert_v2_is_stanfords_form_of_jinas_tower(source, tmp_path):
    """Its rotary positions, and the tower's own code, which is not run."""
    tensors = {f"roberta.{name}": array for name, array in flash_tensors().items()}
    words = np.random.default_rng(3).standard_normal((SIZE, HIDDEN), np.float32)
    tensors["roberta.embeddings.word_embeddings.weight"] = words
    tensors["linear.weight"] = projection()
    config = JINA_V3 | {"architectures": ["HF_ColBERT"], "lora_adaptations": None, **CONFIG}
    code = "jinaai/xlm-roberta-flash-implementation--modeling_xlm_roberta.XLMRobertaModel"
    config["auto_map"] = JINA_V3["auto_map"] | {"AutoModel": code}
    write_tower(source, tensors, **config)
    metadata = {"query_token_id": "[Q] ", "doc_token_id": "[D] ", "attend_to_mask_tokens": True}
    lengths = {"query_maxlen": 9, "doc_maxlen": 20}
    write_json(source / "artifact.metadata", metadata | lengths | {"dim": WIDTH})
    spec = convert(source, tmp_path / "out")
    assert spec.config["rope_theta"] == 20000.0
    assert spec.interaction == LateInteraction(9, 20, Q, D, Expansion(MASK, 9, attended=True))


@pytest.mark.parametrize(
    ("prefix", "marker", "prompt"),
    [
        ("[unused0] ", UNUSED0, ""),
        ("[unused0] hello ", UNUSED0, "hello "),
        ("a query: ", WORDS.index("a"), "query: "),
        ("query: ", None, "query: "),
        ("  ", None, ""),
    ],
)
def test_a_prefix_is_a_token_or_text(source, prefix, marker, prompt):
    write_pylate(source, {"model_type": "ColBERT", "query_prefix": prefix})
    spec = spec_of(source)
    assert (spec.interaction.query_marker, spec.prompts["query"]) == (marker, prompt)


def test_modules_json_wins_over_stanfords_form(source, tmp_path):
    """Whose projection and metadata then mean nothing."""
    write_stanford(source, {"query_maxlen": 17, "dim": 3})
    tensors = load_file(source / "model.safetensors")
    write_pylate(source)
    change_json(source / "config.json", architectures=["HF_ColBERT"])
    sources.write_bert(source / "other", tensors=tensors)
    (source / "other" / "model.safetensors").rename(source / "model.safetensors")
    spec, parameters = sources.converted(source, tmp_path / "out")
    assert spec.interaction is not None
    assert (spec.interaction.query_length, spec.dim) == (9, WIDTH)
    wanted = load_file(source / "1_Dense" / "model.safetensors")["linear.weight"].T
    np.testing.assert_array_equal(parameters["heads.multi_vector.modules.0.kernel"], wanted)


def test_a_residual_is_projected_where_the_widths_differ(source, tmp_path):
    write_pylate(source, use_residual=True)
    tensors = load_file(source / "1_Dense" / "model.safetensors")
    tensors["residual.weight"] = projection()
    sources.write_bert(source / "other", tensors=tensors)
    (source / "other" / "model.safetensors").rename(source / "1_Dense" / "model.safetensors")
    spec, parameters = sources.converted(source, tmp_path / "out")
    layer = head_of(spec).modules[0]
    assert isinstance(layer, DenseLayer)
    assert layer.residual
    residual = parameters["heads.multi_vector.modules.0.residual.kernel"]
    np.testing.assert_array_equal(residual, projection().T)
    assert weight_folders(source) == ["", "1_Dense"]


def test_what_follows_a_marker_in_a_prompt_is_kept(source):
    """A blank too: to a byte-level tokenizer a word after it is another one."""
    write_native(source, {"query": "[MASK] ", "document": "[D] [D] world "})
    tokenizer = sources.wordpiece().from_str(tokenizer_json())
    tokenizer.add_special_tokens(["[MASK]"])
    tokenizer.save(str(source / "tokenizer.json"))
    spec = spec_of(source)
    assert spec.interaction == LateInteraction(22, 22, MASK, D)
    assert spec.prompts == {"query": " ", "document": "[D] world "}


def test_the_filler_of_a_tokenizer_without_a_mask_is_its_end(source):
    write_native(source, query_expansion={"strategy": "fixed", "length": 9})
    path = source / "tokenizer.json"
    path.write_text(path.read_text().replace("[MASK]", "[OTHER]"))
    write_json(source / "tokenizer_config.json", {"eos_token": "[SEP]"})
    assert spec_of(source).interaction.expansion == Expansion(WORDS.index("[SEP]"), 9)


OF_QUERIES = {"skiplist_words": ["."], "skiplist_tasks": ["query"]}


def expanded(**expansion: Any) -> dict[str, Any]:
    return {"query_expansion": {"strategy": "min", "length": 9} | expansion}


@pytest.mark.parametrize(
    ("write", "said", "message"),
    [
        (stanford, {"similarity": "l2"}, "similarity 'l2' is not supported"),
        (stanford, {"interaction": "flipr"}, "interaction 'flipr' is not supported"),
        (stanford, {"query_maxlen": 3}, "documents is 3, wanted at least 4"),
        (stanford, {"query_maxlen": 25}, "filled up to 25 tokens, and there are 24 positions"),
        (stanford, {"query_maxlen": "32"}, 'query_maxlen is "32", wanted a whole number'),
        (stanford, {"attend_to_mask_tokens": "no"}, 'mask_tokens is "no", wanted true or false'),
        (pylate, {"similarity_fn_name": "euclidean"}, "similarity 'euclidean' is not supported"),
        (pylate, {"truncate_dim": 3}, "truncate_dim=3 is not supported"),
        (pylate, {"default_prompt_name": "other"}, "prompt 'other' is not among the prompts"),
        (pylate, {"skiplist_words": "."}, 'skiplist_words is ".", wanted a list of strings'),
        (pylate, {"document_length": 0}, "document_length is 0, wanted a whole number"),
        (write_native, {"mask": {"keep_only_token_ids": [1]}}, "keep_only_token_ids is not supp"),
        (write_native, {"mask": OF_QUERIES}, r"skiplist_tasks \['query'\] is not supported"),
        (write_native, {"modality_config": {"message": {}}}, "modality_config has message"),
        (write_native, expanded(strategy="max"), "strategy 'max' is not supported"),
        (write_native, expanded(x=1), "query_expansion.x is not"),
        (write_native, {"query_expansion": {"strategy": "min"}}, "query_expansion lacks length"),
        (write_native, expanded(length=0), "query_expansion.length is 0"),
        (write_native, expanded() | {"query_length": 8}, "query_length 8 is less than the 9 token"),
        (write_native, expanded(token="lacking"), "filled up with 'lacking', which is not a token"),
    ],
)
def test_what_is_not_served_is_refused_by_name(source, write, said, message):
    write(source, **said)
    with pytest.raises((UnsupportedModel, CheckpointError), match=message):
        spec_of(source)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (f"{TOKEN_POOLING}.HierarchicalTokenPooling", "HierarchicalTokenPooling' is not supported"),
        (
            sources.POOLING,
            "transformer, pooling, dense of a multi-vector model are not supported",
        ),
    ],
)
def test_a_pooling_of_its_tokens_is_refused(source, kind, message):
    write_native(source)
    sources.write_modules(source, (TRANSFORMER, ""), (kind, "2_Mask"), (PYLATE_DENSE, "1_Dense"))
    with pytest.raises(UnsupportedModel, match=message):
        spec_of(source)


def test_a_dense_layer_of_whole_texts_is_refused(source):
    write_native(source)
    change_json(source / "1_Dense" / "config.json", module_input_name="sentence_embedding")
    with pytest.raises(UnsupportedModel, match="module_input_name='sentence_embedding'"):
        spec_of(source)


@pytest.mark.parametrize(("attend", "refused"), [(False, True), (True, False)])
def test_fillers_beyond_a_window_would_see_no_key(source, attend, refused):
    write_pylate(source, {"model_type": "ColBERT", "attend_to_expansion_tokens": attend})
    modern = {"model_type": "modernbert", "architectures": ["ModernBertModel"]}
    change_json(source / "config.json", local_attention=16, **modern)
    message = r"filled up to 9 tokens .* some layers see only 8"
    with pytest.raises(UnsupportedModel, match=message) if refused else nullcontext():
        spec_of(source)


def test_it_is_not_verified_and_takes_no_pooling(source, tmp_path):
    write_pylate(source)
    message = "--pooling mean: this checkpoint has no pooling; its head returns multi_vector"
    with pytest.raises(ConfigError, match=message):
        Embedder(str(source), cache_dir=tmp_path, pooling="mean")
    with pytest.raises(ConfigError, match="computes multi_vector; only vectors of whole texts"):
        verification.comparable_spec(Routes({"": spec_of(source)}))
