"""Commands through the synchronous SDK: output, outcome, environment, background, interrupt."""

import threading
import time
from datetime import timedelta

import pytest
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.execd_sync import ExecutionHandlersSync

from conftest import texts
from stack import wait_for


def test_output_and_exit_code_of_a_command(box):
    done = box.commands.run("echo out; echo err >&2")
    assert texts(done.logs.stdout) == ["out"]
    assert texts(done.logs.stderr) == ["err"]
    assert not done.logs.stdout[0].is_error
    assert done.exit_code == 0 and done.error is None and done.complete is not None
    assert abs(done.logs.stdout[0].timestamp / 1000 - time.time()) < 120


def test_a_failing_command_reports_its_exit_code_and_no_completion(box):
    done = box.commands.run("echo before; exit 7")
    assert texts(done.logs.stdout) == ["before"]
    assert done.exit_code == 7
    assert (done.error.name, done.error.value) == ("CommandExecError", "7")
    assert done.complete is None


def test_an_unknown_command_names_itself_on_stderr(box):
    done = box.commands.run("no-such-program-here")
    assert done.exit_code == 127
    assert "no-such-program-here" in "".join(texts(done.logs.stderr))


def test_argv_runs_without_a_shell(box):
    done = box.commands.run(["printf", "%s|", "a b", "$HOME", ""])
    assert "".join(texts(done.logs.stdout)) == "a b|$HOME||"


def test_an_argv_program_that_does_not_exist_is_an_outcome_and_not_an_http_error(box):
    done = box.commands.run(["/no/such/program"])
    assert done.error.name == "CommandExecError"
    assert done.complete is None


def test_blank_lines_keep_their_place(box):
    done = box.commands.run(r"printf 'a\n\nb\n\n\nc\n'")
    assert texts(done.logs.stdout) == ["a", "\n", "b", "\n", "\n", "c"]


def test_carriage_returns_end_lines_and_an_unterminated_tail_arrives(box):
    done = box.commands.run(r"printf '10%%\r20%%\r\ndone\ntail-é'")
    assert texts(done.logs.stdout) == ["10%", "20%", "done", "tail-é"]


def test_unusual_separators_stay_inside_their_event(box):
    done = box.commands.run(r"printf 'a\302\205b\342\200\250c\342\200\251d\n'")
    assert texts(done.logs.stdout) == ["a\u0085b\u2028c\u2029d"]


def test_512_long_lines_on_each_stream_arrive_complete_and_in_order(box):
    script = (
        "line=$(printf '%04095d' 0); i=0; "
        "while [ $i -lt 512 ]; do echo \"$i:$line\"; echo \"$i:$line\" >&2; i=$((i+1)); done; "
        "printf 'end-ü'; printf 'end-ö' >&2"
    )
    slow = ExecutionHandlersSync(on_stdout=lambda message: time.sleep(0.001))
    done = box.commands.run(script, handlers=slow)
    expected = [f"{i}:{'0' * 4095}" for i in range(512)]
    assert texts(done.logs.stdout) == [*expected, "end-ü"]
    assert texts(done.logs.stderr) == [*expected, "end-ö"]
    assert done.exit_code == 0


def test_working_directory_and_environment(box):
    assert texts(box.commands.run("pwd", opts=RunCommandOpts(working_directory="/tmp")).logs.stdout) == ["/tmp"]
    assert texts(box.commands.run('echo "[$E2E_VALUE]"').logs.stdout) == ["[]"]
    options = RunCommandOpts(envs={"E2E_VALUE": "a b'c\"$d"})
    assert texts(box.commands.run('echo "[$E2E_VALUE]"', opts=options).logs.stdout) == ["[a b'c\"$d]"]


def test_a_working_directory_that_does_not_exist_is_refused(box):
    with pytest.raises(SandboxApiException) as refused:
        box.commands.run("true", opts=RunCommandOpts(working_directory="/no/such/folder"))
    assert refused.value.status_code == 400


def test_set_env_survives_quotes_and_newlines(box):
    for value in ("plain", "a b", "$HOME", "it's", 'say "x"', "two\nlines", "k=v", ""):
        box.commands.set_env("E2E_KEPT", value)
        assert box.commands.run(["sh", "-c", 'printf "[%s]" "$E2E_KEPT" | tr "\\n" "~"']).text == (
            "[" + value.replace("\n", "~") + "]"
        )


def test_a_command_runs_as_the_user_it_names(box):
    assert texts(box.commands.run("id -u; id -g", opts=RunCommandOpts(uid=1234, gid=2345)).logs.stdout) == [
        "1234",
        "2345",
    ]


