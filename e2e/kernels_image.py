"""An image that can run code: the Debian tree with Python, and the kernels of `requirements-kernels.txt` in it.

Made from wheels for the tree's Python, whatever Python makes it, and kept for the next run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import httpx

from docker_engine import CACHE, HERE, debian_tree

NAME = "sandglass-e2e/kernels:1"
REQUIREMENTS = HERE / "requirements-kernels.txt"
# Of the tree's distribution.
VERSION = "3.11"
PACKAGES = f"usr/local/lib/python{VERSION}/dist-packages"
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 37)))


def tree():
    """The path of the tree as an archive."""
    base = debian_tree()
    key = hashlib.sha256((base.name + REQUIREMENTS.read_text() + VERSION).encode()).hexdigest()[:12]
    path = CACHE / f"kernels-{key}.tar"
    if path.exists():
        return path
    fresh = path.with_suffix(f".{os.getpid()}.tar")
    try:
        with tempfile.TemporaryDirectory() as folder:
            install(folder, REQUIREMENTS, VERSION)
            shutil.copy(base, fresh)
            with tarfile.open(fresh, "a") as archive:
                there = {name.removeprefix("./") for name in archive.getnames()}
                for path_in, name in placed(Path(folder)):
                    # An engine refuses an archive that has something twice.
                    if name not in there:
                        archive.add(path_in, name, recursive=False, filter=by_root)
                        there.add(name)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)
    return path


def install(folder, requirements, version):
    """Wheels for a Python of that version, unpacked."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"),
        *("--target", str(folder), "--python-version", version, "--implementation", "cp", "--only-binary=:all:"),
        *platforms,
        *("--requirement", str(requirements)),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr[-2000:]}")


def placed(folder):
    """Files and folders with the names they get in the tree."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if inside.is_relative_to("share/jupyter"):
            yield path, f"usr/local/{inside}"
        elif inside.parts[0] != "share":
            yield path, f"{PACKAGES}/{inside}"


def by_root(entry):
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


def provide(server):
    """The image's name on this server, which has it from now on."""
    if server.runtime == "docker":
        server.stack.engine.bring(NAME, tree(), "ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "ENV LANG=C.UTF-8")
        return NAME
    with open(tree(), "rb") as archive, httpx.Client(base_url=server.url, timeout=600) as client:
        pieces = iter(lambda: archive.read(1 << 20), b"")
        headers = {"OPEN-SANDBOX-API-KEY": server.key}
        answer = client.post("/v1/images/import", params={"name": NAME}, headers=headers, content=pieces)
        assert answer.status_code == 200 and '"done"' in answer.text, answer.text[-500:]
    return NAME
