"""The house rules: sizes, words, broad excepts, and docs that tell the truth."""

from __future__ import annotations

import ast
import importlib
import itertools
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SRC = ROOT / "src" / "stepwell"
SOURCES = sorted(SRC.rglob("*.py"))
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))

MAX_FILE, MAX_FUNCTION, MAX_CLASS, MAX_PARAMETERS = 450, 50, 250, 6
BROAD_HOMES = {"base/threads.py", "move/mover.py", "move/copy.py"}


def relative(path: pathlib.Path) -> str:
    return path.relative_to(SRC).as_posix()


def trees() -> Iterator[tuple[pathlib.Path, ast.Module]]:
    for path in SOURCES:
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def code_lines(path: pathlib.Path, node: ast.AST) -> int:
    """Lines of a definition that hold code: no docstrings, comments or empty lines."""
    lines = path.read_text(encoding="utf-8").splitlines()[node.lineno - 1 : node.end_lineno]
    skipped = set()
    for inner in ast.walk(node):
        body = getattr(inner, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            text = body[0].value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                skipped.update(range(text.lineno, text.end_lineno + 1))
    return sum(
        1
        for number, line in enumerate(lines, node.lineno)
        if line.strip() and not line.strip().startswith("#") and number not in skipped
    )


def test_files_functions_and_classes_keep_their_size() -> None:
    too_large = []
    for path, tree in trees():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE:
            too_large.append(f"{relative(path)}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
                count -= bool(given.args) and given.args[0].arg in ("self", "cls")
                if count > MAX_PARAMETERS:
                    too_large.append(f"{relative(path)}: {node.name} has {count} parameters")
                if code_lines(path, node) > MAX_FUNCTION:
                    too_large.append(f"{relative(path)}: {node.name} is too long")
            if isinstance(node, ast.ClassDef) and code_lines(path, node) > MAX_CLASS:
                too_large.append(f"{relative(path)}: {node.name} is too long")
    assert not too_large


def test_every_module_says_what_it_owns() -> None:
    silent = [relative(path) for path, tree in trees() if not ast.get_docstring(tree)]
    assert not silent


def test_broad_excepts_stand_in_their_homes_only() -> None:
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = any(
                one is None or getattr(one, "id", "") in ("Exception", "BaseException")
                for one in caught
            )
            if broad and relative(path) not in BROAD_HOMES:
                found.append(f"{relative(path)}:{node.lineno}")
    assert not found


def words_of(identifier: str) -> set[str]:
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", identifier)
    return {word.lower() for word in re.split(r"[_\W]+", spaced) if word}


def identifiers(path: pathlib.Path) -> set[str]:
    """Names that a file defines or binds; names of other libraries are theirs."""
    names: set[str] = set(path.relative_to(SRC).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def forbidden_words() -> set[str]:
    lines = (ROOT / "tests" / "house" / "words.txt").read_text(encoding="utf-8").splitlines()
    return {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}


def test_one_word_for_each_thing() -> None:
    forbidden = forbidden_words()
    assert len(forbidden) > 20
    allowed = {
        "TieredStore",
        "StoreModel",
        "MakeStore",
        "store",
    }  # the noun; to store is `put`, `keep` or `seal`
    found = [
        f"{relative(path)}: {name}"
        for path in SOURCES
        if not relative(path).startswith("adapters/")
        for name in identifiers(path)
        if words_of(name) & forbidden and name not in allowed
    ]
    assert not found


def test_pool_is_a_word_for_page_pools_only() -> None:
    allowed = {"pool", "_pool", "PagePool", "DictPool", "PoolSettings"}
    found = [
        f"{relative(path)}: {name}"
        for path in SOURCES
        for name in identifiers(path)
        if "pool" in words_of(name) and name not in allowed
    ]
    assert not found


def test_raw_addresses_stay_where_memory_is_copied() -> None:
    """Everybody else has frames, buffers and views, which are checked when they are used."""
    homes = {"memory", "tiers", "adapters", "move", "testing"}
    found = [
        f"{relative(path)}:{node.lineno}"
        for path, tree in trees()
        if relative(path).split("/")[0] not in homes
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("address", "addresses")
    ]
    assert not found


def test_nothing_is_left_unfinished() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
    found = [relative(path) for path in SOURCES if marks.search(path.read_text(encoding="utf-8"))]
    assert not found


def tracked() -> list[pathlib.Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = [ROOT / name.decode() for name in done.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_path_of_one_machine_and_no_registry_host_is_named() -> None:
    machine = re.compile(r"(?<![\w./-])/(work|root|home/\w+)/")
    hosts = re.compile(
        "|".join(("pypi" + r"\.org", "python" + "hosted", "deb" + r"\.debian", "npm" + "js"))
    )
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path != pathlib.Path(__file__) and (machine.search(text) or hosts.search(text)):
            found.append(str(path.relative_to(ROOT)))
    assert not found


def backticked(path: pathlib.Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for found in re.finditer(r"`([^`\n]+)`", text):
        yield found.group(1)


def test_docs_name_paths_that_exist() -> None:
    missing = []
    homes = (ROOT, SRC, ROOT / "src", ROOT / "benchmarks")
    for path in DOCS:
        text = path.read_text(encoding="utf-8")
        missing += [
            f"{path.name}: ({target})"
            for target in re.findall(r"\]\(([^)#]+)\)", text)
            if "://" not in target and not (path.parent / target).exists()
        ]
        for name in backticked(path):
            looks = re.fullmatch(r"[\w./*-]+/[\w.*-]*|[\w-]+\.(py|md|toml|txt|json)", name)
            if not looks or name in MADE_OR_OUTSIDE:
                continue
            known = any(
                list(home.glob(name)) if "*" in name else (home / name).exists() for home in homes
            )
            # A file may be named without its folder where the text around says the folder.
            if not known and not ("/" not in name and list(ROOT.glob(f"**/{name}"))):
                missing.append(f"{path.name}: {name}")
    assert not missing


MADE_OR_OUTSIDE = {
    "site/",
    "benchmarks/out/latest.json",
    "adapters/",
    "stepwell.toml",
    "config.json",
    "native/",
}


def defined_names() -> set[str]:
    names: set[str] = set()
    for path in [*SOURCES, *TESTS, *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute | ast.arg):
                names.add(node.attr if isinstance(node, ast.Attribute) else node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def test_docs_name_symbols_that_exist() -> None:
    """`Class.member`, `CamelCase` and `stepwell.dotted.names` in docs resolve in the source."""
    names = defined_names()
    foreign = {"AttentionInterface", "DynamicCache", "ResourceWarning"}
    missing = []
    for path in DOCS:
        for text in backticked(path):
            if re.fullmatch(r"stepwell(\.\w+)+", text) and not text.endswith(".toml"):
                module, _, last = text.rpartition(".")
                try:
                    importlib.import_module(text)
                except ModuleNotFoundError:
                    if not hasattr(importlib.import_module(module), last):
                        missing.append(f"{path.name}: {text}")
            elif re.fullmatch(r"_?[A-Z]\w*[a-z]\w*(\.\w+)*", text):
                unknown = [part for part in text.split(".") if part not in names | foreign]
                if unknown:
                    missing.append(f"{path.name}: {text}")
    assert not missing


def fault_rows() -> dict[str, list[str]]:
    """Fault ids of docs/internals/faults.md with the tests that they name."""
    text = (ROOT / "docs" / "internals" / "faults.md").read_text(encoding="utf-8")
    rows = {}
    for line in text.splitlines():
        found = re.match(r"\| ([PAHFM]\d+) \|", line)
        if found:
            rows[found.group(1)] = re.findall(r"`(test_\w+)`", line)
    return rows


def test_every_fault_names_tests_that_exist() -> None:
    names = defined_names()
    rows = fault_rows()
    assert {f"P{number:02}" for number in range(1, 21)} <= set(rows)
    assert {f"A{number}" for number in range(1, 7)} <= set(rows)
    missing = [
        f"{fault}: {test}" for fault, tests in rows.items() for test in tests if test not in names
    ]
    assert not missing


def test_every_fault_id_in_a_test_is_explained() -> None:
    rows = fault_rows()
    used = set()
    for path in TESTS:
        text = path.read_text(encoding="utf-8")
        used |= set(re.findall(r"\b([FHM]\d+)\b", text))
        used |= {
            name.upper()
            for name in re.findall(
                r"_([pfam]\d+)(?=_)", " ".join(re.findall(r"def (test_\w+)", text))
            )
        }
    assert used
    assert not used - set(rows)


def test_every_mutant_names_a_test_that_exists() -> None:
    mutants = tomllib.loads(
        (ROOT / "tests" / "mutants" / "mutants.toml").read_text(encoding="utf-8")
    )
    assert len(mutants) >= 15
    names = defined_names()
    for name, mutant in mutants.items():
        file, _, test = mutant["test"].partition("::")
        assert (ROOT / file).is_file(), name
        assert test.partition("[")[0] in names, name


def loaded_by(statement: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_importing_stepwell_loads_nothing_heavy() -> None:
    modules = loaded_by("import stepwell")
    assert not modules & {"torch", "transformers", "numpy", "asyncio", "http"}


@pytest.mark.parametrize("name", ["PagePool", "Namespace", "Chain"])
def test_the_pool_is_used_without_torch(name: str) -> None:
    assert "torch" not in loaded_by(f"from stepwell import {name}")


def test_core_and_base_import_only_what_is_pure() -> None:
    """The standard library without I/O, threads, clocks and processes; core may have numpy too."""
    impure = {
        *(
            "asyncio",
            "io",
            "logging",
            "multiprocessing",
            "os",
            "pathlib",
            "random",
            "shutil",
            "signal",
        ),
        *("socket", "ssl", "subprocess", "tempfile", "threading", "time", "urllib"),
    }
    needs = {
        "base/settings.py": {"os", "pathlib"},
        "base/clock.py": {"time"},
        "base/threads.py": {"threading"},
        "base/call.py": {"threading"},
    }
    found = []
    for path, tree in trees():
        layer = relative(path).split("/")[0]
        if layer not in ("base", "core"):
            continue
        allowed = set(sys.stdlib_module_names) - impure | needs.get(relative(path), set())
        allowed |= {"stepwell", "numpy"} if layer == "core" else {"stepwell"}
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{relative(path)}: {n}" for n in names if n.split(".")[0] not in allowed]
    assert not found


def test_every_public_name_resolves() -> None:
    import stepwell

    for name in stepwell.__all__:
        assert getattr(stepwell, name) is not None
    assert set(stepwell._HOMES) | {"__version__"} == set(stepwell.__all__)
    with pytest.raises(AttributeError, match="Nothing"):
        _ = stepwell.Nothing


def test_constraints_pin_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
    for requirement in asked:
        name = re.match(r"[\w-]+", requirement).group(0)
        assert re.search(rf"^{name}==[\w.]+$", pinned, re.MULTILINE), name
