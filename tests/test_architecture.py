"""The rules that keep the tree readable: names, layers, no import circles, and a map
that is true.

A test is a rule. Its failure lists every fault in the tree, with file and line, and
says what to do instead.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from mutate import faults_of, read_mutations

ROOT = Path(__file__).parents[1]
MAP = ROOT / "ARCHITECTURE.md"
SOURCES = sorted(ROOT.glob("invrl/**/*.py"))
BENCHMARKS = sorted(ROOT.glob("benchmarks/**/*.py"))
PACKAGES = [path for path in SOURCES + BENCHMARKS if path.name == "__init__.py"]
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "stuff"}

# Imports run one way. The ground is what every package may import; `root` stands for
# the modules of `invrl/` itself. A section of settings (`config.py`) is a leaf that
# everybody may import too.
GROUND = {"root", "types", "user_code"}
MAY_IMPORT: dict[str, set[str]] = {
    "root": {"types"},
    "types": {"root"},
    "user_code": {"root", "types"},
    "host": set(),
    "algorithms": set(),
    "families": set(),
    "environments": {"host"},
    "store": {"host"},
    "weights": {"host", "families"},
    "engines": {"host", "weights", "families"},
    "train": {"host", "store", "weights", "algorithms", "families"},
    "buffer": {"host", "store", "algorithms"},
    "rollout": {"host", "store"},
    "gateway": {
        "host",
        "store",
        "engines.client.generation",
        "engines.client.routed_experts",
        "engines.client.sglang_client",
    },
    "observe": {"host", "store", "buffer", "gateway.types"},
    "datasets": {
        "store",
        "gateway.types",
        "gateway.dialects.chat",
        "gateway.dialects.joined_messages",
        "gateway.rendering.loading",
        "gateway.rendering.renderer",
    },
}
MAY_IMPORT["viewer"] = MAY_IMPORT["observe"] | {
    "observe",
    "rollout.dispatch.intervals",
    "gateway.turns.matching.forest",
    "gateway.turns.matching.fork_changes",
}
MAY_IMPORT["run"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = set(MAY_IMPORT)
MAY_IMPORT["contrib"] = {"algorithms"}
ROOMS: dict[str, tuple[str, ...]] = {
    "train": (
        "runtime",
        "cost",
        "batches",
        "parallel",
        "weights",
        "layers",
        "adapters",
        "model",
        "ranks",
        "critic",
        "step",
        "trainer",
    ),
    "engines": (
        "sglang_models",
        "inside_sglang",
        "client",
        "router",
        "launch",
        "fleet",
    ),
    "weights": ("tensors", "checksums", "transports", "loader", "update"),
    "host": ("output", "files", "network", "processes", "ray"),
    "algorithms": ("advantages", "policy_loss", "objectives"),
    "buffer": ("ledger", "samples", "groups", "process"),
    "rollout": ("tasks", "workers", "dispatch"),
    "gateway.rendering": ("tool_calls", "replies", "template_check"),
    "gateway.server": ("http", "workers", "routes", "processes"),
    "run": (
        "checkpoints",
        "settings",
        "hosts",
        "processes",
        "loop",
        "plan",
        "exports",
        "incarnations",
    ),
    "observe": ("samples", "sinks", "metrics", "status", "screen"),
}
"""The folders of these packages from the ground up: each may import those before it.
The files beside them are below all."""
MAX_NAMES = 20
"""Wanted are about fifteen; the widest folders have one file per command or type."""
NOT_COUNTED = {"__init__.py", "__pycache__"}
INSIDE_THE_GATEWAY: dict[str, set[str]] = {
    "types": set(),
    "config": set(),
    "keys": set(),
    "session_record": set(),
    "registry": {"keys", "session_record"},
    "rendering": {"types"},
    "dialects": {"types"},
    "turns": {"types", "session_record", "rendering"},
    "gate": {"session_record", "turns"},
    "sessions": {"types", "session_record", "registry", "turns"},
    "server": {
        "types",
        "keys",
        "session_record",
        "registry",
        "rendering",
        "dialects",
        "turns",
        "gate",
        "sessions",
    },
}
"""What a package of the gateway may import of the others, besides the settings."""
WITHOUT_EVENT_LOOP = ("types", "rendering", "dialects")
"""Packages of the gateway that are plain functions and values: they import no event
loop and no engine."""


def check(rule: str, faults: Iterable[str], fix: str) -> None:
    """Fail with the rule, its fix and every fault, if there is a fault."""
    lines = "".join(f"\n  {fault}" for fault in faults)
    if lines:
        pytest.fail(f"{rule}. Fix: {fix}.{lines}", pytrace=False)


def place(path: Path, line: int = 1) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def name_of(path: Path) -> str:
    """`invrl/train/config.py` -> `train.config`."""
    parts = path.relative_to(ROOT / "invrl").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def package_of(module: str) -> str:
    """`train.config` -> `train`; `errors` -> `root`."""
    package, _, rest = module.partition(".")
    if rest or (ROOT / "invrl" / package).is_dir():
        return package
    return "root"


MODULES = {name_of(path): path for path in SOURCES}
GATEWAY_SOURCES = [path for path in SOURCES if name_of(path).startswith("gateway.")]


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path), str(path))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@cache
def imported_modules(path: Path) -> list[tuple[str, int]]:
    """Our own modules that a file imports at run time, without `invrl.`, and the
    line."""
    for_types = {
        inner
        for node in nodes_of(path)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    modules = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, inner = name.partition(".")
            if package == "invrl" and node not in for_types:
                module = inner if inner in MODULES else inner.rpartition(".")[0]
                modules.append((module, node.lineno))
    return modules


def test_no_file_is_named_utils_helpers_or_common() -> None:
    faults = (
        f"{place(path)}: {name}"
        for path in SOURCES + BENCHMARKS
        for name in path.relative_to(ROOT).with_suffix("").parts
        if name in EMPTY_NAMES
    )
    check(
        "A name says what is inside",
        faults,
        "name the file or folder by the noun that it is about",
    )


def test_every_module_has_a_docstring() -> None:
    faults = (
        place(path)
        for path in SOURCES + BENCHMARKS
        if path not in PACKAGES and len(ast.get_docstring(tree_of(path)) or "") <= 20
    )
    check(
        "A module says what it is for",
        faults,
        "begin the file with a docstring: its role and its invariant",
    )


def test_every_package_has_a_docstring() -> None:
    faults = (
        place(path)
        for path in PACKAGES
        if len(ast.get_docstring(tree_of(path)) or "") <= 60
    )
    check(
        "A package says what lives in it",
        faults,
        "begin the file with a docstring of a sentence or more",
    )


def test_imports_are_absolute() -> None:
    faults = (
        place(path, node.lineno)
        for path in SOURCES + BENCHMARKS
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and node.level
    )
    check("Imports are absolute", faults, "import from invrl.<module>")


def test_the_product_imports_neither_benchmarks_nor_tests() -> None:
    def faults() -> Iterator[str]:
        others = {"benchmarks", "tests"} | {
            path.stem for path in ROOT.glob("tests/*.py")
        }
        for path in SOURCES:
            for node in nodes_of(path):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                for name in names:
                    if name.partition(".")[0] in others:
                        yield f"{place(path, node.lineno)}: imports {name}"

    fix = "move what both need into invrl/"
    check("The wheel has no benchmarks and no tests", faults(), fix)


def test_packages_import_only_what_they_may() -> None:
    def faults() -> Iterator[str]:
        for path in SOURCES:
            package = package_of(name_of(path))
            for target, line in imported_modules(path):
                is_settings = (
                    target.endswith(".config") and target != "run.settings.config"
                )
                if package_of(target) == package or is_settings or not target:
                    continue
                allowed = MAY_IMPORT.get(package, set())
                if package not in GROUND:
                    allowed = allowed | GROUND
                if not {package_of(target), target} & allowed:
                    yield f"{place(path, line)}: {package} imports {target}"

    fix = "pass the value in, or move what both need to a lower package; see MAY_IMPORT"
    check("Packages import downwards", faults(), fix)


def test_nothing_imports_contrib() -> None:
    """Not for types either: settings name it by import path, as they name user code."""

    def faults() -> Iterator[str]:
        for path in SOURCES:
            if package_of(name_of(path)) == "contrib":
                continue
            for node in nodes_of(path):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                for name in names:
                    if f"{name}.".startswith("invrl.contrib."):
                        yield f"{place(path, node.lineno)}: imports {name}"

    fix = "extend the Protocol in invrl/interfaces.py with what the plug-in needs"
    check("contrib is loaded as user code is", faults(), fix)


def test_contrib_does_not_import_torch_before_a_loss_is_computed() -> None:
    faults = (
        f"{place(path, node.lineno)}: {ast.unparse(node)}"
        for name, path in MODULES.items()
        if package_of(name) == "contrib"
        for node in tree_of(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and ast.unparse(node).split()[1].split(".")[0] == "torch"
    )
    fix = "import it for types, or inside the function"
    check("The driver loads contrib and holds no tensor", faults, fix)


def room_of(module: str, package: str) -> str:
    """`train.model.optimizer` -> `model`; `train.config` -> ""."""
    return module.removeprefix(f"{package}.").rpartition(".")[0]


@pytest.mark.parametrize("package", ROOMS)
def test_the_rooms_of_a_package_import_downwards(package: str) -> None:
    floors = {name: floor for floor, name in enumerate(("", *ROOMS[package]))}

    def faults() -> Iterator[str]:
        for name, path in MODULES.items():
            if not name.startswith(f"{package}.") or path.name == "__init__.py":
                continue
            room = room_of(name, package)
            if room not in floors:
                yield f"{place(path)}: {package}/{room}/ is not listed"
                continue
            for target, line in imported_modules(path):
                if not target.startswith(f"{package}."):
                    continue
                if floors.get(room_of(target, package), 99) > floors[room]:
                    yield f"{place(path, line)}: imports {target}, which is above it"

    fix = "move the definition to the lower of the two rooms; see ROOMS"
    check(f"The rooms of {package}/ import downwards", faults(), fix)


def test_a_folder_of_the_product_has_at_most_twenty_names() -> None:
    folders = {path.parent for path in SOURCES} - {ROOT / "invrl"}
    faults = (
        f"{place(folder)}: {len(names)} names"
        for folder in sorted(folders)
        for names in [{path.name for path in folder.glob("*")} - NOT_COUNTED]
        if len(names) > MAX_NAMES
    )
    check(
        f"A folder has at most {MAX_NAMES} names",
        faults,
        "make rooms by meaning; see ROOMS",
    )


def test_the_packages_of_the_gateway_import_downwards() -> None:
    def faults() -> Iterator[str]:
        for path in GATEWAY_SOURCES:
            package = name_of(path).split(".")[1]
            if package not in INSIDE_THE_GATEWAY:
                yield f"{place(path)}: gateway.{package} is not listed"
                continue
            allowed = INSIDE_THE_GATEWAY[package] | {package, "config"}
            for target, line in imported_modules(path):
                if (
                    target.startswith("gateway.")
                    and target.split(".")[1] not in allowed
                ):
                    yield f"{place(path, line)}: gateway.{package} imports {target}"

    fix = "pass the value in, or move what both need to a lower package; see INSIDE_THE_GATEWAY"
    check("The packages of the gateway import downwards", faults(), fix)


def test_dialects_and_rendering_have_no_event_loop() -> None:
    def faults() -> Iterator[str]:
        for path in GATEWAY_SOURCES:
            if name_of(path).split(".")[1] not in WITHOUT_EVENT_LOOP:
                continue
            for node in nodes_of(path):
                if isinstance(node, ast.AsyncFunctionDef | ast.Await):
                    yield f"{place(path, node.lineno)}: {type(node).__name__}"
                if isinstance(node, ast.Import) and any(
                    alias.name == "asyncio" for alias in node.names
                ):
                    yield f"{place(path, node.lineno)}: imports asyncio"
            for target, line in imported_modules(path):
                if package_of(target) not in GROUND | {"gateway"}:
                    yield f"{place(path, line)}: imports {target}"

    rule = (
        f"The gateway's {', '.join(WITHOUT_EVENT_LOOP)} are plain functions and values"
    )
    check(rule, faults(), "wait in gateway.server, and pass the value in")


def test_imports_have_no_circles() -> None:
    edges: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        at_top = {
            node.lineno
            for node in tree_of(path).body
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        targets = {target for target, line in imported_modules(path) if line in at_top}
        edges[name] = (targets & MODULES.keys()) - {name}
    circles: list[str] = []
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            circle = [*trail[trail.index(name) :], name]
            circles.append(
                " -> ".join(f"invrl.{module}".rstrip(".") for module in circle)
            )
        elif name not in done:
            for target in sorted(edges[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())
    check(
        "Modules import each other in no circle",
        circles,
        "move what both need to a module of its own",
    )


def test_files_named_in_the_architecture_prose_exist() -> None:
    faults = (
        f"{place(MAP, line)}: {name}"
        for line, text in enumerate(MAP.read_text().splitlines(), 1)
        for name in re.findall(
            r"`((?:invrl|benchmarks|tests|launch|docs)/[\w./]*)`", text
        )
        if not (ROOT / name).exists()
    )
    check(
        "ARCHITECTURE.md names files that exist",
        faults,
        "correct the name or the sentence",
    )


def is_defined(symbol: str, path: Path) -> bool:
    """Whether the file, or a file of the folder, defines a function, a class, a field
    or a variable of this name."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    definition = re.compile(
        rf"^\s*(?:(?:async )?def|class) {symbol}\b|^\s*{symbol}\b(?:: .*)?(?: = |$)",
        re.MULTILINE,
    )
    return any(file.exists() and definition.search(text_of(file)) for file in files)


