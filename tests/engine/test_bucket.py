"""Grids: default ones, ones from files, and what covers every request."""

import itertools

import pytest

from jaxembed.engine.bucket import MAX_DEFAULT_BUCKETS, Bucket, BucketGrid, default_grid, read_grid
from jaxembed.errors import ConfigError

LIMITS = [1, 7, 31, 32, 33, 64, 100, 128, 256, 384, 512, 514, 1000, 2048, 4096, 8191, 8192, 32768]
BUDGETS = [64, 100, 512, 1000, 4096, 8192, 16384, 65536]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_default_grid_is_small_and_holds_every_length_and_a_full_batch_of_each(limit):
    for budget, shards in itertools.product(BUDGETS, (1, 3, 8)):
        grid, case = default_grid(limit, budget, shards), f"{budget} tokens, {shards} shards"
        assert 1 <= len(set(grid.buckets)) == len(grid.buckets) <= MAX_DEFAULT_BUCKETS, case
        assert grid.max_length == min(limit, 8192), case  # so every length up to it has a bucket
        for bucket in grid.buckets:
            assert bucket.rows % shards == 0, case
            assert bucket.tokens <= budget * shards or bucket.rows == shards, case
        for length in {bucket.length for bucket in grid.buckets}:
            rows = [bucket.rows for bucket in grid.buckets if bucket.length == length]
            if shards == 1:
                assert min(rows) == 1, case
                assert max(rows) * 2 * length > budget, case  # the next power of two does not fit


@pytest.mark.parametrize("limit", LIMITS)
def test_the_covering_buckets_come_first_and_hold_every_length_and_the_largest_batch(limit):
    for budget in BUDGETS:
        grid = default_grid(limit, budget)
        covering, by_use = grid.covering, grid.by_use
        assert set(covering) <= set(grid.buckets), budget
        lengths = [bucket.length for bucket in covering]
        assert set(lengths) == {bucket.length for bucket in grid.buckets}, budget
        assert lengths[:-1] == sorted(lengths[:-1]), budget  # the largest bucket may be last
        most = max(bucket.tokens for bucket in covering)
        assert most == max(bucket.tokens for bucket in grid.buckets), budget
        assert sorted(by_use) == sorted(grid.buckets), budget
        assert by_use[: len(covering)] == covering, budget
        rest = [bucket.tokens for bucket in by_use[len(covering) :]]
        assert rest == sorted(rest, reverse=True), budget


@pytest.mark.parametrize("limit", LIMITS)
def test_a_joined_grid_has_one_row_of_the_whole_budget_besides(limit):
    for budget in BUDGETS:
        joined = default_grid(limit, budget, shards=2, join=True)
        longer = [bucket for bucket in joined.buckets if bucket.length > limit]
        whole = min(budget, 8192) // 16 * 16
        assert longer == ([Bucket(2, whole)] if whole >= 1.5 * limit else []), budget
        assert len(joined.buckets) <= MAX_DEFAULT_BUCKETS, budget
        rest = {bucket.length for bucket in joined.buckets} - {whole}
        usual = {bucket.length for bucket in default_grid(limit, budget).buckets}
        assert rest == usual - {whole}, budget


@pytest.fixture(name="write")
def _write(tmp_path):
    def write(text: str):
        path = tmp_path / "buckets.json"
        path.write_text(text)
        return path

    return write


def test_a_grid_is_read_from_a_file_sorted_and_without_doubles(write):
    given = read_grid(write('{"buckets": [[4, 32], [1, 64], [4, 32], [1, 16]]}'))
    assert given.grid(64, 128).buckets == (Bucket(1, 16), Bucket(1, 64), Bucket(4, 32))
    assert (given.max_batch_tokens, given.tuned) == (None, {})
    text = '{"buckets": [[1, 16]], "max_batch_tokens": 16, "tuned": {"dtype": "float32"}}'
    given = read_grid(write(text))
    assert (given.max_batch_tokens, given.tuned) == (16, {"dtype": "float32"})
    grid = BucketGrid((Bucket(1, 16), Bucket(8, 16), Bucket(2, 64), Bucket(4, 64), Bucket(64, 16)))
    assert grid.covering == (Bucket(1, 16), Bucket(2, 64), Bucket(64, 16))
    joined = default_grid(64, 256, join=True).covering  # without the largest batch
    assert joined == (Bucket(1, 16), Bucket(1, 32), Bucket(1, 64), Bucket(1, 256))


