"""A runner without a device, to measure the work of the host."""

from collections.abc import Iterable, Mapping

import numpy as np

from jaxembed.data.outputs import OUTPUTS, OutputName
from jaxembed.data.work import SparseRows
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import Outputs, Replica
from jaxembed.models.tokens import PackedTokens


class NullReplica:
    """A replica that returns constants and uses no device, to measure the work of the host."""

    def __init__(self, primary: OutputName, widths: Mapping[OutputName, int]):
        """Make a replica for outputs of these `widths`, which are numbers of columns."""
        self.primary: OutputName = primary
        self.planes = PackedTokens.PLANES
        self._widths = widths

    def compile(self, bucket: Bucket) -> None:
        """Do nothing."""

    def temporary_bytes(self, bucket: Bucket) -> int:
        """None, because it uses no device."""
        return 0

    def free(self) -> None:
        """Do nothing."""

    def run(
        self,
        bucket: Bucket,
        planes: np.ndarray,
        outputs: Iterable[OutputName],
        *,
        in_float32: bool = False,
    ) -> Outputs:
        """Return ones in the shapes of these outputs, which are float32 in any case."""
        made: Outputs = {}
        for name in outputs:
            kind, width = OUTPUTS[name], self._widths[name]
            if kind.sparse:  # one term in each row
                count = bucket.rows * bucket.slots
                row = [np.zeros(1, np.int32)] * count, [np.ones(1, np.float32)] * count
                made[name] = SparseRows(width, *row)
            else:
                columns = bucket.slots if kind.per == "slot" else bucket.length
                made[name] = np.ones((bucket.rows, columns, width), np.float32)
        return made

    @property
    def float32_bucket(self) -> None:
        """None, because constants are always finite."""


Runner = Replica | NullReplica
"""What the threads of an engine run batches on."""
