"""What a sandbox is on Docker: labels, limits, capabilities, networks, secure runtimes, ends, containers that others touch."""

import json
import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from docker_engine import BUSYBOX, ID, PYTHON
from docker_stack import DockerStack, untouched_range
from plain import Plain
from stack import wait_for

START_FAILED = "DOCKER::SANDBOX_START_FAILED"
DROPPED = {"AUDIT_WRITE", "MKNOD", "NET_ADMIN", "NET_RAW", "SYS_ADMIN", "SYS_MODULE", "SYS_PTRACE", "SYS_TIME", "SYS_TTY_CONFIG"}


def bare(names):
    return {name.removeprefix("CAP_") for name in names or ()}


# ---------------------------------------------------------------- the container


def test_what_the_container_is(docker, engine):
    box = docker.create(
        entrypoint=["sleep", "600"],
        env={"A": "1", "B": None, "OPENSANDBOX_ID": "mine"},
        metadata={"team": "blue"},
        resourceLimits={"cpu": "250m", "memory": "128Mi"},
        extensions={"opensandbox.extensions.mine": "x", "access.renew.extend.seconds": "300"},
    )
    seen = engine.container(box)
    labels, host = seen["Config"]["Labels"], seen["HostConfig"]
    assert seen["Name"] == f"/sandbox-{box}" and seen["Config"]["Cmd"] == ["sleep", "600"]
    assert labels[ID] == box and labels["team"] == "blue" and "+00:00" in labels["opensandbox.io/expires-at"]
    assert labels["opensandbox.io/extensions.mine"] == "x" and labels["opensandbox.io/access-renew-extend-seconds"] == "300"
    assert host["NanoCpus"] == 250_000_000 and host["Memory"] == 128 << 20 and host["PidsLimit"] == 4096
    assert bare(host["CapDrop"]) == DROPPED and not host["Privileged"] and not host["CapAdd"]
    assert any(option.startswith("no-new-privileges") for option in host["SecurityOpt"])
    assert host["RestartPolicy"]["Name"] in ("", "no") and not host["AutoRemove"]
    variables = [one for one in seen["Config"]["Env"] if not one.startswith("PATH=")]
    assert "A=1" in variables and not [one for one in variables if one.startswith("B=")]
    assert [one for one in variables if one.startswith("OPENSANDBOX_ID=")] == [f"OPENSANDBOX_ID={box}"]
    ports = seen["NetworkSettings"]["Ports"]
    for port, label in (("44772/tcp", "embedding-proxy-port"), ("8080/tcp", "http-port")):
        assert [binding["HostIp"] for binding in ports[port]] == ["127.0.0.1"]
        assert ports[port][0]["HostPort"] == labels[f"opensandbox.io/{label}"]


def test_limits_and_rights_inside(docker):
    box = docker.create(resourceLimits={"cpu": "500m", "memory": "64Mi"}, env={"MINE": "1"})
    status = dict(line.split(":\t", 1) for line in docker.text(box, "cat /proc/self/status").splitlines() if ":\t" in line)
    effective = int(status["CapEff"], 16)
    for capability in (12, 13, 16, 19, 21, 25, 27):  # NET_ADMIN NET_RAW SYS_MODULE SYS_PTRACE SYS_ADMIN SYS_TIME MKNOD
        assert not effective & (1 << capability), capability
    assert status["NoNewPrivs"].strip() == "1"
    done = docker.run(box, "tail /dev/zero")
    assert done.error is not None
    environment = docker.text(box, "env")
    assert "MINE=1" in environment and "TOKEN" not in environment
    assert "TOKEN" not in docker.text(box, "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -v MINE || true")


def test_the_agent_is_closed_without_its_token(docker):
    box = docker.create()
    direct = docker.http.get(f"/v1/sandboxes/{box}/endpoints/44772").json()
    assert httpx.get(f"http://{direct['endpoint']}/ping", headers=direct.get("headers"), timeout=60).status_code == 200
    assert httpx.post(f"http://{direct['endpoint']}/command", json={"command": "id"}, timeout=60).status_code == 401


def test_workload_out_of_memory(docker):
    box = docker.create(entrypoint=["tail", "/dev/zero"], resourceLimits={"memory": "32Mi"})
    assert wait_for(lambda: docker.state(box) == "Failed"), docker.status(box)
    assert "memory" in json.dumps(docker.status(box)).lower()


