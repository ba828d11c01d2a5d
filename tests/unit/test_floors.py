"""The floors: who may import whom, and what importing does not do."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Floor: the parts of tpu_dist that its modules may import. FACE is tpu_dist/*.py itself.
FACE = "tpu_dist"
MAY_IMPORT = {
    "topology": {"topology"},
    "runtime": {"topology", "runtime"},
    "collectives": {"topology", "runtime", "collectives"},
    FACE: {"topology", "runtime", "collectives", FACE},
    "recipes": {"topology", "runtime", "collectives", FACE, "recipes"},
    "launch": {"topology", "launch"},
}
FOLDERS = [floor for floor in MAY_IMPORT if floor != FACE]

# The environment is read at the edges; whoever needs it elsewhere is handed what was read.
READERS_OF_THE_ENVIRONMENT = {
    "collectives/planner.py",  # keeps libtpu's compiler, in a process of its own, from a TPU VM
    "launch/cli.py",  # hands it to launch/environment.py
    "launch/environment.py",
    "recipes/titan/compatibility.py",  # torchtitan numbers devices by LOCAL_RANK
    "recipes/world.py",
    "runtime/client.py",  # sets libtpu's variables, says which ambient ones it replaces
    "runtime/coordinator.py",  # hands it on to the process it starts
    "runtime/device/place.py",  # as runtime/runtime.py
    "runtime/environment.py",
    "runtime/runtime.py",  # hands libtpu's variables to topology/tpu_environment.py
    "tpu_dist/__init__.py",
    "tpu_dist/_autoload.py",
}


@dataclass(frozen=True)
class Import:
    """One module that a file imports; `early` if it does so when it is itself imported."""

    file: str
    module: str
    early: bool

    @property
    def package(self) -> str:
        return self.module.split(".")[0]

    @property
    def part(self) -> str | None:
        """The floor it belongs to, if it is one of ours."""
        package, _, rest = self.module.partition(".")
        if package != "tpu_dist":
            return None
        first = rest.split(".")[0]
        return first if first in FOLDERS else FACE


# What is loaded with the first tensor on the device, which needs JAX, and with the rendezvous of
# several hosts, which needs gRPC: these may be at their top.
LATE = ("runtime/operators", "launch/service")


def files_of(floor: str) -> list[Path]:
    found = (ROOT / floor).glob("*.py") if floor == FACE else (ROOT / floor).rglob("*.py")
    return sorted(found)


def is_late(file: str) -> bool:
    return file.startswith(tuple(f"{folder}/" for folder in LATE))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_of(path: Path) -> Iterator[Import]:
    tree = parsed(path)
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_for_checkers(node)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        early = id(node) not in inside
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name_of(path), alias.name, early)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively"
            assert node.module is not None
            for alias in node.names:
                yield Import(name_of(path), f"{node.module}.{alias.name}", early)


def is_for_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def every_import() -> Iterator[Import]:
    for floor in MAY_IMPORT:
        for path in files_of(floor):
            yield from imports_of(path)


@pytest.mark.parametrize("floor", MAY_IMPORT)
def test_a_floor_imports_only_what_is_below_it(floor: str) -> None:
    assert files_of(floor), "the floor has no files: is the test looking in the right place?"
    too_high = [
        f"{found.file} imports {found.module}"
        for path in files_of(floor)
        for found in imports_of(path)
        if found.part is not None and found.part not in MAY_IMPORT[floor]
    ]
    assert not too_high


@pytest.mark.parametrize("floor", ["topology", "launch"])
def test_topology_and_launch_are_free_of_jax(floor: str) -> None:
    assert not [i for p in files_of(floor) for i in imports_of(p) if i.package in {"jax", "jaxlib"}]


def test_topology_is_free_of_torch() -> None:
    assert not [i for p in files_of("topology") for i in imports_of(p) if i.package == "torch"]


def test_no_floor_is_imported_by_its_bare_name() -> None:
    assert not [found for found in every_import() if found.package in FOLDERS]


def test_jax_and_grpc_are_imported_only_where_they_are_used() -> None:
    late = {"jax", "jaxlib", "grpc", "grpc_health", "google", "libtpu"}
    found = [found for found in every_import() if found.early and found.package in late]
    assert not [f for f in found if not is_late(f.file)]


@pytest.mark.parametrize("folder", LATE)
def test_what_is_loaded_late_is_imported_only_where_it_is_used(folder: str) -> None:
    module = "tpu_dist." + folder.replace("/", ".")
    early = [f for f in every_import() if f.early and f.module.startswith(module)]
    assert not [f for f in early if not is_late(f.file)]


@pytest.mark.parametrize("file", ["__init__.py", "_autoload.py"])
def test_what_torch_autoloads_imports_nothing_but_itself(file: str) -> None:
    for found in imports_of(ROOT / FACE / file):
        if found.early:
            ours = found.module.startswith(("tpu_dist._autoload", "tpu_dist.errors"))
            assert ours or found.package in sys.stdlib_module_names, found


@pytest.mark.parametrize("floor", FOLDERS)
def test_a_folder_refuses_to_be_imported_by_its_bare_name(floor: str) -> None:
    spec = importlib.util.spec_from_file_location(floor, ROOT / floor / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(ImportError, match=f"tpu_dist.{floor}"):
        spec.loader.exec_module(module)


@pytest.mark.parametrize("floor", FOLDERS)
def test_a_folder_is_a_relative_link_inside_the_package(floor: str) -> None:
    link = ROOT / FACE / floor
    assert link.is_symlink() and link.readlink() == Path("..") / floor


def test_the_environment_is_read_at_the_edges_only() -> None:
    readers = set()
    for floor in MAY_IMPORT:
        for path in files_of(floor):
            for node in ast.walk(parsed(path)):
                named = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
                taken = isinstance(node, ast.ImportFrom) and node.module == "os"
                if named and ast.unparse(node).startswith("os."):
                    readers.add(name_of(path))
                elif taken and {a.name for a in node.names} & {"environ", "getenv", "environb"}:
                    readers.add(name_of(path))
    assert readers == READERS_OF_THE_ENVIRONMENT


def test_every_package_folder_says_that_it_is_typed() -> None:
    for floor in MAY_IMPORT:
        assert (ROOT / floor / "py.typed").exists() or (ROOT / FACE / "py.typed").exists(), floor


def test_importing_every_module_starts_no_jax_and_no_thread() -> None:
    modules = [
        ".".join(
            ("tpu_dist", *(() if floor == FACE else path.relative_to(ROOT).parts[:-1]), path.stem)
        )
        for floor in ("topology", "runtime", "collectives", FACE)
        for path in files_of(floor)
        if path.stem != "__init__" and not is_late(name_of(path))
    ]
    code = (
        "import sys, threading, importlib, logging, torch\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print('jax' in sys.modules, 'grpc' in sys.modules, threading.active_count(),"
        " logging.getLogger('tpu_dist').handlers)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "1", "[]"]
