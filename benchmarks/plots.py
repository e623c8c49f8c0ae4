"""Plots the results in benchmarks/results as PNG files, in the folder of each device.

It measures nothing. Each plot shows one committed JSON file, with the device, the versions and the
commit that the file names. Without the file there is no plot.

    libraries.png   tokens a second of libraries, each in its own process, and their cosine
    http.png        latency of queries alone and under bulk, and bulk throughput, beside Infinity
    buckets.png     the share of the speed of its own matrix products that each bucket reaches

    python -m benchmarks.plots [FOLDER ...]
"""

import json
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import report

RESULTS = report.ROOT / "benchmarks" / "results"
OURS, LIGHT, PEER, INK, FAINT = "#1f6feb", "#79b0ff", "#b8bec6", "#24292f", "#6e7781"
SERVERS = {"jaxembed": "jaxembed", "infinity": "Infinity"}  # name in results -> name in plots
DPI = 130
STYLE: dict[Any, Any] = {  # matplotlib's own type of keys is private
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#d0d7de",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "xtick.color": FAINT,
    "ytick.color": INK,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Plot the results in the given folders, or in all."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, help="default: all of benchmarks/results")
    args = parser.parse_args(argv)
    for folder in args.folders or sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        for picture in draw(folder):
            print(f"{picture} {picture.stat().st_size / 1024:.0f} KiB")


def draw(folder: Path) -> list[Path]:
    """Plot the results in a device's folder. Returns the paths of the plots, beside the results."""
    pictures = []
    for name, (benchmark, plot) in PICTURES.items():
        source = folder / f"{benchmark}.json"
        if not source.is_file():
            continue
        result = json.loads(source.read_text())
        with mpl.rc_context(STYLE):
            figure = plot(result)
            _sign(figure, result["made"])
            figure.savefig(folder / name, dpi=DPI)
            plt.close(figure)
        pictures.append(folder / name)
    return pictures


def libraries(result: dict[str, Any]) -> Figure:
    """Plot tokens a second of each library as bars, with the cosine to float32."""
    rows = sorted(result["results"], key=lambda row: row["tokens_per_s"])
    most = max(row["tokens_per_s"] for row in rows)
    figure, axes = plt.subplots(figsize=(7.4, 0.4 * len(rows) + 1.2), layout="constrained")
    for at, row in enumerate(rows):
        rate, ours = row["tokens_per_s"], row["library"].startswith("jaxembed")
        axes.barh(at, rate, color=OURS if ours else PEER, height=0.72)
        note = f"{rate / 1000:.1f}k"
        if "worst_cosine" in row:
            note += f"   cosine {row['cosine']:.5f}, worst {row['worst_cosine']:.5f}"
        axes.text(rate + most * 0.01, at, note, va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row["library"] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda rate, _: f"{rate / 1000:.0f}k")
    axes.set_xlim(0, most * 1.6)
    texts = result["texts"]
    axes.set_xlabel(f"tokens a second of {texts} mixed English texts, tokenizing included")
    axes.set_title(f"{result['model']} in process: speed, and cosine to float32")
    return figure


def http(result: dict[str, Any]) -> Figure:
    """Plot latencies on a logarithmic axis, and bulk throughput, of both servers."""
    rows = {(row["scenario"], row["load"], row["server"]): row for row in result["summary"]}
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8.6, 2.9), width_ratios=[1.7, 1], layout="constrained"
    )
    shown = [
        ("query under bulk, p99", "under bulk", "p99_ms"),
        ("query under bulk, p50", "under bulk", "p50_ms"),
        ("lone query, p50", "lone", "p50_ms"),
    ]
    pairs = {
        title: {server: rows[scenario, "query", server][figure_] for server in SERVERS}
        for title, scenario, figure_ in shown
    }
    _pairs(left, pairs, lambda ms: f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms", 1.25)
    left.set_xscale("log")
    left.set_xlim(1, 30 * max(max(pair.values()) for pair in pairs.values()))
    left.set_xlabel("milliseconds, logarithmic (less is better)")
    left.set_title(f"{result['model']} over HTTP: latency")
    rates = {server: rows["bulk", "bulk", server]["texts_per_s"] for server in SERVERS}
    _pairs(right, {"bulk": rates}, lambda rate: f"{rate:,.0f}", 1.03)
    right.set_yticks([])
    right.set_xlim(0, max(rates.values()) * 1.55)
    right.set_xlabel("texts a second (more is better)")
    right.set_title(f"Requests of {result['bulk']} texts")
    return figure


def buckets(result: dict[str, Any]) -> Figure:
    """Plot each bucket's share of its ceiling as bars; the shade changes with the row length."""
    rows = result["buckets"]
    lengths = list(dict.fromkeys(row["bucket"].split("x")[1] for row in rows))
    figure, axes = plt.subplots(figsize=(7.4, 3.0), layout="constrained")
    for at, row in enumerate(rows):
        shade = (OURS, LIGHT)[lengths.index(row["bucket"].split("x")[1]) % 2]
        share = 100 * row["share"]
        axes.bar(at, share, color=shade, width=0.75)
        rate = f"{row['tflop_per_s']:.2f}"
        axes.text(at, share + 1.5, rate, ha="center", fontsize=7, color=FAINT)
    axes.set_xticks(range(len(rows)), [row["bucket"] for row in rows], rotation=60, fontsize=8)
    axes.set_ylim(0, 105)
    axes.set_ylabel("% of its matrix products alone")
    axes.set_xlabel("bucket, rows x tokens; over each bar its TFLOP/s")
    axes.set_title(f"{result['model'].split('/')[-1]}, {result['dtype']}: share of the ceiling")
    return figure


def _pairs(
    axes: Axes,
    pairs: dict[str, dict[str, float]],
    says: Callable[[float], str],
    space: float,  # position of a bar's text relative to its end, as a factor
) -> None:
    """Draw a bar of our server and one of the peer for each title, with a gap between titles."""
    for group, pair in enumerate(pairs.values()):
        for (server, name), offset in zip(SERVERS.items(), (0.2, -0.2), strict=True):
            value, color = pair[server], OURS if server == "jaxembed" else PEER
            axes.barh(group + offset, value, color=color, height=0.36)
            note = f"{says(value)}  {name}"
            axes.text(value * space, group + offset, note, va="center", fontsize=8)
    axes.set_yticks(range(len(pairs)), list(pairs))
    axes.tick_params(axis="y", length=0)


def _sign(figure: Figure, info: dict[str, Any]) -> None:
    """Write the device, the versions and the commit of the results under a plot."""
    jax, ours = info["versions"]["jax"], info["versions"]["jaxembed"]
    text = f"{info['device']}, {info['cores']} cores; jaxembed {ours} ({info['commit']}), jax {jax}"
    figure.supxlabel(f"{text}, {info['date']}", x=0.01, ha="left", fontsize=7, color=FAINT)


PICTURES: dict[str, tuple[str, Callable[[dict[str, Any]], Figure]]] = {
    "libraries.png": ("bench_libraries", libraries),
    "http.png": ("bench_peers", http),
    "buckets.png": ("bench_model", buckets),
}


if __name__ == "__main__":
    main()
