"""The life of a sandbox through the synchronous SDK."""

import time
import uuid
from datetime import datetime, timedelta, timezone

import httpx
import pytest
from opensandbox import SandboxManagerSync, SandboxSync
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.models.sandboxes import SandboxFilter, SandboxImageSpec

from conftest import texts
from stack import wait_for


@pytest.fixture(scope="module")
def manager(config):
    made = SandboxManagerSync.create(connection_config=config())
    yield made
    made.close()


def test_create_shows_what_was_asked_for(create, server):
    before = datetime.now(timezone.utc)
    box = create(
        timeout=timedelta(minutes=5),
        metadata={"team": "a", "run": "1"},
        env={"E2E_FROM_CREATE": "yes"},
        entrypoint=["sleep", "3600"],
    )
    info = box.get_info()
    assert info.id == box.id and str(uuid.UUID(box.id)) == box.id
    assert info.status.state == "Running"
    assert info.image.image == server.image
    assert info.entrypoint[-2:] == ["sleep", "3600"]
    assert info.metadata == {"team": "a", "run": "1"}
    assert abs((info.expires_at - before).total_seconds() - 300) < 30
    assert abs((info.created_at - before).total_seconds()) < 30
    assert texts(box.commands.run("echo $E2E_FROM_CREATE; echo $OPENSANDBOX_ID").logs.stdout) == ["yes", box.id]
    assert box.is_healthy()


def test_without_a_timeout_nothing_expires_and_renewing_is_refused(create):
    box = create(timeout=None)
    assert box.get_info().expires_at is None
    with pytest.raises(SandboxApiException) as refused:
        box.renew(timedelta(minutes=5))
    assert refused.value.status_code == 409


def test_connect_to_a_living_sandbox(create, config):
    box = create()
    box.files.write_file("/tmp/kept", "yes")
    again = SandboxSync.connect(box.id, connection_config=config())
    assert again.files.read_file("/tmp/kept") == "yes"
    again.close()


def test_renew_moves_the_end_both_ways(create):
    box = create()
    longer = box.renew(timedelta(minutes=20))
    assert 19 * 60 < (longer.expires_at - datetime.now(timezone.utc)).total_seconds() <= 20 * 60 + 5
    assert box.get_info().expires_at == longer.expires_at
    shorter = box.renew(timedelta(minutes=2))
    assert box.get_info().expires_at == shorter.expires_at < longer.expires_at


def test_a_sandbox_is_gone_soon_after_its_end(create, manager, server):
    box = create()
    box.renew(timedelta(seconds=6))
    time.sleep(1)
    assert box.get_info().status.state == "Running"
    assert wait_for(lambda: gone(manager, box.id), 30)
    if server.stack:
        assert wait_for(lambda: box.id not in server.stack.directories())


def gone(manager, sandbox):
    try:
        manager.get_sandbox_info(sandbox)
    except SandboxApiException as error:
        assert error.status_code == 404
        return True
    return False


def test_pause_stops_the_clock_of_processes_and_resume_continues_them(create, config, manager):
    box = create()
    box.commands.run("i=0; while :; do i=$((i+1)); echo $i > /tmp/m; mv /tmp/m /tmp/n; sleep 0.02; done >/dev/null 2>&1 & echo started")
    assert wait_for(lambda: box.commands.run("cat /tmp/n").text.strip())
    box.pause()
    assert wait_for(lambda: manager.get_sandbox_info(box.id).status.state == "Paused")
    with pytest.raises(SandboxApiException) as refused:
        manager.pause_sandbox(box.id)
    assert refused.value.status_code == 409
    assert manager.renew_sandbox(box.id, timedelta(minutes=9)).expires_at == manager.get_sandbox_info(box.id).expires_at
    resumed = SandboxSync.resume(box.id, connection_config=config())
    assert manager.get_sandbox_info(box.id).status.state == "Running"
    one = int(resumed.commands.run("cat /tmp/n").text)
    assert wait_for(lambda: int(resumed.commands.run("cat /tmp/n").text) > one)
    with pytest.raises(SandboxApiException) as refused:
        manager.resume_sandbox(box.id)
    assert refused.value.status_code == 409
    resumed.close()


