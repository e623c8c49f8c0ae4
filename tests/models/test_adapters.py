"""Low-rank adapters in the engine and the towers: one batch holds sequences of several."""

from typing import Any

import numpy as np
import pytest
from conftest import TOWERS, WIDER_TOWERS, tiny_spec
from representatives import each
from test_replica import replica_with

from benchmarks.parameters import random_parameters
from jaxembed.data.spec import Adapter, DType, ModelSpec
from jaxembed.data.work import Encoding, join_work, work_from_encodings
from jaxembed.engine.batch import pack, place
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.future import WorkFuture
from jaxembed.engine.queue import RequestQueue
from jaxembed.engine.replica import Replica
from jaxembed.errors import CheckpointError
from jaxembed.models import program

BUCKET = Bucket(2, 32)
TEXTS = [[2, 7, 9, 3], [2, 7, 9, 3], [2, 7, 9, 3], [2, 11, 30, 8, 9, 12, 3], [2, 4, 3]]
NUMBERS = [0, 1, 2, 1, 0]  # the adapter of each text

ADAPTED = (
    "bert", "albert", "mpnet", "nomic_bert", "jina_bert_code", "modernbert", "deberta", "qwen3",
    "gemma3", "t5",
)  # fmt: skip


def layers_of(backbone: dict[str, Any]) -> list[str]:
    has_gate = backbone["config"].get("gated", backbone["architecture"] in ("modernbert", "qwen3"))
    names = ("attention.qkv", "attention.out", "mlp.gate_up" if has_gate else "mlp.up", "mlp.down")
    in_layers = [f"tower.layers.{i}.{name}" for i in range(2) for name in names]
    return ["tower.embeddings.word", *in_layers]


def adapted_spec(backbone: dict[str, Any]) -> ModelSpec:
    """Two adapters: one of rank 4 in every layer, and one of rank 2 in every second one."""
    layers = layers_of(backbone)
    adapters = (
        Adapter("first", dict.fromkeys(layers, 4)),
        Adapter("second", dict.fromkeys(layers[::2], 2)),
    )
    return tiny_spec(**backbone, adapters=adapters)


def merged(parameters: dict[str, np.ndarray], spec: ModelSpec, number: int) -> dict[str, Any]:
    """The parameters of the plain model with the weights of one adapter added."""
    plain = {name: array for name, array in parameters.items() if ".adapter." not in name}
    if number:
        before = spec.adapters[: number - 1]
        for layer, rank in spec.adapters[number - 1].ranks.items():
            kind = "embedding" if f"{layer}.embedding" in plain else "kernel"
            first = sum(adapter.ranks.get(layer, 0) for adapter in before)
            down = parameters[f"{layer}.adapter.down.{kind}"][:, first : first + rank]
            up = parameters[f"{layer}.adapter.up.kernel"][first : first + rank]
            plain[f"{layer}.{kind}"] = plain[f"{layer}.{kind}"] + down @ up
    return plain


def replica_of(spec: ModelSpec, parameters, dtype: DType = "float32", native=False) -> Replica:
    replica = replica_with(spec, dtype, native, parameters=parameters)
    replica.compile(BUCKET)
    return replica


def work_with(ids: list[int], adapter: int):
    return join_work(
        [work_from_encodings([Encoding(np.array(ids, np.int32))])], frozenset({"dense"}), adapter
    )


def vectors(replica: Replica, texts=TEXTS, numbers=NUMBERS) -> np.ndarray:
    futures = [WorkFuture(work_with(*of), {"dense": 32}) for of in zip(texts, numbers, strict=True)]
    batch = place(BUCKET, [future.sequences[0] for future in futures])
    assert len(batch.sequences) == len(texts)
    dense = replica.run(BUCKET, pack(batch, replica.planes), ("dense",))["dense"]
    by_entry = dict(zip(map(id, batch.sequences), dense[batch.rows, batch.slots], strict=True))
    return np.array([by_entry[id(future.sequences[0])] for future in futures])