def test_symbols_of_the_architecture_map_are_defined_in_the_named_files() -> None:
    text = MAP.read_text()
    faults = (
        f"{place(MAP, text.count(chr(10), 0, match.start()) + 1)}: {match[2]} defines no {match[1]}"
        for match in re.finditer(r"`(\w+)`[^`|;]* in `(invrl/[\w./]*)`", text)
        if not is_defined(match[1], ROOT / match[2])
    )
    check(
        "ARCHITECTURE.md names symbols where they are defined",
        faults,
        "correct the name or the sentence",
    )


def test_classes_and_methods_of_the_architecture_map_exist() -> None:
    bodies: dict[str, str] = {}
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                bodies[node.name] = bodies.get(node.name, "") + ast.unparse(node)

    def faults() -> Iterator[str]:
        for line, text in enumerate(MAP.read_text().splitlines(), 1):
            for name in re.findall(r"`([A-Z]\w*(?:\.\w+)?)`", text):
                class_name, _, member = name.partition(".")
                if class_name not in bodies or (
                    member and f"def {member}(" not in bodies[class_name]
                ):
                    yield f"{place(MAP, line)}: {name}"

    rule = "ARCHITECTURE.md names classes and methods that exist"
    check(rule, faults(), "correct the name or the sentence")


def test_no_file_names_a_registry_or_the_machine_it_was_written_on() -> None:
    """Package sources are the user's configuration; a path of one machine helps
    nobody."""
    hosts = r"pypi\.(org|python)|pythonhosted|registry\.npmjs|download\.pytorch|huggingface\.co"
    machine = r"/work/(main|scratch|shared)|/opt/(wheels|pypi)|/root/"
    pattern = re.compile(f"{hosts}|{machine}")
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    tracked = [ROOT / name for name in listing.splitlines()] or SOURCES
    faults = (
        f"{place(path, number)}: {line.strip()}"
        for path in tracked
        if path.is_file()
        and path != Path(__file__).resolve()
        and path.suffix in {".py", ".md", ".toml", ".sh", ".txt", ""}
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    )
    check(
        "No file names a registry or a path of one machine",
        faults,
        "leave it to the user's configuration",
    )


