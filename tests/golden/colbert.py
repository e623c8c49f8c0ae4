"""Saves random models that compare texts token by token, in the three forms there are."""

import json
import string
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from golden.families import FAMILIES, SEED, randomise, save_tower
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Normalize
from transformers import AutoTokenizer

WIDTH = 10
MARKERS = ("[Q] ", "[D] ")
STANFORD_MARKERS = ("[unused0]", "[unused1]")


@dataclass(frozen=True)
class Saved:
    """A model. With `length` queries are filled up to so many tokens, by `strategy`."""

    form: Literal["stanford", "pylate", "sentence_transformers"]
    family: str = "bert"
    markers: tuple[str, str] = MARKERS
    length: int | None = 12
    strategy: Literal["fixed", "min"] = "fixed"
    attend: bool = False
    query_length: int | None = None
    document_length: int | None = 20
    skipped: str | None = string.punctuation
    dense: tuple[dict[str, Any], ...] = ({},)
    prompts: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> "Saved":
        return replace(self, **changes)


def save(model: Saved, folder: Path) -> MultiVectorEncoder:
    """Write the model to the folder. Returns what sentence-transformers makes of it."""
    torch.manual_seed(SEED)
    backbone = folder.parent / "tower"
    _save_tower(model, backbone)
    if model.form == "stanford":
        _as_stanford(model, backbone, folder)
    else:
        _as_modules(model, backbone, folder)
    if model.form == "pylate":
        _as_pylate(model, folder)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return MultiVectorEncoder(str(folder), device="cpu", model_kwargs=options)


def _save_tower(model: Saved, folder: Path) -> None:
    """The tower and its tokenizer, with the markers among its tokens."""
    family = FAMILIES[model.family]
    folder.mkdir()
    tokens = [marker for marker in model.markers if marker]
    size = family.config["vocab_size"] + len(tokens)
    save_tower(family, folder, **{"vocab_size": size} | model.config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(tokens)
    tokenizer.save_pretrained(folder)
    if model.markers == STANFORD_MARKERS:
        _into_vocabulary(folder, tokens)


def _into_vocabulary(folder: Path, tokens: list[str]) -> None:
    """Make added tokens ordinary ones, which no text gives, as BERT's [unused0] are."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    for token in [one for one in content["added_tokens"] if one["content"] in tokens]:
        content["model"]["vocab"][token["content"]] = token["id"]
        content["added_tokens"].remove(token)
    path.write_text(json.dumps(content))
    for path in (folder / "added_tokens.json", folder / "vocab.txt"):
        path.unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for name in ("added_tokens_decoder", "extra_special_tokens"):
        config.pop(name, None)
    path.write_text(json.dumps(config))


def _as_stanford(model: Saved, backbone: Path, folder: Path) -> None:
    backbone.rename(folder)
    tensors = load_file(folder / "model.safetensors")
    prefix = {"bert": "bert.", "xlm_roberta": "roberta."}[model.family]
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    hidden = FAMILIES[model.family].config["hidden_size"]
    tensors["linear.weight"] = torch.randn(WIDTH, hidden)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    metadata = {"query_token_id": model.markers[0], "doc_token_id": model.markers[1]}
    metadata |= {"query_maxlen": model.length, "doc_maxlen": model.document_length}
    metadata |= {"attend_to_mask_tokens": model.attend, "mask_punctuation": bool(model.skipped)}
    metadata |= {"similarity": "cosine", "interaction": "colbert", "dim": WIDTH, "nbits": 1}
    (folder / "artifact.metadata").write_text(json.dumps(metadata))


def _as_modules(model: Saved, backbone: Path, folder: Path) -> None:
    expansion = None
    if model.length is not None:
        expansion = {"strategy": model.strategy, "attend": model.attend, "length": model.length}
    lengths = {"query_length": model.query_length, "document_length": model.document_length}
    transformer = Transformer(str(backbone), query_expansion=expansion, **lengths)
    width, layers = transformer.get_embedding_dimension(), []
    for options in model.dense:
        options = {"out_features": WIDTH, "bias": False, "activation_function": None} | options
        layers.append(Dense(width, module_input_name="token_embeddings", **options))
        randomise(layers[-1])
        width = options["out_features"]
    prompts = dict(zip(("query", "document"), model.markers, strict=True)) | model.prompts
    mask = MultiVectorMask(skiplist_words=list(model.skipped or ""))
    modules = [transformer, *layers, mask, Normalize(module_input_name="token_embeddings")]
    encoder = MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu")
    encoder.save_pretrained(str(folder), create_model_card=False)


def _as_pylate(model: Saved, folder: Path) -> None:
    """As PyLate 1 saves it: the tower and its projections, and settings beside the modules."""
    path = folder / "modules.json"
    transformer, *layers, _, _ = json.loads(path.read_text())  # without the mask and Normalize
    for one in layers:
        one["type"] = "pylate.models.Dense.Dense"
        file = folder / one["path"] / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({k: config[k] for k in config if not k.startswith("module_")}))
    path.write_text(json.dumps([transformer, *layers]))
    for path in folder.glob("sentence_*_config.json"):
        most = (model.document_length or 20) - 1  # as PyLate leaves it
        path.write_text(json.dumps({"max_seq_length": most, "do_lower_case": False}))
    settings = {"model_type": "ColBERT", "prompts": model.prompts, "similarity_fn_name": "MaxSim"}
    settings |= dict(zip(("query_prefix", "document_prefix"), model.markers, strict=True))
    settings |= {"query_length": model.length or model.query_length}
    settings |= {"document_length": model.document_length}
    settings["do_query_expansion"] = model.length is not None
    settings["attend_to_expansion_tokens"] = model.attend
    if model.skipped is not None:
        settings["skiplist_words"] = list(model.skipped)
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
