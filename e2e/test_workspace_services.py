"""Services of sandboxes that are made from repositories, reached as people reach them: OpenSSH's clients through the tunnel, the editor in a
browser by a link, terminals by a link; and who is refused."""

import base64
import json
import os
import socket
import subprocess
import threading
import time

import httpx
import pytest
from playwright.sync_api import sync_playwright

import browser_apps
import code_server
import git_image
from archives import Image, directory, file, layer
from browsers import browser, page_of
from ssh_clients import BINARY, CLOSE, Client, Keys, Refused, Tunnel
from stack import free_port, wait_for
from workspace_stacks import embedded

pytestmark = pytest.mark.sandglass

IMAGE = "services-base:test"
APPS = "/apps"
EDITOR = 8443
# What the setup of a repository brings into its image, as an installer would.
CODE_SERVER = f"""#!/bin/sh
export LD_LIBRARY_PATH={APPS}/node
exec {APPS}/node/node {APPS}/node_modules/code-server/out/node/entry.js "$@"
"""
SETUP = """#!/bin/sh
set -e
mkdir -p /usr/local/bin /root/.local/share/code-server/User
cp code-server /usr/local/bin/code-server
cp settings.json /root/.local/share/code-server/User/settings.json
"""
# Says what it got once nothing more comes, so that half-closing is seen.
COUNTER = "while true; do nc -l -p 7000 -e sh -c 'wc -c; echo bye'; done"


def base_image():
    """The image of the other tests, with rsync and the libraries of node."""
    programs = {"/usr/bin/rsync"}
    paths = programs | git_image.libraries("/usr/bin/rsync") | git_image.libraries(os.path.realpath("/usr/bin/node"))
    folders, entries = set(), []
    for path in sorted(paths):
        parents = path.strip("/").split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            folder = "/".join(parents[:depth])
            if folder not in folders:
                folders.add(folder)
                entries.append(directory(folder))
        with open(path, "rb") as source:
            entries.append(file(path[1:], source.read(), 0o755))
    return Image(*git_image.layers(), layer(*entries), Env=["PATH=/usr/local/bin:/usr/bin:/bin"])


@pytest.fixture(scope="module")
def stack():
    paths = {"allowed_host_paths": [str(browser_apps.provide())]}
    with embedded({IMAGE: base_image()}, builds={"base_image": IMAGE}, storage=paths) as made:
        yield made


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path)


def tunnel_url(stack, identity, name="ssh"):
    return f"{stack.url}/v1/sandboxes/{identity}/services/{name}/tunnel"


def access(spaces, identity, name, **body):
    return spaces.http.post(f"/v1/sandboxes/{identity}/services/{name}/access", json=body)


def with_ssh(spaces, git, keys, **more):
    """A sandbox with an SSH server that lets `ann` in; its id, and the key by which it is known."""
    services = [{"name": "ssh", "authorizedKeys": [keys.public("ann")], **more}, {"name": "counter", "command": ["sh", "-c", COUNTER], "port": 7000, "probe": {"type": "exec", "command": ["true"]}}]
    identity = spaces.ready(git.repository(), services=services)
    shown = spaces.until_service(identity, "ssh", lambda service: service["state"] == "Ready" and "hostKey" in service)
    return identity, shown["hostKey"]


def client_of(stack, identity, host_key, keys, name, certificate=None):
    return Client(tunnel_url(stack, identity), stack.key, host_key["publicKey"], keys.pair(name), certificate)


# ---------------------------------------------------------------- who gets in