def test_test_file_names_are_unique() -> None:
    paths = list(ROOT.glob("tests/**/test_*.py"))
    names = Counter(path.name for path in paths)
    faults = (place(path) for path in paths if names[path.name] > 1)
    rule = "pytest imports test files by their names alone: two of one name end the whole suite"
    check(rule, faults, "rename one of them")


def test_no_test_file_is_imported_by_another() -> None:
    """The files of tests/integration and tests/e2e are not held to it yet."""
    test_files = list(ROOT.glob("tests/**/test_*.py"))
    names = {path.stem for path in test_files}

    def imported_names(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Import):
            return {part for alias in node.names for part in alias.name.split(".")}
        if isinstance(node, ast.ImportFrom):
            from_module = set((node.module or "").split("."))
            return from_module | {alias.name for alias in node.names}
        return set()

    faults = (
        f"{place(path, node.lineno)}: {name}"
        for path in sorted(ROOT.glob("tests/**/*.py"))
        if path.parent.name not in {"integration", "e2e"}
        for node in nodes_of(path)
        for name in sorted(imported_names(node) & names)
    )
    check(
        "A test file holds tests alone, and no other file imports it",
        faults,
        "move what both need to a module of tests/ that is named by its noun",
    )


def test_every_error_of_the_mutations_can_be_planted() -> None:
    rule = "The text of each mutation in tests/mutations.toml is once in its file"
    check(rule, faults_of(read_mutations()), "give its error the words of the new code")


