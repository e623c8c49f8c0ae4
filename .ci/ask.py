"""Ask a freshly started server what a user would, with the official client. Argument: its log."""

import sys
import time
import urllib.request
from pathlib import Path

import httpx
import numpy as np
import openai

SECONDS = 120


def wait_for(what, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if found := what():
                return found
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"gave up after {seconds} s:\n{Path(sys.argv[1]).read_text()}")


def address() -> str | None:
    lines = Path(sys.argv[1]).read_text().splitlines()
    return next((line.split()[-1] for line in lines if "listening on" in line), None)


def check_kernels(url: str) -> None:
    """The wheel's native kernels are used where the CPU has what they need."""
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and "avx512_bf16" in cpu.read_text():
        kernels = httpx.get(f"{url}/info").json()["jaxembed"]["kernels"]
        # without a call that was slower than XLA's, where the machine was busy
        assert all(name.startswith("native") for name in kernels["used"].values()), kernels


def main() -> None:
    url = wait_for(address)
    wait_for(lambda: urllib.request.urlopen(f"{url}/ready").status == 200)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    texts = ["a man plays the guitar", "someone is playing an instrument", "stocks fell sharply"]
    model = client.models.list().data[0].id
    floats = client.embeddings.create(model=model, input=texts, encoding_format="float")
    encoded = client.embeddings.create(model=model, input=texts)  # base64 on the wire
    short = client.embeddings.create(model=model, input=texts, dimensions=64)
    pieces = httpx.post(f"{url}/tokenize", json={"inputs": texts}).json()
    ids = [[piece["id"] for piece in one] for one in pieces]
    by_ids = client.embeddings.create(model=model, input=ids)

    vectors = np.array([row.embedding for row in floats.data])
    same = np.array([row.embedding for row in encoded.data])
    np.testing.assert_allclose(same, vectors, atol=1e-6)
    np.testing.assert_allclose([row.embedding for row in by_ids.data], vectors, atol=1e-2)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert len(short.data[0].embedding) == 64
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > far + 0.3, (near, far)
    metrics = httpx.get(f"{url}/metrics").text
    assert "te_request_count" in metrics
    check_kernels(url)
    print(f"{url} serves {model}: {near:.3f} between like texts, {far:.3f} between unlike ones")


if __name__ == "__main__":
    main()