@pytest.fixture(name="adapted", scope="module", params=each(ADAPTED, "bert", "qwen3"))
def _adapted(request) -> tuple[ModelSpec, dict[str, np.ndarray], Replica]:
    """A tower with two adapters, its parameters, and both on a device."""
    spec = adapted_spec(TOWERS[request.param])
    parameters = random_parameters(spec)
    return spec, parameters, replica_of(spec, parameters)


def test_a_text_has_the_vector_of_the_merged_model_of_its_adapter(adapted):
    """Exactly that of the plain model without an adapter."""
    spec, parameters, replica = adapted
    got = vectors(replica)
    plain = tiny_spec(architecture=spec.architecture, config=spec.config)
    for number in (0, 1, 2):
        alone = replica_of(plain, merged(parameters, spec, number))
        wanted = vectors(alone, TEXTS, [0] * len(TEXTS))
        of_it = [k for k, one in enumerate(NUMBERS) if one == number]
        # float32, sums of at most 64 terms in another order; hidden states are of size 1
        close = {"rtol": 1e-5, "atol": 1e-5}
        if number == 0:  # XLA computes norms of Qwen3 in another order beside the sums
            close = {"rtol": 0, "atol": 1e-6 if spec.architecture == "qwen3" else 0}
        np.testing.assert_allclose(got[of_it], wanted[of_it], **close)
    assert np.abs(got[0] - got[1]).max() > 0.01
    assert np.abs(got[1] - got[2]).max() > 0.01


def test_a_text_has_the_same_vector_whatever_adapters_share_its_batch(adapted):
    _, _, replica = adapted
    together = vectors(replica)
    for k, (ids, number) in enumerate(zip(TEXTS, NUMBERS, strict=True)):
        got = vectors(replica, [ids], [number])[0]
        np.testing.assert_allclose(got, together[k], rtol=1e-5, atol=1e-5)  # another row


@pytest.mark.parametrize("name", each(ADAPTED, "bert"))
def test_native_kernels_give_the_adapters_too(name, native_kernels):
    spec = adapted_spec(WIDER_TOWERS[name])
    parameters = random_parameters(spec)
    got = vectors(replica_of(spec, parameters, "bfloat16", native=True))
    wanted = vectors(replica_of(spec, parameters))
    for ours, theirs in zip(got, wanted, strict=True):  # bfloat16 rounds what lies between
        cosine = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
        assert cosine >= 0.999


@pytest.mark.parametrize("name", each(["bert", "nomic_bert", "qwen3"], "nomic_bert"))
def test_native_kernels_compute_a_text_as_if_it_were_alone(name, native_kernels):
    """To the bit: without an adapter as the plain model does, and whatever its batch takes."""
    spec = adapted_spec(WIDER_TOWERS[name])
    parameters = random_parameters(spec)
    replica = replica_of(spec, parameters, "bfloat16", native=True)
    text = [2, *range(5, 35), 3]  # a row of its own
    got = [vectors(replica, [text, text], [number, 2])[0] for number in (0, 1)]
    plain = tiny_spec(architecture=spec.architecture, config=spec.config)
    alone = replica_of(plain, merged(parameters, spec, 0), "bfloat16", native=True)
    np.testing.assert_array_equal(got[0], vectors(alone, [text], [0])[0])
    np.testing.assert_array_equal(got[1], vectors(replica, [text], [1])[0])


def test_an_adapter_of_a_layer_that_the_tower_lacks_is_refused():
    layer = "tower.layers.0.attention.key"
    with pytest.raises(CheckpointError, match=f"an adapter changes the layer {layer}"):
        program(tiny_spec(adapters=(Adapter("a", {layer: 4}),)))


def test_a_text_under_two_adapters_is_computed_twice_and_under_one_once():
    queues = RequestQueue(64)
    queues.set_longest_row(64)
    for number in (1, 1, 2, 0, 0):
        queues.add(WorkFuture(work_with([7, 8], number), {"dense": 1}))
    batch = queues.take({Bucket(1, 64): 1.0}, 0.0, None, 0.0)
    assert sorted(entry.adapter for entry in batch.sequences) == [0, 1, 2]
