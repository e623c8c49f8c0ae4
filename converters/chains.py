"""Reads models that are a chain of modules, or several behind a Router, as most are."""

from collections.abc import Callable
from pathlib import Path

from converters import heads
from converters.features import static, static_terms
from converters.outline import Options, Outline, Reader, check_comparable
from converters.towers import tower_outline
from jaxembed.errors import CheckpointError, UnsupportedModel


def _outlines(source: Path, options: Options) -> tuple[dict[str, Outline], str | None]:
    router = heads.router_of(source)
    if router is None:
        return {"": _outline(source, options, "")}, ""
    if options.adapters:
        raise UnsupportedModel(
            f"adapter {next(iter(options.adapters))}: {source} has the routes "
            f"{', '.join(router.routes)}, and a model with several routes takes no adapter; leave "
            "--adapter out"
        )
    if options.dense_path is not None:
        raise CheckpointError(
            f"dense path {options.dense_path!r} takes the place of the only Dense module, and "
            f"{source} has the routes {', '.join(router.routes)}; leave it out"
        )
    routes = {route: _outline(source, options, route) for route in router.routes}
    if own := [route for route, model in routes.items() if model.built_in]:
        raise UnsupportedModel(
            f"{source}: its route {own[0]} has adapters, and a model with several routes takes none"
        )
    check_comparable(source, routes)
    return routes, router.default


def _outline(source: Path, options: Options, route: str) -> Outline:
    """Describe one route of a model, or a model without routes."""
    if options.splade:
        _refuse_without_terms(source, route)
    static_outline = _static_outline(source, route)
    if static_outline is None:
        return tower_outline(source, options, route)
    if options.adapters:
        raise UnsupportedModel(
            f"adapter {next(iter(options.adapters))}: {source} holds static embeddings, which take "
            "no adapter; leave --adapter out"
        )
    return static_outline(source, options, route)


def _static_outline(source: Path, route: str) -> Callable[[Path, Options, str], Outline] | None:
    """What describes a static model, or such a route; None of one with a tower."""
    if static_terms.holds_static_terms(source, route):
        return static_terms.static_outline
    return static.static_outline if static.holds_static(source, route) else None


def _refuse_without_terms(source: Path, route: str) -> None:
    """Raise UnsupportedModel for what gives no weights of terms: modules that do something else,
    or a class that is no masked language model."""
    if heads.modules_of(source, route) is not None:
        known = heads.weighs_terms(source, route) or static_terms.holds_static_terms(source, route)
        if not known:
            raise UnsupportedModel(
                f"--pooling splade: modules.json of {source} says otherwise; leave the flag out"
            )
        return
    classes = heads.read_optional_json(source / "config.json").get("architectures")
    if not any(str(name).endswith("ForMaskedLM") for name in classes or ()):
        raise UnsupportedModel(
            f"--pooling splade is for masked language models, and config.json of {source} names "
            f"{', '.join(map(str, classes or ())) or 'no class'}; known: classes ...ForMaskedLM"
        )


def _folders_read(source: Path) -> list[str]:
    routes = [route for route in heads.routes_of(source) if _static_outline(source, route)]
    return [heads.tower_folder(source, route) for route in routes]


READER = Reader(lambda source: True, _outlines, folders_read=_folders_read)
