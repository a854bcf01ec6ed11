"""An image that web projects are developed in: git, Node.js with npm, the editor for the browser, and packages for `npm ci` without a network.

Made from what this machine has (see `git_image.py`) and what `browser_apps.py` installs; the packages are those of a project's lock file.
"""

import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

import browser_apps
import git_image
from archives import directory, file, link

NAME = "web-base:demo"
ARCHIVES = Path(__file__).parent / ".cache"
EDITOR = "opt/code-server"
CACHE = "var/cache/npm"
# Applications of other tests, and what only a debugger of the editor reads.
LEFT_OUT = ("@novnc", "vite", "rollup", "@rollup", "esbuild", "@esbuild")
CODE_SERVER = f"""#!/bin/sh
exec /usr/local/bin/node /{EDITOR}/node_modules/code-server/out/node/entry.js "$@"
"""
NPMRC = f"cache=/{CACHE}\noffline=true\naudit=false\nfund=false\nupdate-notifier=false\n"
SETTINGS = {
    # The terminal's text is in the page then and not only in a picture.
    "terminal.integrated.gpuAcceleration": "off",
    "terminal.integrated.defaultProfile.linux": "bash",
    "workbench.startupEditor": "none",
    "files.autoSave": "off",
    "security.workspace.trust.enabled": False,
}


def provide(project):
    """The image in a file as `docker save` writes it, made if it is not there; `project` is the folder with the lock file."""
    apps = browser_apps.provide()
    files = (browser_apps.STAMP, Path(project) / "package-lock.json", Path(git_image.__file__), Path(__file__))
    key = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    archive = ARCHIVES / f"web-base-{key}.tar"
    if not archive.exists():
        ARCHIVES.mkdir(exist_ok=True)
        for older in ARCHIVES.glob("web-base-*.tar"):
            older.unlink()
        # Written beside and renamed: what is half made is made again.
        with tempfile.TemporaryDirectory(dir=ARCHIVES) as scratch:
            _write(Path(scratch) / "image.tar", apps, project)
            os.rename(Path(scratch) / "image.tar", archive)
    return archive


def _write(archive, apps, project):
    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        scratch = Path(scratch)
        tools = scratch / "tools.tar"
        with tarfile.open(tools, "w", format=tarfile.PAX_FORMAT) as out:
            _tools(out, apps, _packages(project, scratch))
        layers = [*git_image.layers(), tools.read_bytes()]
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in layers]},
        }
        names = [f"{number}/layer.tar" for number in range(len(layers))]
        manifest = [{"Config": "config.json", "RepoTags": [NAME], "Layers": names}]
        texts = {"manifest.json": json.dumps(manifest).encode(), "config.json": json.dumps(config).encode()}
        with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as out:
            for name, data in (texts | dict(zip(names, layers, strict=True))).items():
                _add(out, file(name, data))


def _packages(project, scratch):
    """npm's cache with the packages of a lock file, got in the way in which everybody gets them."""
    copy, cache = scratch / "project", scratch / "cache"
    copy.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(Path(project) / name, copy / name)
    browser_apps.run("npm", "ci", *browser_apps.NPM_FLAGS, "--include=dev", "--cache", str(cache), folder=copy)
    shutil.rmtree(cache / "_logs", ignore_errors=True)
    return cache


def _tools(out, apps, packages):
    node = os.path.realpath(shutil.which("node"))
    npm = Path(os.path.realpath(shutil.which("npm"))).parent.parent
    folders = ["usr", "usr/bin", "usr/local", "usr/local/bin", "usr/local/etc", "usr/local/lib", "usr/local/lib/node_modules"]
    folders += ["opt", EDITOR, f"{EDITOR}/node_modules", "var", "var/cache"]
    folders += [f"root/{'/'.join(parts)}" for parts in ((".local",), (".local", "share"), (".local", "share", "code-server"))]
    user = "root/.local/share/code-server/User"
    entries = [directory(path) for path in (*folders, user)]
    entries += [
        file("usr/local/bin/code-server", CODE_SERVER.encode(), 0o755),
        file("usr/local/etc/npmrc", NPMRC.encode()),
        file(f"{user}/settings.json", json.dumps(SETTINGS).encode()),
        link("usr/bin/env", "../../bin/busybox"),
        link("usr/local/bin/npm", "../lib/node_modules/npm/bin/npm-cli.js"),
        link("usr/local/bin/npx", "../lib/node_modules/npm/bin/npx-cli.js"),
    ]
    for entry in entries:
        _add(out, entry)
    made = set(folders)
    # Parts of packages that are native, those of the dev server included, which brings the same.
    native = [str(path) for path in (apps / "node_modules").rglob("*.node")]
    for library in sorted(set().union(*map(git_image.libraries, [node, *native]))):
        for parent in reversed(Path(library).relative_to("/").parents[:-1]):
            if str(parent) not in made:
                made.add(str(parent))
                _add(out, directory(str(parent)))
        _add(out, file(library[1:], Path(library).read_bytes(), 0o755))
    out.add(node, "usr/local/bin/node", filter=_of_root)
    out.add(npm, "usr/local/lib/node_modules/npm", filter=_of_root)
    out.add(packages, CACHE, filter=_of_root)
    for package in sorted((apps / "node_modules").iterdir()):
        if package.name not in LEFT_OUT:
            out.add(package, f"{EDITOR}/node_modules/{package.name}", filter=_of_root)


def _add(out, made):
    entry, data = made
    out.addfile(entry, io.BytesIO(data))


def _of_root(entry):
    """Of the editor, source maps stay out, and so does the extension for TypeScript, whose compiler comes from elsewhere."""
    if entry.name.startswith(EDITOR) and (entry.name.endswith(".map") or entry.name.endswith("/extensions/typescript-language-features")):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
