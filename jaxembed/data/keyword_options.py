"""Keyword options of methods: signature, help and checks come from one Struct."""

import inspect
from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast, get_args, get_type_hints

import msgspec

_P = ParamSpec("_P")
_R = TypeVar("_R")


def described(description: str) -> msgspec.Meta:
    """Return an annotation of a field, with the description that `help` shows."""
    return msgspec.Meta(description=description)


class KeywordOptions:
    """A decorator of methods that take fields of a Struct as `**options`.

    The decorated method lists the options in its signature and its docstring. For an unknown option
    it raises TypeError, whose message has the names of all options and the most similar name.
    """

    def __init__(self, kind: type, names: Collection[str]):
        """`names` are fields of the Struct `kind`, each with a default and a description."""
        hints = get_type_hints(kind, include_extras=True)
        by_name = {field.name: field.default for field in msgspec.structs.fields(kind)}
        self.names = frozenset(names)
        self._options: list[inspect.Parameter] = []
        self._descriptions: list[str] = []
        for name in names:
            assert by_name[name] is not msgspec.NODEFAULT, f"`{name}` has no default"
            annotation, meta = get_args(hints[name])
            keyword = inspect.Parameter.KEYWORD_ONLY
            self._options.append(
                inspect.Parameter(name, keyword, default=by_name[name], annotation=annotation)
            )
            self._descriptions.append(f"    {name}: {meta.description}")

    def __call__(self, method: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return a wrapper of the method, which may be a coroutine function. The wrapper has the
        options in its signature and docstring, and checks the names of keyword arguments."""
        signature = inspect.signature(method)
        own_parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters = [*own_parameters, *self._options]
        allowed = {p.name for p in parameters}
        keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

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
        decorated.__signature__ = signature.replace(parameters=parameters)
        summary = f"{inspect.cleandoc(method.__doc__ or '')}\n\nOptions:"
        decorated.__doc__ = "\n".join([summary, *self._descriptions])
        return decorated
