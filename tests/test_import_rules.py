"""Who may import whom: the rules of docs/architecture.md, checked on the source of every file.

Imports are read with ast: at the top of a file, inside functions, under TYPE_CHECKING and by import_module("...").
All of them count, because each means that one file cannot be understood without the other.
"""

import ast
import functools
import graphlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
    "config": (
        *("model.config", "ops.config", "packed.config", "parallel.config", "diloco.config"),
        *("resilience.config", "tokenizer.config", "track.config"),
    ),
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
    "finetune": (
        *("corpus", "packed", "tokenizer", "model", "infer", "evals.sandbox", "parallel.parameter_table"),
        *("train", "exchange", "config", "resilience.heartbeat"),
    ),
    # on top of everything
    "predict": (*STAGES, "ops", "parallel", "estimate"),
    "measure": (*STAGES, "ops", "parallel", "estimate", "predict"),
    "quickstart": STAGES,
    "cli": (
        *(*STAGES, "estimate", "parallel.job_files", "parallel.launch", "parallel.nodes", "parallel.ssh"),
        *("predict", "measure", "quickstart", "resilience", "serve"),
    ),
    "__main__": ("cli", "resilience.warm"),
}
"""Room -> what it may import beside itself, `common` and the version, from the bottom of the house to the top. A name
covers the modules below it."""

SECTIONS_MAY_IMPORT = {"tokenizer.config": ("tokenizer.specials", "tokenizer.sampling")}
"""A room's `config.py` imports only `common`, with these exceptions."""

TRAINER = (
    *("packed", "model", "ops", "parallel", "diloco", "train", "estimate", "track.writer", "resilience.slots"),
    *("config", "common", "tokenizer.config", "measure"),
)
TRAINER_THIRD_PARTY = {"torch", "numpy", "safetensors", "yaml", "rich", "psutil", "google_crc32c", "orjson"}
"""What a bare GPU image must have for training to start. `tokenizers` is needed only to pack, not to train."""

KERNELS = "ops.kernels"
LAZY_THIRD_PARTY = {
    "common.records": {"zstandard", "pyarrow"},
    "common.engine": {"ray"},
    "packed.remote": {"fsspec"},
    "packed.show": {"matplotlib"},
    "ops.kernels.epilogue": {"quack"},
}
"""Libraries a module may import when it meets what needs them (a corpus shard of their format, an address, …): never
at the top."""
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

    def visit(node: ast.AST, at_top: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno, at_top)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} line {node.lineno}: relative imports are not used here"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield Import(name, whole if whole in modules else str(node.module), node.lineno, at_top)
        else:
            called = getattr(node, "func", None)
            if getattr(called, "attr", getattr(called, "id", "")) == "import_module":
                for argument in node.args[:1]:
                    if isinstance(argument, ast.Constant):
                        yield Import(name, str(argument.value), node.lineno, at_top)
            lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
            )
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_top and not lazy)

    yield from visit(ast.parse(source), at_top=True)


def all_imports(modules: Mapping[str, Path]) -> list[Import]:
    return [
        found for name, path in modules.items() for found in imports_of(name, path.read_text(encoding="utf-8"), modules)
    ]


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
    room = room_of(importer)
    return ("common", room, *MAY_IMPORT[room]) if room else ()


def room_of(module: str) -> str:
    """The room of a module without the package's name: the longest name of MAY_IMPORT that it lies in."""
    return max((room for room in MAY_IMPORT if inside(module, room)), key=len, default=module)


def breaches(imports: list[Import]) -> list[str]:
    """What the tables above forbid."""
    found = []
    for each in imports:
        target, allowed = short(each.target), allowed_for(short(each.importer))
        covered = [name for name in allowed if inside(target, name) and room_of(target) == room_of(name)]
        if target and not covered:  # without a target: the version
            found.append(f"{each}; it may import {', '.join(allowed) or 'not given'}")
    return found


# ---- the rules ------------------------------------------------------------------------------------------------


