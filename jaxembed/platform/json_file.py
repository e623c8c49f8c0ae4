"""Reads JSON files that users wrote, with error messages for them."""

import json
from pathlib import Path
from typing import Any

from jaxembed.errors import ConfigError

MOST_SHOWN = 60  # characters of a value in a message


def read_user_json(path: Path, name: str, expectation: str) -> Any:
    """Read a JSON file and return its value.

    Raises ConfigError if it cannot be read or is not JSON. The message calls the file `name` and
    ends with `expectation`, a phrase that says what the file should hold.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}; wanted {expectation}") from error
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        place = f"no JSON from line {error.lineno}, column {error.colno} on"
        problem = place if data.strip() else "empty"
    except UnicodeDecodeError:
        problem = "no text in UTF-8"
    except (RecursionError, ValueError):  # Python reads integers of at most 4,300 digits
        problem = "nested too deeply, or holds a number of thousands of digits"
    raise ConfigError(f"{name} is {problem}; wanted {expectation}")


def shown(value: Any) -> str:
    """A value as JSON for a message, cut after MOST_SHOWN characters."""
    text = json.dumps(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ..."