def test_no_module_uses_a_star_import() -> None:
    faults = (
        place(path, node.lineno)
        for path in SOURCES + BENCHMARKS
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom)
        and any(alias.name == "*" for alias in node.names)
    )
    check("No wildcard in an import", faults, "import the names that are used")


def test_no_except_is_bare() -> None:
    faults = (
        place(path, node.lineno)
        for path in SOURCES + BENCHMARKS
        for node in nodes_of(path)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    )
    check("No bare except", faults, "name the exceptions that are expected")


def test_no_wait_loses_a_cancellation() -> None:
    """In Python 3.11 `asyncio.wait_for` returns its result in the place of a
    cancellation that comes together with it, and whoever has cancelled waits for ever.
    `asyncio.timeout` does not."""
    faults = (
        place(path, node.lineno)
        for path in SOURCES
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) == ("asyncio", "wait_for")
    )
    check("asyncio.wait_for can lose a cancellation", faults, "use asyncio.timeout")


def test_our_own_clients_ask_no_proxy() -> None:
    """httpx and urllib take a proxy from the environment, also for this machine."""
    of_httpx = {
        "httpx.Client",
        "httpx.AsyncClient",
        "httpx.AsyncHTTPTransport",
        "httpx.HTTPTransport",
    }
    of_httpx.add("anthropic.DefaultAsyncHttpxClient")
    of_urllib = {"urlopen", "build_opener"}
    faults = (
        f"{place(path, node.lineno)}: {ast.unparse(node.func)}"
        for path in SOURCES
        if name_of(path) != "host.network.direct_connections"
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        for keywords in [{keyword.arg for keyword in node.keywords}]
        if ast.unparse(node.func).rpartition(".")[2] in of_urllib
        or (
            ast.unparse(node.func) in of_httpx
            and not keywords & {"trust_env", "transport"}
        )
    )
    check("Our own clients ask no proxy", faults, "`direct_client`")


