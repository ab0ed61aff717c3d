"""Recipes: options of a command line in a TOML file, with the metrics that were published for them.

A key is the name of an option without its leading dashes, and the value is the option's value;
`true` and `false` turn flags on and off. The table `[published]` has published metrics, by the
names under which results are printed. The recipes of this repository are in `examples/recipes`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["RECIPES", "add_recipe", "with_recipe"]

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
PUBLISHED = "published"


def add_recipe(group: argparse._ArgumentGroup) -> None:
    """Adds the option `--recipe`."""
    group.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="take options from this TOML file, and print the published metrics in it beside the "
        "results; options of the command line override it. These are found by their names: "
        f"{', '.join(_known())}",
    )


def with_recipe(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, metrics: Collection[str]
) -> tuple[list[str], dict[str, float]]:
    """Reads the recipe that the arguments name, if any.

    A file that cannot be read, or holds anything but options and metrics, ends the program.

    Args:
        parser: the parser, with all options.
        arguments: the arguments; None is the command line.
        metrics: the names that `[published]` may have.

    Returns:
        The recipe's arguments, followed by the given arguments, which override them; and the
        published metrics by name.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    first = argparse.ArgumentParser(prog=parser.prog, add_help=False)
    first.add_argument("--recipe")
    name = first.parse_known_args(given)[0].recipe
    if name is None:
        return given, {}
    try:
        recipe = _read(name)
        published = recipe.pop(PUBLISHED, {})
        _check_published(published, metrics)
        options = _as_arguments(recipe, vars(parser.parse_args([])))
    except (OSError, ValueError) as error:
        parser.error(f"--recipe {name}: {error}")
    return [*options, *given], published


def _known() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def _read(name: str) -> dict[str, Any]:
    path = RECIPES / f"{name}.toml" if name in _known() else Path(name)
    if not path.exists():
        raise ValueError(f"expected a file, or one of {', '.join(_known())}")
    with path.open("rb") as file:
        recipe: dict[str, Any] = tomllib.load(file)
    return recipe


def _check_published(published: Any, metrics: Collection[str]) -> None:
    if not isinstance(published, dict):
        raise ValueError(f"{PUBLISHED}: expected a table of metrics, got {published!r}")
    for name, value in published.items():
        if name not in metrics:
            raise ValueError(f"[{PUBLISHED}]: expected any of {', '.join(metrics)}; got {name}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"[{PUBLISHED}] {name}: expected a number, got {value!r}")


def _as_arguments(recipe: dict[str, Any], options: Collection[str]) -> list[str]:
    """Returns the options of a recipe as command-line arguments."""
    arguments = []
    for key, value in recipe.items():
        name = key.replace("-", "_")
        if name not in options or "_" in key or key == "recipe":
            raise ValueError(f"expected names of options, without their leading dashes; got {key}")
        if isinstance(value, bool):
            arguments.append(f"--{key}" if value else f"--no-{key}")
        elif isinstance(value, list):
            arguments += [f"--{key}", *map(str, value)]
        else:
            arguments.append(f"--{key}={value}")
    return arguments
