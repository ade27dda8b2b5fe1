"""Rules of the source that no linter knows."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tie.daemon.log import FIELDS

MAX_LINES = 300
# A longer module has two ideas in it. Each exception has its reason.
LONGER = {"tie/cli/bootstrap.py": "one file, since nothing can be imported before it has run"}
# Words that name what a request carries. None may name a log field.
USER_DATA = re.compile(
    r"prompt|text|answer|message|content|token|key(?!_id$)|dek|secret|grammar|schema|regex|stop|image|body|logprob|user"
)
# What would tie the tree to one developer's machine or one package index. The options named --no-emit-… of the lock
# resolver are there to keep such names out.
MACHINE = re.compile(
    r"(?<![\w/])(?:/home|/root|/Users)/\w|/tmp/w/|\.pyenv|(?<!emit-)(?:extra-)?index-url|(?<!emit-)trusted-host"
    r"|pythonhosted\.org|pypi\.org/simple|artifactory|jfrog"
)
NOTES = re.compile(r"(?:FIELD|ENGINE|PRIVACY)-NOTES")
# What an app may not load: it is started for each request.
APP_BUDGET = ("torch", "transformers", "pandas", "scipy", "pydantic", "rich", "h2", "httpx", "grpc_tools")


def test_no_module_outgrows_one_idea(modules, root):
    sizes = {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in modules}
    assert {name: size for name, size in sizes.items() if size > MAX_LINES and name not in LONGER} == {}
    assert {name for name in LONGER if sizes.get(name, 0) <= MAX_LINES} == set(), "exceptions that are none any more"


def _calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def test_only_the_command_line_prints_and_nothing_bypasses_the_log(modules, root):
    bypasses = []
    for path in modules:
        name = str(path.relative_to(root))
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                bypasses += [f"{name}:{node.lineno} imports {it}" for it in names if it in ("logging", "traceback")]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                bypasses += [f"{name}:{node.lineno} prints"] if not name.startswith("tie/cli/") else []
    assert bypasses == []


def test_no_python_is_started_that_imports_from_where_it_was_started(modules, root):
    # With `-m` alone the current directory comes first: somebody's `http.py` would end the runtime, or run in it.
    wrong = []
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            items = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
            words = [item.value if isinstance(item, ast.Constant) else None for item in items]
            if "-m" in words and "-P" not in words[: words.index("-m")]:
                wrong.append(f"{path.relative_to(root)}:{node.lineno}")
    for path in root.glob("tie/**/*.conf"):
        wrong += [str(path.relative_to(root))] * bool(re.search(r"(?<!-P) -m ", path.read_text()))
    assert wrong == []


def test_log_calls_have_static_names_and_allow_listed_fields(modules, root):
    wrong = []
    for path in modules:
        for call in _calls(path):
            function = call.func
            if not (
                isinstance(function, ast.Attribute)
                and function.attr in ("event", "failure")
                and isinstance(function.value, ast.Name)
                and function.value.id == "log"
            ):
                continue
            where = f"{path.relative_to(root)}:{call.lineno}"
            if not (call.args and isinstance(call.args[0], ast.Constant)):
                wrong.append(f"{where}: the event's name is not written out")
            wrong += [f"{where}: field {it.arg}" for it in call.keywords if it.arg is None or it.arg not in FIELDS]
            wrong += [
                f"{where}: text put together for {it.arg}"
                for it in call.keywords
                if isinstance(it.value, ast.JoinedStr)
            ]
    assert wrong == []


def test_no_log_field_is_named_after_what_a_request_carries():
    assert [field for field in FIELDS if USER_DATA.search(field)] == []


def test_nothing_names_a_developers_machine_or_a_package_index(shipped, root):
    here = Path(__file__).resolve()
    found = []
    for path in shipped:
        if path.resolve() == here or path.name == "requirements.lock":
            continue
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(root)}:{number}: {line.strip()[:80]}"
            for number, line in enumerate(lines, 1)
            if MACHINE.search(line) or NOTES.search(line)
        ]
    assert found == []


def test_every_dependency_says_why_it_is_there(root):
    lines = (root / "pyproject.toml").read_text().splitlines()
    start, end = lines.index("dependencies = ["), lines.index("[project.scripts]")
    reasonless = []
    for before, line in zip(lines[start - 1 : end - 1], lines[start:end], strict=True):
        if re.search(r'"[\w.-]+(?:\[\w+\])?[<>=~!]*[^"]*"', line) and "#" not in line and not before.startswith("#"):
            reasonless.append(line.strip())
    # Type stubs and the linters themselves need none.
    names = re.compile(r'^("(?:[\w-]*stubs|types-[\w-]+|mypy|ruff|pytest[\w-]*|grpc-stubs)",? ?)+$')
    assert [line for line in reasonless if not names.match(line)] == []


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=~!;]", requirement, maxsplit=1)[0]).lower()


def test_the_lock_has_every_dependency_with_its_hashes(root):
    path = root / "requirements.lock"
    if not path.exists():
        pytest.skip("no requirements.lock")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [line for extra in ("node", "test") for line in extras[extra]]
    entries = re.split(r"\n(?=\S)", path.read_text())
    locked = {_name(entry) for entry in entries if not entry.startswith("#") and "--hash=sha256:" in entry}
    assert {_name(line) for line in wanted} - locked == set(), "run ./run lock"
    assert [entry for entry in entries if entry.strip() and not entry.startswith("#") and "--hash" not in entry] == []


def test_ci_runs_what_everybody_runs(root):
    assert re.search(r"(?m)^\./run test( |$)", (root / ".ci/run").read_text())
    assert (root / ".ci/run").stat().st_mode & 0o111
    assert (root / "run").stat().st_mode & 0o111


def test_the_app_loads_nothing_that_a_request_has_to_wait_for(root):
    program = f"import sys, tie.app.main; print([name for name in {APP_BUDGET!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["click", "grpc", "torch", "numpy"])
def test_the_base_of_the_suite_imports_without(package, root):
    # The device's side and the command line need the base dependencies only; click is the command line's own.
    if package == "click":
        program = "import sys, tie.daemon.config, kvxfer; assert 'click' not in sys.modules"
    else:
        program = f"import sys; sys.modules[{package!r}] = None; import tie.daemon.config, tie.daemon.log, tie.envelope"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
