"""What people open in a browser, as they use it: code-server, JupyterLab, Vite, noVNC; through the server's proxy and the gateway."""

import json
import subprocess
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect, sync_playwright

import browser_apps
import code_server
from browsers import PICTURES, browser, page_of
from docker_engine import PYTHON
from docker_stack import DockerStack
from gateways import Gateway, config_of, nested
from plain import Plain
from stack import Stack, free_port, wait_for

pytestmark = pytest.mark.sandglass

APPS = "/apps"
NODE = ["env", f"LD_LIBRARY_PATH={APPS}/node", f"{APPS}/node/node"]
SECONDS = 120

NOTEBOOK = {
    "cells": [{"cell_type": "code", "execution_count": None, "id": "one", "metadata": {}, "outputs": [], "source": []}],
    "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}
VITE = f"cp -r {APPS}/vite /tmp/site && cd /tmp/site && exec \"$@\""


class Site:
    """A server whose clients come through its proxy or its gateway, and browsers."""

    def __init__(self, stack, image, playwright, gateway_port):
        self.stack, self.plain = stack, Plain(stack.url, stack.key, image)
        self.runtime = "docker" if isinstance(stack, DockerStack) else "embedded"
        self.playwright, self.gateway_port = playwright, gateway_port

    @contextmanager
    def page(self, name):
        """In a browser of its own: one that has died takes no other test along, nor its own second attempt."""
        with browser(self.playwright, self.stack.port, self.gateway_port, self.stack.home) as chromium, page_of(chromium, name) as page:
            yield page

    def start(self, entrypoint, port, path="", secure=False):
        """A sandbox that is one of the applications, once that answers."""
        body = {"secureAccess": True} if secure else {}
        volume = {"name": "apps", "host": {"path": str(browser_apps.APPS)}, "mountPath": APPS, "readOnly": True}
        limits = {"cpu": "2", "memory": "2Gi"}
        box = self.plain.create(entrypoint=entrypoint, volumes=[volume], resourceLimits=limits, **body)

        def answers():
            assert self.plain.state(box) == "Running", self.plain.status(box)
            return self.plain.http.get(f"/v1/sandboxes/{box}/proxy/{port}/{path}", follow_redirects=True).status_code == 200

        assert wait_for(answers, SECONDS), self.plain.logs(box)
        return box

    def address(self, way, box, port):
        """Where a browser goes: it sends no headers of ours, so that everything is in the address."""
        if way == "proxy":
            return f"{self.stack.url}/v1/sandboxes/{box}/proxy/{port}/"
        query = {"expires": str(int(time.time()) + 3000)} if way == "signed" else {}
        answer = self.plain.http.get(f"/v1/sandboxes/{box}/endpoints/{port}", params=query)
        assert answer.status_code == 200, answer.text
        assert answer.json()["endpoint"].endswith(".sandbox.example")
        return f"https://{answer.json()['endpoint']}/"

    def holds(self, box, path, text):
        """Waits until a file inside the sandbox has that text."""
        return wait_for(lambda: text in self.plain.read(box, path).text, SECONDS)


@pytest.fixture(scope="module")
def playwright(request):
    """One for both runtimes: there can be no two at a time."""
    with sync_playwright() as made:
        yield made
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    reporter.write_line("")
    for picture in PICTURES:
        reporter.write_line(f"picture: {picture}")


@contextmanager
def site(playwright, stack, image, port):
    subject = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=gateway".split()
    certificate, key = stack.home / "gateway.pem", stack.home / "gateway.key"
    extra = ["-addext", "subjectAltName=DNS:*.sandbox.example", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *subject, *extra], check=True, capture_output=True)
    gateway = Gateway(stack, f"--tls-cert={certificate}", f"--tls-key={key}", port=port).ready()
    made = Site(stack, image, playwright, port)
    try:
        yield made
    finally:
        made.plain.close()
        gateway.close()


def configuration(port):
    config = config_of("wildcard", port)
    config["server"] = {"open_proxy": True}
    config["storage"] = {"allowed_host_paths": [str(browser_apps.provide())]}
    return config


@pytest.fixture(scope="module")
def embedded(playwright):
    port = free_port()
    stack = Stack(config=configuration(port))
    try:
        stack.start()
        with site(playwright, stack, "host", port) as made:
            yield made
    finally:
        problems = stack.close()
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="module")
def docker(playwright, engine):
    port = free_port()
    stack = DockerStack(engine, nested(configuration(port)))
    try:
        stack.start()
        with site(playwright, stack, PYTHON, port) as made:
            yield made
    finally:
        problems = stack.close()
    assert not problems, "\n".join(problems)


# ---------------------------------------------------------------- code-server


def edit_and_type(site, way, secure=False):
    """A folder is opened, a file edited and saved, and a command typed into a terminal."""
    settings = json.dumps(code_server.SETTINGS)
    prepare = (
        "mkdir -p /tmp/project /tmp/data/User && echo first > /tmp/project/note.txt && printf %s \"$SETTINGS\" > /tmp/data/User/settings.json && exec \"$@\""
    )
    flags = ["--auth", "none", "--bind-addr", "0.0.0.0:8080", "--disable-telemetry", "--disable-update-check", "--disable-workspace-trust"]
    command = [*NODE, f"{APPS}/node_modules/code-server/out/node/entry.js", *flags, "--user-data-dir", "/tmp/data"]
    box = site.start(["env", f"SETTINGS={settings}", "HOME=/tmp", "sh", "-c", prepare, "sh", *command], 8080, "healthz", secure)
    with site.page(f"code-server-{way}-{site.runtime}") as page:
        sockets = []
        page.on("websocket", lambda socket: sockets.append(socket.url))
        page.goto(site.address(way, box, 8080) + "?folder=/tmp/project")
        code_server.open_file(page, "note.txt", "first")
        code_server.append_and_save(page, "typed in a browser")
        assert site.holds(box, "/tmp/project/note.txt", "first\ntyped in a browser")
        code_server.type_into_terminal(page, "project", "echo it is $((6 * 7)) | tee answer.txt", "it is 42")
        assert site.holds(box, "/tmp/project/answer.txt", "it is 42")
        expect(page.locator(".explorer-folders-view")).to_contain_text("answer.txt")
        came = urlsplit(page.url)
        assert sockets and all(urlsplit(socket).netloc == came.netloc for socket in sockets), sockets
    site.plain.delete(box)


