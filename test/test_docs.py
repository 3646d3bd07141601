"""What the documents say to type can be typed: files, modules, flags, paths, links and error codes exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from weights_engines import forkserver, in_child, said_by

from sglang_adapt import ctl
from sglang_adapt.core.slo_file import parse_slo_config

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "sglang_adapt"
sys.path.insert(0, str(ROOT / "scripts"))

import results_list  # noqa: E402

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOREIGN = {"pip", "uv", "docker", "kubectl", "apt"}
"""Programs whose commands are not ours to check further."""
STOCK_TOOLS = {"sglang_router.launch_router"}


def commands(document: Path) -> list[str]:
    """Each command of the blocks of shell, lines that go on joined."""
    found = []
    for block in re.findall(r"^ *```bash\n(.*?)^ *```", document.read_text(), re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.strip().startswith("#"):
                found.append(line.strip())
    return found


ALL = [(document.name, command) for document in DOCUMENTS for command in commands(document)]


@cache
def help_of(module: str) -> set[str]:
    """The flags that a module's --help tells of."""
    if (ROOT / module).exists():
        command = [sys.executable, str(ROOT / module), "--help"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT).stdout
    else:
        code, text = in_child(forkserver(), said_by, module, "--help")
        assert code == 0, text
    return set(re.findall(r"--[a-z][\w-]+", text))


@pytest.mark.parametrize(("document", "command"), ALL)
def test_a_command_can_be_typed(document: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    while "=" in words[0]:
        words = words[1:]
    if words[:2] == ["uv", "run"]:
        words = words[2:]
    program, *rest = words
    if program == "curl":
        check_curl(rest)
    elif program in ("python", "python3"):
        check_python(rest)
    elif program in ("pytest", "ruff", "mypy"):
        named = [word for word in rest if word.startswith(("test/", "python/"))]
        assert all((ROOT / word).exists() for word in named)
    else:
        assert program in FOREIGN, command
        named = [word for word in rest if word.startswith(("docker/", "./"))]
        assert all((ROOT / word).exists() for word in named), command


def check_python(rest: list[str]) -> None:
    if rest[0] == "-m":
        target, flags = rest[1], rest[2:]
        if target in STOCK_TOOLS and importlib.util.find_spec(target.split(".")[0]) is None:
            pytest.skip(f"{target} is not installed")
        assert importlib.util.find_spec(target) is not None, target
    else:
        target, flags = rest[0], rest[1:]
        assert (ROOT / target).exists(), target
    if "--" in flags:
        # What follows is for the servers that it starts.
        flags, others = flags[: flags.index("--")], flags[flags.index("--") + 1 :]
        unknown = {flag for flag in others if flag.startswith("--")} - help_of("sglang_adapt.launch_server")
        assert not unknown, unknown
    wanted = {flag.split("=")[0] for flag in flags if flag.startswith("--")}
    if target == "sglang_adapt.ctl":
        # Its flags belong to a command of its own.
        ctl.make_parser().parse_args(flags)
    elif wanted:
        assert wanted <= help_of(target), wanted - help_of(target)


def check_curl(rest: list[str]) -> None:
    """Its path is one that we or stock answer."""
    (url,) = [word for word in rest if word.startswith("http")]
    path = url.split("30000", 1)[1].split("?")[0]
    sources = "".join(file.read_text() for file in (PACKAGE / "front").glob("*.py"))
    assert f'"{path}"' in sources or path in ("/generate",), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_our_flags_exist(document: Path) -> None:
    known = help_of("sglang_adapt.launch_server")
    for flag in re.findall(r"--adapt-[a-z][a-z-]*[a-z]", document.read_text()):
        assert flag in known, flag


def test_each_error_code_is_explained_and_no_other() -> None:
    sources = "".join(
        file.read_text() for room in ("front", "router", "core") for file in (PACKAGE / room).glob("*.py")
    )
    codes = set(re.findall(r'(?:Refusal|refuse)\(\s*\d+,\s*"([a-z_]+)"', sources))
    codes |= set(re.findall(r'"code": "([a-z_]+)"', sources))
    codes |= set(re.findall(r'TermsError\(\s*"([a-z_]+)"', sources))
    told = re.findall(r"^\| (\d+) \| `(\w+)` \|", (ROOT / "docs" / "operating.md").read_text(), re.M)
    assert len(codes) > 15
    assert {code for _, code in told} == codes
    for status, code in told:
        terms = status == "400" and re.search(rf'TermsError\(\s*"{code}"', sources)
        assert terms or re.search(rf'{status},\s*(\{{\s*"code": )?"{code}"', sources), (status, code)


def test_files_that_are_named_are_there() -> None:
    """By their path from wherever the text is about."""
    folders = ("python", "test", "docs", "docker", "benchmark", "scripts", "sgl-kernel-ext")
    files = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.*")]
    named = set()
    for document in DOCUMENTS:
        # The log stays as it was written.
        if document.name != "log.md":
            named |= {(document.name, name) for name in re.findall(r"`([\w./-]+\.py)`", document.read_text())}
    assert len(named) > 60
    gone = {(document, name) for document, name in named if not any(file.endswith(f"/{name}") for file in files)}
    assert gone == set()


def test_the_file_of_tiers_in_the_documents_is_read() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "tiers.md").read_text(), re.S | re.M)
    assert [tier.name for tier in parse_slo_config(text, "tiers.md").tiers] == ["strict", "loose", "nightly"]


METRIC = re.compile(r"`(?:sglang_adapt)?:?([a-z][a-z_]*_(?:total|seconds|ratio))(?:\{([\w,]*)\})?`")
"""In the text of a document, with the labels if they are named."""


def test_metrics_that_are_named_are_in_their_table() -> None:
    """A server is asked for the table's own (test_metrics_shown.py)."""
    table = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| ([\w, ]*) ?\|", table, re.M)
    labels = {name: set(said.replace(",", " ").split()) for name, said in rows}
    named = [(document.name, *found) for document in DOCUMENTS for found in METRIC.findall(document.read_text())]
    assert len(named) > 30
    for document, name, said in named:
        # Of the log, which stays as it was written.
        if document != "log.md":
            assert name in labels, (document, name)
            assert set(filter(None, said.split(","))) <= labels[name], (document, name, said)


def test_the_list_of_results_is_that_of_the_files() -> None:
    assert results_list.listed() in results_list.PAGE.read_text(), "run scripts/results_list.py"
