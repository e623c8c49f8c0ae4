"""Images over HTTP, every form that clients send them in and what is refused; pages ranked by a
query, and their vectors beside those of queries."""

import base64
from ipaddress import ip_network
from typing import Any

import idefics3_sources
import numpy as np
import pytest
from colqwen_sources import write_biqwen
from dual_sources import picture, png
from live_server import answering
from page_sources import PAGE, SPACE, write_pages
from test_server_app import fetch_json
from test_server_openai import ask

from jaxembed import Embedder, EngineConfig
from jaxembed.config import ServerConfig
from jaxembed.server.pipeline import body as bodies
from jaxembed.server.registry.models import Models

pytest.importorskip("PIL")

FILES = [png(picture(1)), png(picture(2, 40, 60))]
BARE = [base64.b64encode(data).decode() for data in FILES]
URIS = [f"data:image/png;base64,{text}" for text in BARE]
IMAGE = {"type": "image_url", "image_url": URIS[0]}
COHERE = pytest.mark.parametrize("path", ["/v2/embed", "/v1/embed"])


@pytest.fixture(name="vectors", scope="module")
def _vectors(clip):
    return clip.encode(images=FILES)


def post(clip, body, path="/v1/embeddings", status=200, **config: Any) -> Any:
    """The answer to a body, as JSON."""
    config = ServerConfig(**config)
    return ask(body, path=path, models=Models([clip.model]), config=config, status=status)[1]


def close(got, wanted) -> None:
    np.testing.assert_allclose(got, wanted, atol=2e-6)


def message(content, *before) -> dict:
    """A body as chat clients send it."""
    return {"messages": [*before, {"role": "user", "content": content}]}


def openai_vectors(answer):
    return [item["embedding"] for item in answer["data"]]


