"""Reports a verification: lines for a terminal, and a row for the table of verified models."""

import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np

from jaxembed import __version__
from jaxembed.errors import counted
from jaxembed.tools.verify.texts import InputGroup
from jaxembed.tools.verify.verification import NEIGHBOURS, Verification, locate

HEADER = (
    "| model | of | task | architecture | outputs | jaxembed, jax | compared with | device "
    "| float32 | served |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
MAX_SHOWN_TEXT = 50  # characters of an input
MAX_SHOWN_IDS = 12  # token ids of an input

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


def report_lines(result: Verification) -> Iterator[str]:
    """Yield the lines of the report for a terminal."""
    spec, task = result.spec, result.spec.task
    yield f"{result.name} ({_identity(result)}): {spec.architecture}, {task}, {_outputs(result)}"
    normalized = ", normalised" if spec.head.normalize else ""
    prompts = ", ".join(sorted(spec.prompts)) or "none"
    yield f"pooling {' + '.join(spec.pooling)}{normalized}; prompts: {prompts}"
    yield (
        f"compared with sentence-transformers {result.reference.version} in float32 on the CPU; "
        f"inputs truncated at {result.limit} tokens"
    )
    yield ""
    count = sum(len(group.inputs) for group in result.groups)
    if result.different:
        group, number = result.different[0]
        yield (
            f"tokens: DIFFERENT for {len(result.different)} of {counted(count, 'input')}, first for"
        )
        yield f"  {_describe_input(result.groups[group], number)}"
        for who, results in (("jaxembed", result.got), ("reference", result.reference.results)):
            ids = results[group].ids[number]
            more = " ..." if len(ids) > MAX_SHOWN_IDS else ""
            excerpt = " ".join(map(str, ids[:MAX_SHOWN_IDS])) + more
            yield f"  {who + ':':11} {counted(len(ids), 'token')}: {excerpt}"
    else:
        yield f"tokens: the same for {counted(count, 'input')}"
    yield f"\n{MEASURE[task]}:"
    yield f"{'':10}{'inputs':>8}{'median':>10}{'worst':>10}{'bound':>10}  {RANK[task]}"
    for agreement in result.agreements:
        distances = agreement.distances
        figures = (np.median(distances), distances[agreement.worst], agreement.bound)
        cells = "".join(f"{figure:>10.1e}" for figure in figures)
        yield f"{agreement.dtype:10}{len(distances):>8}{cells}  {agreement.rank:.3f}"
        group, number = locate(agreement.worst, result.groups)
        yield f"{'':10}worst: {_describe_input(result.groups[group], number)}"
        if len(agreement.lengths):
            yield f"{'':10}lengths of vectors within {agreement.lengths.max():.1e}"
    outcome = "agrees" if result.agrees else "DISAGREES"
    yield f"\n{result.name} {outcome} ({result.seconds:.0f} s)"


def markdown_row(result: Verification) -> str:
    """Return the verification as a row of the Markdown table that HEADER begins."""
    spec, exact, served = result.spec, result.agreements[0], result.agreements[-1]
    cells = [
        Path(result.name).name if Path(result.name).exists() else result.name,
        _identity(result),
        spec.task,
        spec.architecture,
        _outputs(result),
        f"{__version__}, {metadata.version('jax')}",
        f"sentence-transformers {result.reference.version}",
        f"{result.device}, {platform.machine()}",
        f"{exact.distances.max():.1e}",
        f"{served.dtype} {served.distances.max():.1e}",
    ]
    return f"| {' | '.join(cells)} |"


def _identity(result: Verification) -> str:
    revision, content = result.spec.revision, result.spec.content_hash
    return f"revision {revision[:12]}" if revision else f"content {content[:12]}"


def _outputs(result: Verification) -> str:
    spec = result.spec
    unit = "dimension" if spec.task == "embed" else "logit"
    return counted(spec.dim, unit)


def _describe_input(group: InputGroup, number: int) -> str:
    """Describe an input of a group: the group, the number, and the start of the text."""
    item = group.inputs[number]
    text = item if isinstance(item, str) else item[1]
    excerpt = repr(text) if len(text) <= MAX_SHOWN_TEXT else f"{text[:MAX_SHOWN_TEXT]!r} ..."
    return f"{group.name}, {number + 1} of {len(group.inputs)}: {excerpt}"
