"""Instructions and prompts in words: what is put before a text, over HTTP and in the library."""

import numpy as np
import pytest
from conftest import save_tiny, word_tokenizer
from test_server_openai import ask

from jaxembed import Embedder
from jaxembed.config import TextConfig
from jaxembed.data.inputs import Text
from jaxembed.data.spec import Routes
from jaxembed.errors import InvalidInput
from jaxembed.preprocessing.prompts import with_instruction
from jaxembed.runtime.options import EncodeOptions, RequestedOptions
from jaxembed.runtime.tasks import Tasks
from jaxembed.server.registry.models import Models

PROMPTS = {"document": "", "query": "Instruct: the cat\nQuery:"}


@pytest.fixture(name="plain", scope="module")
def _plain(tmp_path_factory, load_model) -> Embedder:
    """Its prompts contain no instruction."""
    folder = tmp_path_factory.mktemp("plain")
    return load_model(save_tiny(folder / "tiny", prompts={"query": "what is "}), 2, 64)


@pytest.fixture(name="instructed", scope="module")
def _instructed(tmp_path_factory, load_model) -> Embedder:
    folder = tmp_path_factory.mktemp("instructed")
    return load_model(save_tiny(folder / "tiny", prompts=PROMPTS), 2, 64)


def same(vector, wanted) -> bool:
    return bool(np.allclose(vector, wanted, rtol=1e-5, atol=1e-5))


@pytest.mark.parametrize(
    ("prompts", "wanted"),
    [
        ({}, "X"),
        ({"query": "query: "}, "X"),
        (PROMPTS, "Instruct: X\nQuery:"),
        ({"a": "<instruct>so\n<query>"}, "<instruct>X\n<query>"),
        ({"a": "task: sts | query: ", "query": "task: it is | query: "}, "task: X | query: "),
        ({"web": "Instruct: one\ntwo\nQuery: "}, "Instruct: X\nQuery: "),
        ({"query": "Instruct: one\n Query: "}, "Instruct: X\n Query: "),
    ],
    ids=["none", "no-instruction", "qwen", "bge", "gemma", "lines", "space"],
)
def test_an_instruction_takes_the_place_of_that_in_the_prompt_for_queries(prompts, wanted):
    assert with_instruction("X", prompts) == (wanted, wanted != "X")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/v1/embeddings", {"input": ["cat", "dog"]}),
        ("/embed", {"inputs": ["cat", "dog"]}),
        ("/v1/embed", {"texts": ["cat", "dog"]}),
        ("/v2/embed", {"texts": ["cat", "dog"], "input_type": "search_query"}),
    ],
)
@pytest.mark.parametrize(
    ("fields", "prompt", "named"),
    [
        ({"instruction": "the dog"}, "Instruct: the dog\nQuery:", "instruction"),
        ({"prompt": "the dog "}, "the dog ", "prompt"),
    ],
    ids=["instruction", "prompt"],
)
def test_each_route_that_embeds_takes_words(path, text, fields, prompt, named, instructed):
    models = Models([instructed.model], {instructed.name: ["tiny"]})
    response, body = ask(text | fields, path=path, models=models)
    assert response.status_code == 200, body
    found = body
    if path.startswith("/v"):
        found = body.get("embeddings") or [one["embedding"] for one in body["data"]]
        assert response.headers["x-prompt-name"] == named
    vectors = found["float"] if isinstance(found, dict) else found
    assert same(vectors, instructed.encode(["cat", "dog"], prompt=prompt, normalize=True))


def test_the_library_takes_an_instruction(plain, instructed):
    wanted = instructed.encode("cat", prompt="Instruct: the dog\nQuery:")
    assert same(instructed.encode("cat", instruction="the dog"), wanted)
    assert same(instructed.encode_query("cat", instruction="the dog"), wanted)
    assert same(plain.encode("cat", instruction="the dog "), plain.encode("cat", prompt="the dog "))


LIMIT = 4


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"instruction": "a", "prompt_name": "query"}, "instruction", "and `prompt_name` both say"),
        ({"prompt": "a", "prompt_name": "query"}, "prompt", "and `prompt_name` both say"),
        ({"instruction": "a", "prompt": "b"}, "instruction", "`instruction` and `prompt` both say"),
        ({"instruction": "a", "input_type": "document"}, "instruction", "is for queries of this"),
        ({"instruction": "cat " * LIMIT}, "instruction", "more than 4 tokens, the limit of --max"),
        (
            {"prompt": "cat " * (LIMIT + 1)},
            "prompt",
            "more than 4 tokens, the limit of --max-instr",
        ),
        ({"prompt": "x" * 1_000_000}, "prompt", "more than 4 tokens, the limit of --max-instruct"),
        ({"prompt": " " * (16 * LIMIT + 1)}, "prompt", "or more than 16 characters for each"),
        ({"prompt": "a", "input": [1, 2]}, "prompt", "is for texts, and the request has token ids"),
        ({"instruction": 7}, "instruction", "str"),
    ],
    ids=[
        "name",
        "prompt-and-name",
        "both",
        "document",
        "long",
        "long-prompt",
        "huge",
        "spaces",
        "ids",
        "number",
    ],
)
def test_words_that_cannot_be_are_refused_by_their_field(fields, param, message, instructed):
    model = instructed.model
    text = TextConfig(max_instruction_tokens=LIMIT)
    routes = Routes({"": instructed.spec})
    kept, model.tasks = model.tasks, Tasks("tiny", routes, model.main.processor, text)
    try:
        models = Models([model], {instructed.name: ["tiny"]})
        response, body = ask({"input": "cat"} | fields, models=models)
    finally:
        model.tasks = kept
    assert response.status_code in (400, 422)
    assert body["error"]["param"] == param
    assert message in body["error"]["message"]


def test_an_instruction_leaves_room_for_the_text(plain):
    processor = plain.model.main.processor
    assert not processor.check_prompt("cat " * (processor.limit // 2), 512, "instruction")
    with pytest.raises(InvalidInput, match=f"more than {processor.limit // 2} tokens"):
        processor.check_prompt("cat " * (processor.limit // 2 + 1), 512, "instruction")


def test_names_of_special_tokens_count_as_the_text_that_they_are(plain):
    processor = plain.model.main.processor
    with pytest.raises(InvalidInput, match="more than 20 tokens"):  # of three tokens each as text
        processor.check_prompt("[SEP]" * 10, 20, "prompt")


def test_names_of_special_tokens_in_an_instruction_stay_text(plain):
    tasks, processor = plain.model.tasks, plain.model.main.processor
    separator = word_tokenizer().token_to_id("[SEP]")

    def ids(options: EncodeOptions) -> list[int]:
        intent = tasks.intent(RequestedOptions(options))
        (one,) = processor.encode([Text("cat")], intent.tokenization).work.encodings
        return one.ids.tolist()

    usual = ids(EncodeOptions(prompt="the [SEP] "))
    assert usual.count(separator) == 2
    for options in (
        EncodeOptions(instruction="the [SEP] "),
        EncodeOptions(prompt="the [SEP] ", special_names=False),
    ):
        assert ids(options).count(separator) == 1
        assert ids(options)[-2:] == usual[-2:]


def test_without_a_limit_the_library_takes_long_prompts(plain):
    intent = plain.model.tasks.intent(RequestedOptions(EncodeOptions(instruction="cat " * 600)))
    assert intent.tokenization.prompt == "cat " * 600
