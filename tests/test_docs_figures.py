"""The measured figures in the documents, held against the committed results that they come from."""

import json
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
INTEL, AMD = "cpu-intel-xeon-2-cores", "cpu-amd-epyc-2-cores"
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()


def result(name: str, device: str = INTEL) -> dict:
    return json.loads((RESULTS / device / f"{name}.json").read_text())


def cosine(value: float) -> str:
    return f"{value:.5f}".removesuffix(".00000")


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_latency_and_throughput_beside_infinity(page):
    peers = result("bench_peers")
    ratios = {ratio["figure"]: ratio["median"] for ratio in peers["ratios"]}
    found = {(one["scenario"], one["load"], one["server"]): one for one in peers["summary"]}

    def pair(scenario: str, load: str, figure: str, form: str) -> list[str]:
        servers = ("jaxembed", "infinity")
        return [form.format(found[scenario, load, server][figure]) for server in servers]

    rows = [
        [*pair("bulk", "bulk", "texts_per_s", "{:.0f} texts/s"), f"{ratios['bulk texts/s']:.1f}"],
        [*pair("lone", "query", "p50_ms", "{:.1f} ms"), f"{ratios['lone query p50']:.1f}"],
        [
            *pair("under bulk", "query", "p99_ms", "{:,.0f} ms"),
            f"{ratios['query p99 under bulk']:.0f}",
        ],
    ]
    text = (ROOT / page).read_text()
    assert [row for row in rows if f"| {' | '.join(row)} |" not in text] == []


def test_tokens_a_second_of_each_library():
    for one in result("bench_libraries")["results"]:
        cosines = f"{cosine(one['cosine'])}, {cosine(one['worst_cosine'])}"
        assert f"| {one['tokens_per_s']:,.0f} | {cosines} |" in BENCHMARKS


def test_rates_by_length_of_the_texts():
    for one in result("bench_engine")["results"]:
        rates = f"{one['tokens_per_s']:,.0f} | {one['texts_per_s']:,.0f}"
        assert f"| {rates} | {one['fill']:.2f} | {one['of_best']:.2f} |" in BENCHMARKS
    for one in result("bench_engine", AMD)["results"]:
        assert f"| {one['tokens_per_s']:,.0f} |\n" in BENCHMARKS


def test_the_share_of_the_ceiling_that_each_bucket_reaches():
    for one in result("bench_model")["buckets"]:
        rates = f"{one['ms_median']:.1f} | {one['tokens_per_s']:,.0f} | {one['tflop_per_s']:.2f}"
        assert f"| {one['bucket']} | {rates} | {one['share']:.2f} |" in BENCHMARKS


def test_the_share_of_the_ceiling_that_each_family_reaches():
    of_family: dict[str, list[str]] = {}
    for one in result("bench_families", AMD)["results"]:
        cells = f"{one['share']:.2f} | {one['of_bert']:.2f}"
        of_family.setdefault(one["family"], []).append(cells)
    for name, cells in of_family.items():
        assert f"| {name} | {' | '.join(cells)} |" in BENCHMARKS


def test_what_adapters_cost():
    page = (ROOT / "docs" / "how-to" / "adapters.md").read_text()
    for one in result("bench_adapters", AMD)["buckets"]:
        assert f" {one['times_plain']:.2f} " in page.replace("\n", " ")


def test_static_embeddings_beside_model2vec():
    for one in result("bench_static", AMD)["results"]:
        spread = f"{one['times']:.2f} (from {one['least']:.2f} to {one['most']:.2f})"
        assert spread in BENCHMARKS.replace("\n", " ")


def test_what_a_job_costs_beside_encode():
    for name in ("bench_bulk", "bench_bulk_200k"):
        facts = result(name, AMD)
        encode, job = facts["results"]
        rates = f"{encode['rows_per_s']:,.0f} | {job['rows_per_s']:,.0f} | {job['of_encode']:.3f}"
        assert f"| {facts['texts']:,} | {rates} |" in BENCHMARKS


def test_what_a_job_does_beside_other_libraries():
    facts = result("bench_bulk_peers", AMD)
    assert f"with {facts['texts']:,} texts" in BENCHMARKS
    names = {"encode": "`encode`", "job": "`jaxembed embed`"}
    for one in facts["results"]:
        rates = f"{one['rows_per_s']:,.0f} | {one['of_encode']:.3f}"
        assert f"| {names.get(one['run'], one['run'])} | {rates} |" in BENCHMARKS


def test_the_memory_of_a_job_of_ten_million_rows():
    facts, page = result("bench_bulk_nulls", AMD)["null_model"], BENCHMARKS.replace("\n", " ")
    assert facts["rows"] == 10_000_000
    assert f"at {facts['rows_per_s']:,.0f} rows a second" in page
    assert f"Memory is {facts['settled_mb']:.0f} MB after a tenth of them" in page
    assert f"and {facts['end_mb']:.0f} MB at the end, {facts['highest_mb']:.0f} MB at most" in page


def test_what_several_outputs_cost():
    for one in result("bench_outputs", AMD)["results"]:
        name = f"{one['bucket']} | {one['library']} | {one['outputs']}"
        figures = f"{one['ms_median']:,.0f} | {one['times_dense']:.2f} | {one['flop_ratio']:.2f}"
        assert f"| {name} | {figures} | {one['times_ours']:.2f} |" in BENCHMARKS


