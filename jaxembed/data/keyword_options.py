"""Keyword options of methods: the signature, the help and the check come from one dataclass."""

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
        lacking = [one.name for one in self._fields if one.default is MISSING]
        assert not lacking, f"{lacking} have no default"

    def __call__(self, method: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorate a method, which may be a coroutine function."""
        signature = inspect.signature(method)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type
            )
            for one in self._fields
        ]
        allowed = {one.name for one in (*own, *options)}
        keywords = [one.name for one in (*own, *options) if one.kind is one.KEYWORD_ONLY]

        def check(given: dict[str, Any]) -> None:
            unknown = next((one for one in given if one not in allowed), None)
            if unknown is not None:
                similar = get_close_matches(unknown, allowed, 1)
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

        made: Any = call_async if inspect.iscoroutinefunction(method) else call
        made.__signature__ = signature.replace(parameters=[*own, *options])
        lines = [f"    {one.name}: {one.metadata['description']}" for one in self._fields]
        made.__doc__ = "\n".join([f"{inspect.cleandoc(method.__doc__ or '')}\n\nOptions:", *lines])
        return made
