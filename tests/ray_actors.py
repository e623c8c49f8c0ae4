"""What the tests run in Ray's own processes."""

import os
import signal
from pathlib import Path
from typing import Any

from jaxembed.integrations.ray import Embed

DIES_AFTER = 3  # batches


class Dying(Embed):
    """An Embed that notes its process in a folder. The first to have run some batches is killed
    before it returns the last of them."""

    def __init__(self, folder: str, **arguments: Any):
        super().__init__(**arguments)
        self.folder, self.batches = Path(folder), 0
        (self.folder / f"started-{os.getpid()}").touch()

    async def __call__(self, batch: Any) -> Any:
        done = await super().__call__(batch)
        self.batches += 1
        if self.batches == DIES_AFTER and not list(self.folder.glob("killed-*")):
            (self.folder / f"killed-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return done


class Closing(Embed):
    """An Embed that notes in a folder when it is made and when it is closed."""

    def __init__(self, folder: str, **arguments: Any):
        super().__init__(**arguments)
        close = self._embedder.close

        def noted(*given: Any) -> None:
            close(*given)
            (Path(folder) / f"closed-{os.getpid()}").touch()

        self._embedder.close = noted
        (Path(folder) / f"made-{os.getpid()}").touch()