def test_a_paused_sandbox_can_be_deleted(create, manager):
    box = create()
    box.pause()
    box.kill()
    assert wait_for(lambda: gone(manager, box.id))


def test_kill_twice_and_the_unknown(create, manager):
    box = create()
    box.kill()
    assert wait_for(lambda: gone(manager, box.id))
    unknown = str(uuid.uuid4())
    for attempt in (
        lambda: manager.kill_sandbox(box.id),
        lambda: manager.kill_sandbox(unknown),
        lambda: manager.get_sandbox_info(unknown),
        lambda: manager.pause_sandbox(unknown),
        lambda: manager.resume_sandbox(unknown),
        lambda: manager.renew_sandbox(unknown, timedelta(minutes=5)),
        lambda: manager.patch_sandbox_metadata(unknown, {"a": "b"}),
        lambda: SandboxSync.connect(unknown, connection_config=manager.connection_config),
    ):
        with pytest.raises(SandboxApiException) as missing:
            attempt()
        assert missing.value.status_code == 404
        assert missing.value.error.code.endswith("SANDBOX_NOT_FOUND")
        assert missing.value.request_id


def test_metadata_is_merged_and_null_deletes(create):
    box = create(metadata={"keep": "1", "drop": "2"})
    assert box.patch_metadata({"drop": None, "new": "3", "absent": None}).metadata == {"keep": "1", "new": "3"}
    assert box.get_info().metadata == {"keep": "1", "new": "3"}
    with pytest.raises(SandboxApiException) as refused:
        box.patch_metadata({"opensandbox.io/mine": "x"})
    assert refused.value.status_code == 400


def test_list_filters_by_state_and_metadata_and_pages(create, manager):
    tag = f"t{uuid.uuid4().hex[:8]}"
    boxes = [create(metadata={"tag": tag, "n": str(n)}) for n in range(5)]
    boxes[0].pause()

    def ids(**keys):
        keys.setdefault("metadata", {"tag": tag})
        page = manager.list_sandbox_infos(SandboxFilter(**keys))
        return [info.id for info in page.sandbox_infos], page.pagination

    newest_first = [box.id for box in reversed(boxes)]
    assert ids()[0] == newest_first
    assert ids(states=["Paused"])[0] == [boxes[0].id]
    assert sorted(ids(states=["paused", "RUNNING"])[0]) == sorted(newest_first)
    assert ids(states=["Failed"])[0] == []
    assert ids(metadata={"tag": tag, "n": "3"})[0] == [boxes[3].id]
    assert ids(metadata={"tag": tag, "n": "9"})[0] == []
    first, pages = ids(page=1, page_size=2)
    assert (first, pages.total_items, pages.total_pages, pages.has_next_page) == (newest_first[:2], 5, 3, True)
    last, pages = ids(page=3, page_size=2)
    assert (last, pages.has_next_page) == (newest_first[4:], False)
    beyond, pages = ids(page=9, page_size=2)
    assert (beyond, pages.total_items) == ([], 5)


def test_the_exit_of_the_entrypoint_ends_the_sandbox(create, manager):
    box = create(entrypoint=["sh", "-c", "sleep 1; exit 42"], skip_health_check=True)
    assert wait_for(lambda: manager.get_sandbox_info(box.id).status.state == "Failed")
    assert "42" in (manager.get_sandbox_info(box.id).status.message or "")
    clean = create(entrypoint=["sh", "-c", "sleep 1"], skip_health_check=True)
    assert wait_for(lambda: manager.get_sandbox_info(clean.id).status.state == "Terminated")


