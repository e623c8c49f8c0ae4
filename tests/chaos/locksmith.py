"""The key file of a storm: who may do what, and how it is changed, torn and lost meanwhile."""

import asyncio
import hashlib
import os
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
        ways = (self._replace, self._replace, self._write, self._tear, self._soil, self._lose)
        while not is_over():
            self._random.choice(ways)()
            self.changes += 1
            if self._random.random() < 0.5:
                self._hang_up()
            await asyncio.sleep(self._random.uniform(*PAUSE_S))

    def _replace(self) -> None:
        aside = self._path.with_suffix(".new")
        aside.write_text(self._draw())
        os.replace(aside, self._path)

    def _write(self) -> None:
        self._path.write_text(self._draw())

    def _tear(self) -> None:
        """Cut the file in its first table, so that it has no key, or in the last one, of the key
        that comes and goes: the others never lose what they may not do."""
        text = key_file()
        cuts = (range(len("[[key]]")), range(text.index(FLEETING), len(text)))
        self._path.write_text(text[: self._random.choice(self._random.choice(cuts))])

    def _soil(self) -> None:
        self._path.write_bytes(self._random.randbytes(200))

    def _lose(self) -> None:
        self._path.unlink(missing_ok=True)

    def _draw(self) -> str:
        return key_file(fleeting=self._random.random() < 0.5)


def key_file(*, fleeting: bool = True) -> str:
    """The text of a whole key file, with the fleeting key or without."""
    return "\n".join(_table(key, TABLES[key]) for key in TABLES if fleeting or key != FLEETING)


def _table(key: str, fields: dict) -> str:
    lines = [f'name = "{key}"', f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
    return "\n".join(["[[key]]", *lines, *(f"{name} = {fields[name]!r}" for name in fields), ""])
