"""A workspace with a small trained run, to be changed."""

import shutil

import pytest

from zero2all.common.workspace import Workspace


@pytest.fixture
def work(trained_workspace, tmp_path):
    root = tmp_path / "work"
    shutil.copytree(trained_workspace.root, root)
    return Workspace(root)
