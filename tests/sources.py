"""Tiny Hugging Face directories with random weights, written without torch or transformers."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from converters import convert
from jaxembed.checkpoints import checkpoint
from jaxembed.data.spec import ModelSpec

HIDDEN, LAYERS, INTERMEDIATE, POSITIONS = 8, 2, 16, 24

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "un", "##happy", "a", "##b"]
WORDS.append("[MASK]")


def sized(hidden: int, layers: int, heads: int, wide: int, **others: Any) -> dict[str, Any]:
    """The sizes of a config by transformers' names, and `others`."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return dict(zip(names, (hidden, layers, heads, wide), strict=True)) | others


BERT_CONFIG: dict[str, Any] = sized(HIDDEN, LAYERS, 2, INTERMEDIATE) | {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": len(WORDS),
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
}

# as XLM-R: no types, and two positions fewer than the table has
ROBERTA_CONFIG: dict[str, Any] = BERT_CONFIG | {
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}

TRANSFORMER = "sentence_transformers.models.Transformer"
POOLING = "sentence_transformers.models.Pooling"
DENSE = "sentence_transformers.models.Dense"
NORMALIZE = "sentence_transformers.models.Normalize"
SPLADE = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
STATIC_TERMS = "sentence_transformers.sparse_encoder.models.SparseStaticEmbedding"
STATIC = "sentence_transformers.models.StaticEmbedding"

ROUTER = "sentence_transformers.base.modules.router.Router"

Tensors = dict[str, np.ndarray]


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def change_json(path: Path, **fields: Any) -> None:
    write_json(path, json.loads(path.read_text()) | fields)


def converted(source: Path, out: Path | None = None, **options: Any) -> tuple[ModelSpec, Tensors]:
    """The spec and the parameters of a directory's checkpoint, which is beside it if there is no
    `out`. Options are those of convert."""
    out = out or source.parent / f"{source.name}-out"
    spec = convert(source, out, progress=lambda steps: steps, **options)
    return spec, checkpoint.load_params(out, spec)


def bert_tensors(seed: int = 0, config: Mapping[str, Any] = BERT_CONFIG) -> Tensors:
    """Every tensor of a BertModel, float32, drawn at random."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], hidden),
        **_norm("embeddings.LayerNorm", hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for name in ("query", "key", "value"):
            shapes |= _linear(f"{layer}.attention.self.{name}", hidden, hidden)
        shapes |= _linear(f"{layer}.attention.output.dense", hidden, hidden)
        shapes |= _norm(f"{layer}.attention.output.LayerNorm", hidden)
        shapes |= _linear(f"{layer}.intermediate.dense", hidden, wide)
        shapes |= _linear(f"{layer}.output.dense", wide, hidden)
        shapes |= _norm(f"{layer}.output.LayerNorm", hidden)
    return drawn(shapes, seed)


def drawn(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def with_biases(
    linear: Mapping[str, tuple[int, ...]], norms: Iterable[str], width: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights and biases of linear layers, by shape, and of norms."""
    layers = {**linear, **dict.fromkeys(norms, (width,))}
    both = {name: {"weight": shape, "bias": shape[:1]} for name, shape in layers.items()}
    return {f"{name}.{part}": shape for name in both for part, shape in both[name].items()}


