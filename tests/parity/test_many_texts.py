"""Token ids of 2,000 texts of many scripts, prompts and templates included, against transformers:
with the tiny tokenizers of the goldens, and with published ones of the same kind if they are here.
"""

import gzip
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import transformers
from golden import baai, make, own_code
from golden.families import FAMILIES
from sources import write_json

from converters import convert
from jaxembed.checkpoints import checkpoint
from jaxembed.config import TextConfig
from jaxembed.data.inputs import Text
from jaxembed.data.work import Encoding
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions
from parity import sentences, test_dual

TOKENIZERS = Path(__file__).parents[3] / "shared" / "tokenizers"
TEXTS = sentences.in_many_scripts(2000)
LIMIT = 512


class Published(NamedTuple):
    """A published tokenizer: its file, its tokens, and what tokenizer_config.json says."""

    file: str
    tokens: int
    config: dict[str, Any]


QWEN3 = Published("qwen3/tokenizer.json.gz", 151669, {"tokenizer_class": "Qwen2Tokenizer"})
XLM_ROBERTA = Published(
    "xlm-roberta-paraphrase-multilingual-mpnet-base-v2/tokenizer.json.gz",
    250002,
    {"tokenizer_class": "XLMRobertaTokenizer"},
)
BERT = Published("bge-en-v1.5/tokenizer.json", 30522, {"tokenizer_class": "BertTokenizer"})
MODERNBERT = Published(
    "modernbert/tokenizer.json.gz", 50368, {"tokenizer_class": "PreTrainedTokenizerFast"}
)


UNPROMPTED: dict[str | None, str] = {None: ""}


class Case(NamedTuple):
    """How a model is saved, the published tokenizer, and the prompts by their names, which come
    before texts; of a reranker the line after the two texts."""

    save: Callable[..., Any]
    published: Published | None = None
    prompts: dict[str | None, str] = UNPROMPTED
    line: str | None = None
    of_tokens: bool = False
    ends_early: bool = False  # it pools the first end token, and reads nothing after it


def save_golden(name: str, folder: Path, **config: Any) -> None:
    case = make.CASES[name]
    make.save(replace(case, config=case.config | config), folder)
    make.publish(FAMILIES[case.family], folder)


def prompted(prompts: dict[str, str], default: str = "") -> dict[str | None, str]:
    return {None: default, **prompts}


JINA = prompted(own_code.JINA_PROMPTS, own_code.JINA_PROMPTS["document"])
CASES = {
    "jina-v5-small": Case(partial(own_code.save_jina, family="qwen3"), QWEN3, JINA),
    "jina-v5-nano": Case(partial(own_code.save_jina, family="eurobert"), None, JINA),
    "voyage": Case(own_code.save_voyage, QWEN3, prompted(own_code.VOYAGE_PROMPTS)),
    "pplx": Case(own_code.save_pplx, QWEN3),
    "nomic_moe": Case(
        partial(save_golden, "nomic_moe_mean"), XLM_ROBERTA, prompted(make.SEARCH_PROMPTS)
    ),
    "metaclip_2": Case(
        partial(test_dual.saved, kind="metaclip_2", size="tiny"), XLM_ROBERTA, ends_early=True
    ),
    "gemma": Case(baai.save_gemma, line=baai.PROMPT),
    "minicpm": Case(baai.save_minicpm, line=baai.PROMPT),
    "gemma2": Case(baai.save_lightweight, line=baai.LIGHT_PROMPT),
    **{
        name: Case(partial(save_golden, f"{name}_token_classifier"), published, of_tokens=True)
        for name, published in [
            ("xlm_roberta", XLM_ROBERTA),
            ("bert", BERT),
            ("deberta", None),
            ("modernbert", MODERNBERT),
        ]
    },
}
PAIRS = [f"{name}-tiny" for name, case in CASES.items() if case.line]
ONES = [f"{name}-tiny" for name, case in CASES.items() if not case.line]
ONES += [f"{name}-published" for name, case in CASES.items() if case.published]


def put(published: Published, folder: Path) -> None:
    """A published tokenizer instead of the one in a folder."""
    path = TOKENIZERS / published.file
    if path.suffix == ".gz":
        (folder / "tokenizer.json").write_bytes(gzip.decompress(path.read_bytes()))
    else:
        shutil.copy(path, folder)
    write_json(folder / "tokenizer_config.json", published.config)


