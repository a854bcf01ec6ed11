"""Bash sessions through both Python SDKs: what survives from run to run, and how runs and sessions end."""

import asyncio
import threading
import time
from datetime import timedelta

import pytest
from opensandbox import Sandbox
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.execd_sync import ExecutionHandlersSync

from conftest import texts
from stack import wait_for


@pytest.fixture
def session(box):
    made = box.commands.create_session(working_directory="/tmp/session")
    yield made
    try:
        box.commands.delete_session(made)
    except SandboxApiException as gone:
        assert gone.status_code == 404


@pytest.fixture
def run(box, session):
    return lambda command, **keys: box.commands.run_in_session(session, command, **keys)


def test_the_state_of_a_shell_survives(run, session):
    done = run("export A=1; b='x\ny'; f() { echo \"f:$b\"; }; alias say='echo said'; umask 027; sleep 300 & job=$!")
    assert done.exit_code == 0 and done.id == session and done.complete is not None
    done = run("echo $A; f; say it; umask; pwd; kill $job; wait $job; echo $?")
    assert texts(done.logs.stdout) == ["1", "f:x", "y", "said it", "0027", "/tmp/session", "143"]
    assert texts(done.logs.stderr) == []


def test_stderr_is_in_order_with_stdout_and_blank_lines_are_left_out(run):
    done = run(r"printf 'a\n\nb\n'; echo err >&2; printf tail")
    assert texts(done.logs.stdout) == ["a", "b", "err", "tail"] and texts(done.logs.stderr) == []


def test_a_failing_run_reports_its_code(run):
    done = run("sh -c 'echo before; exit 7'")
    assert texts(done.logs.stdout) == ["before"]
    assert (done.error.name, done.error.value, done.exit_code, done.complete) == ("CommandExecError", "7", 7, None)


def test_exit_ends_the_run_and_not_the_session(run):
    run("kept=1; f() { echo \"f $kept\"; }; cd /usr")
    done = run("kept=2; exit 5")
    assert done.exit_code == 5
    assert texts(run("f; pwd").logs.stdout) == ["f 1", "/usr"]


def test_a_directory_for_one_run(run):
    run("where='/tmp/a b'; mkdir -p \"$where\"")
    assert texts(run("pwd", working_directory="$where").logs.stdout) == ["/tmp/a b"]
    with pytest.raises(SandboxApiException) as refused:
        run("pwd", working_directory="/no/such/folder")
    assert refused.value.status_code == 400


def test_a_timeout_ends_the_run_with_an_error(run):
    run("kept=1")
    begun = time.monotonic()
    done = run("echo on; sleep 30; echo never", timeout=timedelta(seconds=3))
    assert time.monotonic() - begun < 25
    assert texts(done.logs.stdout) == ["on"] and done.exit_code == -1 and done.complete is None
    assert texts(run("echo $kept").logs.stdout) == ["1"]


def test_runs_of_a_session_are_one_after_the_other(run):
    seen = {}

    def add(number):
        seen[number] = run("n=$((${n:-0} + 1)); sleep 0.1; echo $n")

    threads = [threading.Thread(target=add, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(texts(done.logs.stdout)[0] for done in seen.values()) == list("123456")


def test_sessions_do_not_know_each_other(box, run):
    run("export A=1; cd /")
    other = box.commands.create_session()
    assert texts(box.commands.run_in_session(other, 'echo "[$A]"').logs.stdout) == ["[]"]
    box.commands.delete_session(other)


def test_a_new_session_sees_what_set_env_has_set(box):
    box.commands.set_env("E2E_FOR_SESSIONS", "say \"x\"\n$HOME")
    made = box.commands.create_session()
    done = box.commands.run_in_session(made, 'printf %s "$E2E_FOR_SESSIONS" | tr "\\n" "~"; env | grep -c ^EXECD_')
    assert texts(done.logs.stdout) == ['say "x"~$HOME0']
    box.commands.delete_session(made)


@pytest.mark.parametrize("way", ["delete_session", "interrupt"])
def test_a_session_that_is_ended_takes_its_run_along(box, way):
    made = box.commands.create_session()
    begun, seen = threading.Event(), {}
    handlers = ExecutionHandlersSync(on_stdout=lambda message: begun.set())
    runner = threading.Thread(
        target=lambda: seen.update(
            done=box.commands.run_in_session(made, "sleep 4321 & echo on; sleep 4321", handlers=handlers)
        )
    )
    runner.start()
    assert begun.wait(60)
    getattr(box.commands, way)(made)
    runner.join(60)
    assert not runner.is_alive() and seen["done"].error is not None
    left = RunCommandOpts(timeout=timedelta(seconds=20))
    assert box.commands.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 432[1]'", opts=left).text.strip() == "0"
    with pytest.raises(SandboxApiException) as gone:
        box.commands.run_in_session(made, "true")
    assert gone.value.status_code == 404


@pytest.mark.parametrize("through_proxy", [False, True])
def test_the_asynchronous_sdk(server, async_config, box, through_proxy):
    async def walk():
        sandbox = await Sandbox.connect(box.id, connection_config=async_config(use_server_proxy=through_proxy))
        commands = sandbox.commands
        try:
            made = await commands.create_session(working_directory="/tmp/async")
            await commands.run_in_session(made, "f() { echo f; }; text='a\nb'")
            done = await commands.run_in_session(made, 'f; echo "$text"; pwd; (exit 3)')
            assert (texts(done.logs.stdout), done.exit_code) == (["f", "a", "b", "/tmp/async"], 3)
            with pytest.raises((TimeoutError, asyncio.TimeoutError)):
                await asyncio.wait_for(commands.run_in_session(made, "echo $$ > pid; sleep 30"), 0.7)
            for _ in range(100):
                check = await commands.run("kill -0 $(cat /tmp/async/pid)")
                if check.exit_code:
                    break
                await asyncio.sleep(0.1)
            assert check.exit_code, "a client that left did not take its run along"
            assert texts((await commands.run_in_session(made, "f")).logs.stdout) == ["f"]
            await commands.delete_session(made)
            with pytest.raises(SandboxApiException) as gone:
                await commands.delete_session(made)
            assert gone.value.status_code == 404
        finally:
            await sandbox.close()

    asyncio.run(walk())


@pytest.mark.sandglass
def test_a_background_job_outlives_a_timeout_of_a_later_run(run):
    run("sleep 300 & echo $! > job; sleep 0.1")
    assert run("sleep 30", timeout=timedelta(milliseconds=300)).exit_code == -1
    assert wait_for(lambda: run("kill $(cat job)").exit_code == 0)
