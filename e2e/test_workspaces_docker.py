"""From a repository to a sandbox of use and back, on a Docker engine: what its builder and its containers add to what holds everywhere."""

import contextlib
import json
import socket
import socketserver
import subprocess
import threading

import httpx
import pytest

import git_image
from stack import free_port, wait_for
from workspace_stacks import on_engine
from workspaces import QUICK_AGENT, Workspaces

pytestmark = pytest.mark.sandglass

# Nobody's but the build's.
SECRET = "npm-9c1f0e7ab25d4c66"
WORKER = "worker-base:test"
COUNT = '#!/bin/sh\necho ran >> "/var/{0}.count"\n'


@pytest.fixture(scope="module")
def base(engine):
    """The engine, with an image that has a user of its own beside the one of all repositories."""
    engine.call("load", input=git_image.image(User="worker", WorkingDir="/home/worker").docker_save(WORKER))
    return engine


@pytest.fixture(scope="module")
def stack(base):
    with on_engine(base) as made:
        yield made


@contextlib.contextmanager
def relay(path):
    """An address over which a Unix socket is reached."""

    class Pass(socketserver.BaseRequestHandler):
        def handle(self):
            with socket.socket(socket.AF_UNIX) as far:
                far.connect(str(path))
                there = threading.Thread(target=self.carry, args=(self.request, far), daemon=True)
                there.start()
                self.carry(far, self.request)
                there.join()

        @staticmethod
        def carry(source, target):
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Pass) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def built(spaces, identity):
    """The image of a sandbox, as the engine calls it."""
    return spaces.show(identity)["image"]["uri"]


def inspected(engine, name):
    return json.loads(engine.text("inspect", name))[0]


# ---------------------------------------------------------------- images


def test_a_dockerfile_is_built_by_the_engine_once_and_step_by_step(spaces, git, base):
    steps = "COPY package .\nRUN cat package > installed\nCOPY source .\nLABEL team=web\nEXPOSE 8000\n"
    repository = git.repository({"Dockerfile": f"FROM {git_image.NAME}\nWORKDIR /app\n{steps}", "package": "p1\n", "source": "s1\n"})
    first, second = spaces.ready(repository), spaces.ready(repository)
    assert built(spaces, first) == built(spaces, second)
    for identity in (first, second):
        assert spaces.text(identity, "cat /app/installed /app/source /workspace/*/source") == "p1\ns1\ns1"
    (build,) = spaces.builds_of(repository)
    assert "Step 1/" in spaces.build_log(build["id"]) and "Using cache" not in spaces.build_log(build["id"])
    labels = inspected(base, built(spaces, first))["Config"]["Labels"]
    assert labels["team"] == "web" and labels.get("role", "") == "", labels
    # What did not change is not run again.
    repository.commit({"source": "s2\n"})
    again = spaces.start_build(repository)
    again = spaces.until_build(again["id"], "Succeeded")
    log = spaces.build_log(again["id"])
    assert log.count("Using cache") >= 3, log
    third = spaces.ready(repository, imageBuild={"match": "exact", "policy": "requireCached"})
    assert spaces.text(third, "cat /app/source") == "s2"


def test_stages_and_what_newer_builders_know(spaces, git):
    text = f"FROM {git_image.NAME} AS tools\nRUN <<E\necho tool > /tool\nE\nFROM {git_image.NAME}\nCOPY --from=tools /tool /tool\n"
    identity = spaces.ready(git.repository({"Dockerfile": text}))
    assert spaces.text(identity, "cat /tool") == "tool"


def test_what_an_image_tells_agents_is_not_for_the_box_in_which_it_is_made(spaces, git, base):
    steps = 'ENV BOOTSTRAP_CMD="exit 3" EXECD_CLONE3_COMPAT=nonsense EXECD_API_GRACE_SHUTDOWN=never\nRUN test "$BOOTSTRAP_CMD" = "exit 3"\n'
    repository = git.repository({"Dockerfile": f"FROM {git_image.NAME}\n{steps}", ".sandbox/setup.sh": "#!/bin/sh\ntrue\n"})
    build = spaces.until_build(spaces.start_build(repository)["id"], "Succeeded")
    image = next(image for image in spaces.built_images() if image["id"] == build["imageId"])
    env = inspected(base, image["reference"])["Config"]["Env"]
    assert "BOOTSTRAP_CMD=exit 3" in env and "EXECD_CLONE3_COMPAT=nonsense" in env, env


