"""Saves random sparse encoders as sentence-transformers does, and gives its weights of texts."""

from pathlib import Path
from typing import Any

import numpy as np
from golden.families import FAMILIES, class_of, randomise
from sentence_transformers import SparseEncoder
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.sparse_encoder.modules import SpladePooling

LIMIT = 24  # tokens of a text


def save_masked_lm(folder: Path, family: str = "bert", **changes: Any) -> Path:
    """A masked language model and its tokenizer as transformers saves them."""
    made = FAMILIES[family]
    assert made.masked_lm is not None
    kind = class_of(made.masked_lm)
    model = kind(kind.config_class(**made.config | changes))
    randomise(model)
    model.tie_weights()
    folder.mkdir()
    tokenizer = made.tokenizer(folder)
    tokenizer.model_max_length = LIMIT
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save(folder: Path, plain: Path, *, prompts=None, most=None, **pooling) -> SparseEncoder:
    """A sparse encoder of a masked language model, as sentence-transformers saves it."""
    transformer = modules.Transformer(str(plain), transformer_task="fill-mask")
    model = SparseEncoder(
        modules=[transformer, SpladePooling(**pooling)],
        prompts=prompts,
        max_active_dims=most,
        device="cpu",
    )
    model.save_pretrained(str(folder), create_model_card=False)
    return SparseEncoder(str(folder), device="cpu")


def reference(model: SparseEncoder, texts: list[str], **options) -> np.ndarray:
    """Its weights of all terms, one text at a time: nothing is padded."""
    options |= {"batch_size": 1, "convert_to_sparse_tensor": False, "show_progress_bar": False}
    return model.encode(texts, **options).numpy()
