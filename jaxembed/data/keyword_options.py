"""Keyword options of methods: signature, help and checks come from one dataclass."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, field, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

_P = ParamSpec("_P")
_R = TypeVar("_R")


def described(default: Any, description: str) -> Any:
    """Return a dataclass field with a default, and the description that `help` shows."""
    return field(default=default, metadata={"description": description})


class KeywordOptions:
    """A decorator of methods that take fields of a dataclass as `**options`.

    The decorated method lists the options in its signature and its docstring. For an unknown option
    it raises TypeError, whose message has the names of all options and the most similar name.
    """

    def __init__(self, kind: type, names: Collection[str]):
        """`names` are fields of the dataclass `kind`, each with a default and a description."""
        by_name: dict[str, Field] = {option.name: option for option in fields(kind)}
        self.names = frozenset(names)
        self._fields = [by_name[name] for name in names]
        without_default = [option.name for option in self._fields if option.default is MISSING]
        assert not without_default, f"{without_default} have no default"

    def __call__(self, method: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return a wrapper of the method, which may be a coroutine function. The wrapper has the
        options in its signature and docstring, and checks the names of keyword arguments."""
        signature = inspect.signature(method)
        own_parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=option.default,
                annotation=option.type,
            )
            for option in self._fields
        ]
        allowed = {p.name for p in (*own_parameters, *options)}
        keywords = [p.name for p in (*own_parameters, *options) if p.kind is p.KEYWORD_ONLY]

        def check(kwargs: dict[str, Any]) -> None:
            unknown = next((name for name in kwargs if name not in allowed), None)
            if unknown is not None:
                similar = get_close_matches(unknown, allowed, n=1)
                hint = f"; did you mean `{similar[0]}`?" if similar else "."
                raise TypeError(
                    f"{method.__name__}() has no option `{unknown}`{hint} "
                    f"Its options are: {', '.join(keywords)}"
                )

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            check(kwargs)
            return method(*args, **kwargs)

        @wraps(method)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            check(kwargs)
            return await cast(Any, method(*args, **kwargs))

        decorated: Any = call_async if inspect.iscoroutinefunction(method) else call
        decorated.__signature__ = signature.replace(parameters=[*own_parameters, *options])
        lines = [f"    {option.name}: {option.metadata['description']}" for option in self._fields]
        summary = f"{inspect.cleandoc(method.__doc__ or '')}\n\nOptions:"
        decorated.__doc__ = "\n".join([summary, *lines])
        return decorated