def test_too_many_pixels_in_one_request_are_refused(clip, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_PIXELS_A_REQUEST", 3000)
    refused = post(clip, {"input": URIS, "modality": "image"}, status=400)
    assert "2 in number, have 3424 pixels in total; a request can have at most 3000" in str(refused)


def test_typed_inputs_of_tei(clip, vectors):
    urls = URIS[0], URIS[1].replace("data:", "DATA:")
    inputs = [{"type": "image", "url": url} for url in urls]
    close(post(clip, {"inputs": inputs}, "/embed"), vectors)
    close(post(clip, {"inputs": inputs[0]}, "/embed"), vectors[:1])
    for wrong in ({"value": "a"}, {}, {"url": URIS[0], "other": 1}):
        post(clip, {"inputs": [{"type": "image"} | wrong]}, "/embed", status=422)
    for kind in ("text", "audio"):
        post(clip, {"inputs": [{"type": kind, "url": URIS[0]}]}, "/embed", status=422)
    inputs[1] = {"type": "image", "url": "data:image/png;base64,AA"}
    assert "`inputs[1]`: " in post(clip, {"inputs": inputs}, "/embed", status=422)["error"]


def test_texts_and_images_in_one_request_keep_their_order(clip, vectors):
    first, second = ({"type": "image", "url": url} for url in URIS)
    inputs = [{"type": "text", "value": "w1 w2"}, second, "w3", first]
    texts = clip.encode(["w1 w2", "w3"])
    wanted = [texts[0], vectors[1], texts[1], vectors[0]]
    close(post(clip, {"inputs": inputs}, "/embed"), wanted)


@pytest.mark.parametrize("given", [BARE, URIS])
def test_objects_of_jina(clip, vectors, given):
    body = {"input": [{"image": given[0]}, {"text": "w1"}, {"image": given[1]}]}
    wanted = [vectors[0], clip.encode("w1"), vectors[1]]
    answer = post(clip, body)
    close(openai_vectors(answer), wanted)
    assert answer["usage"] == {"prompt_tokens": 17 + 3 + 17, "total_tokens": 37}


def test_the_modality_of_infinity(clip, vectors):
    answer = post(clip, {"input": URIS, "modality": "image"}, "/embeddings")
    close(openai_vectors(answer), vectors)
    answer = post(clip, {"input": URIS[0], "modality": "image", "encoding_format": "base64"})
    got = np.frombuffer(base64.b64decode(openai_vectors(answer)[0]), "<f4")
    close(got, vectors[0])
    refused = post(clip, {"input": ["a"], "modality": "audio"}, status=400)
    assert "send text or image" in refused["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": URIS[0], "detail": "low"}}],
        [{"type": "image_url", "image_url": URIS[0]}],
        [{"type": "input_image", "image_url": URIS[0]}],
        [{"type": "image_base64", "image_base64": URIS[0]}],
    ],
)
def test_messages_of_vllm(clip, vectors, content):
    answer = post(clip, message(content))
    close(openai_vectors(answer), vectors[:1])
    texts = [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}]
    for one in (texts, "w1\nw2"):
        answer = post(clip, message(one))
        close(openai_vectors(answer), [clip.encode("w1 w2")])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "`input` (or `messages`)"),
        ({"input": ["w1"]} | message("w1"), "has `input` and `messages`"),
        ({"messages": [{"role": "system", "content": "w1"}]}, "one message of the role `user`"),
        (message("w1", {"role": "assistant", "content": "w2"}), "must be one message"),
        (message("w1", {"role": "system", "content": [IMAGE]}), "must be one message"),
        (message([{"type": "text", "text": "w1"}, IMAGE]), "`messages[0].content`: "),
        (message([{"type": "video_url"}]), "video_url"),
        (message([IMAGE | {"image_url": URIS[0][:60]}]), "`messages[0].content[0]`: "),
        (message([IMAGE | {"text": "w1"}]), "has `image_url` and `text`; send two parts"),
        (message([{"type": "text", "text": "w1", "image": BARE[0]}]), "unknown field `image`"),
        ({"messages": [{"role": "user", "content": "w1", "images": BARE}]}, "field `images`"),
        (message([{"type": "text", "text": "a"}] * 2049), "at most 2048 parts"),
        (message("w1") | {"modality": "image"}, "`modality` of image is for `input`"),
        ({"input": [[1, 2]], "modality": "image"}, "token ids - at `$.input[0]`"),
        ({"input": [1, 2], "modality": "image"}, "got token ids - at `$.input`"),
        ({"input": ["w1"], "image": BARE[0]}, "the field of its inputs"),
        ({"input": ["w1"], "images": BARE}, "the field of its inputs"),
        ({"input": BARE, "modality": "image"}, "a data URI such as data:image/png;base64,AAAA"),
        (
            {"input": [{"image": BARE[0]}], "output_dtype": "int8"},
            "of int8 is only for vectors of texts",
        ),
        ({"input": ["w1", {"image": URIS[0], "text": "w1"}]}, "`input[1]`: "),
        ({"input": [{"image": URIS[0], "text": ""}]}, "and neither empty"),
        ({"input": [{"image": ""}]}, "cannot be empty"),
        ({"input": [{"image": "%%"}]}, "is not base64"),
        ({"input": [{"image": BARE[0][:80]}]}, "`input[0]`: a file of 60 bytes"),
        ({"input": ["w1", {"image": base64.b64encode(b"no image").decode()}]}, "input[1]"),
        ({"input": [{"image": "data:image/png,abc"}]}, "percent-encoded"),
        ({"input": [{"image": "http://example.com/a.png"}]}, "--allow-media-urls"),
        ({"input": ["w1"], "modality": "image"}, "--allow-media-urls"),
        ({"input": [{"image": BARE[0]}], "prompt_name": "query"}, "`prompt_name` is for texts"),
        ({"input": [{"image": BARE[0]}], "late_chunking": True}, "only texts can have chunks"),
    ],
)
def test_what_is_wrong_is_named(clip, body, words):
    assert words in post(clip, body, status=400)["error"]["message"]


@pytest.mark.parametrize("size", [1, 40_000])  # decoded at once, and in slices
def test_an_unknown_field_of_an_input_is_refused_with_those_there_are(clip, size):
    refused = post(clip, {"inputs": ["a" * size, {"image": BARE[0]}, "b" * size]}, "/embed", 422)
    wanted = "unknown field `image` - at `$.inputs[1]`; its fields are `type`, `value`, `url`"
    assert wanted in refused["error"]


