"""BERT with random weights in a peer, dense and sparse, on token ids: `pipe` says how it is driven.

    {"library": "onnxruntime", "config": {...}, "dtype": "float32", "threads": 2, "bias": -3.8}

`config` is that of transformers, `bias` that of the terms in standard deviations of a logit. A call
is `["values", "SPLADE", 16, 128]`: an output and the shape of a batch, all of it tokens.

sentence-transformers runs its own modules. onnxruntime runs what torch exports of the same model,
its pooling included, for which its environment needs torch, transformers and onnx as well.
"""

import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from pipe import apart, serve, session

OUTPUTS = ("dense", "SPLADE")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Library(ABC):
    """A model, on token ids."""

    def __init__(self, job: dict[str, Any]):
        self._vocabulary = job["config"]["vocab_size"]

    def values(self, output: str, rows: int, length: int) -> np.ndarray:
        """The values of an output that are not zero, for a batch without padding."""
        draw = np.random.default_rng(0)
        return self.run(output, draw.integers(len(SPECIAL), self._vocabulary, (rows, length)))

    @abstractmethod
    def run(self, output: str, ids: np.ndarray) -> np.ndarray:
        """The values of an output that are not zero."""


class SentenceTransformers(Library):
    """Mean pooling and its norm, or the pooling of a SparseEncoder and its sparse tensor."""

    PACKAGES = ("sentence-transformers", "transformers", "torch")

    def __init__(self, job: dict[str, Any]):
        import torch
        from sentence_transformers import SentenceTransformer, SparseEncoder
        from sentence_transformers.sentence_transformer import modules
        from sentence_transformers.sparse_encoder.modules import SpladePooling

        super().__init__(job)
        torch.set_num_threads(job["threads"])
        kind = {"dtype": getattr(torch, job["dtype"])}
        with tempfile.TemporaryDirectory() as folder:
            save(folder, job)
            backbone = modules.Transformer(folder, model_kwargs=kind)
            masked_lm = modules.Transformer(folder, transformer_task="fill-mask", model_kwargs=kind)
        pooling = modules.Pooling(job["config"]["hidden_size"], "mean")
        dense = SentenceTransformer(modules=[backbone, pooling, modules.Normalize()], device="cpu")
        sparse = SparseEncoder(modules=[masked_lm, SpladePooling()], device="cpu")
        self._models = {"dense": dense.eval(), "SPLADE": sparse.eval()}

    def run(self, output: str, ids: np.ndarray) -> np.ndarray:
        import torch

        given = torch.from_numpy(ids)
        features = {"input_ids": given, "attention_mask": torch.ones_like(given)}
        with torch.inference_mode():
            found = self._models[output](features)["sentence_embedding"]
        return (found.to_sparse().values() if output == "SPLADE" else found).float().numpy()


class OnnxRuntime(Library):
    """Both outputs to the end in one graph each, but the terms that are not zero, in float32."""

    PACKAGES = ("onnxruntime", "onnx", "transformers", "torch")

    def __init__(self, job: dict[str, Any]):
        super().__init__(job)
        with tempfile.TemporaryDirectory() as folder:
            apart(export, folder, job)
            self._sessions = {
                output: session(str(Path(folder) / f"{output}.onnx"), job["threads"])
                for output in OUTPUTS
            }

    def run(self, output: str, ids: np.ndarray) -> np.ndarray:
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        (found,) = self._sessions[output].run(None, feeds)
        return found[found.nonzero()] if output == "SPLADE" else found


LIBRARIES = {"sentence-transformers": SentenceTransformers, "onnxruntime": OnnxRuntime}


def masked_lm(job: dict[str, Any]) -> Any:
    """A masked language model with random weights, whose terms have the job's bias."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(**job["config"])
    model = transformers.BertForMaskedLM(config).eval()
    deviation = config.initializer_range * config.hidden_size**0.5  # of a logit
    with torch.no_grad():
        model.get_output_embeddings().bias.fill_(job["bias"] * deviation)
    return model


def save(folder: str, job: dict[str, Any]) -> None:
    """Save the model, with a tokenizer that nothing is asked of."""
    import transformers

    masked_lm(job).save_pretrained(folder)
    (Path(folder) / "vocab.txt").write_text("\n".join(SPECIAL))
    transformers.BertTokenizer.from_pretrained(folder).save_pretrained(folder)


def export(folder: str, job: dict[str, Any]) -> None:
    """Write dense.onnx and SPLADE.onnx of the model."""
    import torch

    model = masked_lm(job)

    class Dense(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = model.bert

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.backbone(input_ids, attention_mask).last_hidden_state
            weights = attention_mask[:, :, None].to(hidden.dtype)
            pooled = (hidden * weights).sum(1) / weights.sum(1)
            return torch.nn.functional.normalize(pooled)

    class Splade(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            logits = self.model(input_ids, attention_mask).logits
            weights = torch.log1p(torch.relu(logits * attention_mask[:, :, None].to(logits.dtype)))
            return weights.max(1).values

    ids = torch.randint(len(SPECIAL), job["config"]["vocab_size"], (2, 16))
    names = ["input_ids", "attention_mask"]
    for output, module in zip(OUTPUTS, (Dense(), Splade()), strict=True):
        torch.onnx.export(
            module.eval(),
            (ids, torch.ones_like(ids)),
            str(Path(folder) / f"{output}.onnx"),
            input_names=names,
            dynamic_axes={name: {0: "rows", 1: "length"} for name in names},
            dynamo=False,  # the other exporter needs onnxscript, which Infinity does not bring
        )


if __name__ == "__main__":
    serve(LIBRARIES)