def test_images_beside_other_libraries():
    facts = result("bench_images", AMD)
    for one in facts["results"]:
        spread = f"{one['times']:.2f} ({one['least']:.2f} to {one['most']:.2f})"
        parts = f"{one['prepare_ms']:,.0f} | {one['forward_ms']:,.0f} | {one['cosine']:.5f}"
        rates = f"{one['images_per_s']:.2f} | {spread}"
        assert f"| {one['library']} | {rates} | {parts} |" in BENCHMARKS
    for one in facts["towers"]:
        assert f"| {one['bucket']} | {one['images']} | {one['share']:.2f} |" in BENCHMARKS


def test_maxsim_beside_plain_numpy():
    ways = {one["way"]: one for one in result("bench_maxsim", AMD)["results"]}
    (_, section) = BENCHMARKS.split("## MaxSim on the host\n")
    lines = section.split("\n## ")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    assert len(rows) == 6
    for name, *figures in rows:
        one = ways[name]
        wanted = [f"{one['ms_median']:.1f}", f"{one['times']:.2f}", f"{one['extra_mb']:.1f}"]
        assert figures == wanted


@pytest.mark.parametrize(("start", "cache"), [("cold", "empty"), ("warm", "warm")])
def test_the_times_of_a_start(start, cache):
    starts = [one for one in result("bench_start")["starts"] if one["start"] == start]
    figures = {
        name: median(one[name] for one in starts)
        for name in ("embeddings_s", "ready_s", "compiled")
    }
    times = f"{figures['embeddings_s']:.1f} s | {figures['ready_s']:.1f} s"
    assert f"| {cache} | {times} | {figures['compiled']:.0f} |" in BENCHMARKS


def test_what_a_tuned_grid_gains():
    for one in result("bench_tune")["results"]:
        gains = [
            f"{gain['median']:.2f} ({gain['least']:.2f} to {gain['most']:.2f})"
            for gain in one["after_over_before"].values()
        ]
        counts = ", ".join(str(len(one[grid]["buckets"])) for grid in ("before", "after"))
        assert f"| {' | '.join(gains)} | {counts} |" in BENCHMARKS


def test_what_two_models_leave_each_other():
    rates = {
        (one["load"], one["with"]): one["texts_per_s"]
        for one in result("bench_pair", AMD)["results"]
    }
    assert f"| {rates['bulk', 'alone']:,.0f} | {rates['bulk', 'all']:,.0f} |" in BENCHMARKS
    assert f"| {rates['rerank', 'alone']:.1f} | {rates['rerank', 'all']:.1f} |" in BENCHMARKS


def test_the_score_on_sts_b():
    for one in result("eval_sts", AMD)["results"]:
        assert f"{one['spearman']:.2f} in float32 and in bfloat16" in BENCHMARKS


def test_the_scores_of_hybrid_search():
    page = (ROOT / "docs" / "how-to" / "hybrid-search.md").read_text()
    facts = result("eval_hybrid", AMD)
    assert f"{facts['documents']:,} abstracts and {facts['queries']} queries" in page
    for one in facts["results"]:
        assert f"| {one['ranking']} | {100 * one['ndcg_at_10']:.2f} |" in page


def test_what_front_end_processes_cost_and_would_give():
    page = (ROOT / "docs" / "front-ends.md").read_text()
    text = page.replace("\n  ", " ").replace("\n", " ")
    facts = result("front_ends", AMD)

    def spread(one: dict) -> str:
        return f"{one['median']:.2f} ({one['least']:.2f} to {one['most']:.2f})"

    costs = {(one["load"], one["front_ends"]): one for one in facts["results"]}
    for load in {one["load"] for one in facts["results"] if one["front_ends"] == 0}:
        figures = [costs[load, 0]["engine_us"]]
        figures += [costs[load, n][part] for n in (1, 2) for part in ("front_us", "engine_us")]
        assert f"| {' | '.join(format(one['median'], ',.0f') for one in figures)} |" in page
    alone = [one for one in facts["results"] if one["front_ends"] == 4]
    assert [one for one in alone if f" {one['engine_us']['median']:.0f}" not in text] == []
    for one in facts["of_one_process"]:
        if "front" in one:
            parts = " | ".join(spread(one[part]) for part in ("front", "engine", "both"))
            assert f", N = {one['front_ends']} | {parts} |" in page
    given = facts["calculated"]
    times = f"{given['times']:.1f} times as many as one process"
    assert f"{times} ({given['least']:.1f} to {given['most']:.1f} from round to round)" in text
    assert f"against the event loop alone it is {given['times_of_loop']:.1f} times" in text
    assert f"it does {given['engine_limit']:.0f} times the queries" in text
    full, soon = (given[name] for name in ("engine_full_at", "engine_full_at_as_with_2"))
    assert f"the limit from {full:.0f} front ends on, or from {soon:.0f} if" in text
    for one in facts["profile"]["parts"]:
        assert f"| {one['part']} | {100 * one['share']:.0f} % |" in page
    sent, answered = (facts["faults"]["sigterm"][name] for name in ("submitted", "answered"))
    assert f"of the {sent} requests that the engine had got" in text
    assert f"{answered} were answered and the {sent - answered} were cancelled" in text
    limit = facts["faults"]["limit"]
    assert f"{limit['answered']} were answered and {limit['refused_429']} got a 429" in text
    query, again, probe, probe_again = (
        f"{one['of_hypercorn']['median']:.2f}" for one in facts["other_server"]
    )
    took = f"{query} times the CPU time for a lone query and {probe} times for `/livez`"
    assert f"took {took}; Hypercorn beside itself {again} and {probe_again}" in text