def decoder_shapes(
    layer: str, width: int, wide: int, queries: int, keys: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of a layer of a decoder."""
    return {
        f"{layer}.input_layernorm.weight": (width,),
        f"{layer}.post_attention_layernorm.weight": (width,),
        f"{layer}.self_attn.q_proj.weight": (queries, width),
        **{f"{layer}.self_attn.{name}_proj.weight": (keys, width) for name in "kv"},
        f"{layer}.self_attn.o_proj.weight": (width, queries),
        **{f"{layer}.mlp.{name}_proj.weight": (wide, width) for name in ("gate", "up")},
        f"{layer}.mlp.down_proj.weight": (width, wide),
    }


def head_tensors(layers: Mapping[str, tuple[int, int]], seed: int = 2) -> Tensors:
    """The tensors of linear layers, by name so many inputs and outputs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (inputs, outputs) in layers.items():
        shapes |= _linear(name, inputs, outputs)
    return drawn(shapes, seed)


def masked_lm_tensors(seed: int = 3, config: Mapping[str, Any] = BERT_CONFIG) -> Tensors:
    """The tensors of the head of a BertForMaskedLM whose decoder is tied."""
    hidden = config["hidden_size"]
    shapes = _linear("cls.predictions.transform.dense", hidden, hidden)
    shapes |= _norm("cls.predictions.transform.LayerNorm", hidden)
    shapes["cls.predictions.bias"] = (config["vocab_size"],)
    return drawn(shapes, seed)


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def wordpiece() -> Tokenizer:
    """A WordPiece tokenizer of eleven tokens that lowers its text."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)  # pyright: ignore
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(WORDS[:4])
    return tokenizer


def write_bert(
    folder: Path,
    *,
    tensors: Tensors | None = None,
    rename: Callable[[str], str] = str,
    shards: int = 1,
    **config: Any,
) -> Path:
    """A plain transformers directory: no modules.json."""
    write_json(folder / "config.json", BERT_CONFIG | config)
    wordpiece().save(str(folder / "tokenizer.json"))
    tensors = bert_tensors() if tensors is None else tensors
    write_weights(folder, {rename(name): array for name, array in tensors.items()}, shards)
    return folder


def write_weights(folder: Path, tensors: Tensors, shards: int = 1) -> None:
    """model.safetensors, or so many shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    files = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = list(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, folder / file)
        files |= dict.fromkeys(names, file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": files})


def write_modules(folder: Path, *modules: tuple[str, str]) -> None:
    """modules.json from pairs of type and path."""
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (kind, path) in enumerate(modules)
    ]
    write_json(folder / "modules.json", entries)


def write_sentence_bert(folder: Path, **options: Any) -> Path:
    """A sentence-transformers directory: mean pooling and Normalize. Options as for write_bert."""
    write_bert(folder, **options)
    write_modules(folder, (TRANSFORMER, ""), (POOLING, "1_Pooling"), (NORMALIZE, "2_Normalize"))
    write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True},
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 16})
    return folder


def write_masked_lm(folder: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    """A BertForMaskedLM, as transformers saves it. `tensors` are those of its head."""
    head = masked_lm_tensors() if tensors is None else tensors
    backbone = {f"bert.{name}": tensor for name, tensor in bert_tensors().items()}
    config = {"architectures": ["BertForMaskedLM"]} | config
    write_bert(folder, tensors=backbone | head, **config)
    write_json(folder / "sentence_bert_config.json", {"transformer_task": "fill-mask"})
    return folder


def write_splade(
    folder: Path, tensors: Tensors | None = None, most: int | None = None, **pooling: Any
) -> Path:
    """A sparse encoder on `write_masked_lm`, with its SpladePooling and max_active_dims."""
    write_masked_lm(folder, tensors)
    write_modules(folder, (TRANSFORMER, ""), (SPLADE, "1_SpladePooling"))
    write_json(folder / "1_SpladePooling" / "config.json", pooling)
    config = {"model_type": "SparseEncoder", "prompts": {"query": "hello "}}
    write_json(folder / "config_sentence_transformers.json", config | {"max_active_dims": most})
    return folder


def write_sparse_router(folder: Path, weights: np.ndarray, **given: Any) -> Path:
    """A Router of a static query encoder with these weights, and of `write_splade` for documents.
    `given` are the parameters of the Router."""
    terms = folder / "query_0_SparseStaticEmbedding"
    write_weights(terms, {"weight": weights})
    write_json(terms / "config.json", {"frozen": False})
    write_json(terms / "tokenizer_config.json", {"model_max_length": 16})
    wordpiece().save(str(terms / "tokenizer.json"))
    write_masked_lm(folder / "document_0_Transformer")
    write_json(folder / "document_1_SpladePooling" / "config.json", {})
    query = [(STATIC_TERMS, "query_0_SparseStaticEmbedding")]
    document = [(TRANSFORMER, "document_0_Transformer"), (SPLADE, "document_1_SpladePooling")]
    given = {"default_route": "document"} | given
    write_router_config(folder, {"query": query, "document": document}, (), **given)
    config = {"model_type": "SparseEncoder", "prompts": {"query": "", "document": ""}}
    write_json(folder / "config_sentence_transformers.json", config)
    return folder


def write_dense(
    folder: Path, inputs: int, outputs: int, *, bias: bool = True, seed: int = 1, **config: Any
) -> Tensors:
    """The folder of one Dense module; gives its tensors."""
    write_json(
        folder / "config.json",
        {"in_features": inputs, "out_features": outputs, "bias": bias} | config,
    )
    shapes = _linear("linear", inputs, outputs)
    tensors = drawn(shapes if bias else {"linear.weight": shapes["linear.weight"]}, seed)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def write_static(
    folder: Path, tensors: Tensors, *modules: tuple[str, str], at: str = "", **config: Any
) -> Path:
    """Static embeddings with the tokenizer of `wordpiece`: those of sentence-transformers, which
    are in the folder `at`, with `modules` after them; or of model2vec if there is only `config`."""
    (folder / at).mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / at / "model.safetensors")
    wordpiece().save(str(folder / at / "tokenizer.json"))
    if config:
        write_json(folder / "config.json", {"model_type": "model2vec"} | config)
    if modules or not config:
        write_modules(folder, (STATIC, at or "."), *modules)
    return folder


