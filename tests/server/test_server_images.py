"""Images over HTTP: every form that clients send them in, and what is refused."""

import base64
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from threading import Thread
from typing import Any

import numpy as np
import pytest
from dual_sources import picture, png
from test_server_app import fetch_json
from test_server_openai import ask

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


def message(content) -> dict:
    """A body as chat clients send it."""
    return {"messages": [{"role": "user", "content": content}]}


def openai_vectors(answer):
    return [item["embedding"] for item in answer["data"]]


def test_too_many_pixels_in_one_request_are_refused(clip, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_PIXELS_A_REQUEST", 3000)
    refused = post(clip, {"input": URIS, "modality": "image"}, status=400)
    assert "the 2 images have 3424 pixels in total; a request can have at most 3000" in str(refused)


def test_typed_inputs_of_tei(clip, vectors):
    inputs = [
        {"type": "image", "url": URIS[0]},
        {"type": "image", "url": URIS[1].replace("data:", "DATA:")},
    ]
    np.testing.assert_allclose(post(clip, {"inputs": inputs}, "/embed"), vectors, atol=2e-6)
    got = post(clip, {"inputs": inputs[0]}, "/embed")
    np.testing.assert_allclose(got, vectors[:1], atol=2e-6)
    for wrong in ({"value": "a"}, {}, {"url": URIS[0], "other": 1}):
        post(clip, {"inputs": [{"type": "image"} | wrong]}, "/embed", status=422)
    for wrong in ({"type": "text", "url": URIS[0]}, {"type": "audio", "url": "a"}):
        post(clip, {"inputs": [wrong]}, "/embed", status=422)


def test_texts_and_images_in_one_request_keep_their_order(clip, vectors):
    inputs = [
        {"type": "text", "value": "w1 w2"},
        {"type": "image", "url": URIS[1]},
        "w3",
        {"type": "image", "url": URIS[0]},
    ]
    texts = clip.encode(["w1 w2", "w3"])
    wanted = [texts[0], vectors[1], texts[1], vectors[0]]
    np.testing.assert_allclose(post(clip, {"inputs": inputs}, "/embed"), wanted, atol=2e-6)


@pytest.mark.parametrize("given", [BARE, URIS])
def test_objects_of_jina(clip, vectors, given):
    body = {"input": [{"image": given[0]}, {"text": "w1"}, {"image": given[1]}]}
    wanted = [vectors[0], clip.encode("w1"), vectors[1]]
    answer = post(clip, body)
    np.testing.assert_allclose(openai_vectors(answer), wanted, atol=2e-6)
    assert answer["usage"] == {"prompt_tokens": 17 + 3 + 17, "total_tokens": 37}


def test_the_modality_of_infinity(clip, vectors):
    answer = post(clip, {"input": URIS, "modality": "image"}, "/embeddings")
    np.testing.assert_allclose(openai_vectors(answer), vectors, atol=2e-6)
    answer = post(clip, {"input": URIS[0], "modality": "image", "encoding_format": "base64"})
    got = np.frombuffer(base64.b64decode(openai_vectors(answer)[0]), "<f4")
    np.testing.assert_allclose(got, vectors[0], atol=2e-6)
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
    np.testing.assert_allclose(openai_vectors(answer), vectors[:1], atol=2e-6)
    texts = [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}]
    for one in (texts, "w1\nw2"):
        answer = post(clip, message(one))
        np.testing.assert_allclose(openai_vectors(answer), [clip.encode("w1 w2")], atol=2e-6)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "`input` (or `messages`)"),
        (
            {"input": ["w1"], "messages": [{"role": "user", "content": "w1"}]},
            "has `input` and `messages`",
        ),
        ({"messages": [{"role": "system", "content": "w1"}]}, "one message of the role `user`"),
        (message([{"type": "text", "text": "w1"}, IMAGE]), "either one image or only texts"),
        (message([{"type": "video_url"}]), "video_url"),
        ({"input": [{"image": URIS[0], "text": "w1"}]}, "`text` or `image`"),
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


def test_the_image_at_fault_is_named_by_its_place(clip):
    urls = URIS[0], "data:image/png;base64,AA"
    typed = [{"type": "image", "url": url} for url in urls]
    answer = post(clip, {"inputs": typed}, "/embed", status=422)
    assert "`inputs[1]`: " in answer["error"]


def test_a_model_of_texts_refuses_images_by_name_and_fetches_nothing(embedder, monkeypatch):
    config: Any = {"media_hosts": ("example.com",)}
    for image in (BARE[0], "http://example.com/a.png"):
        body = {"input": [{"image": image}]}
        answer = post(embedder, body, status=400, **config)
        assert "takes texts and no images" in answer["error"]["message"]
    post(embedder, {"images": URIS}, "/v2/embed", status=400)
    inputs = {"type": "image", "url": URIS[0]}
    assert "no images" in post(embedder, {"inputs": inputs}, "/embed", status=424)["error"]


