"""Keyword options of methods: the signature, the help and the check come from one dataclass."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, field, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def described(default: Any, description: str) -> Any:
    """Return a dataclass field with a default, and the description that `help` shows."""
    return field(default=default, metadata={"description": description})


class KeywordOptions:
    """Fields of a dataclass that methods take as `**options`.

    A method that it decorates lists the options in its signature and its docstring, and raises
    TypeError for another one, with the names of all and the one that is most like it.
    """

    def __init__(self, kind: type, names: Collection[str]):
        """`names` are those of the fields of the dataclass `kind`, all of which have a default and
        a description."""
        by_name: dict[str, Field] = {one.name: one for one in fields(kind)}
        self.names = frozenset(names)
        self._fields = [by_name[name] for name in names]

    def __call__(self, method: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorate a method, which may be a coroutine function."""
        signature = inspect.signature(method)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        options = [self._parameter(one) for one in self._fields]
        allowed = {one.name for one in (*own, *options)}

        def check(given: dict[str, Any]) -> None:
            if not given.keys() <= allowed:
                keywords = [one.name for one in (*own, *options) if one.kind is one.KEYWORD_ONLY]
                raise TypeError(_refusal(method.__name__, given, allowed, keywords))

        made: Any = _checked(method, check)
        made.__signature__ = signature.replace(parameters=[*own, *options])
        made.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n\nOptions:\n{self._lines()}"
        return made

    def _parameter(self, one: Field) -> inspect.Parameter:
        assert one.default is not MISSING, f"{one.name} has no default"
        return inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type
        )

    def _lines(self) -> str:
        return "\n".join(f"    {one.name}: {one.metadata['description']}" for one in self._fields)


def _checked(method: Any, check: Callable[[dict[str, Any]], None]) -> Any:
    """A function that calls `check` with the keyword arguments, and then the method."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        check(kwargs)
        return method(*args, **kwargs)

    @wraps(method)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        check(kwargs)
        return await method(*args, **kwargs)

    return call_async if inspect.iscoroutinefunction(method) else call


def _refusal(
    name: str, given: dict[str, Any], allowed: Collection[str], keywords: Collection[str]
) -> str:
    """The message for options that a method does not have."""
    unknown = next(one for one in given if one not in allowed)
    similar = get_close_matches(unknown, allowed, 1)
    hint = f"; did you mean `{similar[0]}`?" if similar else "."
    return f"{name}() has no option `{unknown}`{hint} Its options are: {', '.join(keywords)}"
