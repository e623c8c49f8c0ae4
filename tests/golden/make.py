"""Makes the goldens anew (`make golden`; needs torch): tiny models as transformers and
sentence-transformers save them, and what torch computes with them.

A golden is one .npz of
    source/PATH        a text file of the saved directory, as a string
    tensors/PATH:NAME  a tensor of one of its files of tensors
    ids, types         sequences one after another, of `lengths` tokens each
    hidden             [tokens, width]: transformers' last hidden states of them
    pooled             [sequences, poolings * width]: their hidden states in every pooling of
                       POOLINGS, side by side
    logits             [sequences, labels]: of a model that scores
    token_logits       [tokens, labels]: of a model that scores tokens
    calls              JSON: the method, inputs and options of calls to SentenceTransformer or
                       CrossEncoder, in jaxembed's words
    vectors/N          [texts, dim]: what call N gives, of an embedder
    scores/N           [inputs, labels]: what call N gives in the order of the inputs, of a model
                       that scores
    dense/N, sparse/N  [texts, dim or terms]: those outputs of call N, of a model of such outputs
    multi_vector/N     [vectors of all texts, width]: that output, of texts of `counts/N` vectors
    images/N           uint8 [height, width, 3]: an image, of an embedder that takes images too
    image_vectors      [images, dim]: their vectors
    entities/N         JSON: what transformers' pipeline finds in the texts of call N, of a model
                       that scores tokens; scores/N are the scores of all that it finds
"""

import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched; it also ends up in a saved config

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer import modules

sys.path.append(str(Path(__file__).parents[1]))  # as for pytest: run as a script, this is "golden"

from golden import baai, colbert, listwise, m3, own_code, qwen2_vl, qwen3_vl, splade
from golden.families import FAMILIES, SEED, WORDS, Family, class_of, randomise, save_tower

HERE = Path(__file__).parent
STATIC_WIDTH = 16

# sentence-transformers' names, in the order in which it concatenates them
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")

TEXTS = [
    "the cat sat on the mat",
    "What is a dog?",
    "THE RED SKY, the blue sky; Café 42!",
    "x",
    "日本 the 🙂 mat",
    " ".join(WORDS) + " where is the red dog and how is the sky",  # over every limit here
]

QUESTION = "Where is the red dog?"
PROMPTS = {"query": "query: ", "document": "what is the document: "}


@dataclass(frozen=True)
class Dense:
    """sentence-transformers' Dense; `activation` is a class of torch.nn."""

    out_features: int
    activation: str = "Tanh"
    bias: bool = True


NORMALIZE = "normalize"


@dataclass(frozen=True)
class Static:
    """Static embeddings, with the tokenizer of a family. With `folded` the table is made of tensors
    as model2vec stores them: fewer rows in float16, a mapping and weights."""

    later: tuple[Dense | str, ...] = ()
    prompts: dict[str, str] | None = None
    family: str = "bert"
    folded: bool = False


