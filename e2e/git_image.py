"""An image that repositories are built on: this machine's git, ssh client and bash with the libraries that they need, and busybox.

Smaller than a distribution's by far, and made without any network. Needs Debian's `git`, `openssh-client` and `busybox-static`.
"""

import os
import re
import subprocess
from functools import cache
from pathlib import Path

from archives import APPLETS, BUSYBOX, Image, directory, file, layer, link

NAME = "git-base:test"
PROGRAMS = ("/usr/bin/git", "/usr/bin/ssh", "/bin/bash", "/usr/lib/git-core/git-remote-http", "/usr/lib/git-core/git-submodule")
# Beside what other images have.
MORE = (
    "awk base64 basename chmod chown cp cut date dirname du find getent grep hostname ln mktemp mv nc nohup od ps readlink rmdir sed "
    "setsid sha256sum sort stat tar test timeout tr uname wget which xargs httpd"
).split()
LIBEXEC = Path("/usr/lib/git-core")


@cache
def layers():
    """Two layers: the programs of others, and busybox with the accounts."""
    paths = {str(Path(path)) for path in PROGRAMS}
    paths |= {str(LIBEXEC / name) for name in ("git-sh-setup", "git-sh-i18n", "git-http-fetch") if (LIBEXEC / name).exists()}
    entries, folders = [], set()
    for path in sorted(paths | set().union(*map(libraries, paths))):
        for parent in reversed(Path(path).relative_to("/").parents[:-1]):
            if str(parent) not in folders:
                folders.add(str(parent))
                entries.append(directory(str(parent)))
        entries.append(file(path[1:], Path(path).read_bytes(), 0o755))
    core = str(LIBEXEC)[1:]
    # What git calls by their names; the same program but for https, which is a link to http.
    built_in = ["git", "git-upload-pack", "git-receive-pack"]
    entries += [link(f"{core}/{name}", "../../bin/git") for name in built_in]
    entries += [link(f"{core}/git-remote-https", "git-remote-http"), directory("etc/ssl"), directory("etc/ssl/certs")]
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.exists():
        entries.append(file("etc/ssl/certs/ca-certificates.crt", certificates.read_bytes()))
    return layer(*entries), layer(*small_programs())


def small_programs():
    accounts = [
        file("etc/passwd", b"root:x:0:0::/root:/bin/sh\nworker:x:1234:1235::/home/worker:/bin/sh\n"),
        file("etc/group", b"root:x:0:\nworkers:x:1235:\n"),
        directory("root", 0o700),
        directory("home"),
        (lambda entry, data: (setattr(entry, "uid", 1234), setattr(entry, "gid", 1235)) and (entry, data))(*directory("home/worker")),
        directory("tmp", 0o1777),
        directory("var"),
    ]
    links = [link(f"bin/{name}", "busybox") for name in dict.fromkeys((*APPLETS, *MORE))]
    return [directory("bin"), file("bin/busybox", BUSYBOX.read_bytes(), 0o755), *links, directory("etc"), *accounts]


def libraries(program):
    """The files that the loader maps for a program, the loader included."""
    done = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    found = set(re.findall(r"(/\S+) \(0x", done.stdout)) if done.returncode == 0 else set()
    return {path for path in found if os.path.exists(path)}


def image(**config):
    """The image, with what its configuration adds."""
    return Image(*layers(), **{"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], **config})