def test_a_dockerfile_that_fails_tells_its_line_code_and_end(spaces, git, base):
    repository = git.repository({"Dockerfile": f"FROM {git_image.NAME}\nRUN echo the disk is green; exit 7\n"})
    shown = spaces.failed(repository)
    failure = shown["lastFailure"]
    assert (shown["status"]["reason"], failure["phase"], failure["exitCode"]) == ("image_build_failed", "build", 7), failure
    assert "the disk is green" in failure["outputTail"], failure
    (build,) = spaces.builds_of(repository)
    assert (build["status"]["state"], build["attempt"]) == ("Failed", 1)
    assert not base.wait_clean(), base.leftovers()


def test_setup_runs_once_and_start_at_every_boot(spaces, git):
    repository = git.repository({".sandbox/setup.sh": COUNT.format("setup"), ".sandbox/start.sh": COUNT.format("start")})
    for _ in range(2):
        identity = spaces.ready(repository)
        assert spaces.text(identity, "cat /var/setup.count; echo -; cat /var/start.count") == "ran\n-\nran"
    (build,) = spaces.builds_of(repository)
    assert build["cache"]["hit"] is False


def test_a_setup_that_fails_is_told_with_its_end_and_not_tried_again(spaces, git):
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\necho no registry >&2\nexit 1\n"})
    shown = spaces.failed(repository)
    failure = shown["lastFailure"]
    assert (shown["status"]["reason"], failure["phase"], failure["exitCode"]) == ("image_build_failed", "setup", 1)
    assert "no registry" in failure["outputTail"]
    spaces.failed(repository)
    (build,) = spaces.builds_of(repository)
    assert (build["attempt"], "no registry" in spaces.build_log(build["id"])) == (1, True)


@pytest.mark.parametrize("way", ["setup", "mount"])
def test_a_build_secret_is_nowhere_in_the_image(spaces, git, base, stack, way):
    digest = 'sha256sum > /var/digest'
    files = {
        "setup": {".sandbox/setup.sh": f'#!/bin/sh\necho "token $NPM_TOKEN"\nprintf %s "$NPM_TOKEN" | {digest}\n'},
        "mount": {"Dockerfile": f"FROM {git_image.NAME}\nRUN --mount=type=secret,id=NPM_TOKEN {digest} < /run/secrets/NPM_TOKEN\n"},
    }
    repository = git.repository(files[way])
    identity = spaces.ready(repository, imageBuild={"secrets": {"NPM_TOKEN": SECRET}})
    found = spaces.text(identity, "cat /var/digest; echo $NPM_TOKEN").split()
    assert found[0] == subprocess.run(["sha256sum"], input=SECRET.encode(), capture_output=True, check=True).stdout.decode().split()[0]
    name = built(spaces, identity)
    # History, configuration, labels and every layer.
    shown = [base.text("history", "--no-trunc", name), base.text("inspect", name), base.text("inspect", f"sandbox-{identity}")]
    assert not [text for text in shown if SECRET in text]
    assert SECRET.encode() not in base.call("save", name, text=False).stdout
    (build,) = spaces.builds_of(repository)
    told = [spaces.build_log(build["id"]), json.dumps(build), spaces.get(identity).text, stack.log.read_text(errors="replace")]
    assert not [text for text in told if SECRET in text]


def test_an_image_tells_nothing_of_the_box_that_it_was_built_in(spaces, git, base):
    identity = spaces.ready(git.repository({".sandbox/setup.sh": COUNT.format("setup")}))
    config = inspected(base, built(spaces, identity))["Config"]
    env = dict(pair.split("=", 1) for pair in config["Env"])
    assert not env.get("EXECD_ACCESS_TOKEN") and not env.get("OPENSANDBOX_ID"), env
    assert not {key: value for key, value in config["Labels"].items() if key.startswith("opensandbox.io/") and value}
    assert not config["Entrypoint"]


# ---------------------------------------------------------------- boxes