@pytest.mark.parametrize("limits", [{"gpu": "1"}, {"gpu": "all"}], ids=str)
def test_gpu_without_a_driver_for_it(docker, engine, limits):
    before = len(engine.containers())
    state, code, message = docker.outcome(docker.post(resourceLimits=limits))
    assert (state == 500 and code == START_FAILED) or state == "Failed", (state, code, message)
    assert wait_for(lambda: len(engine.containers()) == before)


def test_environment_and_binds_for_every_sandbox(on_docker, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "a").write_text("from the host")
    _, docker = on_docker(config={"docker": {
        "sandbox_env": {"EVERYWHERE": "yes", "REMOVED": "x", "CHANGED": "old"},
        "sandbox_binds": [f"{tmp_path}/shared:/shared:ro"],
        "pids_limit": 64,
    }})
    box = docker.create(env={"REMOVED": None, "CHANGED": "new"})
    assert docker.text(box, "echo $EVERYWHERE $REMOVED $CHANGED; cat /shared/a") == "yes new\nfrom the host"
    assert docker.run(box, "touch /shared/b").error
    assert docker.run(box, "for i in $(seq 200); do sleep 30 & done; wait").stderr


# ---------------------------------------------------------------- ends


def test_entrypoint_that_does_not_exist(docker, engine):
    before = len(engine.containers())
    state, code, message = docker.outcome(docker.post(entrypoint=["/no/such/program"]))
    assert (state, code) == (400, "DOCKER::INVALID_ENTRYPOINT") or state == "Failed", (state, code, message)
    if state == 400:
        assert wait_for(lambda: len(engine.containers()) == before)


@pytest.mark.parametrize("code, state", [(0, "Terminated"), (1, "Failed"), (137, "Failed")])
def test_entrypoint_that_ends(docker, code, state):
    answer = docker.post(entrypoint=["sh", "-c", f"exit {code}"])
    assert answer.status_code == 202, answer.text
    box = answer.json()["id"]
    assert wait_for(lambda: docker.state(box) == state), docker.status(box)
    assert docker.http.post(f"/v1/sandboxes/{box}/resume").json()["code"] == "DOCKER::SANDBOX_NOT_PAUSED"
    assert docker.delete(box) == 204


def test_container_removed_behind_our_back(docker, engine):
    box = docker.create()
    engine.call("rm", "-f", f"sandbox-{box}")
    assert wait_for(lambda: docker.get(box).status_code == 404)
    assert docker.delete(box) == 404


def test_container_stopped_and_paused_behind_our_back(docker, engine):
    box = docker.create()
    engine.call("pause", f"sandbox-{box}")
    assert wait_for(lambda: docker.state(box) == "Paused")
    assert docker.http.post(f"/v1/sandboxes/{box}/resume").status_code == 202
    assert docker.state(box) == "Running"
    engine.call("kill", f"sandbox-{box}")
    assert wait_for(lambda: docker.state(box) == "Failed"), docker.status(box)


def test_container_started_by_hand_with_our_label(docker, engine):
    identity = str(uuid.uuid4())
    engine.call("run", "-d", "--name", "by-hand", "--label", f"{ID}={identity}", "--label", "team=hand", BUSYBOX, "sleep", "600")
    try:
        assert wait_for(lambda: docker.state(identity) == "Running"), docker.get(identity).text
        got = docker.get(identity).json()
        assert got["metadata"] == {"team": "hand"} and got["entrypoint"] == ["sleep", "600"] and "expiresAt" not in got
        assert got["image"] == {"uri": BUSYBOX}
        listed = docker.http.get("/v1/sandboxes", params={"metadata": "team=hand"}).json()["items"]
        assert [item["id"] for item in listed] == [identity]
        assert docker.http.post(f"/v1/sandboxes/{identity}/pause").status_code == 202
        assert docker.delete(identity) == 204
        assert identity not in {c["Labels"].get(ID) for c in engine.containers()}
    finally:
        engine.call("rm", "-f", "by-hand", check=False)


