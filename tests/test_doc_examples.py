"""The examples of the documents: each command line of jaxembed is one that the command line takes,
and each request by curl is one that some model answers."""

import json
import re
import shlex
from collections.abc import Iterator

import fake_embedder
import msgspec
import pytest
from click import Context, Group
from fake_embedder import (
    CLASSIFIER,
    GENERATOR,
    M3,
    MEAN,
    RERANKER,
    TOKEN_CLASSIFIER,
    FakeEmbedder,
)
from test_docs import PAGES
from test_server_openai import ask

from jaxembed.cli import cli

SHELL = re.compile(r"^ *```(?:sh|bash|console)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
HERE_DOCUMENT = re.compile(r"<<-?\s*'?(\w+)'?\n.*?^\1$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(?:^|(?<=[ \t]))#[^\n]*", re.MULTILINE)
PUNCTUATION = "();<>|&\n"
SERVER = re.compile(r"^(?:http://)?(?:localhost|127\.0\.0\.1|\$\w+)(?::\d+)?(/[\w/-]+)$")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command in the shell blocks of a page."""
    for block in SHELL.findall(text):
        plain = COMMENT.sub("", HERE_DOCUMENT.sub("", block)).replace("\\\n", " ")
        lexer = shlex.shlex(plain, posix=True, punctuation_chars=PUNCTUATION)
        lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
        words: list[str] = []
        for word in [*lexer, "\n"]:
            if set(word) <= set(PUNCTUATION):
                yield words
                words = []
            else:
                words.append(word)


def examples(first: str) -> list[tuple[str, list[str]]]:
    """The name of the page and the arguments of each command of this name."""
    found = []
    for page in PAGES:
        for words in commands(page.read_text()):
            while words and re.match(r"\w+=", words[0]):
                del words[0]
            if words and words[0].rpartition("/")[2] == first:
                found.append((page.name, words[1:]))
    return found


@pytest.mark.parametrize(("page", "words"), examples("jaxembed"))
def test_a_command_of_a_page_has_flags_and_values_that_jaxembed_takes(page, words):
    if words == ["--version"]:
        return
    # a command keeps the names of its help option, which it has from the context above it
    context = Context(cli, info_name="jaxembed", **cli.context_settings)
    name, command, rest = cli.resolve_command(context, list(words))
    while isinstance(command, Group):
        context = Context(command, parent=context)
        name, command, rest = command.resolve_command(context, rest)
    with Context(command, parent=context, info_name=name) as context:
        values, _, _ = command.make_parser(context).parse_args(rest)
        for parameter in command.params:
            if isinstance(value := values.get(parameter.name), str):
                parameter.type_cast_value(context, value)


def requests() -> list[tuple[str, str, dict]]:
    """The page, the route and the body of each request with a body of JSON. Models are left out of
    the body: their names are those of the reader's server."""
    found = []
    for page, words in examples("curl"):
        (flag,) = {"-d", "--data", "--json"} & set(words) or ("",)
        text = words[words.index(flag) + 1] if flag else ""
        if text.startswith("{"):
            (route,) = [match[1] for word in words if (match := SERVER.match(word))]
            body = json.loads(text)
            body.pop("model", None)
            found.append((page, route, body))
    return found


@pytest.mark.parametrize(("page", "route", "body"), requests())
def test_a_request_of_a_page_is_answered(page, route, body, monkeypatch):
    monkeypatch.setattr(fake_embedder, "MAX_TOKENS", 512)
    monkeypatch.setattr(fake_embedder, "DIM", 1024)
    answers = {}
    for spec in (MEAN, M3, RERANKER, GENERATOR, CLASSIFIER, TOKEN_CLASSIFIER):
        large = msgspec.structs.replace(spec, max_input_tokens=512, hidden_size=1024)
        response, answer = ask(body, path=route, embedder=FakeEmbedder(spec=large))
        answers[response.status_code] = answer
    if page == "errors.md":  # which shows a refusal
        assert answers.keys() <= {400, 413, 422}
    else:
        assert 200 in answers, answers
