"""Repositories that mean ill, on a Docker engine: what its builder must not fetch, show or share for them."""

import contextlib
import http.server
import threading
import uuid

import pytest

import git_image
from stack import wait_for
from tenants import SharedDockerStack
from workspace_stacks import on_engine, settings
from workspaces import Workspaces

pytestmark = pytest.mark.sandglass

DONE = ("Succeeded", "Failed", "Cancelled", "TimedOut")
# Images with something that is done first in every build of them.
DOWNLOADS, COPIES, RUNS = "triggers-download:test", "triggers-copy:test", "triggers-run:test"


@pytest.fixture(scope="module")
def inner():
    """A service of this machine that no sandbox on a bridge reaches, and what it was asked for."""
    asked = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "6")
            self.end_headers()
            self.wfile.write(b"inner\n")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.url, server.asked = f"http://127.0.0.1:{server.server_address[1]}", asked
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def base(engine, inner):
    triggers = {
        git_image.NAME: None,
        DOWNLOADS: f"ADD {inner.url}/base /stolen",
        COPIES: f"COPY --from={git_image.NAME} /bin/sh /stolen",
        RUNS: "RUN head -c 16 /dev/urandom | sha256sum > /first",
    }
    for name, trigger in triggers.items():
        config = {"OnBuild": [trigger]} if trigger else {}
        engine.call("load", input=git_image.image(**config).docker_save(name))
    return engine


@pytest.fixture(scope="module")
def shared(base):
    stack = SharedDockerStack(base, config=settings({})).start()
    yield stack
    stack.clear()
    problems = stack.close()
    assert not problems, "\n".join(problems)


@pytest.fixture
def tenants(shared):
    made = [Workspaces(shared.url, f"{name}-key") for name in shared.names]
    yield made
    for client in made:
        client.close()


def attempt(client, repository):
    """How a build ends, with everything that is said about it."""
    answer = client.http.post("/v1/image-builds", json={"repository": {"url": repository.url}})
    if answer.status_code >= 400:
        return "refused", answer.text
    identity = answer.json()["id"]
    wait_for(lambda: client.build(identity)["status"]["state"] in DONE, 240)
    build = client.build(identity)
    return build["status"]["state"], f"{build}\n{client.build_log(identity)}"


def dockerfile(git, *lines, **files):
    return git.repository({"Dockerfile": "\n".join(lines) + "\n", **files})


def test_the_engine_fetches_nothing_for_a_dockerfile(tenants, git, inner):
    client, name = tenants[1], git_image.NAME
    url = inner.url
    for lines in (
        (f"FROM {name}", f"ADD {url}/plain /stolen"),
        (f"FROM {name}", f"ARG U={url}/argument", "ADD $U /stolen"),
        (f"FROM {name}", "ENV S=http", f"ADD ${{S}}{url.removeprefix('http')}/split /stolen"),
        (f"FROM {name}", f'ADD "{url}/quoted" /stolen'),
        (f"FROM {name}", f'ADD ["{url}/array", "/stolen"] x'),
        (f"FROM {name} AS q", f"ONBUILD ADD {url}/trigger /stolen", "FROM q", "RUN true"),
        (f"FROM {name} AS q", f"ARG U={url}/trigger", "ONBUILD ADD $U /stolen", "FROM q", "RUN true"),
        (f"FROM {name}", "RUN cat <<#E", f"ADD {url}/document /stolen", "#E"),
        (f"FROM {DOWNLOADS}", "RUN true"),
    ):
        state, said = attempt(client, dockerfile(git, *lines))
        assert state in ("refused", "Failed") or "<<#E" in lines[1], f"{lines}\n{said}"
    assert inner.asked == []


def test_archives_and_variables_in_names_of_files_go_to_the_engine_as_before(tenants, git):
    lines = (f"FROM {git_image.NAME}", "ARG V=1", "ADD file-$V.txt /added", "COPY . /all", "RUN ls -a /all > /names", "RUN cat /names")
    state, said = attempt(tenants[0], dockerfile(git, *lines, **{"file-1.txt": "x\n", "Dockerfile.dockerignore": ".git\n"}))
    assert state == "Succeeded" and "Step 1/" in said, said
    # What the server adds for the builder is not copied.
    assert ".sandglass" not in said.split("Running in")[-1], said