def test_foreign_container_with_a_name_of_ours(docker, engine):
    engine.call("run", "-d", "--name", "sandbox-not-ours", BUSYBOX, "sleep", "600")
    try:
        assert docker.get("not-ours").status_code == 404
        assert docker.delete("not-ours") == 404
        assert engine.call("inspect", "sandbox-not-ours", check=False).returncode == 0
    finally:
        engine.call("rm", "-f", "sandbox-not-ours")


# ---------------------------------------------------------------- networks


def test_user_defined_network(on_docker, engine):
    engine.call("network", "create", "sandglass-own")
    try:
        _, docker = on_docker(config={"docker": {"network_mode": "sandglass-own"}})
        box = docker.create()
        assert docker.text(box, "echo inside") == "inside"
        networks = engine.container(box)["NetworkSettings"]["Networks"]
        assert list(networks) == ["sandglass-own"]
        direct = docker.http.get(f"/v1/sandboxes/{box}/endpoints/44772").json()
        assert httpx.get(f"http://{direct['endpoint']}/ping", headers=direct.get("headers"), timeout=60).status_code == 200
        docker.close()
    finally:
        engine.call("network", "rm", "sandglass-own", check=False)


def test_user_defined_network_that_is_missing(on_docker):
    _, docker = on_docker(config={"docker": {"network_mode": "sandglass-none"}})
    status, code, _ = docker.outcome(docker.post())
    assert (status, code) == (400, "SANDBOX::INVALID_PARAMETER")


def test_host_network(on_docker, engine):
    _, docker = on_docker(config={"docker": {"network_mode": "host"}})
    box = docker.create()
    seen = engine.container(box)
    assert seen["HostConfig"]["NetworkMode"] == "host" and "opensandbox.io/http-port" not in seen["Config"]["Labels"]
    assert docker.http.get(f"/v1/sandboxes/{box}/endpoints/9000").json()["endpoint"] == "127.0.0.1:9000"
    assert docker.text(box, "echo on the host") == "on the host"
    docker.close()


def test_ports_run_out_and_come_back(on_docker, engine):
    start = untouched_range()["port_range_min"]
    stack, docker = on_docker(image=BUSYBOX, config={"docker": {"port_range_min": start, "port_range_max": start + 100}})
    body = {"resourceLimits": {"memory": "32Mi"}}

    def one(_):
        client = Plain(stack.url, stack.key, BUSYBOX)
        told = client.outcome(client.post(**body))
        docker.made += client.made
        client.http.close()
        return told

    with ThreadPoolExecutor(200) as pool:
        outcomes = list(pool.map(one, range(200)))
    running = [outcome for outcome in outcomes if outcome[0] == "Running"]
    refused = [outcome for outcome in outcomes if outcome[0] != "Running"]
    assert len(running) == 50, outcomes
    for state, code, message in refused:
        assert state in (500, "Failed") and "port" in message, (state, code, message)
        assert state == "Failed" or code == START_FAILED
    used = []
    for container in engine.containers(ID):
        used += [port["PublicPort"] for port in container["Ports"] if port.get("PublicPort") and start <= port["PublicPort"] <= start + 100]
    assert len(used) == len(set(used)) == 100
    for box in docker.made:
        docker.delete(box)
    docker.made.clear()
    assert docker.outcome(docker.post(**body))[0] == "Running"
    docker.close()


# ---------------------------------------------------------------- secure runtimes


def test_gvisor_runs_a_sandbox(on_docker, engine):
    _, docker = on_docker(config={"secure_runtime": {"type": "gvisor", "docker_runtime": "runsc"}})
    box = docker.create()
    assert engine.container(box)["HostConfig"]["Runtime"] == "runsc"
    assert "gVisor" in docker.text(box, "dmesg")
    assert docker.write(box, "/tmp/a", b"written").status_code == 200
    assert docker.read(box, "/tmp/a").content == b"written"
    docker.close()


def test_runtime_that_the_engine_does_not_know(engine):
    stack = DockerStack(engine, {"secure_runtime": {"type": "kata", "docker_runtime": "kata-none"}})
    with pytest.raises(RuntimeError, match="ended with"):
        stack.start()
    assert "kata-none" in stack.tail()
    stack.close()


def test_images_are_those_of_the_suite(engine):
    assert engine.text("run", "--rm", PYTHON, "python3", "-c", "print(6 * 7)") == "42"