def test_every_room_of_the_house_has_a_rule():
    parts = {room_of(short(name)) for name in MODULES} - {""}
    assert parts == set(MAY_IMPORT), "a new room needs a line in MAY_IMPORT, and one in docs/architecture.md"


def test_the_table_of_the_page_is_that_of_the_rules():
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = {room: ", ".join(f"`{name}`" for name in may) or "nothing" for room, may in MAY_IMPORT.items()}
    stages = ", ".join(f"`{name}`" for name in STAGES)
    rows = "".join(f"| `{room}` | {may.replace(stages, 'the stages')} |\n" for room, may in names.items())
    assert rows in text.replace("`__main__.py`", "`__main__`"), rows


def test_the_map_of_the_package_names_every_file_once():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(
        r"(?m)^\| `([\w.]+)/?` \| (.*) \|$", text[text.index("## The package") : text.index("### Inside")]
    )
    assert sorted(room.removesuffix(".py") for room, _ in rows) == sorted(
        {name for name in MAY_IMPORT if "." not in name} - {"__main__"}
    )
    for room, words in rows:
        folder = ROOT / PACKAGE / room
        if not folder.is_dir():
            continue
        named = [name for name in re.findall(r"`([\w/]+)`", words) if name != "__init__"]
        covered = [path for name in named for path in covered_by(folder, name)]
        files = [path for path in folder.rglob("*.py") if path.parent != folder or path.name != "__init__.py"]
        missing = sorted(str(path.relative_to(folder)) for path in set(files) - set(covered))
        assert not missing, f"docs/architecture.md, the row of {room}/: it does not name {', '.join(missing)}"
        twice = sorted({str(path.relative_to(folder)) for path in covered if covered.count(path) > 1})
        assert not twice, f"docs/architecture.md, the row of {room}/: named twice: {', '.join(twice)}"


def covered_by(folder: Path, name: str) -> list[Path]:
    """The files that a name of the map stands for."""
    found = list((folder / name).rglob("*.*")) if name.endswith("/") else [folder / f"{name}.py"]
    there = [path for path in found if path.exists()]
    assert there == found != [], f"docs/architecture.md names {folder.name}/{name}, which is not there"
    return found


def test_no_room_imports_a_room_above_it():
    rooms = list(MAY_IMPORT)
    for room, allowed in MAY_IMPORT.items():
        above = [name for name in allowed if rooms.index(room_of(name)) >= rooms.index(room)]
        assert not above, f"{room} may import {above}, which stand above it"


def test_every_module_imports_only_what_its_room_may():
    assert breaches(imports_of_ours()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("corpus.build", "from zero2all.tokenizer import load_tokenizer"),
        ("model.z2all", "def f():\n    from zero2all.parallel.device import pick_device"),
        ("train.trainer", "import zero2all.resilience.launch"),
        ("config", "from zero2all.train.setup import prepare"),
        ("config.schedule", "importlib.import_module('zero2all.train.trainer')"),
        ("estimate.memory", "from zero2all.ops import registry"),
        ("ops.config", "from zero2all.ops import registry"),
        ("common.files", "if TYPE_CHECKING:\n    from zero2all.config import RunConfig"),
        ("exchange", "from zero2all.evals.probes import run_probes"),
        ("quickstart.pipeline", "from zero2all.cli.main import main"),
    ],
)
def test_the_rules_catch_a_breach(module, source):
    assert len(breaches(list(imports_of(f"{PACKAGE}.{module}", source)))) == 1


def test_the_command_line_imports_stages_only_inside_functions_and_alone_knows_the_quickstart():
    ours = imports_of_ours()
    at_top = {short(each.target) for each in ours if inside(short(each.importer), "cli") and each.at_top} - {""}
    light = {"common.errors", "common.language", "common.progress"}
    assert {target for target in at_top if not inside(target, "cli")} == light
    importers = {short(each.importer).split(".")[0] for each in ours if inside(short(each.target), "quickstart")}
    assert importers == {"cli", "quickstart"}


# ---- circles --------------------------------------------------------------------------------------------------


def circle_in(graph: Mapping[str, set[str]]) -> str:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return ""