def test_urls_of_other_hosts_and_of_private_addresses_are_refused(clip):
    config: Any = {"media_hosts": ("example.com", "localhost")}
    for url in ("http://127.0.0.1/a.png", "http://localhost/a.png", "gopher://example.com/"):
        answer = post(clip, {"input": [url], "modality": "image"}, status=400, **config)
        assert answer["error"]["code"] == "invalid_media_url"


def test_the_image_of_a_host_in_a_named_network_is_fetched(clip, vectors):
    class Store(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(FILES[0])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as store:
        Thread(target=store.serve_forever, daemon=True).start()
        host = f"localhost:{store.server_port}"
        body = {"input": [f"http://{host}/a.png"], "modality": "image"}
        networks = (ip_network("127.0.0.0/8"), ip_network("::1"))
        config: Any = {"media_hosts": (host,), "media_networks": networks}
        answer = post(clip, body, **config)
        np.testing.assert_allclose(answer["data"][0]["embedding"], vectors[0], atol=2e-6)
        answer = post(clip, body, status=400, media_hosts=(host,))
        assert "--allow-media-network" in answer["error"]["message"]
        store.shutdown()


@COHERE
def test_images_of_cohere(clip, vectors, path):
    body = {"images": URIS, "input_type": "image", "embedding_types": ["float"]}
    answer = post(clip, body, path)
    np.testing.assert_allclose(answer["embeddings"]["float"], vectors, atol=2e-6)
    assert answer["texts"] == []
    assert answer["images"] == [
        {"width": 32, "height": 32, "format": "png", "bit_depth": 24},
        {"width": 60, "height": 40, "format": "png", "bit_depth": 24},
    ]


@COHERE
@pytest.mark.parametrize("url", [URIS[0], {"url": URIS[0]}])
def test_inputs_of_cohere(clip, vectors, path, url):
    inputs = [
        {"content": [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}]},
        {"content": [{"type": "image_url", "image_url": url}]},
    ]
    answer = post(clip, {"inputs": inputs, "embedding_types": ["float"]}, path)
    wanted = [clip.encode("w1 w2"), vectors[0]]
    np.testing.assert_allclose(answer["embeddings"]["float"], wanted, atol=2e-6)
    assert answer["texts"] == ["w1\nw2"]
    both = [{"content": inputs[0]["content"] + inputs[1]["content"]}]
    assert "has its own vector" in post(clip, {"inputs": both}, path, status=400)["message"]


def test_inputs_of_voyage(clip, vectors):
    inputs = [
        {"content": [{"type": "text", "text": "w1"}]},
        {"content": [{"type": "image_base64", "image_base64": URIS[0]}]},
        {"content": [{"type": "image_url", "image_url": URIS[1]}]},
    ]
    body = {"inputs": inputs, "model": None, "input_type": None, "truncation": True}
    answer = post(clip, body, "/v1/multimodalembeddings")
    wanted = [clip.encode("w1"), *vectors]
    np.testing.assert_allclose(openai_vectors(answer), wanted, atol=2e-6)
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    pixels = 32 * 32 + 40 * 60
    assert answer["usage"] == {
        "text_tokens": 3,
        "image_pixels": pixels,
        "video_pixels": 0,
        "total_tokens": 3 + 2 * 17,
    }
    for name in ("output_encoding", "encoding_format"):
        answer = post(clip, body | {name: "base64"}, "/v1/multimodalembeddings")
        got = np.frombuffer(base64.b64decode(openai_vectors(answer)[1]), "<f4")
        np.testing.assert_allclose(got, vectors[0], atol=2e-6)
    both = [{"content": inputs[0]["content"] + inputs[1]["content"]}]
    refused = post(clip, {"inputs": both}, "/v1/multimodalembeddings", status=400)
    assert "inputs[0].content" in refused["error"]["message"]


def test_a_large_image_is_decoded_and_a_body_over_the_limit_is_refused(clip):
    data = png(picture(9, 300, 300))
    uri = "data:;base64," + base64.b64encode(data).decode()
    answer = post(clip, {"input": [uri], "modality": "image"})
    np.testing.assert_allclose(openai_vectors(answer), clip.encode(images=[data]), atol=2e-6)
    post(clip, {"input": [uri], "modality": "image"}, status=413, payload_limit=1000)


def test_the_list_of_models_says_which_take_images(clip, embedder):
    """Also while they are not in memory."""
    models = Models([clip.model, embedder.model], {clip.name: ("clip",), embedder.name: ("texts",)})
    for _ in range(2):
        _, body = fetch_json("/v1/models", models=models)
        capabilities = {one["id"]: one["capabilities"] for one in body["data"]}
        assert capabilities == {"clip": ["embed", "image_embed"], "texts": ["embed"]}
        models["clip"].instance = None
