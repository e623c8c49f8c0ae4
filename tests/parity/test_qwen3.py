"""Qwen3-Embedding and Qwen3-Reranker with the published tokenizer, random weights of real widths.

The reranker's reference is what its README does: prefix, text and suffix tokenized one by one, and
softmax over the logits of "no" and "yes" at the last position.
"""

import gc
import gzip
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from golden import make
from golden.families import sized
from sources import NORMALIZE, POOLING, TRANSFORMER, write_json, write_modules

from converters.families import qwen3
from jaxembed.data.inputs import Pair
from jaxembed.preprocessing.text import TokenizationOptions
from parity import sentences
from parity.reference import same_ids, smallest_cosine

TOKENIZERS = Path(__file__).parents[3] / "shared" / "tokenizers"
pytestmark = pytest.mark.skipif(not TOKENIZERS.is_dir(), reason=f"no {TOKENIZERS}")

# Qwen3-Embedding-0.6B and Qwen3-Reranker-0.6B, but for their positions
LIMIT = 512
PUBLISHED = sized(1024, 28, 16, 3072, LIMIT, vocab_size=151669, num_key_value_heads=8, head_dim=128)
PUBLISHED |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": True}
PUBLISHED |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
LAYERS = [2, pytest.param(28, marks=pytest.mark.slow)]

QUERY = "What is the capital of China?"
DOCUMENTS = [*sentences.WEIRD, *sentences.ENGLISH[:5]]
PROMPTS = {
    "query": "Instruct: Given a web search query, retrieve relevant passages that answer the query"
    "\nQuery:",
    "document": "",
}

PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"


def unpack(name: str, folder: Path) -> None:
    """A published tokenizer into `folder`."""
    packed = TOKENIZERS / name / "tokenizer.json.gz"
    (folder / "tokenizer.json").write_bytes(gzip.decompress(packed.read_bytes()))
    shutil.copy(TOKENIZERS / "qwen3" / "tokenizer_config.json", folder)


def save_language_model(folder: Path, layers: int) -> None:
    """Random weights, scaled so that logits are of the size that a trained model's are."""
    config = transformers.Qwen3Config(**PUBLISHED | {"num_hidden_layers": layers})
    model = transformers.Qwen3ForCausalLM(config)
    make.randomise(model)
    model.tie_weights()
    model.model.norm.weight.data *= 0.1
    model.save_pretrained(folder)


def reference_ids(tokenizer: Any, query: str, document: str, limit: int) -> list[int]:
    text = f"<Instruct>: {TASK}\n<Query>: {query}\n<Document>: {document}"
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in (PREFIX, SUFFIX))
    room = limit - len(before) - len(after)
    return before + tokenizer(text, truncation=True, max_length=room)["input_ids"] + after


@torch.no_grad()
def reference_scores(model: Any, tokenizer: Any, rows: Sequence[list[int]]) -> np.ndarray:
    """[rows, 2]: the probability of yes, and the difference of the logits."""
    answers = tokenizer.convert_tokens_to_ids(["no", "yes"])
    found = (model(torch.tensor([row]), logits_to_keep=1).logits for row in rows)
    logits = torch.stack([one[0, -1, answers].float() for one in found])
    shares = torch.log_softmax(logits, 1)[:, 1].exp()
    return torch.stack([shares, logits[:, 1] - logits[:, 0]], 1).numpy()


@pytest.fixture(name="reranker", scope="module", params=LAYERS)
def _reranker(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "Qwen3-Reranker-random"
    folder.mkdir()
    save_language_model(folder, request.param)
    unpack("qwen3", folder)
    gc.collect()
    return folder


def test_the_reranker_is_asked_and_scores_as_its_readme_does(reranker, make_embedder, note):
    embedder = make_embedder(reranker, [(1, LIMIT)])
    assert embedder.spec.template == qwen3.FAMILY.reranker.template
    pairs = [Pair(QUERY, document) for document in DOCUMENTS]
    tokenization = TokenizationOptions(prompt="", truncate=True, side="right")
    rows = [
        one.ids.tolist()
        for one in embedder.model.main.processor.encode(pairs, tokenization).work.encodings
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(reranker)
    assert rows == [reference_ids(tokenizer, QUERY, text, LIMIT) for text in DOCUMENTS]
    assert max(len(row) for row in rows) == LIMIT
    got = [
        sorted(embedder.rerank(QUERY, DOCUMENTS, raw_scores=raw), key=lambda one: one.index)
        for raw in (False, True)
    ]
    embedder.close()
    model = transformers.Qwen3ForCausalLM.from_pretrained(reranker, dtype=torch.float32).eval()
    wanted = reference_scores(model, tokenizer, rows)
    apart = np.abs(np.array([[one.score for one in each] for each in got]).T - wanted).max(axis=0)
    spread = wanted[:, 1].std()
    note(f"scores within {apart[0]:.1e}, logits {apart[1]:.1e} of a spread of {spread:.1f}")
    assert spread > 0.5
    assert apart[0] < 1e-4
    assert apart[1] < 1e-4 * np.abs(wanted[:, 1]).max()


def write_embedder(folder: Path, layers: int) -> None:
    """As published, by an older sentence-transformers than the installed one."""
    save_language_model(folder, layers)
    unpack("qwen3-embedding", folder)
    write_modules(folder, (TRANSFORMER, ""), (POOLING, "1_Pooling"), (NORMALIZE, "2_Normalize"))
    pooling = {"word_embedding_dimension": PUBLISHED["hidden_size"], "pooling_mode_lasttoken": True}
    prompts = {"prompts": PROMPTS, "default_prompt_name": None}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "config_sentence_transformers.json", prompts)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": LIMIT})


@pytest.mark.parametrize("layers", LAYERS)
def test_vectors_of_the_embedder_agree(layers, tmp_path, make_embedder, note):
    write_embedder(tmp_path, layers)
    model = make.load(tmp_path)
    calls = {"encode_query": DOCUMENTS, "encode_document": DOCUMENTS[::3]}
    wanted = {
        method: getattr(model, method)(texts, batch_size=1, show_progress_bar=False)
        for method, texts in calls.items()
    }
    tokenizer = model.tokenizer
    del model
    gc.collect()
    embedder = make_embedder(tmp_path, [(1, LIMIT)])
    for tokenizer.truncation_side in ("right", "left"):
        processor = embedder.model.main.processor
        encodings = same_ids(processor, tokenizer, DOCUMENTS, LIMIT, note)
        assert {one.ids[-1] for one in encodings} == {151643}
    got = {method: getattr(embedder, method)(texts) for method, texts in calls.items()}
    embedder.close()
    apart = max(1 - smallest_cosine(got[method], wanted[method]) for method in calls)
    note(f"cosines from 1 - {apart:.1e}")
    assert apart < 1e-5