def test_the_four_fields_of_the_short_dialect(spaces, git, stack):
    repository = git.repository({"README": "four fields\n"})
    bearer = httpx.Client(base_url=stack.url, headers={"Authorization": f"Bearer {stack.key}"}, timeout=60)
    body = {"repo_url": repository.url, "image_tag": "latest", "env": {"COLOUR": "blue"}, "ttl_seconds": 600}
    answer = bearer.post("/v1/sandboxes", json=body)
    assert answer.status_code == 202, answer.text
    identity = answer.json()["id"]
    spaces.made.append(identity)
    spaces.until_ready(identity)
    shown = bearer.get(f"/v1/sandboxes/{identity}").json()
    assert shown["state"] == "READY"
    assert wait_for(lambda: bearer.get(f"/v1/sandboxes/{identity}").json()["uptime_seconds"] > shown["uptime_seconds"])
    assert spaces.text(identity, "cat /workspace/*/README; echo $COLOUR") == "four fields\nblue"
    assert bearer.delete(f"/v1/sandboxes/{identity}").status_code == 204
    bearer.close()
    spaces.until_gone(identity)


@pytest.mark.parametrize("recipe", ["hooks", "dockerfile"])
def test_an_image_with_a_user_of_its_own(spaces, git, recipe):
    note = "id -un >> /home/worker/who\n"
    files = {
        "hooks": {".sandbox/setup.sh": f"#!/bin/sh\n{note}", ".sandbox/start.sh": f"#!/bin/sh\n{note}"},
        "dockerfile": {"Dockerfile": f"FROM {WORKER}\nRUN {note}", ".sandbox/start.sh": f"#!/bin/sh\n{note}"},
    }
    repository = git.repository(files[recipe])
    asked = {"recipe": {"type": "hooks", "image": WORKER}} if recipe == "hooks" else {}
    identity = spaces.ready(repository, imageBuild=asked)
    place = spaces.show(identity)["source"]["repositories"][0]["path"]
    said = spaces.text(identity, f"id -un; echo $HOME; cat ~/who; stat -c %U {place} {place}/.git; touch {place}/mine && git -C {place} status --short")
    lines = said.split("\n")
    assert lines[:2] == ["worker", "/home/worker"], said
    assert "worker" in lines[2:] and not {"root"} & set(lines), said
    assert "?? mine" in said
    # What opens the channel to the server is not for it.
    refused = spaces.run(identity, "cat /run/.execd/workspace.token")
    assert refused.error is not None and not refused.stdout


def test_an_agent_reaches_its_server_though_nothing_may_leave(spaces, git, base):
    repository = git.repository({".sandbox/start.sh": COUNT.format("start")})
    identity = spaces.ready(repository, networkPolicy={"defaultAction": "deny", "egress": []})
    assert spaces.show(identity)["agent"]["state"] == "Attached"
    done = spaces.run(identity, f"timeout 3 wget -q -O- http://{git.host}/open/ 2>&1")
    assert done.error is not None, done
    spaces.delete(identity)
    spaces.until_gone(identity)
    assert not base.wait_clean(), base.leftovers()


def test_a_snapshot_of_one_is_a_sandbox_like_any_other(spaces, git):
    source = spaces.ready(git.repository({".sandbox/start.sh": "#!/bin/sh\ntrue\n"}), imageBuild={"recipe": {"type": "hooks", "image": WORKER}})
    place = spaces.show(source)["source"]["repositories"][0]["path"]
    spaces.text(source, f"echo changed > {place}/changed")
    answer = spaces.http.post(f"/v1/sandboxes/{source}/snapshots", json={"name": "copy"})
    assert answer.status_code == 202, answer.text
    snapshot = f"/v1/snapshots/{answer.json()['id']}"
    assert wait_for(lambda: spaces.http.get(snapshot).json()["status"]["state"] == "Ready"), spaces.http.get(snapshot).text
    answer = spaces.send({"snapshotId": answer.json()["id"], "timeout": 600, "resourceLimits": {"memory": "256Mi"}, "entrypoint": ["sleep", "600"]})
    assert answer.status_code == 202, answer.text
    copy = answer.json()["id"]
    spaces.until_ready(copy)
    # It is not made from a repository, and boots as no such thing; its user is that of the image.
    assert spaces.text(copy, f"cat {place}/changed; id -un") == "changed\nworker"
    assert "source" not in spaces.show(copy)
    for identity in (copy, source):
        spaces.delete(identity)
        spaces.until_gone(identity)
    assert spaces.http.delete(snapshot).status_code == 204