def test_a_listed_key_and_a_certificate_get_in_and_others_do_not(stack, spaces, git, keys):
    identity, host_key = with_ssh(spaces, git, keys)
    listed = client_of(stack, identity, host_key, keys, "ann").ssh("id -un; exit 3")
    assert (listed.returncode, listed.stdout) == (3, b"root\n"), listed.stderr

    stranger = client_of(stack, identity, host_key, keys, "bob")
    refused = stranger.ssh("true")
    assert refused.returncode == 255 and b"Permission denied" in refused.stderr, refused

    answer = access(spaces, identity, "ssh", publicKey=keys.public("bob"))
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store", answer.text
    assert answer.json()["credential"]["hostKey"] == host_key
    assert answer.json()["endpoint"]["endpoint"] == tunnel_url(stack, identity).split("://")[1]
    certificate = keys.folder / "bob-cert.pub"
    certificate.write_text(answer.json()["credential"]["certificate"] + "\n")
    told = subprocess.run(["ssh-keygen", "-L", "-f", certificate], capture_output=True, text=True, check=True).stdout
    assert identity in told and "user certificate" in told, told
    certified = client_of(stack, identity, host_key, keys, "bob", certificate)
    for login in ("root", "worker"):
        done = certified.ssh("id -un", login=login)
        assert (done.returncode, done.stdout.decode().strip()) == (0, login), done.stderr

    # Another sandbox does not believe it, and no client believes another sandbox.
    other, other_key = with_ssh(spaces, git, keys)
    refused = client_of(stack, other, other_key, keys, "bob", certificate).ssh("true")
    assert refused.returncode == 255 and b"Permission denied" in refused.stderr, refused
    fooled = client_of(stack, other, host_key, keys, "ann").ssh("true")
    assert fooled.returncode == 255 and b"verification failed" in fooled.stderr, fooled
    # The key that signs is in no place that anybody reads.
    private = (stack.state / "workspaces" / identity / "ssh_user_ca").read_bytes()
    seen = stack.log.read_text() + json.dumps(spaces.show(identity)) + str(spaces.history(identity)) + answer.text
    seen += certified.ssh("cat /run/.execd/workspace.json").stdout.decode()
    for written in (private.hex(), base64.b64encode(private).decode()[:40]):
        assert written not in seen


def test_the_tunnel_asks_for_the_api_key_and_for_a_service_that_listens(stack, spaces, git, keys):
    identity, _ = with_ssh(spaces, git, keys)
    for url, key, status in [
        (tunnel_url(stack, identity), None, 401),
        (tunnel_url(stack, identity), "wrong", 401),
        (tunnel_url(stack, identity, "none"), stack.key, 404),
        (tunnel_url(stack, identity, "bridge"), stack.key, 400),
    ]:
        with pytest.raises(Refused) as refused:
            Tunnel(url, key)
        assert refused.value.status == status, refused.value
    assert spaces.http.get(f"/v1/sandboxes/{identity}/services/ssh/tunnel").status_code == 400
    assert spaces.http.put(f"/v1/sandboxes/{identity}/services/counter", json={"enabled": False}).status_code == 200
    spaces.until_service(identity, "counter", lambda service: service["state"] == "Disabled" or service["state"] == "Stopped")
    with pytest.raises(Refused) as refused:
        Tunnel(tunnel_url(stack, identity, "counter"), stack.key)
    assert refused.value.status == 502, refused.value


# ---------------------------------------------------------------- what people do


def test_files_go_by_sftp_scp_and_rsync(stack, spaces, git, keys, tmp_path):
    identity, host_key = with_ssh(spaces, git, keys)
    client = client_of(stack, identity, host_key, keys, "ann")
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    big = os.urandom(8 << 20)
    (source / "big").write_bytes(big)
    (source / "deep/small").write_text("small\n")
    for done in (
        client.sftp(f"mkdir /tmp/sent\nput -r {source} /tmp/sent/by-sftp\nget /tmp/sent/by-sftp/big {tmp_path}/back\n"),
        client.scp("-r", source, "root@box:/tmp/sent/by-scp"),
        client.rsync("-a", f"{source}/", "root@box:/tmp/sent/by-rsync"),
        client.rsync("-a", "--checksum", "root@box:/tmp/sent/by-rsync/", f"{tmp_path}/again"),
    ):
        assert done.returncode == 0, done
    assert (tmp_path / "back").read_bytes() == big
    assert (tmp_path / "again/big").read_bytes() == big and (tmp_path / "again/deep/small").read_text() == "small\n"
    sums = spaces.text(identity, "cd /tmp/sent; sha256sum */big | cut -d' ' -f1 | sort -u | wc -l; cat */deep/small")
    assert sums.split() == ["1", "small", "small", "small"], sums


