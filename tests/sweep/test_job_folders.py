"""The folder of a job: one that cannot be made is rejected before the sweep begins."""

from __future__ import annotations

import pytest

from tests.running import one_process

LINE = "train -m seed=range(0,2) hydra.sweep.subdir="
LONGEST = "é" * 127 + "x"  # 255 bytes
TOO_LONG = LONGEST + "x"
DEEP = "/".join(["x" * 250] * 17)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    lines = {
        "name": LINE + TOO_LONG,
        "in between": f"{LINE}'a/{'x' * 256}/${{hydra.job.num}}'",
        "by overrides": f"{LINE}'${{hydra.job.override_dirname}}' "
        f"tracking.description={'x' * 250}",
        "path": LINE + DEEP,
        "longest": f"{LINE}{LONGEST} training.updates=-1",
    }
    return one_process(lines, tmp_path_factory.mktemp("folders"))


@pytest.mark.parametrize("name", ["name", "in between", "by overrides"])
def test_a_name_of_more_than_255_bytes_is_rejected(results, name):
    assert_rejected(
        results[name],
        "pipeline: hydra.sweep.subdir must be a folder that can be created (a name may have "
        "at most 255 bytes). Received: '",
    )


def test_a_path_of_more_than_4095_bytes_is_rejected(results):
    assert_rejected(
        results["path"],
        "pipeline: hydra.sweep.subdir must be a folder that can be created (its path may "
        "have at most 4095 bytes). Received: '",
    )


def test_the_longest_name_is_taken(results):
    assert_rejected(results["longest"], "pipeline: training.updates must be")


def assert_rejected(result, line):
    assert result["status"] == 2, result
    assert result["err"].startswith(line), result
    assert len(result["err"].splitlines()) == 1
    assert result["changed"] == []
