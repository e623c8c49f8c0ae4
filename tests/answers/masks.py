"""What of an answer may differ between two recordings: times, dates, ids, folders and ports."""

import re
from collections.abc import Mapping
from typing import Any

import orjson

# Headers whose value is a time if it fits the pattern, and the mark that stands for it.
HEADERS = {
    "date": (r".*", "<date>"),
    "x-compute-time": (r"\d+", "<ms>"),
    "x-total-time": (r"\d+", "<ms>"),
    "x-tokenization-time": (r"\d+", "<ms>"),
    "x-queue-time": (r"\d+", "<ms>"),
    "x-inference-time": (r"\d+", "<ms>"),
    "x-ratelimit-reset-requests": (r"[\d.ms]+", "<duration>"),
    "x-ratelimit-reset-tokens": (r"[\d.ms]+", "<duration>"),
    "retry-after": (r"\d\d+", "<seconds>"),  # of a quota; others are always the same
}
# Patterns in headers and in bodies that are texts, and the marks that stand for them.
TEXTS = (
    (re.compile(r"\b[0-9a-f]{32}\b"), "<request id>"),
    (re.compile(r'"created":[1-9]\d{9}\b'), '"created":<seconds>'),
    (re.compile(r"try again in \d+ s\b"), "try again in <seconds>"),
    (re.compile(r'"unix":[\d.]+'), '"unix":<seconds>'),
    (re.compile(r'"time":"[\d:.T+-]+"'), '"time":"<date>"'),  # of the audit log
    (re.compile(r'"ms":[\d.]+'), '"ms":<ms>'),
    (re.compile(r'"front_ends":\d+'), '"front_ends":<count>'),
)
LENGTH = "<length of the body>"  # for a Content-Length that says so, and for one without a body
DOCTOR = "verbose"  # in a query: what was measured is in the answer, of which only fields are kept
LABEL = re.compile(r"(\w+)=")
METRICS = "/metrics"  # the path of which only names, types and labels are kept


def masked(text: str, places: Mapping[str, str]) -> str:
    """A text with marks; `places` are those for texts of this recording alone, such as folders."""
    for place, mark in places.items():
        text = text.replace(place, mark)
    for pattern, mark in TEXTS:
        text = pattern.sub(mark, text)
    return text


def masked_header(name: str, value: str, places: Mapping[str, str], size: int | None) -> str:
    """The value of a header with marks. `size` is that of the body, None if there can be none."""
    name = name.lower()
    if name == "content-length" and (size is None or value == str(size)):
        return LENGTH
    if name == "allow":  # a set of Python, whose order is another one in each process
        return ", ".join(sorted(value.split(", ")))
    pattern, mark = HEADERS.get(name, (r"", ""))
    return mark if mark and re.fullmatch(pattern, value) else masked(value, places)


def masked_body(target: str, body: str, places: Mapping[str, str]) -> str:
    """A body that is a text with marks; `target` is the path and the query of its request."""
    path, _, query = target.partition("?")
    if path == METRICS and body.startswith("#"):
        return "\n".join(_series(body))
    if DOCTOR in query and '"doctor":' in body:
        whole = orjson.loads(body)
        whole["jaxembed"]["doctor"] = _fields(whole["jaxembed"]["doctor"])
        body = orjson.dumps(whole).decode()
    return masked(body, places)


def _series(exposition: str) -> list[str]:
    """The names, types and labels of all metrics, without their values."""
    found = {line for line in exposition.splitlines() if line.startswith("# TYPE")}
    for line in exposition.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            found.add(" ".join([name, *LABEL.findall(labels)]))
    return sorted(found)


def _fields(value: Any) -> Any:
    """The names of fields, without their values; lists are as long as what was measured."""
    return {key: _fields(one) for key, one in value.items()} if isinstance(value, dict) else None