@pytest.mark.sandglass
def test_an_image_that_does_not_exist_leaves_nothing(config, manager, server):
    before = {info.id for info in manager.list_sandbox_infos(SandboxFilter(page_size=200)).sandbox_infos}
    with pytest.raises(SandboxException):
        SandboxSync.create(
            SandboxImageSpec("no-such-image:none"), connection_config=config(), ready_timeout=timedelta(seconds=10)
        )
    # The SDK deletes what it saw fail; a sandbox that was refused never existed.
    def after():
        return {info.id for info in manager.list_sandbox_infos(SandboxFilter(page_size=200)).sandbox_infos}

    assert wait_for(lambda: after() == before)


@pytest.mark.parametrize("through_proxy", [False, True])
def test_endpoints_of_the_agent_the_egress_port_and_a_program(create, config, server, through_proxy):
    box = create(connection_config=config(use_server_proxy=through_proxy))
    box.commands.run("mkdir -p /tmp/www && echo hello > /tmp/www/index.html")
    for port in (44772, 18080, 8080):
        endpoint = box.get_endpoint(port)
        assert "://" not in endpoint.endpoint
        if through_proxy:
            assert endpoint.endpoint == f"{server.domain}/v1/sandboxes/{box.id}/proxy/{port}"
    agent = box.get_endpoint(44772)
    headers = {**agent.headers, **({"OPEN-SANDBOX-API-KEY": server.key} if through_proxy else {})}
    assert httpx.get(f"http://{agent.endpoint}/ping", headers=headers, timeout=60).status_code == 200
    assert texts(box.commands.run("echo through").logs.stdout) == ["through"]


@pytest.mark.sandglass
@pytest.mark.parametrize("through_proxy", [False, True])
def test_a_program_in_the_sandbox_is_reached_through_its_endpoint(create, config, server, through_proxy):
    box = create(connection_config=config(use_server_proxy=through_proxy))
    box.commands.run(
        "mkdir -p /tmp/www && echo hello > /tmp/www/index.html && busybox httpd -p 8080 -h /tmp/www >/dev/null 2>&1"
    )
    endpoint = box.get_endpoint(8080)
    headers = {**endpoint.headers, **({"OPEN-SANDBOX-API-KEY": server.key} if through_proxy else {})}

    def answer():
        got = httpx.get(f"http://{endpoint.endpoint}/index.html", headers=headers, timeout=60)
        return got.status_code == 200 and got.text

    assert wait_for(answer) == "hello\n"


@pytest.mark.sandglass
def test_two_sandboxes_do_not_reach_each_other(create, server):
    one, other = create(), create()
    address = other.commands.run("hostname -I 2>/dev/null || ip -4 -o addr show scope global | awk '{print $4}'").text
    address = address.split()[0].split("/")[0]
    if server.runtime == "docker":
        # One bridge joins all containers of an engine; the agents in them are closed to each other.
        asked = f"curl -s -o /dev/null -w '%{{http_code}}' -X POST -d '{{\"command\":\"id\"}}' http://{address}:44772/command"
        assert one.commands.run(asked).text == "401"
        return
    reached = one.commands.run(f"timeout 3 bash -c 'exec 3<>/dev/tcp/{address}/44772' && echo reached || echo refused")
    assert texts(reached.logs.stdout)[-1] == "refused"


@pytest.mark.sandglass
def test_two_sandboxes_do_not_share_files_or_processes(create):
    one, other = create(), create()
    one.files.write_file("/tmp/only-here", "x")
    one.commands.run("sleep 4242 >/dev/null 2>&1 &")
    assert other.commands.run("test -e /tmp/only-here").exit_code == 1
    assert "4242" not in other.commands.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").text


@pytest.mark.sandglass
def test_memory_is_limited(create):
    box = create(resource={"cpu": "1", "memory": "64Mi"})
    done = box.commands.run("head -c 300000000 /dev/zero | tail -c 299999999 | wc -c")
    assert done.error is not None or done.text.strip() != "299999999"
    assert box.is_healthy()