def test_files_of_another_tenants_image_are_not_copied_behind_a_trigger(tenants, git, shared):
    a, b = tenants
    state, said = attempt(a, git.repository({".sandbox/setup.sh": "#!/bin/sh\necho of-a > /a-secret\n"}))
    assert state == "Succeeded", said
    (image, *_) = a.built_images()
    lines = (f"FROM {git_image.NAME} AS q", f"ONBUILD COPY --from={image['reference']} /a-secret /s", "FROM q", "RUN cat /s")
    for one in (lines, (f"FROM {COPIES}", "RUN true")):
        state, said = attempt(b, dockerfile(git, *one))
        assert state == "refused" and "of-a" not in said, f"{one}\n{said}"
    # What the builder knows by itself does not lead to another image than the one that was looked at.
    hidden = (
        "ARG TARGETARCH=",
        f"ARG X=${{TARGETARCH:+{image['reference']}}}",
        f"ARG Y=${{X:-{git_image.NAME}}}",
        "FROM $Y",
        "RUN cat /a-secret",
    )
    state, said = attempt(b, dockerfile(git, *hidden))
    assert state in ("refused", "Failed") and "of-a" not in said, said


def test_variables_lead_to_no_image_but_the_one_that_was_looked_at(tenants, git, shared):
    a, b = tenants
    state, said = attempt(a, git.repository({".sandbox/setup.sh": "#!/bin/sh\necho of-a > /a-secret\n"}))
    assert state == "Succeeded", said
    (image,) = [image for image in a.built_images() if "osb-img-" in image["reference"]][-1:]
    other, base = image["reference"], git_image.NAME
    # What the engine's own reader would make of each is the other image.
    for start in (
        ("ARG A=$1", f"ARG B=${{A:+{base}}}", f"FROM ${{B:-{other}}}"),
        (f"ARG A={base}", "ARG A", f"FROM ${{A:-{other}}}"),
    ):
        state, said = attempt(b, dockerfile(git, *start, "RUN cat /a-secret || echo nothing there"))
        assert "of-a" not in said and (state != "Succeeded" or "nothing there" in said), said
    manifest = f"version: 1\ndockerfile:\n  path: Dockerfile\n  args:\n    HTTP_PROXY: {other}\n"
    lines = (f"FROM ${{HTTP_PROXY:-{base}}}", "RUN cat /a-secret || echo nothing there")
    state, said = attempt(b, dockerfile(git, *lines, **{".sandbox.yml": manifest}))
    assert "of-a" not in said and (state != "Succeeded" or "nothing there" in said), said


def test_an_images_check_does_not_run_where_it_is_built(tenants, git):
    lines = (f"FROM {git_image.NAME}", "HEALTHCHECK --interval=10ms CMD touch /checked")
    setup = {".sandbox/setup.sh": "#!/bin/sh\nsleep 1\nls /checked || echo no check\n"}
    state, said = attempt(tenants[0], dockerfile(git, *lines, **setup))
    assert state == "Succeeded" and "no check" in said, said


@pytest.mark.parametrize("start", [git_image.NAME, RUNS])
def test_tenants_share_nothing_that_an_instruction_made(tenants, git, start):
    made = "RUN head -c 16 /dev/urandom | sha256sum > /key"
    shown = []
    for client in tenants:
        # What is shown is never from an earlier attempt's layers.
        lines = (f"FROM {start}", made, "COPY . /x", "RUN cat /key /first 2>/dev/null || true")
        repository = dockerfile(git, *lines, only=f"{uuid.uuid4()}\n")
        state, said = attempt(client, repository)
        assert state == "Succeeded" and "Step 1/" in said, said
        shown.append({line for line in said.splitlines() if line.endswith("  -")})
        # One's own is still used.
        if start == git_image.NAME:
            repository.commit({"more": "x\n"})
            state, said = attempt(client, repository)
            assert state == "Succeeded" and "Using cache" in said, said
    assert shown[0] and shown[1] and not shown[0] & shown[1], shown


@contextlib.contextmanager
def server(engine, **sections):
    with on_engine(engine, **sections) as stack:
        client = Workspaces(stack.url, stack.key)
        try:
            yield client
        finally:
            client.close()


@pytest.mark.parametrize(
    "sections",
    [{"builds": {"engine_builder": "never"}}, {"docker": {"pids_limit": 200}}],
    ids=["never", "a lower limit"],
)
def test_what_a_dockerfile_runs_is_confined_like_a_sandbox(base, git, sections):
    lines = (f"FROM {git_image.NAME}", "RUN /bin/busybox mknod /x b 254 0 || echo refused")
    with server(base, **sections) as client:
        state, said = attempt(client, dockerfile(git, *lines))
    assert state == "Succeeded", said
    assert "Step 1/" not in said and "refused" in said, said
