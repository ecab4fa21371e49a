"""The training loop and its parts. Importing it sets `zero2all.train`, which is also a function of the
Python API: so it can be called."""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **fields: Any) -> Any:
        return sys.modules["zero2all"].__getattr__("train")(*arguments, **fields)


sys.modules[__name__].__class__ = _CallablePackage
