"""Who may import whom: the rules of docs/architecture.md, checked on every file. Imports in functions, for the type
checker and by import_module("...") count too."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PACKAGE = "zero2all"

STAGES = (
    "corpus",
    "tokenizer",
    "packed",
    "model",
    "train",
    "infer",
    "evals",
    "exchange",
    "finetune",
    "config",
    "track",
)

WITH_A_SECTION = ("model", "ops", "packed", "parallel", "diloco", "resilience", "tokenizer", "track")

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    # the foundations import nothing of ours
    "common": (),
    "corpus": (),
    "tokenizer": (),
    "ops": (),
    "track": (),
    "resilience": ("track.writer",),
    # each stands on those before it
    "packed": ("tokenizer",),
    "model": ("ops",),
    "estimate": ("model.config", "ops.footprint"),
    "parallel": ("model", "estimate", "ops", "resilience"),
    "diloco": ("parallel", "ops.host_memory", "resilience.heartbeat"),
    "config": tuple(f"{room}.config" for room in WITH_A_SECTION),
    "train": (
        *("packed", "model", "ops", "parallel", "diloco", "estimate", "track.writer", "config"),
        *("resilience.heartbeat", "resilience.slots"),
    ),
    "infer": ("model", "ops", "parallel", "tokenizer", "train", "config"),
    "evals": (
        *("corpus.download", "packed", "model", "infer", "parallel", "tokenizer", "train", "config"),
        *("track.reader", "track.writer"),
    ),
    "serve": ("infer", "tokenizer", "track.access", "track.http_server"),
    "exchange": ("model", "tokenizer", "train", "infer.load", "config"),
    "gguf": ("model", "tokenizer", "infer.load", "exchange"),
    "finetune": (
        *("corpus", "packed", "tokenizer", "model", "infer", "evals.sandbox", "parallel.parameter_table"),
        *("train", "exchange", "config", "resilience.heartbeat"),
    ),
    # on top of everything
    "predict": (*STAGES, "ops", "parallel", "estimate"),
    "measure": (*STAGES, "ops", "parallel", "estimate", "predict"),
    "experiments": (
        *("corpus", "packed", "model", "estimate", "parallel.device", "train", "infer", "evals", "finetune.prepare"),
        *("config", "track.plot", "track.reader"),
    ),
    "quickstart": (*STAGES, "estimate", "parallel.device", "predict", "measure", "experiments"),
    "api": ("config", "track.reader", "train", "infer", "tokenizer", "parallel.launch", "evals.perplexity", "finetune"),
    "cli": (
        *(*STAGES, "estimate", "parallel.job_files", "parallel.launch", "parallel.nodes", "parallel.ssh"),
        *("predict", "measure", "experiments", "quickstart", "resilience", "serve", "gguf"),
    ),
    "__main__": ("cli", "resilience.warm"),
}
"""Room -> what it may import beside itself, `common` and the version, from the bottom of the house to the top. A name
covers the modules below it."""

SECTIONS_MAY_IMPORT = {"tokenizer.config": ("tokenizer.sampling",)}
"""A room's `config.py` imports only `common`, with this exception."""

TRAINER = (
    *("packed", "model", "ops", "parallel", "diloco", "train", "estimate", "track.writer", "resilience.slots"),
    *("config", "common", "tokenizer.config", "measure"),
)
TRAINER_THIRD_PARTY = {"torch", "numpy", "safetensors", "yaml", "rich", "psutil", "google_crc32c", "orjson"}
"""What a bare GPU image must have for training to start. `tokenizers` is needed only to pack, not to train."""

KERNELS = "ops.kernels"
LAZY_THIRD_PARTY = {"common.records": {"zstandard", "pyarrow"}, "common.engine": {"ray"}, "packed.remote": {"fsspec"}}
LAZY_THIRD_PARTY |= {"packed.show": {"matplotlib"}, "ops.kernels.epilogue": {"quack"}}
"""Libraries a module may import when it meets what needs them: never at the top."""
EPILOGUES = {"ops.kernels.softmax_epilogue"}
"""Kernels in the language of QuACK's epilogues: functions that it decorates, so it is imported at their top."""


@dataclass(frozen=True)
class Import:
    """One import statement's target, seen from one module."""

    importer: str
    target: str
    line: int
    at_top: bool
    """Runs when the module is imported (not inside a function, not for the type checker only)."""

    def __str__(self) -> str:
        return f"{self.importer} line {self.line}: imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


def imports_of(name: str, source: str, modules: Mapping[str, Path] = MODULES) -> Iterator[Import]:
    """Every import of a module; `from package import module` counts as importing the module."""
    left: list[tuple[ast.AST, bool]] = [(ast.parse(source), True)]
    while left:
        (node, at_top), targets = left.pop(), []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} line {node.lineno}: relative imports are not used here"
            wholes = (f"{node.module}.{alias.name}" for alias in node.names)
            targets = [whole if whole in modules else str(node.module) for whole in wholes]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            targets = [str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)]
        yield from (Import(name, target, node.lineno, at_top) for target in targets)
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        )
        left += [(child, at_top and not lazy) for child in ast.iter_child_nodes(node)]


