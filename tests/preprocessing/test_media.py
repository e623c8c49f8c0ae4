"""Data URIs and base64: what they hold, and what is refused."""

import base64
import binascii
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxembed.errors import EmptyInput, InvalidInput
from jaxembed.preprocessing.images.media import excerpt, is_data_uri, read_base64, read_data_uri

LIMIT = 1000  # bytes
PIXEL = b"GIF89a\x01\x00\x01\x00"
DIGITS = base64.b64encode(PIXEL).decode()


def test_the_bytes_of_a_data_uri():
    for kind in ("image/gif", "", "text/html", "a/b;charset=utf-8;name=a.gif"):  # any type
        assert read_data_uri(f"data:{kind};base64,{DIGITS}", LIMIT) == PIXEL
    for head in ("DATA:image/gif;BASE64", "dAtA:;base64", "data:image/gif; base64"):
        assert read_data_uri(f"{head},{DIGITS}", LIMIT) == PIXEL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:image/gif;base64", "is not a data URI; expected data:"),
        ("data:", "is not a data URI"),
        ("", "is not a data URI"),
        (" data:image/gif;base64,QQ==", "is not a data URI"),
        ("https://example.com/a,b", "is not a data URI"),
        ("data:image/svg+xml,%3Csvg/%3E", "percent-encoded data URI; expected base64"),
        ("data:,QQ==", "percent-encoded data URI"),
        ("data:image/gif;base64;charset=utf-8,QQ==", "percent-encoded data URI"),
        ("data:image/gif;base64,QQ%3D%3D", "'%' at character 2"),
    ],
)
def test_what_is_no_data_uri_of_base64_is_refused(text, message):
    with pytest.raises(InvalidInput, match=message):
        read_data_uri(text, LIMIT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("QQ", "multiple of 4 characters"),
        ("====", "multiple of 4 characters"),
        ("QQ==QQ==", "only at the end"),
        ("=QQQ", "only at the end"),
        ("QQ Q", "' ' at character 2"),
        ("Q-_Q", "'-' at character 1"),  # the alphabet of URLs
        ("QQ==#", "'#' at character 4"),
        ("QQéQ", "'é' at character 2"),
        ("QQ\udc80Q", r"'\\udc80' at character 2"),
        ("QQ\x00Q", r"'\\x00' at character 2"),
    ],
)
def test_what_is_not_base64_is_refused(text, message):
    with pytest.raises(InvalidInput, match=message):
        read_base64(text, LIMIT)


@pytest.mark.parametrize("text", ["", "\n", "\r\n\r\n"])
def test_nothing_is_refused_as_empty(text):
    with pytest.raises(EmptyInput):
        read_base64(text, LIMIT)
    with pytest.raises(EmptyInput):
        read_data_uri(f"data:image/gif;base64,{text}", LIMIT)


@pytest.mark.parametrize("most", range(1, 10))
def test_the_limit_is_exact(most):
    exact = base64.encodebytes(b"x" * most).decode() + "\n" * 9
    assert read_base64(exact, most) == b"x" * most
    over = base64.encodebytes(b"x" * (most + 1)).decode()
    with pytest.raises(InvalidInput, match=f"holds {most + 1} bytes; the limit is {most}$"):
        read_base64(over, most)


def test_what_is_too_large_is_not_decoded(monkeypatch):
    def decode(*_, **__):
        raise AssertionError("decoded")

    monkeypatch.setattr(base64, "b64decode", decode)
    with pytest.raises(InvalidInput, match="holds 1500 bytes"):
        read_data_uri("data:image/gif;base64," + "A" * 2000, LIMIT)


def test_a_message_quotes_no_whole_payload():
    for text in ("A" * 1001, "data:image/gif," + "A" * 1001, "x" * 1001):
        with pytest.raises(InvalidInput) as caught:
            read_data_uri(text, LIMIT)
        assert len(str(caught.value)) < 300
    assert excerpt("short") == "'short'"
    assert excerpt("a" * 61) == f"'{'a' * 60}'..."


@given(st.binary(min_size=1, max_size=200), st.integers(1, 80), st.sampled_from(["\n", "\r\n"]))
def test_what_was_encoded_comes_back(content, width, line_break):
    digits = base64.b64encode(content).decode()
    text = line_break.join(re.findall(f".{{1,{width}}}", digits))
    assert read_base64(text, len(content)) == content
    assert read_data_uri(f"data:a/b;base64,{text}", len(content)) == content


@given(st.one_of(st.text(), st.text("QAz09+/=\r\n-_ ,;:", max_size=40)), st.integers(1, 30))
def test_any_text_gives_its_bytes_or_an_error_of_ours(text, most):
    """The bytes are those of the standard library's strict reading, never more than the limit."""
    try:
        content = read_base64(text, most)
    except InvalidInput:
        return
    stripped = text.replace("\r", "").replace("\n", "")
    assert content == binascii.a2b_base64(stripped, strict_mode=True)
    assert 0 < len(content) <= most


@given(st.text(st.sampled_from("dataDATA:;,base64/=Q \n%"), max_size=40))
def test_any_text_as_a_data_uri_gives_bytes_or_an_error_of_ours(text):
    for whole in (text, f"data:{text}", f"data:;base64,{text}"):
        try:
            content = read_data_uri(whole, LIMIT)
        except InvalidInput:
            continue
        assert is_data_uri(whole)
        assert content == read_base64(whole.partition(",")[2], LIMIT)