def test_services_are_started_again(spaces, git):
    web = {"name": "web", "command": ["sh", "-c", "exec httpd -f -p 8000 -h /workspace"], "port": 8000, "required": True}
    identity = spaces.ready(git.repository(), services=[web], agent=QUICK_AGENT)
    assert spaces.services(identity)["web"]["state"] == "Ready"
    spaces.text(identity, "kill -9 $(ps | grep '[h]ttpd -f' | awk '{print $1}')")
    spaces.until_service(identity, "web", lambda web: web["restartCount"] == 1 and web["state"] == "Ready")
    assert spaces.show(identity)["status"]["reason"] == "ready"


@pytest.mark.parametrize("way", ["called", "asks"])
def test_an_engine_that_sees_none_of_this_machines_files(base, git, way):
    """As one on another machine: the agent and its document are uploaded, and it calls the server over the network, or is asked by it."""
    listen = f"{base.gateway}:{free_port()}"
    with relay(base.socket) as engine:
        sections = {"agent_listen": listen, "agent_url": f"http://{listen}"} if way == "called" else {}
        with on_engine(base, start=False, workspaces=sections) as stack:
            stack.extra["DOCKER_HOST"] = f"tcp://{engine}"
            stack.start()
            spaces = Workspaces(stack.url, stack.key)
            repository = git.repository({"Dockerfile": f"FROM {WORKER}\nRUN echo made > made\n", ".sandbox/start.sh": "#!/bin/sh\nid -un > started\n"})
            web = {"name": "web", "command": ["/bin/sh", "-c", "echo begun; exec sleep 600"]}
            identity = spaces.ready(repository, services=[web], agent=QUICK_AGENT)
            assert spaces.show(identity)["agent"]["state"] == "Attached"
            told = spaces.history(identity)
            assert told.count("boot.completed") == 1 and "boot.phase_finished" in told, told
            path = f"/v1/sandboxes/{identity}/services/web"
            assert spaces.http.post(f"{path}/restart").status_code == 202
            assert wait_for(lambda: "begun" in spaces.http.get(f"{path}/logs").text)
            assert not [m for m in base.container(identity)["Mounts"] if m["Type"] == "bind"]
            assert spaces.text(identity, "cat /home/worker/made /workspace/*/started") == "made\nworker"
            spaces.close()
            assert not base.wait_clean(), base.leftovers()


# ---------------------------------------------------------------- ends


def test_deleted_sandboxes_leave_their_image_and_nothing_else(spaces, git, base, stack):
    repository = git.repository({".sandbox/setup.sh": COUNT.format("setup")})
    first = spaces.ready(repository)
    name = built(spaces, first)
    spaces.delete(first)
    spaces.until_gone(first)
    assert not base.wait_clean(), base.leftovers()
    assert not [path for path in stack.home.glob(f"**/*{first}*")]
    second = spaces.ready(repository)
    assert built(spaces, second) == name and len(spaces.builds_of(repository)) == 1


def test_an_image_that_somebody_pruned_is_built_again(spaces, git, base):
    repository = git.repository({".sandbox/setup.sh": COUNT.format("setup")})
    first = spaces.ready(repository)
    name = built(spaces, first)
    spaces.delete(first)
    spaces.until_gone(first)
    base.call("rmi", "-f", name)
    second = spaces.ready(repository)
    assert spaces.text(second, "cat /var/setup.count") == "ran"
    assert len(spaces.builds_of(repository)) == 2


def test_deleted_while_its_image_is_built(spaces, git, base):
    for files in (
        {".sandbox/setup.sh": "#!/bin/sh\necho begun\nsleep 600\n"},
        {"Dockerfile": f"FROM {git_image.NAME}\nRUN echo begun && sleep 600\n"},
    ):
        repository = git.repository(files)
        identity = spaces.begin(repository)
        spaces.until(identity, "Pending", reason="image_building")
        (build,) = spaces.builds_of(repository)
        assert wait_for(lambda: "\nbegun" in spaces.build_log(build["id"]), 60)
        spaces.delete(identity)
        spaces.until_gone(identity)
        assert spaces.until_build(build["id"], "Cancelled")
        assert not base.wait_clean(), base.leftovers()