def all_imports(modules: Mapping[str, Path]) -> list[Import]:
    sources = {name: path.read_text(encoding="utf-8") for name, path in modules.items()}
    return [found for name, source in sources.items() for found in imports_of(name, source, modules)]


@functools.cache
def every_import() -> list[Import]:
    """Of the package; not when this file is collected, which every worker does."""
    return all_imports(MODULES)


def imports_of_ours() -> list[Import]:
    return [found for found in every_import() if found.target.split(".")[0] == PACKAGE]


def inside(module: str, part: str) -> bool:
    """Whether `module` (without the package's name) is `part` or below it."""
    return module == part or module.startswith(f"{part}.")


def short(module: str) -> str:
    return module.removeprefix(PACKAGE).removeprefix(".")


def is_section(module: str) -> bool:
    return module.endswith(".config") and module.count(".") == 1


def allowed_for(importer: str) -> tuple[str, ...]:
    if is_section(importer):
        return ("common", *SECTIONS_MAY_IMPORT.get(importer, ()))
    if not importer:
        return ("api",)  # whose names the package hands out
    room = room_of(importer)
    return ("common", room, *MAY_IMPORT[room]) if room else ()


@functools.cache
def room_of(module: str) -> str:
    """The room of a module without the package's name."""
    return next((room for room in MAY_IMPORT if inside(module, room)), module)


def breaches(imports: list[Import]) -> list[str]:
    """What the tables above forbid."""
    of_each = ((each, short(each.target), allowed_for(short(each.importer))) for each in imports)
    return [
        f"{each}; it may import {', '.join(allowed) or 'not given'}"
        for each, target, allowed in of_each
        if target and not any(inside(target, name) for name in allowed)  # without a target: the version
    ]


def test_every_room_of_the_house_has_a_rule_and_imports_none_above_it():
    parts = {room_of(short(name)) for name in MODULES} - {""}
    assert parts == set(MAY_IMPORT), "a new room needs a line in MAY_IMPORT, and one in docs/architecture.md"
    rooms = list(MAY_IMPORT)
    for room, allowed in MAY_IMPORT.items():
        above = [name for name in allowed if rooms.index(room_of(name)) >= rooms.index(room)]
        assert not above, f"{room} may import {above}, which stand above it"


def test_the_table_of_the_page_is_that_of_the_rules():
    names = {room: ", ".join(f"`{name}`" for name in may) or "nothing" for room, may in MAY_IMPORT.items()}
    stages = ", ".join(f"`{name}`" for name in STAGES)
    rows = "".join(f"| `{room}` | {may.replace(stages, 'the stages')} |\n" for room, may in names.items())
    assert rows in ARCHITECTURE.read_text().replace("`__main__.py`", "`__main__`"), rows


def test_the_map_of_the_package_names_every_file_once():
    text = ARCHITECTURE.read_text()
    text = text[text.index("## The package") : text.index("### Inside")]
    rows = re.findall(r"(?m)^\| `([\w.]+)/?` \| (.*) \|$", text)
    rooms = {name for name in MAY_IMPORT if "." not in name} - {"__main__"}
    assert sorted(room.removesuffix(".py") for room, _ in rows) == sorted(rooms)
    for room, words in rows:
        folder = ROOT / PACKAGE / room
        named = [name for name in re.findall(r"`([\w/]+)`", words) if name != "__init__" and folder.is_dir()]
        covered = sorted(path for name in named for path in covered_by(folder, name) if path.suffix == ".py")
        files = sorted(path for path in folder.rglob("*.py") if path != folder / "__init__.py")
        assert covered == files, f"docs/architecture.md, the row of {room}/: a file is not named, or twice"


def covered_by(folder: Path, name: str) -> list[Path]:
    """The files that a name of the map stands for."""
    found = list((folder / name).rglob("*.*")) if name.endswith("/") else [folder / f"{name}.py"]
    there = [path for path in found if path.exists()]
    assert there == found != [], f"docs/architecture.md names {folder.name}/{name}, which is not there"
    return found


BREACHES = {
    "model.z2all": "def f():\n    from zero2all.parallel.device import pick_device",
    "train.trainer": "import zero2all.resilience.launch",
    "config.schedule": "importlib.import_module('zero2all.train.trainer')",
    "ops.config": "from zero2all.ops import registry",
    "common.files": "if TYPE_CHECKING:\n    from zero2all.config import RunConfig",
}


def test_every_module_imports_only_what_its_room_may_and_a_breach_would_be_found():
    assert breaches(imports_of_ours()) == []
    for module, source in BREACHES.items():
        assert len(breaches(list(imports_of(f"{PACKAGE}.{module}", source)))) == 1, module


