"""A runner without a device, to measure the work of the host."""

from collections.abc import Iterable, Mapping

import numpy as np

from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import Outputs
from jaxembed.models.tokens import PackedTokens
from jaxembed.outputs import OUTPUTS, OutputName


class NullReplica:
    """A replica that returns constants and uses no device, to measure the work of the host."""

    def __init__(self, primary: OutputName, widths: Mapping[OutputName, int]):
        """Make a replica for outputs of these `widths`, which are numbers of columns."""
        self.primary: OutputName = primary
        self.planes = PackedTokens.PLANES
        self._widths = widths

    def compile(self, bucket: Bucket) -> None:
        """Do nothing."""

    def run(self, bucket: Bucket, planes: np.ndarray, outputs: Iterable[OutputName]) -> Outputs:
        """Return ones in the shapes of these outputs."""
        columns = {"slot": bucket.slots, "token": bucket.length}
        return {
            name: np.ones((bucket.rows, columns[OUTPUTS[name].per], self._widths[name]), np.float32)
            for name in outputs
        }

    @property
    def float32_bucket(self) -> None:
        """None, because constants are always finite."""

    def run_in_float32(
        self, bucket: Bucket, planes: np.ndarray, outputs: Iterable[OutputName]
    ) -> Outputs:
        """Return what `run` returns, because the constants are float32."""
        return self.run(bucket, planes, outputs)