@pytest.fixture(name="models")
def _models(request, tmp_path, closed) -> tuple[Case, TextProcessor, Any]:
    """What tokenizes for a converted model, and transformers' tokenizer of its source."""
    name, _, kind = request.param.rpartition("-")
    case, source, out = CASES[name], tmp_path / "source", tmp_path / "out"
    source.mkdir()
    if kind == "tiny":
        case.save(source)
    elif TOKENIZERS.is_dir():
        assert case.published
        case.save(source, vocab_size=case.published.tokens)
        put(case.published, source)
    else:
        pytest.skip(f"no {TOKENIZERS}")
    spec = convert(source, out)
    main = checkpoint.route_path(out, checkpoint.load_routes(out).main_route)
    processor = TextProcessor(checkpoint.tokenizer_path(main), spec, LIMIT, TextConfig(), workers=1)
    closed.callback(processor.executor.shutdown)
    return case, processor, transformers.AutoTokenizer.from_pretrained(source)


def options(prompt: str = "", side: Any = "right") -> TokenizationOptions:
    return TokenizationOptions(prompt, truncate=True, side=side)


def read_of(case: Case, ids: list[int]) -> list[int]:
    """What a model reads of the ids of a text, up to the first end token if it pools that one."""
    return ids[: ids.index(ids[-1]) + 1] if case.ends_early else ids


def assert_same(encodings: Iterable[Encoding], wanted: list[list[int]], texts: list[str]) -> None:
    trios = zip(texts, encodings, wanted, strict=True)
    assert not [text[:60] for text, one, ids in trios if one.ids.tolist() != ids]


@pytest.mark.parametrize("models", ONES, indirect=True)
def test_ids_of_texts_equal_those_of_transformers(models, note):
    """Cut on each side, all together and each alone."""
    case, processor, tokenizer = models
    for name, prompt in case.prompts.items():
        assert processor.prompt(None, name) == prompt
        for side in ("right", "left"):
            tokenizer.truncation_side = side
            given = [prompt + text for text in TEXTS]
            wanted = tokenizer(given, truncation=True, max_length=LIMIT)["input_ids"]
            wanted = [read_of(case, ids) for ids in wanted]
            inputs, tokenization = [Text(text) for text in TEXTS], options(prompt, side)
            together = processor.encode(inputs, tokenization).work.encodings
            alone = [processor.encode([text], tokenization).work.encodings[0] for text in inputs]
            for encodings in (together, alone):
                assert_same(encodings, wanted, TEXTS)
    note(f"{len(TEXTS)} texts the same with each of its prompts")
    if case.of_tokens:
        assert_offsets_same(processor, tokenizer)


def assert_offsets_same(processor: TextProcessor, tokenizer: Any) -> None:
    """Of the tokens of texts, by which entities are found."""
    found = processor.encode_with_offsets([Text(text) for text in TEXTS], options(side="left"))
    wanted = tokenizer(
        TEXTS,
        truncation=True,
        max_length=LIMIT,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
    )
    assert_same(found.work.encodings, wanted["input_ids"], TEXTS)
    offsets = np.concatenate(wanted["offset_mapping"])
    offsets[np.concatenate(wanted["special_tokens_mask"]) == 1] = -1
    assert np.array_equal(found.offsets, offsets)


@pytest.mark.parametrize("models", ONES, indirect=True)
def test_ids_with_names_of_special_tokens_as_plain_text_equal_those_of_transformers(models, note):
    """As of an instruction in words."""
    case, processor, tokenizer = models
    given = [f"</s> {text}" for text in TEXTS]
    wanted = tokenizer(given, truncation=True, max_length=LIMIT, split_special_tokens=True)
    tokenization = msgspec.structs.replace(options("</s> "), has_special_names=False)
    encodings = processor.encode([Text(text) for text in TEXTS], tokenization).work.encodings
    assert_same(encodings, [read_of(case, ids) for ids in wanted["input_ids"]], TEXTS)
    note(f"{len(TEXTS)} texts the same")


@pytest.mark.parametrize("models", PAIRS, indirect=True)
def test_ids_of_pairs_equal_those_of_transformers_line_by_line(models, note):
    """Of queries with 100 documents each."""
    case, processor, tokenizer = models
    for start in range(0, len(TEXTS), 100):
        texts = TEXTS[start : start + 100]
        question = texts[0][:60]
        query = processor.tokenize_query(question, options())
        encodings = processor.encode_pairs_of_query(query, texts, options()).work.encodings
        wanted = [baai.ids_of(tokenizer, question, text, case.line, LIMIT) for text in texts]
        assert_same(encodings, wanted, texts)
    note(f"{len(TEXTS)} pairs the same")