def test_ports_are_forwarded_both_ways_and_not_beyond_the_box(stack, spaces, git, keys):
    identity, host_key = with_ssh(spaces, git, keys)
    client = client_of(stack, identity, host_key, keys, "ann")
    near, back = free_port(), free_port()
    listener = socket.create_server(("127.0.0.1", back))

    def greet():
        connection, _ = listener.accept()
        connection.sendall(b"from outside\n")
        connection.close()

    threading.Thread(target=greet, daemon=True).start()
    forwards = ("-N", "-o", "ExitOnForwardFailure=yes", "-L", f"{near}:127.0.0.1:7000", "-R", f"7777:127.0.0.1:{back}")
    running = client.start(*forwards)
    try:
        assert wait_for(lambda: running.poll() is not None or connects(near), 60)
        assert running.poll() is None, running.stderr.read()
        # That was a connection as well; the counter listens again after it.
        assert wait_for(lambda: ask(near, b"x" * 1000) == "1000\nbye\n", 60)
        assert wait_for(lambda: spaces.text(identity, "nc 127.0.0.1 7777 </dev/null") == "from outside", 60)
    finally:
        running.kill()
        running.wait()
        listener.close()
    beyond = client.ssh("-W", f"{git.address}:8090", options=())
    assert beyond.returncode != 0


