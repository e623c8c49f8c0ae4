"""MPNet: RoBERTa's positions, and biases of scores by distance.

Its numbers are compared with torch's by the goldens.
"""

import numpy as np
from test_families import BIASES, converted, golden

from jaxembed.models import position_limit


def test_all_layers_share_one_table_of_biases_by_distance(tmp_path):
    arrays = golden("mpnet_cross_encoder")
    spec, params = converted(arrays, tmp_path)
    biases, buckets = params["tower.distance.bias"], arrays[BIASES]
    assert biases.shape == (2, 257)
    assert [name for name in params if "distance" in name] == ["tower.distance.bias"]
    for distance, bucket in ((-128, 15), (-1, 1), (0, 0), (1, 17), (8, 24), (128, 31)):
        np.testing.assert_array_equal(biases[:, 128 + distance], buckets[bucket])
    assert position_limit(spec) == 32  # two fewer than the table of positions has
