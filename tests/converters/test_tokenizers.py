"""Real tokenizers through the processor, against ids that others recorded; skipped without them.
Normalizers that would make texts longer and longer.

The files are not part of this repository: a folder beside it holds tokenizers and vectors of ids
from public test suites.
"""

import gzip
import hashlib
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import tiny_spec, word_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_text import assert_enough

from jaxembed.checkpoints.hub import DEFAULT_MODEL_PACKAGE
from jaxembed.config import TextConfig
from jaxembed.data.inputs import Text
from jaxembed.data.spec import PairTemplate
from jaxembed.errors import CheckpointError, EmptyInput
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions
from jaxembed.preprocessing.tokenizer import parse_tokenizer

FOLDER = Path(__file__).parents[3] / "shared" / "tokenizers"
VECTORS = json.loads((FOLDER / "id_vectors.json").read_text()) if FOLDER.exists() else {}
LIMIT = 512
XLM_R = "xlm-roberta-paraphrase-multilingual-mpnet-base-v2"
QWEN3_RERANKER = PairTemplate(
    prefix="<|im_start|>system\nJudge whether the Document meets the requirements based on the "
    'Query and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n",
    first="<Instruct>: {instruction}\n<Query>: {query}\n<Document>:",
    second=" {document}",
    suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
TASKS = {"qwen3-reranker": {"labels": ("yes",), "template": QWEN3_RERANKER}}

beside_us = pytest.mark.skipif(not FOLDER.exists(), reason=f"{FOLDER.name} are not beside us")


@pytest.fixture(name="open_processor", scope="module")
def _open_processor(tmp_path_factory, closed_late):
    """Processors by the name of a tokenizer, each loaded once."""

    @cache
    def open_processor(name: str) -> TextProcessor:
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        path.write_bytes(_tokenizer_file(name.replace("-reranker", "")))
        spec = tiny_spec(prompts={}, **TASKS.get(name, {}))
        processor = TextProcessor(path, spec, LIMIT, TextConfig(), 1)
        closed_late.callback(processor.executor.shutdown)
        return processor

    return open_processor


def _tokenizer_file(name: str) -> bytes:
    if name == "all-minilm-l6-v2":
        package = find_spec(DEFAULT_MODEL_PACKAGE)
        if package is None:
            pytest.skip(f"{DEFAULT_MODEL_PACKAGE} is not installed")
        return (Path(package.submodule_search_locations[0]) / "model/tokenizer.json").read_bytes()
    packed = FOLDER / name / "tokenizer.json.gz"
    if packed.exists():
        return gzip.decompress(packed.read_bytes())
    return packed.with_suffix("").read_bytes()


def ids_of(processor: TextProcessor, text: str, *, special: bool) -> list[int]:
    """The ids a model would be run with; without special tokens those of the text among them."""
    (encoding,) = processor.encode([Text(text)], tokenization(truncate=False)).work.encodings
    before, after = (0, 0) if special else processor._around
    return encoding.ids[before : encoding.length - after].tolist()


def tokenization(*, truncate: bool, side="right") -> TokenizationOptions:
    return TokenizationOptions("", truncate, side)


@beside_us
@pytest.mark.parametrize(
    "case", VECTORS.get("cases", []), ids=lambda case: f"{case['family']}-{case['text'][:20]!r}"
)
def test_texts_have_the_ids_that_others_recorded(open_processor, case):
    for name in (name for name, same in case["reproduced_with"].items() if same):
        processor = open_processor(name)
        if case["text"]:
            ids = ids_of(processor, case["text"], special=case["add_special_tokens"])
            assert ids == case["ids"]
        else:  # nothing is nothing, and refused
            assert case["ids"] == []
            with pytest.raises(EmptyInput):
                processor.encode([Text("")], tokenization(truncate=False))


@beside_us
@pytest.mark.parametrize("hashed", VECTORS.get("chk", []), ids=lambda hashed: hashed["local"][-1])
def test_a_text_of_everything_has_the_hash_that_others_recorded(open_processor, hashed):
    for name in hashed["local"]:
        ids = ids_of(open_processor(name), VECTORS["chk_text"], special=True)
        assert hashlib.sha256(str(ids).encode()).hexdigest() == hashed["sha256"]


# -- pairs -----------------------------------------------------------------------------------------

texts = st.lists(
    st.sampled_from(
        [
            *("What is the capital of China?", " The capital is Beijing.", " ", "\n", "\n\n", ":"),
            *("\u5317\u4eac\u662f\u9996\u90fd", "e\u0301", "\u0301", "\U0001f600", "don't", "\t"),
            *("<|im_end|>", "<|im", "_end|>", "</s>", "[SEP]", "<Document>: ", "12 345"),
        ]
    )
    | st.text(max_size=12),
    min_size=1,
    max_size=8,
).map("".join)

runs = st.tuples(
    st.sampled_from(
        [
            *("a,", " the cat", "\u5317\u4eac", "\U0001f600", "\ufdfa", "\ud55c ", " ", "z", "x"),
            *("0", "12", "-", "=", ".\n", "\n", "\t ", "e\u0301", "\u0e01", "don't ", "<mask>"),
        ]
    ),
    st.sampled_from([1, 30, 101, 800, 5000]),
).map(lambda run: run[0] * run[1])


@beside_us
@pytest.mark.parametrize("name", ["bert-base-uncased", "modernbert", "qwen3", XLM_R])
@given(
    text=st.lists(texts | runs, min_size=1, max_size=8).map("".join).filter(bool),
    most=st.sampled_from([8, 64, 512]),
    side=st.sampled_from(["left", "right"]),
)
@settings(max_examples=20, deadline=None)
@example(text="x" * 5001, most=512, side="right")
@example(text="0" * 5001, most=512, side="left")
def test_enough_of_a_text_has_the_ids_of_the_whole(open_processor, name, text, most, side):
    assert_enough(open_processor(name)._tokenizer, text, most, side)


def by_the_readme(tokenizer, query: str, document: str, limit: int) -> list[int]:
    """What Qwen3-Reranker's model card does: the middle is one string, cut to what is left."""
    template = QWEN3_RERANKER
    middle = f"<Instruct>: {template.instruction}\n<Query>: {query}\n<Document>: {document}"
    before, ids, after = (
        tokenizer.encode(text, add_special_tokens=False).ids
        for text in (template.prefix, middle, template.suffix)
    )
    return [*before, *ids[: limit - len(before) - len(after)], *after]


@beside_us
@given(query=texts, document=texts, repeat=st.sampled_from([1, 1, 400]))
@example(query="", document=" ", repeat=1)
@example(query="What is the capital of China? " * 400, document="Beijing.", repeat=1)
@settings(max_examples=20, deadline=None)
def test_qwen3_reranker_gets_the_ids_of_its_model_card(open_processor, query, document, repeat):
    processor = open_processor("qwen3-reranker")
    tokenizer = processor._tokenizer.file
    document = document * repeat
    row = processor.tokenize_query(query, tokenization(truncate=True))
    rules = tokenization(truncate=True)
    (encoding,) = processor.encode_pairs_of_query(row, [document], rules).work.encodings
    assert encoding.types is None
    assert encoding.ids.tolist() == by_the_readme(tokenizer, query, document, LIMIT)
    whole = (
        f"{QWEN3_RERANKER.prefix}<Instruct>: {QWEN3_RERANKER.instruction}\n<Query>: {query}\n"
        f"<Document>: {document}{QWEN3_RERANKER.suffix}"
    )
    if encoding.length < LIMIT:
        assert encoding.ids.tolist() == tokenizer.encode(whole, add_special_tokens=False).ids


def stored_tokenizer(*replaced: tuple[str, str]) -> bytes:
    """A tokenizer.json whose normalizer makes these replacements, one after another."""
    stored = json.loads(word_tokenizer().to_str())
    steps = [
        {"type": "Replace", "pattern": {"String": text}, "content": content}
        for text, content in replaced
    ]
    stored["normalizer"] = {"type": "Sequence", "normalizers": steps}
    return json.dumps(stored).encode()


def test_a_normalizer_that_makes_texts_longer_and_longer_is_refused():
    with pytest.raises(CheckpointError, match="x is damaged: its normalizer makes up to 858"):
        parse_tokenizer(stored_tokenizer(*[("a", "aa")] * 33), "x")


def test_a_normalizer_may_replace_many_letters_by_two():
    letters = [(chr(code), "ae") for code in range(0x400, 0x430)]
    assert parse_tokenizer(stored_tokenizer(*letters), "x").encode("a").ids
