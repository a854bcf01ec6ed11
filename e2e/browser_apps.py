"""Web applications that people run in sandboxes, at exact versions, in a folder that sandboxes mount: `.apps`.

From the npm registry by lock files (ours for the applications, code-server's own for the editor in it) and from PyPI; parts of
code-server and a Node.js for images without one are made here, since their installers would fetch them from elsewhere. Made
once for each state of what it is made from: delete `.apps` to make it again.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels_image import install

HERE = Path(__file__).parent
SOURCES = HERE / "apps"
APPS = HERE / ".apps"
REQUIREMENTS = HERE / "requirements-jupyterlab.txt"
STAMP = APPS / "installed.json"
NPM_FLAGS = ("--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund", "--prefer-offline")
# What code-server's own lock file has not got, so that `npm ci` refuses it.
UNLOCKED = "tslib@2.8.1"
# What the C library's package has; an image brings its own.
OF_EVERY_SYSTEM = re.compile(r"/(ld-linux|lib(c|m|dl|rt|pthread)\.so)")


def provide():
    """The folder with everything, made if it is not there: `node`, `node_modules`, `jupyterlab` and our own files."""
    wanted = {
        "files": hashlib.sha256(b"".join(path.read_bytes() for path in (*sources(), REQUIREMENTS, Path(__file__)))).hexdigest(),
        "node": output("node", "--version"),
        "python": system_python(),
    }
    if STAMP.exists() and json.loads(STAMP.read_text()) == wanted:
        return APPS
    shutil.rmtree(APPS, ignore_errors=True)
    shutil.copytree(SOURCES, APPS)
    with ThreadPoolExecutor() as pool:
        # Whoever failed first is who is heard.
        for part in [pool.submit(part) for part in (node_modules, node, jupyterlab)]:
            part.result()
    # Written last: what is half made is made again.
    STAMP.write_text(json.dumps(wanted))
    return APPS


def sources():
    return sorted(path for path in SOURCES.rglob("*") if path.is_file())


def output(*command):
    return run(*command).strip()


def run(*command, folder=None, **environment):
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def system_python():
    """The version of the Python that sandboxes see, whatever Python runs the tests."""
    return output("/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")


def node_modules():
    run("npm", "ci", *NPM_FLAGS, folder=APPS)
    editor = APPS / "node_modules/code-server/lib/vscode"
    run("npm", "install", *NPM_FLAGS, "--no-save", UNLOCKED, folder=editor)
    # Natively and without any download: with the headers of the installed Node.js.
    native = {"npm_config_nodedir": str(Path(shutil.which("node")).resolve().parent.parent)}
    # node-pty's own script would fetch the builder again, which npm brings along.
    commands = [("npm", "run", "node-gyp", "--", "rebuild", "-C", str(editor / "node_modules" / name)) for name in ("node-pty", "@vscode/spdlog")]
    commands.append(("npm", "rebuild", "--foreground-scripts", "--build-from-source", "argon2"))
    with ThreadPoolExecutor() as pool:
        for made in [pool.submit(run, *command, folder=APPS, **native) for command in commands]:
            made.result()


def node():
    """The host's Node.js with its libraries, for images of the same or a newer C library."""
    program, folder = Path(shutil.which("node")).resolve(), APPS / "node"
    folder.mkdir()
    shutil.copy(program, folder / "node")
    for library in re.findall(r"=> (/\S+)", output("ldd", str(program))):
        if not OF_EVERY_SYSTEM.search(library):
            shutil.copy(Path(library).resolve(), folder / Path(library).name)


def jupyterlab():
    install(APPS / "jupyterlab", REQUIREMENTS, system_python())


if __name__ == "__main__":
    print(provide())
