"""With this folder on PYTHONPATH a process reads no pickle: `pickle.loads` and the like raise, and say so on stderr.

Python imports this file before anything else, so that who keeps a name of its own for them (torch does) keeps these.
What local workers and readers get over their own socket pair is let through, by the file that reads it.
"""

import _pickle
import os
import pickle
import sys
from typing import Any

OWN_SOCKETS = ("zero2all/common/engine.py", "zero2all/packed/readers.py")
SAID = "a pickle is read by"


def _refuse() -> None:
    frame = sys._getframe(2)
    while frame.f_back is not None and "/multiprocessing/" in frame.f_code.co_filename:  # Connection.recv of a caller
        frame = frame.f_back
    reader = frame.f_code.co_filename
    if not reader.endswith(OWN_SOCKETS):
        os.write(2, f"{SAID} {reader} line {frame.f_lineno}\n".encode())  # seen also where the error is caught
        raise RuntimeError(f"{SAID} {reader}")


def _refusing(read: Any) -> Any:
    def refusing(*arguments: Any, **options: Any) -> Any:
        _refuse()
        return read(*arguments, **options)

    return refusing


class _RefusingUnpickler(_pickle.Unpickler):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        _refuse()
        super().__init__(*arguments, **options)


for module in (pickle, _pickle):
    module.load, module.loads, module.Unpickler = _refusing(module.load), _refusing(module.loads), _RefusingUnpickler
