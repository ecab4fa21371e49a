"""The small workspace and config of the tests of training."""

from tests.train.conftest import config_file, shared_work, work  # noqa: F401
