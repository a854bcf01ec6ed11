"""The demonstration of a repository's way to an editor, an SSH session and a dev server does what it tells."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sandglass

SCRIPT = Path(__file__).with_name("demo_workspace.py")
PNG = b"\x89PNG\r\n\x1a\n"
PICTURES = ("1-dev-server", "2-editor", "3-dev-server-after-the-editor", "4-dev-server-after-ssh")
TEXTS = ("up-first", "up-second", "ps", "terminal", "web-log")
# Against hanging only.
PATIENCE = 1500


def test_the_demonstration_ends_well_and_leaves_pictures(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--out", tmp_path], capture_output=True, text=True, timeout=PATIENCE, check=False)
    told = done.stdout + done.stderr
    print(told)
    assert done.returncode == 0, told
    for name in PICTURES:
        picture = (tmp_path / f"{name}.png").read_bytes()
        # What a page without anything in it is smaller than.
        assert picture.startswith(PNG) and len(picture) > 8_000, f"{name}: {len(picture)} bytes\n{told}"
    texts = {name: (tmp_path / f"{name}.txt").read_text() for name in TEXTS}
    assert "image       built" in texts["up-first"] and "image       cached" in texts["up-second"], texts
    # What lets people in is in nothing that is kept.
    assert not any("sandglass-access=" in text.replace("sandglass-access=…", "") for text in texts.values()), texts
