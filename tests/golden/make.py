"""Makes the goldens anew (`make golden`; needs torch): tiny models as transformers and
sentence-transformers save them, and what torch computes with them.

A golden is one .npz of
    source/PATH        a text file of the saved directory, as a string
    tensors/PATH:NAME  a tensor of one of its safetensors files
    ids, types         sequences one after another, of `lengths` tokens each
    hidden             [tokens, width]: transformers' last hidden states of them
    pooled             [sequences, poolings * width]: their hidden states in every pooling of
                       POOLINGS, side by side
    calls              JSON: the method, texts and options of calls to SentenceTransformer
    vectors/N          [texts, dim]: what call N gives

Weights come from numpy and not from transformers' initialisers, whose zero biases and unit norms
would hide a swapped tensor, and which may change from release to release.
"""

import json
import os
import string
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched; it also ends up in a saved config

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

HERE = Path(__file__).parent
SEED = 7

# sentence-transformers' names, in the order in which it concatenates them
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")

_SENTENCE = "the a of cat dog sat on mat runs red blue sky how what is where query document"
WORDS = _SENTENCE.split()
LETTERS = string.ascii_lowercase + string.digits
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, *",.?!:", *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]

BERT: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "hidden_act": "gelu",
}

TEXTS = [
    "the cat sat on the mat",
    "What is a dog?",
    "THE RED SKY, the blue sky; Café 42!",
    "x",
    "日本 the 🙂 mat",
    " ".join(WORDS) + " where is the red dog and how is the sky",  # over every limit here
]

PROMPTS = {"query": "query: ", "document": "what is the document: "}


@dataclass(frozen=True)
class Dense:
    """sentence-transformers' Dense; `activation` is a class of torch.nn."""

    out_features: int
    activation: str = "Tanh"
    bias: bool = True


NORMALIZE = "normalize"


@dataclass(frozen=True)
class Case:
    """A model to make. `bert` are changes to BERT, `later` the modules after the pooling."""

    pooling: str | tuple[str, ...] = "mean"
    later: tuple[Dense | str, ...] = ()
    bert: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None
    include_prompt: bool = True
    max_seq_length: int = 24
    tower_dtype: str = "float32"
    masked_lm: bool = False  # saved as BertForMaskedLM, with "bert." before every name


# Odd in every size, so that no two axes can be swapped unseen.
ODD = {
    "hidden_size": 15,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 37,
    "max_position_embeddings": 29,
    "type_vocab_size": 3,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-2,  # large, so that one that is ignored shows
}

CASES = {
    "bert_mean": Case("mean", (NORMALIZE,), prompts=PROMPTS),
    "bert_odd_cls": Case("cls", (NORMALIZE,), ODD, masked_lm=True),
    "bert_half_max": Case("max", (Dense(9),), prompts=PROMPTS, tower_dtype="float16"),
    "bert_mean_sqrt_len": Case(
        "mean_sqrt_len_tokens",
        bert={"hidden_act": "relu", "num_attention_heads": 1},
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
}


def save(case: Case, folder: Path) -> None:
    """The model as a directory that SentenceTransformer loads."""
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory() as plain:
        save_bert(Path(plain), **BERT | case.bert)
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
        _as_masked_lm(folder)


def save_bert(folder: Path, **config: Any) -> None:
    """A BertModel and its tokenizer, as transformers saves them."""
    bert = transformers.BertModel(transformers.BertConfig(**config), add_pooling_layer=False)
    randomise(bert)
    bert.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    tokenizer = transformers.BertTokenizerFast.from_pretrained(folder, do_lower_case=True)
    tokenizer.save_pretrained(folder)


def randomise(model: torch.nn.Module) -> None:
    """Weights drawn by numpy in the order of their names."""
    draw = np.random.default_rng(SEED)
    for name, parameter in sorted(model.named_parameters()):
        values = draw.standard_normal(tuple(parameter.shape), np.float32)
        if name.endswith("LayerNorm.weight"):
            values = 1 + 0.2 * values
        elif parameter.ndim == 1:
            values *= 0.2
        elif "embeddings" in name:
            values *= 0.5
        else:
            values *= parameter.shape[1] ** -0.5
        parameter.data = torch.from_numpy(values)


def _later(case: Case, width: int) -> Iterator[torch.nn.Module]:
    for layer in case.later:
        if isinstance(layer, Dense):
            activation = getattr(torch.nn, layer.activation)()
            yield modules.Dense(width, layer.out_features, layer.bias, activation)
            width = layer.out_features
        else:
            yield modules.Normalize()


def _as_masked_lm(folder: Path) -> None:
    tower = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False)
    whole = transformers.BertForMaskedLM(tower.config)
    randomise(whole)
    whole.bert.load_state_dict(tower.state_dict())
    whole.save_pretrained(folder)


def sequences(case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Random ids and types, ragged: from one token to every position there is."""
    draw = np.random.default_rng(SEED)
    config = {"type_vocab_size": 2} | BERT | case.bert
    positions = config["max_position_embeddings"]
    lengths = [1, 2, 3, 5, 8, 13, positions - 1, positions]
    ids = [draw.integers(1, config["vocab_size"], n, dtype=np.int32) for n in lengths]
    types = [draw.integers(0, config["type_vocab_size"], n, dtype=np.int32) for n in lengths]
    return ids, types


def calls(case: Case) -> list[dict[str, Any]]:
    """In jaxembed's words: method, texts, options."""
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


def load(folder: Path) -> SentenceTransformer:
    """In float32 whatever the dtype it was saved in."""
    return SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})


@torch.no_grad()
def hidden_states(bert, ids: np.ndarray, types: np.ndarray | None = None) -> np.ndarray:
    """The last hidden states of one sequence, [length, width]."""
    kinds = np.zeros_like(ids) if types is None else types
    output = bert(
        input_ids=torch.from_numpy(ids[None]).long(),
        token_type_ids=torch.from_numpy(kinds[None]).long(),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
    )
    return output.last_hidden_state[0].numpy()


def _pooled(hidden: np.ndarray) -> np.ndarray:
    pooling = modules.Pooling(hidden.shape[1], POOLINGS)
    features = {
        "token_embeddings": torch.from_numpy(hidden)[None],
        "attention_mask": torch.ones(1, len(hidden), dtype=torch.long),
    }
    return pooling(features)["sentence_embedding"][0].numpy()


def make(case: Case) -> dict[str, np.ndarray]:
    """The arrays of a golden."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save(case, folder)
        model = load(folder)
        ids, types = sequences(case)
        bert = model[0].auto_model.eval()
        hidden = [hidden_states(bert, *pair) for pair in zip(ids, types, strict=True)]
        asked = calls(case)
        golden = dict(_source(folder))
        golden |= {f"vectors/{n}": answer(model, call) for n, call in enumerate(asked)}
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
        if path.suffix == ".safetensors":
            for name, tensor in load_file(path).items():
                yield f"tensors/{inside}:{name}", tensor
        else:
            yield f"source/{inside}", np.array(path.read_text())


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for old in HERE.glob("*.npz"):
        old.unlink()
    for name, case in CASES.items():
        path = HERE / f"{name}.npz"
        np.savez_compressed(path, allow_pickle=False, **make(case))
        print(f"{path.name:<28}{path.stat().st_size / 1024:6.0f} KiB")


if __name__ == "__main__":
    main()