def connects(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        return True
    except OSError:
        return False


def ask(port, data):
    """What a port answers when nothing more comes."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(4096), b"")).decode()
    except OSError:
        return ""


def test_each_direction_of_a_tunnel_ends_by_itself(stack, spaces, git, keys):
    identity, _ = with_ssh(spaces, git, keys)

    def counted():
        try:
            tunnel = Tunnel(tunnel_url(stack, identity, "counter"), stack.key)
        except Refused:
            return False
        for _ in range(3):
            tunnel.send(os.urandom(300_000))
        tunnel.send(b"")
        got, kind = b"", BINARY
        while kind == BINARY:
            kind, data = tunnel.receive()
            got += data if kind == BINARY else b""
        tunnel.close()
        return got == b"900000\nbye\n" and kind == CLOSE and data[:2] == (1000).to_bytes(2, "big")

    # It listens anew between two connections.
    assert wait_for(counted, 60)


def test_a_session_in_a_terminal_and_its_count(stack, spaces, git, keys):
    identity, host_key = with_ssh(spaces, git, keys)
    client = client_of(stack, identity, host_key, keys, "ann")
    done = client.ssh("test -t 0 && stty size && echo $TERM", options=("-tt",), env={**client.environment, "TERM": "xterm-256color"})
    assert done.returncode == 0 and b"xterm-256color" in done.stdout, done


# ---------------------------------------------------------------- what stays


def test_the_host_key_stays_over_pause_and_restarts(stack, spaces, git, keys):
    identity, host_key = with_ssh(spaces, git, keys)
    client = client_of(stack, identity, host_key, keys, "ann")
    assert client.ssh("true").returncode == 0
    assert spaces.http.post(f"/v1/sandboxes/{identity}/pause").status_code == 202
    spaces.until(identity, "Paused")
    assert access(spaces, identity, "ssh", publicKey=keys.public("bob")).status_code == 409
    with pytest.raises(Refused) as refused:
        Tunnel(tunnel_url(stack, identity), stack.key)
    assert refused.value.status == 409
    assert spaces.http.post(f"/v1/sandboxes/{identity}/resume").status_code == 202
    spaces.until_ready(identity)
    assert client.ssh("true").returncode == 0
    assert spaces.http.post(f"/v1/sandboxes/{identity}/services/ssh/restart").status_code == 202
    assert wait_for(lambda: client.ssh("true").returncode == 0, 60)
    anew = spaces.until_service(identity, "ssh", lambda ssh: ssh["restartCount"] >= 1 and ssh["state"] == "Ready")
    stack.kill()
    stack.start()
    spaces.until_ready(identity)
    assert client.ssh("true").returncode == 0
    shown = spaces.services(identity)["ssh"]
    assert shown["hostKey"] == host_key and shown["startedAt"] == anew["startedAt"] > spaces.show(identity)["createdAt"], (shown, anew)
    answer = access(spaces, identity, "ssh", publicKey=keys.public("bob"))
    certificate = keys.folder / "bob-cert.pub"
    certificate.write_text(answer.json()["credential"]["certificate"] + "\n")
    assert client_of(stack, identity, host_key, keys, "bob", certificate).ssh("true").returncode == 0


# ---------------------------------------------------------------- in the browser


@pytest.fixture(scope="module")
def playwright():
    with sync_playwright() as made:
        yield made


def test_the_editor_is_opened_by_a_link_and_by_nothing_else(stack, spaces, git, playwright):
    files = {"code-server": CODE_SERVER, "settings.json": json.dumps({**code_server.SETTINGS, "security.workspace.trust.enabled": False}), ".sandbox/setup.sh": SETUP, "note.txt": "first\n"}
    volume = {"name": "apps", "host": {"path": str(browser_apps.APPS)}, "mountPath": APPS, "readOnly": True}
    body = {"services": [{"name": "code-server", "required": True}], "volumes": [volume], "resourceLimits": {"cpu": "2", "memory": "2Gi"}}
    identity = spaces.ready(git.repository(files), **body)
    place = spaces.show(identity)["source"]["repositories"][0]["path"]
    address = f"{stack.url}/v1/sandboxes/{identity}/proxy/{EDITOR}/"
    assert httpx.get(address, timeout=60).status_code == 401
    listens = spaces.text(identity, "cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == \"0A\" {print $2}'")
    port = f"{EDITOR:04X}"
    assert [line for line in listens.split() if line.endswith(port)] == [f"0100007F:{port}"], listens
    answer = access(spaces, identity, "code-server")
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store", answer.text
    url = answer.json()["credential"]["url"]
    assert url.startswith(f"{address}?sandglass-access=")
    with browser(playwright, stack.port, free_port(), stack.home) as chromium, page_of(chromium, "code-server-service") as page:
        assert page.goto(address).status == 401
        page.goto(f"{url}&folder={place}")
        assert page.url.startswith(address) and "sandglass-access" not in page.url, page.url
        code_server.open_file(page, "note.txt", "first")
        code_server.append_and_save(page, "typed in a browser")
        assert wait_for(lambda: "typed in a browser" in spaces.read(identity, f"{place}/note.txt").text, 60)
        code_server.type_into_terminal(page, "#", "echo it is $((6 * 7)) > answer.txt; cat answer.txt", "it is 42")
        assert wait_for(lambda: "it is 42" in spaces.read(identity, f"{place}/answer.txt").text, 60)
        # The cookie is for this port of this sandbox alone.
        (cookie,) = [one for one in page.context.cookies() if one["name"] == "sandglass-access"]
        assert cookie["httpOnly"] and cookie["sameSite"] == "Lax", cookie
        assert cookie["path"] == f"/v1/sandboxes/{identity}/proxy/{EDITOR}", cookie
        assert page.goto(f"{stack.url}/v1/sandboxes/{identity}/proxy/44772/ping").status == 401


def test_an_editor_that_is_not_there_is_said_to_be_missing(spaces, git):
    identity = spaces.ready(git.repository(), services=[{"name": "code-server"}])
    begun = time.monotonic()
    shown = spaces.until_service(identity, "code-server", lambda service: service["state"] == "Failed")
    assert "code-server is not installed" in shown["lastError"] and "npm install --global code-server" in shown["lastError"], shown
    assert shown["restartCount"] == 0 and time.monotonic() - begun < 100
    assert spaces.show(identity)["status"]["reason"] == "degraded"
    answer = access(spaces, identity, "code-server")
    assert answer.status_code == 409 and "not installed" in answer.json()["message"], answer.text
    failed = spaces.failed(git.repository(), services=[{"name": "code-server", "required": True}])
    assert "not installed" in failed["lastFailure"]["message"], failed


# ---------------------------------------------------------------- terminals


def test_a_terminal_by_its_link(stack, spaces, git):
    identity = spaces.ready(git.repository(), services=[{"name": "terminal"}])
    answer = access(spaces, identity, "terminal")
    assert answer.status_code == 200, answer.text
    url = answer.json()["credential"]["url"]
    stranger = httpx.Client(timeout=60)
    made = stranger.post(url, json={})
    assert made.status_code in (200, 201), made.text
    session = made.json()["session_id"]
    base, _, query = url.partition("?")
    tunnel = Tunnel(f"{base}/{session}/ws", None, query=query)
    tunnel.send(b"\0echo $((6 * 7)) it is\n")
    got = b""
    while b"42 it is" not in got:
        kind, data = tunnel.receive()
        assert kind != CLOSE, got
        got += data
    tunnel.close()
    # By the cookie as well, and for nothing else.
    assert stranger.get(url).status_code == 303
    assert stranger.get(f"{base}/{session}").status_code == 200
    assert stranger.get(base.removesuffix("/pty") + "/metrics").status_code == 401
    assert stranger.get(base.removesuffix("/pty") + f"/metrics?{query}").status_code == 401
    stranger.close()
