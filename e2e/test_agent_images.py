"""The agent in every kind of image, on both runtimes: with bash, with sh only, with a loader and no shell, with one static program."""

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path

import httpx
import pytest

from archives import Image, directory, file, layer
from docker_engine import PYTHON, busybox_tree, compiled
from plain import Plain
from stack import free_port, wait_for

pytestmark = pytest.mark.sandglass

# Waits for ever, or says something and ends with the number given: the only program of the images that have just one.
PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int count, char **words) {
    char text[64];
    if (count > 1) {
        printf("alone %ld\n", (long)read(0, text, sizeof text));
        return atoi(words[1]);
    }
    for (;;) pause();
}
"""


@cache
def program():
    return compiled(PROGRAM, "program")


def alone(*more):
    return layer(file("program", program(), 0o755), *more)


def distroless():
    """Certificates, accounts and zones, no shell: as small images for one program are made."""
    folders = [directory(name) for name in ("etc", "etc/ssl", "usr", "usr/share", "home", "home/nonroot")]
    accounts = [
        file("etc/passwd", b"root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532::/home/nonroot:/sbin/nologin\n"),
        file("etc/group", b"root:x:0:\nnonroot:x:65532:\n"),
        file("etc/os-release", b"ID=small\n"),
    ]
    return alone(*folders, *accounts, directory("tmp", 0o1777))


def musl():
    """Busybox as the whole userland and a musl-like tree: sh, no bash, no C library of ours."""
    return busybox_tree({"lib/ld-musl-x86_64.so.1": b"", "etc/alpine-release": b"3.20\n"})


# name: (archive of the root, shell, configuration)
IMAGES = {
    "musl": (musl, "sh", {}),
    "distroless": (distroless, None, {"User": "nonroot"}),
    "empty": (alone, None, {}),
    "user": (lambda: busybox_tree(), "sh", {"User": "ann", "WorkingDir": "/tmp"}),
}
NAMES = ["debian", *IMAGES]


def agent_file(server):
    """The program that boxes of this server get."""
    for folder in (server.stack.state, server.stack.home):
        for found in Path(folder).rglob("agent-*"):
            if found.is_file() and found.parent.name == "bin":
                return found
    raise LookupError("no agent")


@pytest.fixture
def plain(server):
    made = Plain(server.url, server.key, server.image)
    yield made
    made.close()


@pytest.fixture
def image(server, request):
    """Brings an image to the runtime under test and gives its name, its shell and its entrypoint."""
    kind = request.param
    if kind == "debian":
        yield (PYTHON if server.runtime == "docker" else server.image), "bash", ["tail", "-f", "/dev/null"]
        return
    root, shell, config = IMAGES[kind]
    name = f"sandglass-e2e/agent-{kind}:1"
    environment = ["PATH=/usr/bin:/bin"]
    if server.runtime == "docker":
        engine = request.getfixturevalue("engine")
        changes = [f"ENV {word}" for word in environment]
        changes += [f"{word} {config[key]}" for word, key in (("USER", "User"), ("WORKDIR", "WorkingDir")) if key in config]
        engine.bring(name, root(), *changes)
        remove = lambda: engine.call("rmi", "-f", name, check=False)  # noqa: E731
    else:
        http = request.getfixturevalue("http")
        archive = Image(root(), Env=environment, **config).docker_save()
        answer = http.post("/v1/images/import", params={"name": name}, content=archive)
        assert json.loads(answer.text.splitlines()[-1])["event"] == "done", answer.text
        remove = lambda: http.delete(f"/v1/images/{name.replace('/', '%2F')}")  # noqa: E731
    yield name, shell, ["sleep", "600"] if shell else ["/program"]
    remove()


@pytest.mark.parametrize("image", NAMES, indirect=True)
def test_everything_that_needs_no_shell_works_and_what_needs_one_says_so(plain, image):
    name, shell, entrypoint = image
    box = plain.create(name, entrypoint)
    assert plain.state(box) == "Running", plain.status(box)
    ping = plain.agent("GET", box, "ping")
    assert (ping.status_code, ping.content) == (200, b"")

    # A program without a shell; its standard input is at its end, also without /dev.
    if entrypoint == ["/program"]:
        done = plain.run(box, ["/program", "7"])
        assert done.stdout == ["alone 0"] and done.error["evalue"] == "7", done
    else:
        assert plain.text(box, ["cat"]) == ""
        assert plain.run(box, ["false"]).error["evalue"] == "1"
    missing = plain.run(box, ["no-such-program"])
    assert "not found" in missing.error["evalue"], missing

    # A command line: by the shell that there is, or a plain word about its absence.
    done = plain.run(box, "echo $0; exit 3")
    if shell:
        assert done.stdout == [shell] and done.error["evalue"] == "3", done
    else:
        assert not done.stdout and "no shell" in done.error["evalue"] and "argv" in done.error["evalue"], done
        session = plain.agent("POST", box, "session", json={}).json()["session_id"]
        refused = plain.agent("POST", box, f"session/{session}/run", json={"command": "true"}).text
        assert '"type":"error"' in refused and "no shell" in refused, refused

    # Files, to a folder that is made on the way.
    content = bytes(range(256)) * 300
    place = "/tmp/agent/deep/file"
    assert plain.write(box, place, content).status_code == 200
    assert plain.read(box, place).content == content
    part = plain.agent("GET", box, "files/download", params={"path": place}, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, content[10:20])
    found = plain.agent("GET", box, "files/info", params={"path": place}).json()[place]
    assert found["size"] == len(content) and found["owner"] and found["group"], found
    listed = plain.agent("GET", box, "directories/list", params={"path": "/tmp/agent/deep"}).json()
    assert [entry["path"] for entry in listed] == [place]
    assert plain.agent("DELETE", box, "directories", params={"path": "/tmp/agent"}).status_code == 200

    metrics = plain.agent("GET", box, "metrics").json()
    assert metrics["cpu_count"] > 0 and 0 < metrics["mem_total_mib"] <= 256 * 1.1, metrics
    assert 0 <= metrics["mem_used_mib"] <= metrics["mem_total_mib"], metrics

    # In the background, with the output kept where the image has no folder for it.
    words = ["/program", "0"] if entrypoint == ["/program"] else ["echo", "kept"]
    begun = plain.agent("POST", box, "command", json={"argv": words, "background": True})
    identity = json.loads(begun.text.split("\n\n")[0])["text"]
    assert wait_for(lambda: not plain.agent("GET", box, f"command/status/{identity}").json()["running"])
    assert plain.agent("GET", box, f"command/{identity}/logs").text in ("alone 0\n", "kept\n")


@pytest.mark.parametrize("image", ["user", "distroless"], indirect=True)
def test_the_user_of_the_image_is_the_user_of_commands_and_files(plain, image):
    name, shell, entrypoint = image
    box = plain.create(name, entrypoint)
    who = "ann" if shell else "nonroot"
    assert plain.write(box, "/tmp/mine", b"x").status_code == 200
    assert plain.agent("GET", box, "files/info", params={"path": "/tmp/mine"}).json()["/tmp/mine"]["owner"] == who
    if shell:
        assert plain.text(box, "id -u; pwd; test -w /etc || echo no") == "1000\n/tmp\nno"


@pytest.mark.only_on("docker")
def test_a_root_that_cannot_be_written_is_told_about_and_everything_else_works(plain, server, request, tmp_path):
    """The agent alone, as the engine starts it: no lifecycle request asks for such a root."""
    engine = request.getfixturevalue("engine")
    agent = agent_file(server)
    name = engine.bring("sandglass-e2e/agent-read-only:1", busybox_tree(), "ENV PATH=/bin")
    box = engine.text(
        "run", "-d", "--rm", "--read-only", "--cap-drop", "ALL", "--user", "1000:1000", "-v", f"{agent}:/opt/opensandbox/execd:ro",
        "--entrypoint", "/opt/opensandbox/execd", name, "--init", "--", "sleep", "600",
    )  # fmt: skip
    try:
        address = engine.text("inspect", "-f", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", box)
        with httpx.Client(base_url=f"http://{address}:44772", timeout=30, transport=httpx.HTTPTransport(retries=5)) as http:
            assert wait_for(lambda: http.get("/ping").status_code == 200)
            assert '"text":"1000"' in http.post("/command", json={"command": "id -u"}).text
            begun = http.post("/command", json={"command": "echo kept", "background": True}).text
            identity = json.loads(begun.split("\n\n")[0])["text"]
            assert wait_for(lambda: http.get(f"/command/{identity}/logs").text == "kept\n")
            form = [
                ("metadata", ("metadata", json.dumps({"path": "/etc/new"}), "application/json")),
                ("file", ("file", b"x", "application/octet-stream")),
            ]
            refused = http.post("/files/upload", files=form)
            assert refused.status_code == 500 and "read-only" in refused.json()["message"], refused.text
            assert http.get("/files/download", params={"path": "/etc/passwd"}).text.startswith("root:")
            assert http.get("/metrics").json()["mem_total_mib"] > 0
    finally:
        engine.call("rm", "-f", box, check=False)
        engine.call("rmi", "-f", name, check=False)


@pytest.mark.only_on("embedded")
@pytest.mark.parametrize("user", ["0:0", "1000:1000"])
def test_a_root_with_nothing_in_it(server, tmp_path, user):
    """Neither /dev nor /proc nor /tmp, which no runtime leaves out: the agent as its own program in such a directory."""
    tmp_path.chmod(0o777)
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o777)
    shutil.copy(agent_file(server), root / "execd")
    (root / "program").write_bytes(program())
    for name in ("execd", "program"):
        (root / name).chmod(0o755)
    for above in (tmp_path.parent, tmp_path.parent.parent):
        above.chmod(above.stat().st_mode | 0o011)
    port = free_port()
    command = ["chroot", f"--userspec={user}", "--groups=", str(root), "/execd", "--port", str(port), "--init", "--", "/program"]
    agent = subprocess.Popen(command, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, stdin=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:

            def answers():
                try:
                    return http.get("/ping").status_code == 200
                except httpx.TransportError:
                    return False

            assert wait_for(answers)
            assert '"text":"alone 0"' in http.post("/command", json={"argv": ["/program", "0"]}).text
            assert "no shell" in http.post("/command", json={"command": "true"}).text
            begun = http.post("/command", json={"argv": ["/program", "5"], "background": True}).text
            identity = json.loads(begun.split("\n\n")[0])["text"]
            assert wait_for(lambda: http.get(f"/command/status/{identity}").json().get("exit_code") == 5)
            assert http.get(f"/command/{identity}/logs").text == "alone 0\n"
            form = [
                ("metadata", ("metadata", json.dumps({"path": "/made/file"}), "application/json")),
                ("file", ("file", b"content", "application/octet-stream")),
            ]
            assert http.post("/files/upload", files=form).status_code == 200
            assert http.get("/files/download", params={"path": "/made/file"}).text == "content"
            number = user.split(":")[0]
            assert http.get("/files/info", params={"path": "/made/file"}).json()["/made/file"]["owner"] == number
            assert http.get("/metrics").json()["cpu_count"] > 0
    finally:
        agent.terminate()
        assert agent.wait(60) in (143, 0), agent.returncode
