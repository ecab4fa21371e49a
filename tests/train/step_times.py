"""What must hold of the times of steps, wherever a run computes."""

import numpy as np

from zero2all.track.reader import RunData
from zero2all.train.anatomy import PARTS


def assert_parts_add_up(data: RunData) -> None:
    """Waiting, the parts and the rest are the time of the step, of every single one."""
    parts = ("data_wait", *PARTS, "other")
    total = np.sum([data.series[f"time/{part}"].value for part in parts], axis=0)
    whole = data.series["time/step"].value
    np.testing.assert_allclose(total, whole, rtol=1e-3, atol=1e-4)