def test_a_container_that_somebody_removed_is_noticed(spaces, git, base):
    identity = spaces.ready(git.repository())
    base.call("rm", "-f", f"sandbox-{identity}")
    shown = spaces.until(identity, "Failed")
    # Whether its end or its absence is seen first is a matter of moments.
    assert shown["status"]["reason"] in ("runtime_lost", "runtime_error"), shown
    spaces.delete(identity)
    spaces.until_gone(identity)


def test_a_container_that_somebody_removed_while_no_server_ran_is_told_of(own_stack, git, base):
    stack, spaces = own_stack()
    identity = spaces.ready(git.repository(), metadata={"team": "web"})
    # Shown to be ready a moment before that is written down; killed in between, the next server would make the box again.

    def types():
        return [event["type"] for event in spaces.event_page(identity)]

    assert wait_for(lambda: "sandbox.state_changed" in types())
    stack.kill()
    base.call("rm", "-f", f"sandbox-{identity}")
    for _ in range(2):
        stack.start()
        path = f"/v1/sandboxes/{identity}"
        answer = spaces.http.get(path)
        assert answer.status_code == 404, answer.text
        past = spaces.http.get(path, params={"includeTerminated": "true"}).json()
        assert (past["status"]["state"], past["status"]["reason"], past["metadata"]["team"]) == ("Failed", "runtime_lost", "web"), past
        assert types()[-2:] == ["sandbox.failed", "sandbox.terminated"]
        stack.kill()
    stack.start()


# ---------------------------------------------------------------- a server that is killed


@pytest.mark.parametrize("recipe", ["hooks", "dockerfile"])
def test_a_server_killed_during_a_build_goes_on_with_it(own_stack, git, base, recipe):
    stack, spaces = own_stack()
    wait = "echo begun; sleep 4; echo done > /var/done"
    files = {"hooks": {".sandbox/setup.sh": f"#!/bin/sh\n{wait}\n"}, "dockerfile": {"Dockerfile": f"FROM {git_image.NAME}\nRUN {wait}\n"}}
    repository = git.repository(files[recipe])
    identity = spaces.begin(repository)
    spaces.until(identity, "Pending", reason="image_building")
    (build,) = spaces.builds_of(repository)
    assert wait_for(lambda: "\nbegun" in spaces.build_log(build["id"]), 60)
    stack.kill()
    stack.start()
    spaces.until_ready(identity)
    assert spaces.text(identity, "cat /var/done") == "done"
    assert len(spaces.builds_of(repository)) == 1 and len(spaces.built_images()) == 1
    # Nothing of the attempt that died, and the box that was made after it.
    left = base.wait_clean(living=[identity])
    assert not left, left
    spaces.close()


def test_a_server_killed_during_a_boot_takes_it_up(own_stack, git):
    stack, spaces = own_stack()
    repository = git.repository({".sandbox/start.sh": "#!/bin/sh\necho ran >> /var/start.count\nsleep 4\n"})
    identity = spaces.begin(repository)
    spaces.until(identity, "Pending", reason="booting")
    for _ in range(2):
        stack.kill()
        stack.start()
        spaces.until_ready(identity)
        attached = wait_for(lambda: spaces.show(identity)["agent"]["state"] == "Attached")
        assert attached, spaces.show(identity)
    assert spaces.text(identity, "cat /var/start.count") == "ran"
    spaces.close()


def test_build_boxes_of_a_server_that_forgot_them_are_removed(own_stack, git, base):
    stack, spaces = own_stack()
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\necho begun\nsleep 600\n"})
    build = spaces.start_build(repository)
    assert wait_for(lambda: "\nbegun" in spaces.build_log(build["id"]), 60)
    (box,) = base.containers("role=build")
    assert (box["Labels"]["role"], box["Labels"]["image-build"]) == ("build", build["id"])
    stack.kill()
    for path in stack.home.glob("store.db*"):
        path.unlink()
    stack.start()
    assert not base.wait_clean(), base.leftovers()
    assert wait_for(lambda: spaces.http.get("/v1/sandboxes").json()["items"] == [])
    spaces.close()
