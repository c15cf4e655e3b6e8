"""Where a rank writes what only one rank's is to stay of."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import mpidist
from mpidist.checkpoint import (
    remove_temp_dir_with_filepath,
    remove_temp_dirpath,
    write_dirpath,
    write_filepath,
)

pytestmark = pytest.mark.nodes


def test_each_rank_writes_and_one_file_stays(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    is_chief = strategy.extended.should_checkpoint
    file = Path(write_filepath(tmp_path / "model.npz", strategy))
    assert file.name == "model.npz"
    assert (file.parent == tmp_path) == is_chief
    if not is_chief:
        assert file.parent.parent == tmp_path
        assert re.fullmatch(r"workertemp_[1-9]\d*", file.parent.name)
    # What has been returned may be given again.
    assert write_filepath(file, strategy) == str(file)
    with strategy.scope():
        assert write_dirpath(tmp_path) == str(file.parent)
    file.write_text("weights")
    remove_temp_dir_with_filepath(file, strategy)
    remove_temp_dirpath(tmp_path, strategy)
    assert os.listdir(tmp_path) == (["model.npz"] if is_chief else [])
    write_dirpath(tmp_path, strategy)
    remove_temp_dirpath(tmp_path, strategy)
    assert os.listdir(tmp_path) == (["model.npz"] if is_chief else [])