Answer = Callable[[Any, dict[str, Any]], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Outputs:
    """A model of other outputs than one dense vector. `save` writes it into a folder, and returns
    what torch gives for a text and the options of a call, of which there is one for each of
    `options`. If it takes images of these `sides` too, it returns its dense vector of an image."""

    save: Callable[[Path], Answer]
    names: tuple[str, ...]
    options: tuple[dict[str, Any], ...] = ({},)
    sides: tuple[tuple[int, int], ...] = ()


def save_sparse(folder: Path, family: str, config: dict[str, Any], **pooling: Any) -> Answer:
    """A sparse encoder, and its weights of a text."""
    with tempfile.TemporaryDirectory() as plain:
        masked_lm = splade.save_masked_lm(Path(plain) / "plain", family, **config)
        model = splade.save(folder, masked_lm, prompts=PROMPTS, **pooling)
    return lambda text, options: {"sparse": splade.reference(model, [text], **options)}


def save_colbert(folder: Path, saved: colbert.Saved) -> Answer:
    """A model that compares texts token by token, and the vectors of a text."""
    with tempfile.TemporaryDirectory() as beside:
        made = Path(beside) / "model"
        model = colbert.save(saved, made)
        shutil.copytree(made, folder, dirs_exist_ok=True)

    def answer(text: str, options: dict[str, Any]) -> dict[str, np.ndarray]:
        encode = getattr(model, f"encode_{options['role']}")
        return {"multi_vector": encode([text], show_progress_bar=False, convert_to_numpy=True)[0]}

    return answer


def save_m3(folder: Path) -> Answer:
    """A model of three outputs, and those of a text."""
    m3.save(folder)
    reference = m3.Reference(folder)
    return lambda text, options: dict(zip(M3_OUTPUTS, reference(text), strict=True))


M3_OUTPUTS = ("dense", "sparse", "multi_vector")
OF_SPARSE = ({}, {"prompt_name": "query"}, {"max_active_dims": 7})
OF_TASKS = ({}, {"adapter": "text-matching", "prompt_name": "query"})
OF_PROMPTS = ({}, {"prompt_name": "query"})
OF_INSTRUCTIONS = ({}, {"instruction": " Find the cat"}, {"instruction": "Is it a mat?"})
OF_ROLES = ({"role": "query"}, {"role": "document"})
STANFORD = colbert.Saved("stanford", markers=colbert.STANFORD_MARKERS)
DISTILBERT = {"family": "distilbert", "config": {"tie_word_embeddings": False}}
DISTILBERT |= {"pooling_strategy": "sum", "activation_function": "log1p_relu"}
PYLATE = colbert.Saved("pylate", "modernbert", config={"local_attention": 32}, attend=True)

ANSWERS = (70, 90)  # the ids of two tokens: the logit of the first less that of the second

CHAT = (
    "<|im_start|>is the{{ '\n' }}"
    "what {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first"
    " | default('the sky') }}{{ '\n' }}"
    "query {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    "{{ '\n' }}document "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    "<|im_end|>{{ '\n' }}how is"
)


@dataclass(frozen=True)
class Judge:
    """A language model that reranks. `save` writes it into a folder, and returns what torch gives
    for a query and a document: a logit."""

    save: Callable[[Path], Callable[[str, str], float]]


@dataclass(frozen=True)
class Ranker:
    """A reranker of documents together. `save` writes it into a folder, and returns it in torch."""

    save: Callable[[Path], listwise.Reference]


@dataclass(frozen=True)
class Head:
    """What scores. Saved by transformers alone, or as a CrossEncoder with its files around it."""

    labels: tuple[str, ...] = ("LABEL_0",)
    problem_type: str | None = None
    cross_encoder: bool = True
    of_tokens: bool = False  # a logit for each token and label, of a model without CrossEncoder
    chat_template: str | None = None  # of a language model that answers with ANSWERS, saved whole

    @property
    def activation(self) -> torch.nn.Module:
        """From logits to scores. CrossEncoder leaves the logits of several labels as they are."""
        independent = self.problem_type == "multi_label_classification"
        softmax = len(self.labels) > 1 and not independent
        return torch.nn.Softmax(dim=-1) if softmax else torch.nn.Sigmoid()


@dataclass(frozen=True)
class Case:
    """A model to make. `config` are changes to the family's, `later` the modules after the pooling,
    which a model with a `head` has none of."""

    pooling: str | tuple[str, ...] = "mean"
    later: tuple[Dense | str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None
    include_prompt: bool = True
    max_seq_length: int = 24
    tower_dtype: str = "float32"
    masked_lm: bool = False  # saved with the head it was trained with, its prefix on every name
    family: str = "bert"
    head: Head | None = None


def odd(family: str, pooling: str = "mean", later: tuple[Dense | str, ...] = (), **options) -> Case:
    """One of the family's odd config."""
    return Case(pooling, later, FAMILIES[family].odd, family=family, **options)


NORMALIZED = (NORMALIZE,)
PLAIN = Head(cross_encoder=False)
CLASSIFIER = Head(("no", "perhaps", "yes"), cross_encoder=False)
TOKEN_CLASSIFIER = Head(
    ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC"), cross_encoder=False, of_tokens=True
)
SEARCH_PROMPTS = {"query": "search_query: ", "document": "search_document: "}
GEMMA_PROMPTS = {"query": "task: the | query: ", "document": "what: of | how: "}
QWEN_PROMPTS = {"query": "Instruct: how is the sky\nQuery:", "document": ""}

CASES: dict[str, Case | Static | Outputs | Judge | Ranker] = {
    "bert_mean": Case("mean", NORMALIZED, prompts=PROMPTS),
    "bert_odd_cls": odd("bert", "cls", NORMALIZED, masked_lm=True),
    "bert_half_max": Case("max", (Dense(9),), prompts=PROMPTS, tower_dtype="float16"),
    "bert_mean_sqrt_len": Case(
        "mean_sqrt_len_tokens",
        config={"hidden_act": "relu", "num_attention_heads": 1},
        prompts=PROMPTS,
        default_prompt_name="query",
    ),
    "bert_weightedmean": Case(
        "weightedmean",
        (Dense(12, "Identity", bias=False), NORMALIZE),
        {"hidden_act": "silu"},
        prompts=PROMPTS,
        include_prompt=False,
    ),
    "bert_lasttoken": Case("lasttoken", (Dense(20, "GELU"), NORMALIZE), max_seq_length=32),
    "bert_concatenated": Case(
        ("cls", "max", "mean"),
        (Dense(24, "SiLU"), NORMALIZE, Dense(10, "Sigmoid"), NORMALIZE),
        {"hidden_act": "gelu_pytorch_tanh"},
        prompts=PROMPTS,
        include_prompt=False,
    ),
    "bert_cross_encoder": Case(family="bert", head=Head()),
    "bert_classifier": odd("bert", head=CLASSIFIER),
    "electra_mean": Case("mean", NORMALIZED, masked_lm=True, family="electra"),
    "electra_odd_cls": odd("electra", "cls"),
    "electra_cross_encoder": Case(family="electra", head=Head()),
    "albert_mean": Case("mean", masked_lm=True, family="albert"),
    "albert_odd_cls": odd("albert", "cls", NORMALIZED),
    "albert_cross_encoder": Case(family="albert", head=Head()),
    "xlm_roberta_mean": Case("mean", NORMALIZED, prompts=PROMPTS, family="xlm_roberta"),
    "xlm_roberta_cross_encoder": odd("xlm_roberta", head=PLAIN),
    "jina_v3_mean": Case("mean", NORMALIZED, masked_lm=True, family="jina_v3"),
    "jina_v3_cross_encoder": odd("jina_v3", head=PLAIN),
    "roberta_classifier": Case(
        family="roberta",
        head=Head(("joy", "anger", "fear", "calm"), "multi_label_classification"),
        max_seq_length=32,
    ),
    "mpnet_mean": Case("mean", NORMALIZED, family="mpnet", max_seq_length=32),
    "mpnet_odd_cls": odd("mpnet", "cls", masked_lm=True),
    "mpnet_cross_encoder": Case(family="mpnet", head=Head()),
    "nomic_bert_mean": Case("mean", prompts=SEARCH_PROMPTS, family="nomic_bert"),
    "nomic_bert_odd_cls": odd("nomic_bert", "cls", NORMALIZED, masked_lm=True),
    "nomic_bert_cross_encoder": Case(family="nomic_bert", head=PLAIN),
    "nomic_moe_mean": Case("mean", NORMALIZED, prompts=SEARCH_PROMPTS, family="nomic_moe"),
    "nomic_moe_odd_cls": odd("nomic_moe", "cls"),
    "gte_cls": Case("cls", NORMALIZED, family="gte"),
    "gte_odd_mean": odd("gte", masked_lm=True),
    "gte_cross_encoder": Case(family="gte", head=Head(), config={"type_vocab_size": 0}),
    "jina_bert_mean": Case("mean", family="jina_bert"),
    "jina_bert_cross_encoder": odd("jina_bert", head=PLAIN),
    "jina_bert_code_odd_mean": odd("jina_bert_code", "mean", NORMALIZED),
    "distilbert_mean": Case("mean", NORMALIZED, family="distilbert"),
    "distilbert_odd_cls": odd("distilbert", "cls", NORMALIZED, prompts=PROMPTS, masked_lm=True),
    "distilbert_cross_encoder": Case(family="distilbert", head=Head()),
    "distilbert_classifier": odd("distilbert", head=CLASSIFIER),
    "deberta_mean": Case("mean", NORMALIZED, prompts=PROMPTS, family="deberta"),
    "deberta_odd_cls": odd("deberta", "cls", NORMALIZED, masked_lm=True),
    "deberta_cross_encoder": Case(family="deberta", head=Head()),
    "deberta_classifier": Case(
        family="deberta",
        head=CLASSIFIER,
        config=FAMILIES["deberta"].odd
        | {"norm_rel_ebd": "layer_norm", "position_buckets": 10, "pos_att_type": ["p2c"]},
    ),
    "modernbert_mean": Case("mean", NORMALIZED, prompts=SEARCH_PROMPTS, family="modernbert"),
    "modernbert_cls": Case("cls", family="modernbert", max_seq_length=32, masked_lm=True),
    "modernbert_odd_mean": odd("modernbert", "mean", NORMALIZED),
    "modernbert_cross_encoder": Case(
        family="modernbert", head=Head(), config={"classifier_pooling": "mean"}
    ),
    "modernbert_classifier": odd("modernbert", head=CLASSIFIER, max_seq_length=41),
    "qwen3_lasttoken": Case(
        "lasttoken", NORMALIZED, prompts=QWEN_PROMPTS, family="qwen3", masked_lm=True
    ),
    "qwen3_odd_lasttoken": odd("qwen3", "lasttoken", NORMALIZED, max_seq_length=41),
    "qwen3_classifier": odd("qwen3", head=CLASSIFIER, max_seq_length=41),
    "qwen3_cross_encoder": Case(family="qwen3", head=Head()),
    "qwen3_reranker": Case(
        family="qwen3",
        head=Head(chat_template=CHAT),
        config={"tie_word_embeddings": True, "max_position_embeddings": 64},
        max_seq_length=48,
    ),
    "qwen2_lasttoken": Case("lasttoken", NORMALIZED, family="qwen2"),
    "qwen2_odd_mean": odd("qwen2", "mean", (Dense(24, "Identity"),)),
    "static_bert": Static(NORMALIZED, PROMPTS),
    "static_xlm_roberta": Static((Dense(12), NORMALIZE), family="xlm_roberta", folded=True),
    "gemma_odd_lasttoken": odd("gemma", "lasttoken", NORMALIZED),
    "gemma2_lasttoken": Case("lasttoken", NORMALIZED, family="gemma2"),
    "gemma2_odd_mean": odd("gemma2", max_seq_length=41, masked_lm=True),
    "gemma3_mean": Case(
        "mean",
        (Dense(24, "Identity", bias=False), Dense(18, "Identity", bias=False), NORMALIZE),
        prompts=GEMMA_PROMPTS,
        family="gemma3",
    ),
    "gemma3_odd_lasttoken": odd(
        "gemma3", "lasttoken", NORMALIZED, max_seq_length=41, masked_lm=True
    ),
    "llama_cross_encoder": Case(family="llama", head=Head(), max_seq_length=48),
    "llama_odd_mean": odd("llama"),
    "mistral_lasttoken": Case("lasttoken", NORMALIZED, family="mistral", masked_lm=True),
    "mistral_odd_lasttoken": odd("mistral", "lasttoken", max_seq_length=41),
    "ministral3_mean": Case("mean", NORMALIZED, family="ministral3", max_seq_length=64),
    "eurobert_mean": Case("mean", NORMALIZED, family="eurobert", masked_lm=True),
    "eurobert_classifier": odd("eurobert", head=CLASSIFIER, max_seq_length=41),
    "t5_mean": Case(
        "mean",
        (Dense(12, "Identity", bias=False), NORMALIZE),
        prompts=PROMPTS,
        include_prompt=False,  # as instructor's
        family="t5",
    ),
    "t5_odd_mean": odd("t5", "mean", NORMALIZED, masked_lm=True, max_seq_length=41),
    "bert_token_classifier": Case(family="bert", head=TOKEN_CLASSIFIER),
    "deberta_token_classifier": odd("deberta", head=TOKEN_CLASSIFIER),
    "modernbert_token_classifier": odd("modernbert", head=TOKEN_CLASSIFIER, max_seq_length=41),
    "xlm_roberta_token_classifier": Case(family="xlm_roberta", head=TOKEN_CLASSIFIER),
    "bert_sparse": Outputs(
        partial(save_sparse, family="bert", config=FAMILIES["bert"].odd), ("sparse",), OF_SPARSE
    ),
    "distilbert_sparse": Outputs(partial(save_sparse, **DISTILBERT), ("sparse",), OF_SPARSE),
    "bert_colbert": Outputs(partial(save_colbert, saved=STANFORD), ("multi_vector",), OF_ROLES),
    "modernbert_colbert": Outputs(partial(save_colbert, saved=PYLATE), ("multi_vector",), OF_ROLES),
    "xlm_roberta_m3": Outputs(save_m3, M3_OUTPUTS),
    "qwen3_jina_v5": Outputs(partial(own_code.save_jina, family="qwen3"), ("dense",), OF_TASKS),
    "eurobert_jina_v5": Outputs(
        partial(own_code.save_jina, family="eurobert"), ("dense",), OF_TASKS
    ),
    "qwen3_voyage": Outputs(own_code.save_voyage, ("dense",), OF_PROMPTS),
    "qwen3_pplx": Outputs(own_code.save_pplx, ("dense",)),
    "qwen3_vl_embedder": Outputs(
        qwen3_vl.save_embedder, ("dense",), OF_INSTRUCTIONS, ((16, 24), (24, 9), (5, 31))
    ),
    "qwen3_vl_reranker": Judge(qwen3_vl.save_reranker),
    "qwen2_vl_reranker": Judge(qwen2_vl.save),
    "gemma_reranker": Judge(baai.save_gemma),
    "minicpm_layerwise": Judge(baai.save_minicpm),
    "gemma2_lightweight": Judge(baai.save_lightweight),
    "qwen3_listwise": Ranker(listwise.save),
}


def save(case: Case, folder: Path) -> None:
    """The model as a directory that SentenceTransformer or CrossEncoder loads."""
    torch.manual_seed(SEED)
    family = FAMILIES[case.family]
    if case.head is not None:
        save_scorer(case, case.head, folder)
        return
    with tempfile.TemporaryDirectory() as plain:
        save_tower(family, Path(plain), **case.config)
        transformer = modules.Transformer(plain, max_seq_length=case.max_seq_length)
    width = transformer.get_embedding_dimension()
    pooling = modules.Pooling(width, case.pooling, include_prompt=case.include_prompt)
    later = list(_later(case, pooling.get_embedding_dimension()))
    model = SentenceTransformer(
        modules=[transformer, pooling, *later],
        prompts=case.prompts,
        default_prompt_name=case.default_prompt_name,
        device="cpu",
    )
    randomise(model)
    transformer.to(getattr(torch, case.tower_dtype))
    model.save_pretrained(str(folder), create_model_card=False)
    if case.masked_lm:
        _as_masked_lm(family, folder)


def save_static(case: Static, folder: Path) -> None:
    """Static embeddings as a directory that SentenceTransformer loads."""
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory() as plain:
        tokenizer = FAMILIES[case.family].tokenizer(Path(plain))
    tokens = max(tokenizer.get_vocab().values()) + 1
    table = modules.StaticEmbedding(tokenizer, np.zeros((tokens, STATIC_WIDTH), np.float32))
    later = list(_later(case, STATIC_WIDTH))
    model = SentenceTransformer(modules=[table, *later], prompts=case.prompts, device="cpu")
    randomise(model)
    model.save_pretrained(str(folder), create_model_card=False)
    if case.folded:
        draw = np.random.default_rng(SEED)
        tensors = {
            "embeddings": draw.standard_normal((20, STATIC_WIDTH)).astype(np.float16),
            "mapping": draw.integers(0, 20, tokens),
            "weights": draw.random(tokens),
        }
        (beside,) = folder.glob("**/tokenizer.json")
        save_file(tensors, beside.with_name("model.safetensors"))


def publish(family: Family, folder: Path) -> None:
    """Let config.json say what published ones say, after torch has loaded the model: it would not
    find a class of our own by that."""
    for path in folder.glob("**/config.json"):
        said = json.loads(path.read_text())
        if family.published and "architectures" in said:
            path.write_text(json.dumps(said | family.published, indent=2))


def save_scorer(case: Case, head: Head, folder: Path) -> None:
    """A model with a head that scores, or a language model that answers, with or without a
    CrossEncoder's files."""
    family, is_judge = FAMILIES[case.family], head.chat_template is not None
    name = family.masked_lm if is_judge else family.classifier
    if head.of_tokens:
        name = token_classifier_of(family)
    kind, config = class_of(name), {}
    if not is_judge:
        config["id2label"] = dict(enumerate(head.labels))
        config["label2id"] = {label: n for n, label in enumerate(head.labels)}
        config["problem_type"] = head.problem_type
    scorer = kind(kind.config_class(**family.config | case.config | config))
    randomise(scorer)
    if is_judge:
        scorer.tie_weights()
    with tempfile.TemporaryDirectory() as temporary:
        plain = Path(temporary) if head.cross_encoder else folder
        scorer.to(getattr(torch, case.tower_dtype)).save_pretrained(plain)
        tokenizer = family.tokenizer(plain)
        tokenizer.model_max_length = case.max_seq_length
        tokenizer.chat_template = head.chat_template
        tokenizer.save_pretrained(plain)
        if is_judge:
            transformer = modules.Transformer(temporary, transformer_task="text-generation")
            model = CrossEncoder(modules=[transformer, LogitScore(*ANSWERS)], device="cpu")
        elif head.cross_encoder:
            model = CrossEncoder(temporary, device="cpu")
        else:
            return
        model.save_pretrained(str(folder), create_model_card=False)


def token_classifier_of(family: Family) -> str:
    """The class of the family's models that score tokens."""
    return family.backbone.replace("Model", "ForTokenClassification")


def _later(case: Case | Static, width: int) -> Iterator[torch.nn.Module]:
    for layer in case.later:
        if isinstance(layer, Dense):
            activation = getattr(torch.nn, layer.activation)()
            yield modules.Dense(width, layer.out_features, layer.bias, activation)
            width = layer.out_features
        else:
            yield modules.Normalize()


def _as_masked_lm(family: Family, folder: Path) -> None:
    backbone = class_of(family.backbone).from_pretrained(folder, **family.options)
    whole = class_of(family.masked_lm)(backbone.config)
    randomise(whole)
    # not strict: that of T5 is the whole, with a decoder
    loaded = whole.base_model.load_state_dict(backbone.state_dict(), strict=False)
    assert not loaded.unexpected_keys
    whole.save_pretrained(folder)


def sequences(case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Random ids and types, ragged: from one token to every position there is."""
    draw = np.random.default_rng(SEED)
    family = FAMILIES[case.family]
    config = family.config | case.config
    positions = family.positions(case.config)
    lengths = [1, 2, 3, 5, 8, 13, positions - 1, positions]
    limits = ((1, config["vocab_size"]), (0, config.get("type_vocab_size") or 1))
    ids, types = ([draw.integers(*of, n, dtype=np.int32) for n in lengths] for of in limits)
    return ids, types


def rerank_calls() -> list[dict[str, Any]]:
    asked = {"method": "rerank", "query": QUESTION, "documents": TEXTS}
    return [asked | {"options": options} for options in ({}, {"raw_scores": True})]


def calls(case: Case) -> list[dict[str, Any]]:
    """In jaxembed's words: method, inputs, options."""
    if case.head is None:
        return _embedding_calls(case)
    if case.head.of_tokens:
        strategies = ("none", "simple", "first", "average", "max")
        return [{"method": "token_classify", "texts": TEXTS, "strategy": one} for one in strategies]
    if len(case.head.labels) == 1:
        return rerank_calls()
    pairs = list(zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True))[:-1]
    return [
        {"method": "classify", "inputs": inputs, "options": options}
        for inputs in (TEXTS, pairs)
        for options in ({}, {"raw_scores": True})
    ]


def _embedding_calls(case: Case | Static) -> list[dict[str, Any]]:
    plain = [
        {"method": "encode"},
        {"method": "encode", "options": {"prompt": "how is "}},
        {"method": "encode", "options": {"dimensions": 5, "normalize": True}},
    ]
    named = [
        {"method": "encode_query"},
        {"method": "encode_document"},
        {"method": "encode", "options": {"prompt_name": "document"}},
    ]
    chosen = plain + (named if case.prompts else [])
    return [{"texts": TEXTS, "options": {}} | call for call in chosen]


def answer(model: SentenceTransformer, call: dict[str, Any], batch_size: int = 1) -> np.ndarray:
    """What sentence-transformers gives; with one text at a time nothing is padded."""
    spellings = {"dimensions": "truncate_dim", "normalize": "normalize_embeddings"}
    options = {spellings.get(name, name): value for name, value in call["options"].items()}
    encode = getattr(model, call["method"])
    return encode(call["texts"], batch_size=batch_size, show_progress_bar=False, **options)


def score(model: CrossEncoder, head: Head, call: dict[str, Any]) -> np.ndarray:
    """The scores of the inputs, [inputs, labels]. Of a pair over the limit the second text is cut,
    which is jaxembed's way and one of transformers'."""
    inputs = call.get("inputs") or [(call["query"], document) for document in call["documents"]]
    activation = torch.nn.Identity() if call["options"].get("raw_scores") else head.activation
    if isinstance(inputs[0], str):
        return torch.cat([activation(_text_logits(model, text)) for text in inputs]).numpy()
    cut = {} if head.chat_template else {"text": {"truncation": "only_second"}}
    scores = model.predict(
        inputs,
        batch_size=1,
        activation_fn=activation,
        processing_kwargs=cut,
        show_progress_bar=False,
    )
    return scores.reshape(len(inputs), -1)


def entities(model: Any, folder: Path, call: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """What transformers' pipeline finds in each text, as JSON, and the scores."""
    pipeline = transformers.TokenClassificationPipeline(
        model=model,
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        aggregation_strategy=call["strategy"],
    )
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # how words are found
        found = [pipeline(text) for text in call["texts"]]
    scores = [one.pop("score") for in_text in found for one in in_text]
    return np.array(json.dumps(found)), np.array(scores, np.float32)


@torch.no_grad()
def _text_logits(model: CrossEncoder, text: str) -> torch.Tensor:
    """Of a text that is no pair, which CrossEncoder does not take."""
    features = model.tokenizer(
        text, truncation=True, max_length=model.max_seq_length, return_tensors="pt"
    )
    return model.model(**features).logits


def load(folder: Path, kind: Any = SentenceTransformer) -> Any:
    """In float32 whatever the dtype it was saved in."""
    return kind(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})


load_scorer = partial(load, kind=CrossEncoder)


def hidden_states(backbone, ids: np.ndarray, types: np.ndarray | None = None) -> np.ndarray:
    """The last hidden states of one sequence, [length, width]."""
    return _run(backbone, ids, types).last_hidden_state[0].numpy()


def token_logits(classifier, ids: np.ndarray, types: np.ndarray | None = None) -> np.ndarray:
    """Of each token of one sequence, [length, labels]."""
    return _run(classifier, ids, types).logits[0].numpy()


def logits(scorer, ids: np.ndarray, types: np.ndarray | None = None) -> np.ndarray:
    """Of one sequence, [labels]."""
    given = _run(scorer, ids, types).logits[0].numpy()
    if given.ndim == 1:
        return given
    yes, no = ANSWERS  # of a language model, which gives every token's
    return given[-1, [yes]] - given[-1, [no]]


@torch.no_grad()
def _run(model, ids: np.ndarray, types: np.ndarray | None):
    inputs = {"input_ids": torch.from_numpy(ids[None]).long()}
    if hasattr(model.config, "type_vocab_size"):
        kinds = np.zeros_like(ids) if types is None else types
        inputs["token_type_ids"] = torch.from_numpy(kinds[None]).long()
    return model(**inputs, attention_mask=torch.ones(1, len(ids), dtype=torch.long))


def _pooled(hidden: np.ndarray) -> np.ndarray:
    pooling = modules.Pooling(hidden.shape[1], POOLINGS)
    features = {
        "token_embeddings": torch.from_numpy(hidden)[None],
        "attention_mask": torch.ones(1, len(hidden), dtype=torch.long),
    }
    return pooling(features)["sentence_embedding"][0].numpy()


def make_static(case: Static) -> dict[str, np.ndarray]:
    """The arrays of a golden of static embeddings, without hidden states."""
    chosen = _embedding_calls(case)
    asked = [*chosen, {"method": "encode", "texts": ["", "the cat", " "], "options": {}}]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_static(case, folder)
        model = load(folder)
        golden = dict(_source(folder))
        golden |= {f"vectors/{n}": answer(model, call) for n, call in enumerate(asked)}
    return golden | {"calls": np.array(json.dumps(asked))}


def make_outputs(case: Outputs) -> dict[str, np.ndarray]:
    """The arrays of a golden of other outputs than one dense vector, without hidden states."""
    call = {"method": "encode_outputs", "texts": TEXTS, "outputs": case.names}
    asked = [call | {"options": options} for options in case.options]
    golden: dict[str, np.ndarray] = {"calls": np.array(json.dumps(asked))}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        answer = case.save(folder)
        for n, options in enumerate(case.options):
            answers = [answer(text, options) for text in TEXTS]  # alone: nothing is padded
            for name in case.names:
                parts = [np.atleast_2d(one[name]) for one in answers]
                golden[f"{name}/{n}"] = np.concatenate(parts)
                if name == "multi_vector":
                    golden[f"counts/{n}"] = np.array([len(part) for part in parts])
        draw = np.random.default_rng(SEED)
        images = [draw.integers(0, 256, (*sides, 3), dtype=np.uint8) for sides in case.sides]
        if images:
            golden |= {f"images/{n}": colours for n, colours in enumerate(images)}
            golden["image_vectors"] = np.stack([answer(one, {})["dense"] for one in images])
        golden |= _source(folder)
    return golden


def make_judge(case: Judge | Ranker) -> dict[str, np.ndarray]:
    """The arrays of a golden of a language model that reranks, without hidden states."""
    asked = rerank_calls()
    golden: dict[str, np.ndarray] = {"calls": np.array(json.dumps(asked))}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if isinstance(case, Ranker):
            cosines = case.save(folder).rank(QUESTION, TEXTS)[:, None]
            golden |= {"scores/0": cosines, "scores/1": cosines}
        else:
            judge = case.save(folder)
            logits = np.array([[judge(QUESTION, text)] for text in TEXTS], np.float32)
            golden |= {"scores/0": 1 / (1 + np.exp(-logits)), "scores/1": logits}
        return golden | dict(_source(folder))


def make(case: Case | Static | Outputs | Judge | Ranker) -> dict[str, np.ndarray]:
    """The arrays of a golden."""
    if isinstance(case, Static):
        return make_static(case)
    if isinstance(case, Outputs):
        return make_outputs(case)
    if isinstance(case, Judge | Ranker):
        return make_judge(case)
    ids, types = sequences(case)
    pairs = list(zip(ids, types, strict=True))
    asked = calls(case)
    golden: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save(case, folder)
        if case.head is None:
            model = load(folder)
            backbone = model[0].auto_model.eval()
            golden |= {f"vectors/{n}": answer(model, call) for n, call in enumerate(asked)}
        elif case.head.of_tokens:
            model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
            backbone = model.base_model
            for n, call in enumerate(asked):
                golden[f"entities/{n}"], golden[f"scores/{n}"] = entities(model, folder, call)
            golden["token_logits"] = np.concatenate([token_logits(model, *pair) for pair in pairs])
        else:
            model = load_scorer(folder)
            scorer = model.model.eval()
            backbone = scorer.base_model
            golden |= {f"scores/{n}": score(model, case.head, c) for n, c in enumerate(asked)}
            golden["logits"] = np.stack([logits(scorer, *pair) for pair in pairs])
        hidden = [hidden_states(backbone, *pair) for pair in pairs]
        publish(FAMILIES[case.family], folder)
        golden |= _source(folder)
    return golden | {
        "ids": np.concatenate(ids),
        "types": np.concatenate(types),
        "lengths": np.array([len(one) for one in ids], np.int32),
        "hidden": np.concatenate(hidden),
        "pooled": np.stack([_pooled(one) for one in hidden]),
        "calls": np.array(json.dumps(asked)),
    }


def _source(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        inside = path.relative_to(folder).as_posix()
        if path.suffix in (".safetensors", ".pt"):
            for name, tensor in (torch.load if path.suffix == ".pt" else load_file)(path).items():
                yield f"tensors/{inside}:{name}", np.asarray(tensor)
        else:
            yield f"source/{inside}", np.array(path.read_text())


def main(names: list[str]) -> None:
    """Make those named, or all, and then drop what no case makes any more."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for path in HERE.glob("*.npz"):
        if path.stem not in CASES:
            path.unlink()
    for name in names or CASES:
        path = HERE / f"{name}.npz"
        np.savez_compressed(path, allow_pickle=False, **make(CASES[name]))
        print(f"{path.name:<32}{path.stat().st_size / 1024:6.0f} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