def test_a_model_of_texts_refuses_images_by_name_and_fetches_nothing(embedder):
    for image in (BARE[0], "http://example.com/a.png"):
        body = {"input": [{"image": image}]}
        answer = post(embedder, body, status=400, media_hosts=("example.com",))
        assert "takes texts and no images" in answer["error"]["message"]
    post(embedder, {"images": URIS}, "/v2/embed", status=400)
    inputs = {"type": "image", "url": URIS[0]}
    assert "no images" in post(embedder, {"inputs": inputs}, "/embed", status=424)["error"]


def test_urls_of_other_hosts_and_of_private_addresses_are_refused(clip):
    hosts = ("example.com", "localhost")
    for url in ("http://127.0.0.1/a.png", "http://localhost/a.png", "gopher://example.com/"):
        asked = {"input": [url], "modality": "image"}
        answer = post(clip, asked, status=400, media_hosts=hosts)
        assert answer["error"]["code"] == "invalid_media_url"


def test_the_image_of_a_host_in_a_named_network_is_fetched(clip, vectors):
    with answering(lambda *_: (200, FILES[0])) as url:
        host = url.removeprefix("http://").replace("127.0.0.1", "localhost")
        body = {"input": [f"http://{host}/a.png"], "modality": "image"}
        networks = (ip_network("127.0.0.0/8"), ip_network("::1"))
        answer = post(clip, body, media_hosts=(host,), media_networks=networks)
        close(answer["data"][0]["embedding"], vectors[0])
        answer = post(clip, body, status=400, media_hosts=(host,))
        assert "--allow-media-network" in answer["error"]["message"]


@COHERE
def test_images_of_cohere(clip, vectors, path):
    body = {"images": URIS, "input_type": "image", "embedding_types": ["float"]}
    answer = post(clip, body, path)
    close(answer["embeddings"]["float"], vectors)
    assert answer["texts"] == []
    facts = {"format": "png", "bit_depth": 24}
    sizes = {"width": 32, "height": 32}, {"width": 60, "height": 40}
    assert answer["images"] == [size | facts for size in sizes]


@COHERE
@pytest.mark.parametrize("url", [URIS[0], {"url": URIS[0]}])
def test_inputs_of_cohere(clip, vectors, path, url):
    inputs = [
        {"content": [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}]},
        {"content": [{"type": "image_url", "image_url": url}]},
    ]
    answer = post(clip, {"inputs": inputs, "embedding_types": ["float"]}, path)
    wanted = [clip.encode("w1 w2"), vectors[0]]
    close(answer["embeddings"]["float"], wanted)
    assert answer["texts"] == ["w1\nw2"]
    both = [{"content": inputs[0]["content"] + inputs[1]["content"]}]
    refused = post(clip, {"inputs": both}, path, status=400)["message"]
    assert refused.startswith("`inputs[0]`: ")
    assert "takes one text or one image" in refused


def test_inputs_of_voyage(clip, vectors):
    inputs = [
        {"content": [{"type": "text", "text": "w1"}]},
        {"content": [{"type": "image_base64", "image_base64": URIS[0]}]},
        {"content": [{"type": "image_url", "image_url": URIS[1]}]},
    ]
    body = {"inputs": inputs, "model": None, "input_type": None, "truncation": True}
    answer = post(clip, body, "/v1/multimodalembeddings")
    wanted = [clip.encode("w1"), *vectors]
    close(openai_vectors(answer), wanted)
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    usage = {"text_tokens": 3, "image_pixels": 32 * 32 + 40 * 60, "video_pixels": 0}
    assert answer["usage"] == usage | {"total_tokens": 3 + 2 * 17}
    for name in ("output_encoding", "encoding_format"):
        answer = post(clip, body | {name: "base64"}, "/v1/multimodalembeddings")
        got = np.frombuffer(base64.b64decode(openai_vectors(answer)[1]), "<f4")
        close(got, vectors[0])
    both = [{"content": inputs[0]["content"] + inputs[1]["content"]}]
    refused = post(clip, {"inputs": both}, "/v1/multimodalembeddings", status=400)
    assert "inputs[0]`: " in refused["error"]["message"]


def test_a_large_image_is_decoded_and_a_body_over_the_limit_is_refused(clip):
    data = png(picture(9, 300, 300))
    uri = "data:;base64," + base64.b64encode(data).decode()
    answer = post(clip, {"input": [uri], "modality": "image"})
    close(openai_vectors(answer), clip.encode(images=[data]))
    post(clip, {"input": [uri], "modality": "image"}, status=413, payload_limit=1000)


