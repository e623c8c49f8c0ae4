"""Where the tokens of an image lie, as numbers that the tower reads. Knows nothing of pixels."""

import numpy as np


def page_places(rows: int, columns: int, before: int, after: int) -> np.ndarray:
    """The places of an image in the middle of a text, int32 `[before + rows * columns + after, 3]`.

    Added to the position of a token in its sequence, the numbers give its time, row and column, by
    which Qwen2-VL rotates heads (Wang et al. 2024, arXiv:2409.12191). All three of a token of text
    are its place in the text, where an image takes as many places as the longer of its sides. The
    time of an image's tokens is where it begins; row and column count from there.
    """
    row, column = (one.reshape(-1) for one in np.indices((rows, columns)))
    image = np.stack([np.zeros_like(row), row, column], axis=1) - np.arange(rows * columns)[:, None]
    places = np.zeros((before + rows * columns + after, 3), np.int32)
    places[before : before + rows * columns] = image
    places[before + rows * columns :] = max(rows, columns) - rows * columns
    return places