def test_timeout_kills_the_command(box):
    begun = time.monotonic()
    done = box.commands.run("sleep 30", opts=RunCommandOpts(timeout=timedelta(milliseconds=500)))
    assert time.monotonic() - begun < 25
    assert done.exit_code == -1 and done.complete is None


def test_background_status_and_logs(box):
    started = box.commands.run("echo one; sleep 1; echo two", opts=RunCommandOpts(background=True))
    assert started.exit_code is None and started.id
    status = box.commands.get_command_status(started.id)
    assert status.id == started.id and status.running is True and status.exit_code is None
    assert wait_for(lambda: "one" in box.commands.get_background_command_logs(started.id).content)
    first = box.commands.get_background_command_logs(started.id)
    assert wait_for(lambda: not box.commands.get_command_status(started.id).running)
    rest = box.commands.get_background_command_logs(started.id, cursor=first.cursor)
    assert first.content + rest.content == "one\ntwo\n"
    status = box.commands.get_command_status(started.id)
    assert status.exit_code == 0 and status.finished_at >= status.started_at


def test_status_of_an_unknown_command_is_404(box):
    with pytest.raises(SandboxApiException) as missing:
        box.commands.get_command_status("0" * 32)
    assert missing.value.status_code == 404


def test_interrupt_ends_a_running_command(box):
    started = threading.Event()
    seen = {}

    def on_init(event):
        seen["id"] = event.id
        started.set()

    def run():
        seen["done"] = box.commands.run("sleep 60", handlers=ExecutionHandlersSync(on_init=on_init))

    runner = threading.Thread(target=run)
    runner.start()
    assert started.wait(60)
    box.commands.interrupt(seen["id"])
    # Long before it would end by itself.
    runner.join(40)
    assert not runner.is_alive()
    assert seen["done"].id == seen["id"]
    assert (seen["done"].complete is None) != (seen["done"].error is None)


def test_handlers_see_init_first_and_the_end_last(box):
    seen = []
    handlers = ExecutionHandlersSync(
        on_init=lambda event: seen.append("init"),
        on_stdout=lambda event: seen.append(event.text),
        on_execution_complete=lambda event: seen.append("complete"),
        on_error=lambda event: seen.append("error"),
    )
    box.commands.run("echo a; echo b", handlers=handlers)
    assert seen == ["init", "a", "b", "complete"]


def test_a_short_command_is_not_held_open(box):
    box.commands.run("true")
    times = []
    for _ in range(10):
        begun = time.monotonic()
        box.commands.run("true")
        times.append(time.monotonic() - begun)
    # One that is held open is so every time; whatever else is slow is not.
    assert min(times) < 0.15, times


def test_a_stream_may_outlive_the_request_timeout(create, config):
    box = create(connection_config=config(request_timeout=timedelta(seconds=2)))
    done = box.commands.run("for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.5; done")
    assert texts(done.logs.stdout) == list("12345678") and done.exit_code == 0
    silent = box.commands.run("sleep 4; echo late")
    assert texts(silent.logs.stdout) == ["late"]


def test_many_commands_at_once(box):
    results = {}

    def run(number):
        results[number] = texts(box.commands.run(f"echo {number}; sleep 0.2; echo {number}").logs.stdout)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: [str(number)] * 2 for number in range(16)}


def test_metrics_are_plausible(box):
    metrics = box.get_metrics()
    assert metrics.cpu_count > 0
    assert 0 <= metrics.cpu_used_percentage <= 100
    assert 0 <= metrics.memory_used_in_mib <= metrics.memory_total_in_mib
    assert abs(metrics.timestamp / 1000 - time.time()) < 120


@pytest.mark.sandglass
def test_the_first_process_is_the_agent_and_cannot_be_killed_or_read_from_inside(box):
    assert texts(box.commands.run("cat /proc/1/comm").logs.stdout) == ["execd"]
    box.commands.run("kill -9 1")
    unreadable = box.commands.run("cat /proc/1/environ", opts=RunCommandOpts(uid=1000, gid=1000))
    assert unreadable.exit_code != 0
    assert box.is_healthy()


@pytest.mark.sandglass
def test_orphans_are_reaped(box):
    box.commands.run("for i in 1 2 3 4 5 6 7 8; do (sleep 0.1 &) ; done")
    assert wait_for(
        lambda: box.commands.run("cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || true").text.strip() == "0"
    )


@pytest.mark.sandglass
def test_no_token_reaches_a_command(box, server):
    environment = box.commands.run("env").text
    assert "TOKEN" not in environment and server.key not in environment
    assert box.id in environment
