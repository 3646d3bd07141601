"""What shares servers stays in one process of tests, and what does not is free."""

from __future__ import annotations

import pytest
from two_processes import ROOT, shared_by


@pytest.mark.parametrize(
    ("file", "unit"),
    [
        ("test/serving/test_outputs.py", "servers"),
        ("test/serving/test_follows_traffic.py", "servers"),
        ("test/serving/test_page.py", "shown"),
        ("test/serving/test_tiers.py", "test/serving/test_tiers.py"),
        ("test/weights/test_engines.py", "engines"),
        ("test/kv/test_kv_pool.py", "engines"),
        ("test/policy/test_goodput.py", "test/policy/test_goodput.py"),
    ],
)
def test_files_are_together_that_share(file: str, unit: str) -> None:
    assert shared_by(file) == unit


def test_no_server_of_the_session_is_started_twice() -> None:
    """Each fixture of the session in test/serving/conftest.py is used by the tests of one unit."""
    fixtures = ("ours", "stock", "shown")
    text = (ROOT / "test/serving/conftest.py").read_text()
    assert text.count('scope="session"') == len(fixtures)
    users: dict[str, set[str]] = {name: set() for name in fixtures}
    for file in (ROOT / "test/serving").glob("test_*.py"):
        for name in fixtures:
            if f"{name}: " in file.read_text():
                users[name].add(shared_by(str(file.relative_to(ROOT))))
    assert users == {"ours": {"servers"}, "stock": {"servers"}, "shown": {"shown"}}