def test_code_server_through_the_proxy(embedded):
    edit_and_type(embedded, "proxy")


def test_code_server_by_a_signed_route(embedded):
    edit_and_type(embedded, "signed", secure=True)


def test_code_server_through_the_proxy_on_docker(docker):
    edit_and_type(docker, "proxy")


def test_code_server_through_the_gateway_on_docker(docker):
    edit_and_type(docker, "signed")


# ---------------------------------------------------------------- JupyterLab


def test_jupyterlab_by_a_signed_route(embedded):
    lab = f"{APPS}/jupyterlab"
    variables = [f"PYTHONPATH={lab}", f"JUPYTER_PATH={lab}/share/jupyter", f"NOTEBOOK={json.dumps(NOTEBOOK)}", "HOME=/tmp"]
    prepare = "mkdir -p /tmp/project && printf %s \"$NOTEBOOK\" > /tmp/project/note.ipynb && exec \"$@\""
    flags = [
        *("--no-browser", "--allow-root", "--ip=0.0.0.0", "--port=8888", "--IdentityProvider.token=", "--ServerApp.allow_remote_access=True"),
        *("--ServerApp.root_dir=/tmp/project", f"--app-dir={lab}/share/jupyter/lab", "--LabApp.news_url=None"),
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    command = ["/usr/bin/python3", "-m", "jupyterlab", *flags]
    box = embedded.start(["env", *variables, "sh", "-c", prepare, "sh", *command], 8888, "api/status", secure=True)
    with embedded.page("jupyterlab-signed") as page:
        page.goto(embedded.address("signed", box, 8888) + "lab/tree/note.ipynb")
        expect(page.locator("#jp-main-statusbar")).to_contain_text("Python 3 (ipykernel) | Idle")
        page.locator(".jp-Notebook .jp-CodeCell .cm-content").first.click()
        page.keyboard.type("import socket; print('cell says', 6 * 7, socket.gethostname())")
        page.keyboard.press("Shift+Enter")
        inside = embedded.plain.text(box, "hostname").strip()
        expect(page.locator(".jp-Notebook .jp-OutputArea-output").first).to_contain_text(f"cell says 42 {inside}")
        page.keyboard.press("Control+s")
        assert embedded.holds(box, "/tmp/project/note.ipynb", "cell says 42")
    embedded.plain.delete(box)


# ---------------------------------------------------------------- Vite


def test_vite_changes_the_page_by_a_signed_route(embedded):
    command = [*NODE, f"{APPS}/node_modules/vite/bin/vite.js", "--host", "0.0.0.0", "--port", "5173", "--strictPort"]
    # It answers to names that it knows; the other one is what the proxy asks for, whose addresses it always takes.
    names = "__VITE_ADDITIONAL_SERVER_ALLOWED_HOSTS=.sandbox.example"
    box = embedded.start(["env", names, "sh", "-c", VITE, "sh", *command], 5173, secure=True)
    with embedded.page("vite-signed") as page:
        with page.expect_console_message(lambda message: "[vite] connected" in message.text):
            page.goto(embedded.address("signed", box, 5173))
        expect(page.locator("#message")).to_have_text("as it was")
        page.evaluate("window.kept = 'not loaded again'")
        embedded.plain.write(box, "/tmp/site/message.js", 'export const message = "changed inside";\n')
        expect(page.locator("#message")).to_have_text("changed inside")
        embedded.plain.text(box, "sed -i 's/changed/changed again/' /tmp/site/message.js")
        expect(page.locator("#message")).to_have_text("changed again inside")
        assert page.evaluate("window.kept") == "not loaded again"
    embedded.plain.delete(box)


# ---------------------------------------------------------------- noVNC

COLOR = "([x, y]) => [...document.querySelector('canvas').getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3).join()"


def paint(site, way, secure=False):
    box = site.start(["/usr/bin/python3", f"{APPS}/desktop.py", "6080", f"{APPS}/node_modules/@novnc/novnc"], 6080, secure=secure)
    with site.page(f"novnc-{way}") as page:
        page.goto(site.address(way, box, 6080))
        expect(page).to_have_title("connect")
        canvas = page.locator("canvas")

        def shows(x, y, color):
            page.wait_for_function(f"place => ({COLOR})(place) === '{color}'", arg=[x, y])

        shows(110, 70, "0,0,0")
        canvas.click(position={"x": 100, "y": 60})
        shows(110, 70, "255,0,0")
        shows(90, 50, "0,0,0")
        page.keyboard.press("Space")
        shows(110, 70, "0,255,0")
        shows(319, 239, "0,255,0")
    site.plain.delete(box)


def test_a_desktop_is_painted_and_used_by_a_signed_route(embedded):
    paint(embedded, "signed", secure=True)


def test_a_desktop_is_painted_and_used_through_the_proxy(embedded):
    paint(embedded, "proxy")
