"""A real server whose models come and go: its memory stays level."""

import json
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from conftest import tiny_spec, word_tokenizer
from live_server import served

from benchmarks.parameters import random_parameters
from jaxembed.checkpoints import checkpoint

pytestmark = pytest.mark.slow

NAMES = "abcd"
WARM_LOADS, LOADS = 8, 50
LOAD_S = 300  # that a model may take on a busy machine
# Of a tiny model: about 17 buckets of 10 MiB each are counted, so that two models fit.
MODEL_MEMORY = 500 * 10**6


@pytest.fixture(name="server", scope="module")
def _server(tmp_path_factory):
    """A server of four models of which two fit: (client, pid)."""
    folder = tmp_path_factory.mktemp("lifecycle")
    for seed, name in enumerate(NAMES):
        save(folder / "models" / name, seed)
    flags = ["--model-repository", str(folder / "models"), "--model-memory", str(MODEL_MEMORY)]
    flags += ["--cache-dir", str(folder / "cache")]
    flags += ["--load-timeout", str(LOAD_S), "--dtype", "float32"]
    with served(*flags) as (url, pid), httpx.Client(base_url=url, timeout=2 * LOAD_S) as client:
        yield client, pid


def save(path: Path, seed: int) -> None:
    """A tiny model with parameters of its own."""
    rng = np.random.default_rng(seed)
    parameters = {
        name: (values + rng.normal(scale=0.1, size=values.shape)).astype(values.dtype)
        for name, values in random_parameters(tiny_spec()).items()
    }
    checkpoint.save(path, tiny_spec(), parameters, word_tokenizer().to_str().encode())


def embed(client: httpx.Client, model: str) -> np.ndarray:
    body = {"model": model, "input": "the cat sat", "encoding_format": "float"}
    response = client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return np.array(json.loads(response.content)["data"][0]["embedding"])


def test_memory_stays_level_while_models_come_and_go(server):
    client, pid = server
    process = psutil.Process(pid)
    vectors = {name: embed(client, name) for name in NAMES}
    reservation, threads = [], []
    for k in range(WARM_LOADS + LOADS):  # each is a load, and takes the model before the last out
        name = NAMES[k % len(NAMES)]
        np.testing.assert_allclose(embed(client, name), vectors[name], atol=1e-6)
        reservation.append(process.memory_info().rss)
        threads.append(process.num_threads())
    reservation, threads = reservation[WARM_LOADS:], threads[WARM_LOADS:]
    # medians: at some moments a program is being compiled
    assert np.median(reservation[-LOADS // 3 :]) <= 1.05 * np.median(reservation[: LOADS // 3])
    assert np.median(threads[-LOADS // 3 :]) <= np.median(threads[: LOADS // 3]) + 2
