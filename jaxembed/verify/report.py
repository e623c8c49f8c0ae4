"""The report of a verification for a terminal, and its row in the table of verified models."""

import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np

from jaxembed import __version__
from jaxembed.verify.agreement import NEIGHBOURS, Agreement, locate
from jaxembed.verify.texts import InputGroup
from jaxembed.verify.verification import Verification

HEADER = (
    "| model | of | task | architecture | outputs | jaxembed, jax | compared with | device "
    "| float32 | served |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
MOST_SHOWN_TEXT = 50  # characters of an input
MOST_SHOWN_IDS = 12

MEASURE = {
    "embed": "cosine distance",
    "rerank": "difference of logits, relative to the largest",
    "classify": "difference of logits, relative to the largest",
}
RANK = {
    "embed": f"nearest {NEIGHBOURS} shared",
    "rerank": "in the same order",
    "classify": "same best label",
}


def report_lines(found: Verification) -> Iterator[str]:
    """The report, line by line."""
    spec, task = found.spec, found.spec.task
    yield f"{found.name} ({_identity(found)}): {spec.architecture}, {task}, {_outputs(found)}"
    normalized = ", normalised" if spec.head.normalize else ""
    prompts = ", ".join(sorted(spec.prompts)) or "none"
    yield f"pooling {' + '.join(spec.head.pooling)}{normalized}; prompts: {prompts}"
    yield (
        f"compared with sentence-transformers {found.reference.version} in float32 on the CPU; "
        f"inputs cut at {found.limit} tokens"
    )
    yield from ("", *_token_lines(found))
    yield f"\n{MEASURE[task]}:"
    yield f"{'':10}{'inputs':>8}{'median':>10}{'worst':>10}{'bound':>10}  {RANK[task]}"
    for one in found.agreements:
        yield from _agreement_lines(one, found)
    verdict = "agrees" if found.agrees else "DISAGREES"
    yield f"\n{found.name} {verdict} ({found.seconds:.0f} s)"


def markdown_row(found: Verification) -> str:
    """The row for HEADER."""
    spec, exact, served = found.spec, found.agreements[0], found.agreements[-1]
    cells = [
        Path(found.name).name if Path(found.name).exists() else found.name,
        _identity(found),
        spec.task,
        spec.architecture,
        _outputs(found),
        f"{__version__}, {metadata.version('jax')}",
        f"sentence-transformers {found.reference.version}",
        f"{found.device}, {platform.machine()}",
        f"{exact.distances.max():.1e}",
        f"{served.dtype} {served.distances.max():.1e}",
    ]
    return f"| {' | '.join(cells)} |"


def _identity(found: Verification) -> str:
    spec = found.spec
    return (
        f"revision {spec.revision[:12]}" if spec.revision else f"content {spec.content_hash[:12]}"
    )


def _outputs(found: Verification) -> str:
    spec = found.spec
    unit = "dimension" if spec.task == "embed" else "logit"
    return f"{spec.dim} {unit}{'s' * (spec.dim > 1)}"


def _token_lines(found: Verification) -> Iterator[str]:
    count = sum(len(group.inputs) for group in found.groups)
    if not found.different:
        yield f"tokens: the same for all {count} inputs"
        return
    group, number = found.different[0]
    yield f"tokens: DIFFERENT for {len(found.different)} of {count} inputs, first for"
    yield f"  {_place(found.groups[group], number)}"
    for who, results in (("jaxembed", found.got), ("reference", found.reference.results)):
        ids = results[group].ids[number]
        more = " ..." if len(ids) > MOST_SHOWN_IDS else ""
        shown = " ".join(map(str, ids[:MOST_SHOWN_IDS])) + more
        yield f"  {who + ':':11} {len(ids)} tokens: {shown}"


def _agreement_lines(one: Agreement, found: Verification) -> Iterator[str]:
    distances = one.distances
    figures = (np.median(distances), distances[one.worst], one.bound)
    cells = "".join(f"{figure:>10.1e}" for figure in figures)
    yield f"{one.dtype:10}{len(distances):>8}{cells}  {one.rank:.3f}"
    group, number = locate(one.worst, found.groups)
    yield f"{'':10}worst: {_place(found.groups[group], number)}"
    if len(one.lengths):
        yield f"{'':10}lengths of vectors within {one.lengths.max():.1e}"


def _place(group: InputGroup, number: int) -> str:
    one = group.inputs[number]
    text = one if isinstance(one, str) else one[1]
    shown = repr(text) if len(text) <= MOST_SHOWN_TEXT else f"{text[:MOST_SHOWN_TEXT]!r} ..."
    return f"{group.name}, {number + 1} of {len(group.inputs)}: {shown}"
