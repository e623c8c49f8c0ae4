"""The key file of a storm: who may do what, and how it is changed, torn and lost meanwhile."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from random import Random

from .wire import STEADY

FLEETING, NARROW, METERED, WRONG = "fleeting", "narrow", "metered", "wrong"  # keys
PAUSE_S = (0.02, 0.4)  # between two changes, at least and at most

TABLES = {
    STEADY: {},
    NARROW: {"models": ["other"]},
    METERED: {"requests_per_minute": 60, "tokens_per_minute": 600, "max_inputs_waiting": 4},
    FLEETING: {},
}


class Locksmith:
    """Changes a key file while a server reads it, and tells the server so by a signal, or not."""

    def __init__(self, path: Path, seed: str, hang_up: Callable[[], object]):
        """`hang_up` sends the server SIGHUP."""
        self._path = path
        self._random = Random(f"{seed}/locks")
        self._hang_up = hang_up
        self.changes = 0

    async def work(self, is_over: Callable[[], bool]) -> None:
        """Change the file again and again, until it is over or the task is cancelled."""
        while not is_over():
            self._change()
            self.changes += 1
            if self._random.random() < 0.5:
                self._hang_up()
            await asyncio.sleep(self._random.uniform(*PAUSE_S))

    def _change(self) -> None:
        """Replace, write, tear, soil or lose the file.

        It is torn in its first table, so that it has no key, or in the last one, of the key that
        comes and goes: the others never lose what they may not do.
        """
        whole, text = key_file(), key_file(fleeting=self._random.random() < 0.5)
        match self._random.choice(["replace", "replace", "write", "tear", "soil", "lose"]):
            case "replace":
                aside = self._path.with_suffix(".new")
                aside.write_text(text)
                aside.replace(self._path)
            case "write":
                self._path.write_text(text)
            case "tear":
                cuts = (range(len("[[key]]")), range(whole.index(FLEETING), len(whole)))
                self._path.write_text(whole[: self._random.choice(self._random.choice(cuts))])
            case "soil":
                self._path.write_bytes(self._random.randbytes(200))
            case "lose":
                self._path.unlink(missing_ok=True)


def key_file(*, fleeting: bool = True) -> str:
    """The text of a whole key file, with the fleeting key or without."""
    return "\n".join(_table(key, TABLES[key]) for key in TABLES if fleeting or key != FLEETING)


def _table(key: str, fields: dict) -> str:
    lines = [f'name = "{key}"', f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
    return "\n".join(["[[key]]", *lines, *(f"{name} = {fields[name]!r}" for name in fields), ""])
