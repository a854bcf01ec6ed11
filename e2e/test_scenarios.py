"""The page that says which test shows what names tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent
# Files of tests, and the names that follow them: `a.py`, `b.py`: `one`, `two`.
FILE = r"`[\w/]+\.(?:py|rs)`"
NAMED = re.compile(rf"({FILE}(?:, {FILE})*): (`\w+`(?:, `\w+`)*)")


def words(text):
    return re.findall(r"`([^`]+)`", text)


def missing():
    """What the page names and is not there, and how many names it has."""
    text, found, absent = (HERE / "scenarios.md").read_text(), 0, []
    for files, names in NAMED.findall(text):
        for file in words(files):
            path = HERE / file if file.endswith(".py") else HERE.parent / "crates" / file
            code = path.read_text() if path.exists() else ""
            for name in words(names):
                found += 1
                if not re.search(rf"\b(?:def|fn) {name}\b", code):
                    absent.append(f"{file}: {name}")
    return absent, found


def test_what_the_scenarios_name_is_there():
    absent, found = missing()
    assert not absent, absent
    assert found > 100