def test_the_list_of_models_says_which_take_images(clip, embedder):
    """Also while they are not in memory."""
    models = Models([clip.model, embedder.model], {clip.name: ("clip",), embedder.name: ("texts",)})
    for _ in range(2):
        _, body = fetch_json("/v1/models", models=models)
        capabilities = {one["id"]: one["capabilities"] for one in body["data"]}
        assert capabilities == {"clip": ["embed", "image_embed"], "texts": ["embed"]}
        models["clip"].instance = None


PAGES = [*FILES, png(picture(3, 9, 20))]
PAGE_URIS = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in PAGES]
RERANKS = pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])


@pytest.fixture(name="colpali", scope="module")
def _colpali(tmp_path_factory):
    folder = write_pages(tmp_path_factory.mktemp("colpali"))
    cache = tmp_path_factory.mktemp("cache")
    config = EngineConfig(dtype="float32", devices=1, max_batch_tokens=256)
    with Embedder(str(folder), cache_dir=cache, config=config) as embedder:
        yield embedder


def test_the_tokens_of_pages_are_named(colpali):
    body = {"input": [{"image": URIS[0]}], "return_multivector": True, "return_tokens": True}
    (found,) = post(colpali, body)["data"]
    assert found["tokens"] == ["<image>"] * 16 + ["<bos>", "Describe", "the", "image", ".", "\n"]


@RERANKS
def test_pages_are_ranked_by_a_query(colpali, path):
    body = {"query": "w1 w2", "documents": [{"image": uri} for uri in PAGE_URIS], "top_n": 2}
    found = post(colpali, body, path)["results"]
    wanted = colpali.rerank("w1 w2", images=PAGES, top_n=2)
    assert [one["index"] for one in found] == [one.index for one in wanted]
    close([one["relevance_score"] for one in found], [one.score for one in wanted])


def test_documents_that_are_no_pages_are_refused(colpali):
    answer = post(colpali, {"query": "w1", "documents": ["a text"]}, "/v1/rerank", 400)
    assert "takes images as documents" in answer["error"]["message"]
    body = {"query": "w1", "documents": [{"image": URIS[0]}], "return_documents": True}
    answer = post(colpali, body, "/v1/rerank", 400)
    assert "`return_documents` supports only texts" in answer["error"]["message"]
    for query in ({"image": URIS[0]}, {"content": [IMAGE, IMAGE]}):
        answer = post(colpali, {"query": query, "documents": ["a text"]}, "/v1/rerank", 400)
        assert "takes texts as queries" in answer["error"]["message"]
    for document, words in (
        ({}, "an object with `text`, `image` or both"),
        ({"text": "a", "image": URIS[0]}, "`documents[1]`: "),
        ({"content": []}, "`content` with at least one part"),
        ({"content": [{"type": "text", "text": "a"}], "text": "a"}, "`content` with at least one"),
        ({"image": "data:image/png;base64,aaaa"}, "documents[1]"),
    ):
        body = {"query": "w1", "documents": [{"image": URIS[0]}, document]}
        assert words in post(colpali, body, "/v1/rerank", 400)["error"]["message"]


def test_a_model_of_texts_and_images_ranks_both(clip):
    documents = ["w1", {"image": URIS[0]}, "w2 w3", {"text": "w4"}]
    found = post(clip, {"query": "w1 w2", "documents": documents}, "/v1/rerank")["results"]
    vectors = clip.encode(["w1 w2", "w1", "w2 w3", "w4"], images=FILES[:1]).astype(float)
    wanted = vectors[[1, 4, 2, 3]] @ vectors[0]
    order = np.argsort(-wanted)
    assert [one["index"] for one in found] == order.tolist()
    close([one["relevance_score"] for one in found], wanted[order])
    body = {"query": "w1", "documents": [URIS[0]]}
    assert "send it as an image" in str(post(clip, body, "/v1/rerank", 400))