def test_text_names_its_encoding() -> None:
    """Without a name it is the locale's: a template with full-width characters became
    other tokens."""
    sources = [
        *SOURCES,
        *sorted(ROOT.glob("launch/**/*.py")),
        *sorted(ROOT.glob("rollout_fns/**/*.py")),
    ]
    faults = (
        f"{place(path, node.lineno)}: {ast.unparse(node)[:60]}"
        for path in sources
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and _makes_text(node)
        if "encoding" not in {keyword.arg for keyword in node.keywords}
    )
    check("Text names its encoding", faults, 'encoding="utf-8"')


def _makes_text(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the locale's encoding unless it names
    another."""
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    function = ast.unparse(call.func)
    name = function.rpartition(".")[2]
    # of subprocess
    if "True" in (options.get("text"), options.get("universal_newlines")):
        return True
    if name in {"read_text", "write_text", "FileHandler", "TextIOWrapper"}:
        return True
    modes = [
        argument.value
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    mode = options.get("mode", modes[-1] if modes else "")
    if name in {"NamedTemporaryFile", "TemporaryFile"}:
        return bool(mode) and "b" not in mode
    is_file = function in {"open", "os.fdopen", "gzip.open"} or (
        name == "open" and not call.args
    )
    if (
        name == "open"
        and isinstance(call.func, ast.Attribute)
        and mode
        and set(mode) <= set("+artwx")
    ):
        is_file = True
    return is_file and "b" not in mode
