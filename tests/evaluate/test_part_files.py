"""The parts of a file of predictions, as a killed command leaves them."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.common.errors import ConfigError
from pipeline.evaluate import part_files

BATCHES = 50


def batch(number: int) -> pa.Table:
    first = 100 * number
    return pa.table({"position": pa.array(range(first, first + 100))})


def written(out, batches, identity=None) -> int:
    """Add the batches that a file lacks up to a number; return how many it had."""
    with part_files.opened(out, identity or {"run": "a"}) as files:
        had = files.batches_done
        assert files.rows_done == 100 * had
        for number in range(had, batches):
            files.add(batch(number))
        if batches == BATCHES:
            files.finish()
    return had


def test_a_file_goes_on_after_its_last_part(tmp_path):
    out = tmp_path / "out.parquet"
    # A part has 41 batches, the first with at least 4,096 rows. The rest is not written.
    assert written(out, 45) == 0
    assert not out.exists()
    (tmp_path / "out.parquet.parts/.0000000050.parquet").write_bytes(b"half a part")
    with pytest.raises(ConfigError, match="contains a part of other predictions"):
        written(out, BATCHES, {"run": "b"})
    assert written(out, BATCHES) == 41
    positions = pq.read_table(out)["position"].to_pylist()
    assert positions == list(range(100 * BATCHES))
    assert list(tmp_path.iterdir()) == [out]


def test_two_commands_do_not_write_one_file(tmp_path):
    out = tmp_path / "out.parquet"
    with (
        part_files.opened(out, {}),
        pytest.raises(ConfigError, match="no other process is writing"),
        part_files.opened(out, {}),
    ):
        pass


def test_a_file_that_exists_is_left_as_it_is(tmp_path):
    out = tmp_path / "out.parquet"
    out.write_text("precious")
    with pytest.raises(ConfigError, match="must be a file that does not exist"):
        part_files.check_free(out)
    with pytest.raises(ConfigError, match="must lie in a folder that exists"):
        part_files.check_free(tmp_path / "none" / "out.parquet")


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_appears_meanwhile_is_left_as_it_is(
    tmp_path, monkeypatch, has_links
):
    """It was replaced by the predictions."""

    def no_links(*_):
        raise PermissionError("the file system has no links")

    if not has_links:
        monkeypatch.setattr("os.link", no_links)
    out = tmp_path / "out.parquet"
    written(out, 45)
    out.write_text("precious")
    with pytest.raises(ConfigError, match="it has appeared meanwhile: move it away"):
        written(out, BATCHES)
    assert out.read_text() == "precious"
    with pytest.raises(ConfigError, match="must be a file that does not exist"):
        part_files.check_free(out)

    # Nothing has to be predicted again.
    out.unlink()
    part_files.check_free(out)
    assert written(out, BATCHES) == BATCHES
    assert pq.read_metadata(out).num_rows == 100 * BATCHES
    assert list(tmp_path.iterdir()) == [out]


def test_parts_that_a_killed_command_left_beside_its_file_are_removed(
    tmp_path, monkeypatch
):
    out = tmp_path / "out.parquet"
    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", lambda *_: None)
        written(out, BATCHES)
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ConfigError, match="must be a file that does not exist"):
        part_files.check_free(out)
    assert list(tmp_path.iterdir()) == [out]
