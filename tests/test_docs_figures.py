"""The measured figures that readers see first, held against the results that they come from."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu-intel-xeon-2-cores"


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_latency_and_throughput_beside_infinity(page):
    peers = json.loads((RESULTS / "bench_peers.json").read_text())
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
