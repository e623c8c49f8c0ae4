"""A JSON file that a person gave, and what is wrong with it in words for that person."""

import json
from pathlib import Path
from typing import Any

from jaxembed.errors import ConfigError

MOST_SHOWN = 60  # characters of a value


def read_user_json(path: Path, name: str, wanted: str) -> Any:
    """What the file says. Raises ConfigError, which calls the file `name` and says what was
    wanted of it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}; wanted {wanted}") from error
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        place = f"no JSON from line {error.lineno}, column {error.colno} on"
        problem = place if data.strip() else "empty"
    except UnicodeDecodeError:
        problem = "no text in UTF-8"
    except (RecursionError, ValueError):  # Python reads whole numbers of up to 4,300 digits
        problem = "nested too deeply, or holds a number of thousands of digits"
    raise ConfigError(f"{name} is {problem}; wanted {wanted}")


def shown(value: Any) -> str:
    """As it stands in a file, without the rest of a long one."""
    text = json.dumps(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ..."