def file_graph(modules: Mapping[str, Path], imports: list[Import]) -> dict[str, set[str]]:
    """Module -> the modules it imports. Importing a.b.c also imports a and a.b, unless the importer lies in them: a
    package may gather what its own files define."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for each in imports:
        parts = each.target.split(".")
        for target in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            is_own = target == each.importer or each.importer.startswith(f"{target}.")
            if target in modules and not (is_own and target != each.target):
                graph[each.importer].add(target)
    return graph


def test_there_is_no_circle_over_the_files_of_the_package():
    graph = file_graph(MODULES, imports_of_ours())
    assert circle_in(graph) == ""
    assert sum(map(len, graph.values())) > 1000  # it has seen the house
    modules = {module_name(path): path for path in sorted((ROOT / "benchmarks").glob("*.py"))}
    assert circle_in(file_graph(modules, all_imports(modules))) == ""


def test_there_is_no_circle_over_the_scripts_of_a_page():
    for room in ("track", "serve"):
        files = sorted((ROOT / PACKAGE / room / "web").glob("*.js"))
        sources = {path.name: path.read_text(encoding="utf-8") for path in files}
        imported = {name: set(re.findall(r"from '\./([\w.]+)'", source)) for name, source in sources.items()}
        assert len(imported) > 10
        assert circle_in(imported) == ""


def test_a_circle_is_found_however_its_import_is_written():
    modules = {"a": Path(), "b": Path(), "c": Path()}
    plain, lazy = "from b import y", "def f():\n    from b import y"
    for back in (plain, lazy, "if TYPE_CHECKING:\n    import b", "import_module('b')"):
        sources = {"a": back, "b": "import c", "c": "import a"}
        imports = [each for name, source in sources.items() for each in imports_of(name, source, modules)]
        assert circle_in(file_graph(modules, imports)) in ("a -> b -> c -> a", "b -> c -> a -> b", "c -> a -> b -> c")


# ---- third parties --------------------------------------------------------------------------------------------


def third_parties(part: str) -> list[Import]:
    return [
        each
        for each in every_import()
        if inside(short(each.importer), part) and each.target.split(".")[0] not in (*sys.stdlib_module_names, PACKAGE)
    ]


@pytest.mark.parametrize("part", TRAINER)
def test_the_trainer_needs_no_more_than_a_bare_gpu_image_has(part):
    for each in third_parties(part):
        importer, library = short(each.importer), each.target.split(".")[0]
        is_kernel = inside(importer, KERNELS) and library == "triton"
        is_epilogue = importer in EPILOGUES and library == "quack"
        is_lazy = not each.at_top and library in LAZY_THIRD_PARTY.get(importer, ())
        assert library in TRAINER_THIRD_PARTY or is_kernel or is_epilogue or is_lazy, each


def users_of(is_meant: Callable[[str], bool]) -> list[Import]:
    return [each for each in every_import() if is_meant(short(each.target))]


def test_kernels_epilogues_and_the_tokenizers_library_are_imported_only_where_one_is_chosen():
    """They import Triton, QuACK and their like at their top; everything else must run without it."""
    users = users_of(lambda name: inside(name, KERNELS))
    assert users
    assert [str(each) for each in users if each.at_top and not inside(short(each.importer), KERNELS)] == []
    assert {short(each.target) for each in users_of(EPILOGUES.__contains__)} == EPILOGUES
    tokenizers = users_of(lambda name: name.split(".")[0] == "tokenizers")
    assert {short(each.importer).split(".")[0] for each in tokenizers} == {"tokenizer"}
    assert not any(each.at_top for each in (*users_of(EPILOGUES.__contains__), *tokenizers))


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
        others = ["tokenizers", "transformers", "pyarrow", "zstandard", "numba", "ray", "xxhash", "matplotlib", "rich"]
        others += ["orjson", "libarchive", "fsspec", "huggingface_hub"]
        sys.modules.update(dict.fromkeys(others))
        import zero2all.train.run, zero2all.packed.writer
    """)