NUMBERS = "not two integers"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", " is empty"),
        ("not json", " is not valid JSON at line 1, column 1"),
        ('{"buckets":\n [[1, 16],]}', " is not valid JSON at line 2, column 1"),
        ("[" * 100_000, " is nested too deeply"),
        ("1" * 5000, "a number of thousands of digits"),
        ("[[1, 16]]", ": the file contains [[1, 16]]"),
        ("{}", ': the key "buckets" is missing'),
        ('{"buckets": 3}', ': "buckets" is 3, not a list'),
        ('{"buckets": [[1, 16], [1, 16, 2]]}', f": buckets[1] is [1, 16, 2], {NUMBERS}"),
        ('{"buckets": [["1", "16"]]}', f': buckets[0] is ["1", "16"], {NUMBERS}'),
        ('{"buckets": [[1.5, 16]]}', f": buckets[0] is [1.5, 16], {NUMBERS}"),
        ('{"buckets": [[true, 16]]}', f": buckets[0] is [true, 16], {NUMBERS}"),
        ('{"buckets": [[Infinity, 16]]}', f": buckets[0] is [Infinity, 16], {NUMBERS}"),
        ('{"buckets": [[1, 16]], "max_batch_tokens": 0}', ': "max_batch_tokens" is 0, not an'),
        ('{"buckets": [[1, 16]], "max_batch_tokens": 1.5}', "set --max-batch-tokens"),
        ('{"buckets": [[1, 16]], "tuned": 3}', ': "tuned" is 3, not an object'),
    ],
)
def test_a_malformed_file_is_refused_with_what_came_and_what_was_wanted(write, text, problem):
    path = write(text)
    with pytest.raises(ConfigError) as raised:
        read_grid(path)
    message = str(raised.value)
    assert message.startswith(f"--buckets {path}")
    assert problem in message
    assert message.endswith("[[rows, length], ...]}, as `jaxembed tune` writes it")


def test_a_missing_file_or_one_that_is_not_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read --buckets .*: No such file .*; expected"):
        read_grid(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"--buckets .* is not UTF-8 text; expected"):
        read_grid(tmp_path / "bytes.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "the file contains no buckets"),
        ("[[0, 16]]", "bucket 0x16 has no tokens"),
        ("[[1, 0]]", "bucket 1x0 has no tokens"),
        ("[[4, 1]]", "bucket 4x1 is too short: a row must have 2 tokens or more"),
        ("[[-1, 16]]", "bucket -1x16 has no tokens"),
        ("[[5, 16]]", "80 tokens, more than max_batch_tokens=64; raise --max-batch-tokens"),
        ("[[1, 8]]", "row has 8 tokens, and the model's limit is 16.*--max-input-length 8"),
    ],
)
def test_a_grid_that_cannot_serve_is_refused(write, text, message):
    with pytest.raises(ConfigError, match=message):
        read_grid(write(f'{{"buckets": {text}}}')).grid(16, 64)


def test_all_problems_of_a_file_are_told_at_once(write):
    path = write('{"buckets": [[3, 8], [64, 8], [0, 4]]}')
    with pytest.raises(ConfigError) as raised:
        read_grid(path).grid(16, 64, shards=2)
    for part in ("bucket 3x8 cannot be divided into 2 equal", "64x8 has 512", "0x4", "limit is"):
        assert part in str(raised.value)
    path = write('{"buckets": [[8, 16], [4, 32]]}')
    assert len(read_grid(path).grid(32, 32, shards=4).buckets) == 2
    with pytest.raises(ConfigError, match="more than max_batch_tokens=31 on each of 4 devices"):
        read_grid(path).grid(32, 31, shards=4)