def test_the_command_line_imports_stages_only_inside_functions_and_alone_knows_the_quickstart():
    ours = imports_of_ours()
    at_top = {short(each.target) for each in ours if inside(short(each.importer), "cli") and each.at_top} - {""}
    light = {"common.errors", "common.language", "common.progress"}
    assert {target for target in at_top if not inside(target, "cli")} == light
    importers = {short(each.importer).split(".")[0] for each in ours if inside(short(each.target), "quickstart")}
    assert importers == {"cli", "quickstart"}


def refuse_circles(graph: Mapping[str, set[str]]) -> None:
    graphlib.TopologicalSorter(graph).prepare()


def file_graph(modules: Mapping[str, Path], imports: list[Import]) -> dict[str, set[str]]:
    """Module -> the modules it imports. Importing a.b.c also imports a and a.b, unless the importer lies in them. What
    the package itself imports when a name of its API is used is left out: importing the package does not."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for each in (each for each in imports if each.importer != PACKAGE or each.at_top):
        parts = each.target.split(".")
        for target in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            is_own = target == each.importer or each.importer.startswith(f"{target}.")
            if target in modules and not (is_own and target != each.target):
                graph[each.importer].add(target)
    return graph


def test_there_is_no_circle_over_the_files_of_the_package_the_benchmarks_and_the_scripts_of_a_page():
    graph = file_graph(MODULES, imports_of_ours())
    refuse_circles(graph)
    assert sum(map(len, graph.values())) > 1000  # it has seen the house
    modules = {module_name(path): path for path in sorted((ROOT / "benchmarks").glob("*.py"))}
    refuse_circles(file_graph(modules, all_imports(modules)))
    for room in ("track", "serve"):
        sources = {path.name: path.read_text() for path in (ROOT / PACKAGE / room / "web").glob("*.js")}
        imported = {name: set(re.findall(r"from '\./([\w.]+)'", source)) for name, source in sources.items()}
        assert len(imported) > 10
        refuse_circles(imported)


def test_a_circle_is_found_however_its_import_is_written():
    modules = {"a": Path(), "b": Path(), "c": Path()}
    plain, lazy = "from b import y", "def f():\n    from b import y"
    for back in (plain, lazy, "if TYPE_CHECKING:\n    import b", "import_module('b')"):
        sources = {"a": back, "b": "import c", "c": "import a"}
        imports = [each for name, source in sources.items() for each in imports_of(name, source, modules)]
        with pytest.raises(graphlib.CycleError):
            refuse_circles(file_graph(modules, imports))


def third_parties(part: str) -> list[Import]:
    known = {*sys.stdlib_module_names, PACKAGE}
    theirs = (each for each in every_import() if each.target.split(".")[0] not in known)
    return [each for each in theirs if inside(short(each.importer), part)]


def test_the_trainer_needs_no_more_than_a_bare_gpu_image_has():
    for each in (found for part in TRAINER for found in third_parties(part)):
        importer, library = short(each.importer), each.target.split(".")[0]
        is_kernel = inside(importer, KERNELS) and library == "triton"
        is_epilogue = importer in EPILOGUES and library == "quack"
        is_lazy = not each.at_top and library in LAZY_THIRD_PARTY.get(importer, ())
        assert library in TRAINER_THIRD_PARTY or is_kernel or is_epilogue or is_lazy, each


def test_kernels_epilogues_and_the_tokenizers_library_are_imported_only_where_one_is_chosen():
    """They import Triton, QuACK and their like at their top; everything else must run without it."""
    users = [each for each in every_import() if inside(short(each.target), KERNELS)]
    assert users
    assert [str(each) for each in users if each.at_top and not inside(short(each.importer), KERNELS)] == []
    epilogues = [each for each in users if short(each.target) in EPILOGUES]
    assert {short(each.target) for each in epilogues} == EPILOGUES
    tokenizers = [each for each in every_import() if each.target.split(".")[0] == "tokenizers"]
    assert {short(each.importer).split(".")[0] for each in tokenizers} == {"tokenizer"}
    assert not any(each.at_top for each in (*epilogues, *tokenizers))


def test_the_metrics_writer_and_the_estimates_need_the_standard_library_only():
    assert [str(each) for part in ("track.writer", "estimate") for each in third_parties(part)] == []


def run_python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_estimates_every_section_of_the_config_and_the_check_of_an_evaluation_load_without_torch():
    modules = [name for name in MODULES if room_of(short(name)) == "estimate" or is_section(short(name))]
    modules += [f"{PACKAGE}.config", f"{PACKAGE}.evals.options"]
    run_python(f"""
        import importlib, sys
        sys.modules["torch"] = sys.modules["numpy"] = None  # from here on, importing them is an ImportError
        for name in {modules}:
            importlib.import_module(name)
    """)


def test_training_starts_without_the_libraries_of_other_stages():
    run_python("""
        import sys
        others = "tokenizers transformers pyarrow zstandard numba ray xxhash matplotlib rich orjson libarchive fsspec"
        sys.modules.update(dict.fromkeys([*others.split(), "huggingface_hub"]))
        import zero2all.train.run, zero2all.packed.writer
    """)
