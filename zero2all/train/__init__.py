"""The training loop and its parts. `zero2all.train` is also a function of the Python API; importing this package would
hide it, so the package can be called."""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **fields: Any) -> Any:
        """`api.train`."""
        import zero2all

        return zero2all.__getattr__("train")(*arguments, **fields)


sys.modules[__name__].__class__ = _CallablePackage
