"""jina-embeddings-v5-text, voyage-4-nano, pplx-embed-v1 and nomic-embed-text-v2-moe in their
published widths, and the merged repositories of the first, in the library and over HTTP. The
goldens have them in tiny."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden import make, own_code
from golden.families import FAMILIES, sized
from sources import NORMALIZE

from jaxembed import Embedder
from jaxembed.errors import CheckpointError
from parity import sentences
from parity.reference import answers, from_every_order, in_every_order, relative, sent

QWEN3 = sized(1024, 2, 16, 3072, 64, num_key_value_heads=8, head_dim=128)
QWEN3 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
EUROBERT = sized(768, 2, 12, 3072, 64, num_key_value_heads=12)
EUROBERT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0}}
CONFIGS = {"qwen3": QWEN3, "eurobert": EUROBERT}
TEXTS = [*sentences.WEIRD[:6], *sentences.ENGLISH[:3]]
BUCKETS = [(4, 32)]


def assert_agree(
    embedder: Embedder, options: dict[str, Any], wanted: Iterable[np.ndarray], note: Callable
) -> None:
    """From the library and from a server, in every order."""
    vectors = np.stack([*wanted])
    got = from_every_order([embedder.encode(batch, **options) for batch in in_every_order(TEXTS)])
    answered = sent(embedder, TEXTS, **options)
    apart = max(relative(np.array(one), vectors) for one in [*got, *answered])
    note(f"vectors within {apart:.1e}")
    assert apart < 1e-5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_jina_v5", make.OF_TASKS),
        ("eurobert_jina_v5", make.OF_TASKS),
        ("qwen3_voyage", make.OF_PROMPTS),
        ("qwen3_pplx", ({"normalize": False},)),  # a server normalises unless it is told
    ],
)
def test_vectors_of_the_published_width_agree(name, options, tmp_path, make_embedder, note):
    config = CONFIGS[name.partition("_")[0]]
    answer = make.CASES[name].save(tmp_path, **config)
    embedder = make_embedder(tmp_path, BUCKETS)
    for one in options:
        wanted = [answer(text, one)["dense"] for text in TEXTS]
        assert_agree(embedder, one, wanted, note)


@pytest.mark.parametrize("family", CONFIGS)
def test_jina_v5_with_an_adapter_merged_is_a_plain_model(family, tmp_path, make_embedder, note):
    make.save_tower(FAMILIES[family], tmp_path, **CONFIGS[family])
    width = CONFIGS[family]["hidden_size"]
    own_code.write_pooling(tmp_path, "lasttoken", width, (NORMALIZE, "2_Normalize"))
    own_code.write_prompts(tmp_path, own_code.JINA_PROMPTS, "document")
    model, embedder = make.load(tmp_path), make_embedder(tmp_path, [(4, 64)])
    for role in own_code.JINA_PROMPTS:
        wanted = [model.encode(text, prompt_name=role) for text in TEXTS]
        assert_agree(embedder, {"prompt_name": role}, wanted, note)


def test_nomic_embed_v2_moe_of_the_published_width_agrees(tmp_path, make_embedder, note):
    case = replace(make.CASES["nomic_moe_mean"], config=sized(768, 2, 12, 3072, 64))
    make.save(case, tmp_path)
    model = make.load(tmp_path)
    make.publish(FAMILIES["nomic_moe"], tmp_path)
    embedder = make_embedder(tmp_path, BUCKETS)
    for role in make.SEARCH_PROMPTS:
        wanted = [model.encode(text, prompt_name=role) for text in TEXTS]
        assert_agree(embedder, {"prompt_name": role}, wanted, note)


def test_int8_and_ubinary_of_pplx_are_those_of_its_quantizer(tmp_path, make_embedder, note):
    answer = own_code.save_pplx(tmp_path, **QWEN3)
    vectors = np.stack([answer(text, {})["dense"] for text in TEXTS])
    embedder = make_embedder(tmp_path, BUCKETS)
    got = {name: embedder.encode(TEXTS, output_dtype=name) for name in ("int8", "ubinary")}
    for name, rows in got.items():
        body = {"input": TEXTS, "output_dtype": name, "normalize": False}
        (answer,) = answers(embedder, "/v1/embeddings", [body])
        assert [one["embedding"] for one in answer["data"]] == rows.tolist()
    wanted = np.clip(np.round(vectors * 127), -128, 127)
    differ = np.abs(got["int8"] - wanted)
    note(f"int8: {(differ > 0).mean():.1e} of the values differ")
    assert differ.max() <= 1
    assert (differ > 0).mean() < 1e-3
    assert np.array_equal(got["ubinary"], np.packbits(vectors >= 0, axis=-1))


PLANETS = [
    "Venus is often called Earth's twin because of its similar size and proximity.",
    "Mars, known for its reddish appearance, is often referred to as the Red Planet.",
    "Jupiter, the largest planet in our solar system, has a prominent red spot.",
    "Saturn, famous for its rings, is sometimes mistaken for the Red Planet.",
]


@pytest.mark.parametrize("merged", ["", "-retrieval"])
@pytest.mark.parametrize(
    ("name", "wanted"),
    [("small", [0.4860, 0.7611, 0.5914, 0.6188]), ("nano", [0.5013, 0.7914, 0.6133, 0.5736])],
    ids=["small", "nano"],
)
def test_the_cosines_of_the_readme(name, merged, wanted, note):
    """Of the real weights, if the hub's cache has them. The README computed in bfloat16."""
    published = f"jinaai/jina-embeddings-v5-text-{name}{merged}"
    try:
        embedder = Embedder(published, offline=True)
    except CheckpointError as error:
        pytest.skip(f"no weights of {published}: {error}")
    with embedder:
        query = embedder.encode_query("Which planet is known as the Red Planet?")
        apart = np.abs(embedder.encode_document(PLANETS) @ query - wanted).max()
    note(f"cosines within {apart:.1e}")
    assert apart < 1e-2