def write_route(folder: Path, route: str, seed: int, **config: Any) -> list[tuple[str, str]]:
    """The folders of one route of a Router: a tiny BERT and mean pooling. Gives the types and the
    names of its modules. `config` is that of the tower."""
    config = BERT_CONFIG | config
    backbone = write_bert(
        folder / f"{route}_0_Transformer", tensors=bert_tensors(seed, config), **config
    )
    write_json(backbone / "sentence_bert_config.json", {"max_seq_length": 16})
    write_json(
        folder / f"{route}_1_Pooling" / "config.json",
        {"word_embedding_dimension": config["hidden_size"], "pooling_mode_mean_tokens": True},
    )
    return [(TRANSFORMER, backbone.name), (POOLING, f"{route}_1_Pooling")]


def write_router_config(
    folder: Path,
    routes: dict[str, list[tuple[str, str]]],
    later: tuple[tuple[str, str], ...] = ((NORMALIZE, "1_Normalize"),),
    **given: Any,
):
    """modules.json with a Router and the `later` modules, and router_config.json. `given` are the
    parameters of the Router."""
    write_modules(folder, (ROUTER, ""), *later)
    named = {name: kind for modules in routes.values() for kind, name in modules}
    content = {
        "types": named,
        "structure": {route: [name for _, name in modules] for route, modules in routes.items()},
        "parameters": {"default_route": None, "allow_empty_key": True} | given,
    }
    write_json(folder / "router_config.json", content)


def write_router(folder: Path, *, static: bool = False, **given: Any) -> Path:
    """A Router of two towers: of one layer for queries, or `static` embeddings, and of two for
    documents, whose vectors are equally wide. The prompt of queries is "hello ". `given` are the
    parameters of the Router."""
    if static:
        query = [(STATIC, "query_0_StaticEmbedding")]
        table = drawn({"embedding.weight": (len(WORDS), HIDDEN)}, seed=1)
        write_static(folder, table, at=query[0][1])
    else:
        query = write_route(folder, "query", 1, num_hidden_layers=1)
    document = write_route(folder, "document", 2)
    write_router_config(folder, {"query": query, "document": document}, **given)
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": {"query": "hello "}, "default_prompt_name": None},
    )
    return folder


def write_alone(folder: Path, router: Path, route: str) -> Path:
    """A directory of one route of `write_router`, as a model of its own."""
    copytree(router / f"{route}_0_Transformer", folder)
    copytree(router / f"{route}_1_Pooling", folder / "1_Pooling")
    write_modules(folder, (TRANSFORMER, ""), (POOLING, "1_Pooling"), (NORMALIZE, "2_Normalize"))
    return folder