def test_vectors_of_queries_and_pages_in_one_request(colpali):
    wanted = colpali.encode_multi(["w1 w2"], images=FILES[:2])
    inputs = ["w1 w2", *({"type": "image", "url": uri} for uri in URIS[:2])]
    found = post(colpali, {"inputs": inputs}, "/embed_multi")
    assert [np.shape(one) for one in found][1:] == [(PAGE, SPACE)] * 2
    for got, want in zip(found, wanted, strict=True):
        close(got, want)


def test_a_page_model_of_one_vector_answers_every_route_of_dense_vectors(tmp_path, load_model):
    model = load_model(write_biqwen(tmp_path), 1, 256)
    wanted = [*model.encode(images=FILES), model.encode_query("who?")]
    inputs = [*({"image": uri} for uri in URIS), {"text": "who?"}]
    close(openai_vectors(post(model, {"input": inputs})), wanted)
    typed = [*({"type": "image", "url": uri} for uri in URIS), "who?"]
    close(post(model, {"inputs": typed}, "/embed"), wanted)
    body = {"query": "who?", "documents": [{"image": uri} for uri in URIS]}
    found = post(model, body, "/v1/rerank")["results"]
    scores = {one["index"]: one["relevance_score"] for one in found}
    close([scores[0], scores[1]], [vector @ wanted[2] for vector in wanted[:2]])
    answer = post(model, {"query": "who?", "documents": ["a text"]}, "/v1/rerank", 400)
    assert "takes images as documents" in answer["error"]["message"]
    pair = {"inputs": {"source_sentence": "who?", "sentences": ["a text"]}}
    assert "takes images as documents" in str(post(model, pair, "/similarity", 422))


@pytest.mark.parametrize("kind", idefics3_sources.KINDS)
def test_pages_of_tiles_are_ranked_and_embedded(kind, tmp_path):
    folder = idefics3_sources.write_tiled(tmp_path / "model", kind)
    grid = tmp_path / "grid.json"
    grid.write_text('{"buckets": [[1, 32], [1, 256]]}')
    config = EngineConfig(dtype="float32", devices=1, buckets=grid)
    with Embedder(str(folder), cache_dir=tmp_path, config=config) as model:
        body = {"query": "w1 w2", "documents": [{"image": uri} for uri in PAGE_URIS]}
        found = post(model, body, "/v1/rerank")["results"]
        wanted = model.rerank("w1 w2", images=PAGES)
        assert [one["index"] for one in found] == [one.index for one in wanted]
        close([one["relevance_score"] for one in found], [one.score for one in wanted])
        inputs = ["w1 w2", {"type": "image", "url": URIS[0]}]
        vectors = model.encode_multi(["w1 w2"], images=FILES[:1])
        for got, want in zip(post(model, {"inputs": inputs}, "/embed_multi"), vectors, strict=True):
            close(got, want)
        refused = post(model, {"inputs": "w1 <image>"}, "/embed_multi", 422)
        assert "the token that stands for a part of an image" in str(refused)


def test_voyages_route_says_that_it_answers_dense_vectors(colpali):
    for part in ({"type": "text", "text": "a"}, {"type": "image_base64", "image_base64": URIS[0]}):
        body = {"inputs": [{"content": [part]}]}
        answer = post(colpali, body, "/v1/multimodalembeddings", 400)
        assert "has no dense output" in str(answer)


def test_an_image_that_comes_as_a_text_is_refused(colpali, clip):
    for model, more in ((clip, {}), (colpali, {"return_multivector": True})):
        answer = post(model, {"input": ["w1", URIS[0]]} | more, status=400)
        assert "is a data URI of an image; send it as an image" in str(answer)
        assert answer["error"]["param"] == "input[1]"


@pytest.mark.parametrize("field", ["images", "image_url", "image_base64"])
def test_an_image_in_a_field_of_other_apis_is_not_left_out_of_a_document(colpali, field):
    body = {"query": "w1", "documents": [{"text": "w1", field: URIS[:1]}]}
    refused = post(colpali, body, "/v1/rerank", 400)
    assert f"in `content`, not {field} - at `$.documents[0]`" in str(refused)


def test_similarity_takes_no_text_for_a_page(colpali):
    inputs = {"source_sentence": "w1", "sentences": ["w1 w2"]}
    answer = post(colpali, {"inputs": inputs}, "/similarity", 422)
    assert "takes images as documents" in str(answer)
