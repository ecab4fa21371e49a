"""No code comes from a socket or a file: a pickle can run any, so the package reads none."""

import ast
import inspect
import re
from pathlib import Path

import numpy as np
import torch.distributed as dist

PACKAGE = Path(__file__).parents[1] / "zero2all"
COLLECTIVES = {name for name in dir(dist.distributed_c10d) if "_object" in name and not name.startswith("_")}
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve"}
SUSPECT = re.compile(r"\b(load|\w*pickle\w*|rpc|distributed\.checkpoint|" + "|".join(MODULES | COLLECTIVES) + r")\b")
"""A word of these is in every file with a problem."""
OWN_SOCKETS = {"common/engine.py", "packed/readers.py"}
"""These talk to processes that they start, over a socket pair that no one else has."""


def name_of(node: ast.expr) -> str:
    """`a.b.c` of an expression; of anything else what follows it (`.c`)."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{name_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def allows_pickle(call: ast.Call) -> bool:
    """Whether an argument `allow_pickle` is anything but a plain False, which is what numpy takes without it."""
    asked = next((word.value for word in call.keywords if word.arg == "allow_pickle"), None)
    return asked is not None and not (isinstance(asked, ast.Constant) and asked.value is False)


def problems_in(source: str, may_pickle: bool = False) -> list[str]:
    """What may read a pickle, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        modules, names, is_bad = [], [], False
        if isinstance(node, ast.Import):
            modules = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules, names = [node.module or ""], [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Attribute | ast.Name):
            names = [name_of(node)]
        elif isinstance(node, ast.Call):
            is_bad = allows_pickle(node)
            if name_of(node.func).endswith(("import_module", "__import__")) and isinstance(node.args[0], ast.Constant):
                modules = [str(node.args[0].value)]
        is_bad |= not may_pickle and any(name.split(".")[0] in MODULES for name in modules)
        if is_bad or any(map(reads_pickles, [*modules, *names])):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def reads_pickles(name: str) -> bool:
    """Whether that is an object collective of torch, its reader of files, or pandas' one."""
    last = name.rpartition(".")[2]
    is_file = last == "read_pickle" or (last == "load" and name.startswith(("torch.", "torch.serialization.")))
    return last in COLLECTIVES or is_file or name.startswith(("torch.distributed.rpc", "torch.distributed.checkpoint"))


def test_no_file_of_the_package_can_read_a_pickle():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        source = path.read_text(encoding="utf-8")
        if SUSPECT.search(source):  # to parse all of them takes seconds
            found += [f"{name} {problem}" for problem in problems_in(source, name in OWN_SOCKETS)]
    assert found == []
    assert inspect.signature(np.load).parameters["allow_pickle"].default is False


def test_the_rule_catches_what_reads_pickles_and_lets_other_names_be():
    for source in (
        "import pickle",
        "def f():\n    from _pickle import loads",
        "import marshal as m",
        "importlib.import_module('dill')",
        "dist.all_gather_object(found, value)",
        "gather = dist.gather_object",
        "from torch.distributed import broadcast_object_list as tell",
        "torch.distributed.scatter_object_list(a, b)",
        "torch.load(path, weights_only=True)",
        "from torch import load",
        "from torch.distributed import rpc",
        "import torch.distributed.checkpoint as dcp",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=asked)",
        "np.lib.format.read_array(file, allow_pickle=True)",
        "pandas.read_pickle(path)",
    ):
        assert SUSPECT.search(source)
        assert len(problems_in(source)) == 1
    for source in ("np.load(path, allow_pickle=False)", "np.load(path)", "read_json_object(path)", "torch.save(1, f)"):
        assert problems_in(source) == []
