"""Running code through the published code interpreter: state, results, plots, isolation, interrupts, dead kernels."""

import asyncio
import json
import threading
from datetime import timedelta

import httpx
import pytest
from code_interpreter import CodeInterpreter, CodeInterpreterSync
from opensandbox import Sandbox, SandboxSync
from opensandbox.exceptions import SandboxException
from opensandbox.models.execd_sync import ExecutionHandlersSync

import kernels_image
from conftest import delete, texts
from stack import wait_for

pytestmark = pytest.mark.sandglass

RESOURCES = {"cpu": "2", "memory": "1Gi"}


@pytest.fixture(scope="module")
def image(server):
    return kernels_image.provide(server)


@pytest.fixture(scope="module")
def sandbox(server, config, image):
    made = SandboxSync.create(image, timeout=timedelta(minutes=30), resource=RESOURCES, connection_config=config())
    yield made
    delete(server, made.id)
    made.close()


@pytest.fixture(scope="module")
def interpreter(sandbox):
    made = CodeInterpreterSync.create(sandbox=sandbox)
    assert made.id == sandbox.id
    return made


@pytest.fixture
def codes(interpreter):
    """Every context that a test leaves is deleted after it."""
    yield interpreter.codes
    for language in ("python", "bash"):
        interpreter.codes.delete_contexts(language)


def values(done):
    return [result.text for result in done.result]


def check(done):
    """Exactly one outcome, and an id."""
    assert done.id and (done.complete is None) != (done.error is None)
    assert done.exit_code is None
    return done


def test_a_language_alone_keeps_its_state(codes):
    assert values(check(codes.run("1 + 1", language="python"))) == ["2"]
    first = check(codes.run("kept = 21\nprint('out')", language="python"))
    assert texts(first.logs.stdout) == ["out\n"]
    second = check(codes.run("kept * 2", language="python"))
    assert values(second) == ["42"] and second.id == first.id
    assert second.execution_count == first.execution_count + 1
    assert [context.id for context in codes.list_contexts("python")] == [first.id]


def test_a_plot_is_a_result(codes, sandbox):
    context = codes.create_context("python")
    code = "import matplotlib.pyplot as plot\nplot.plot([1, 3, 2])\nplot.show()"
    # The package keeps the text of a result and drops its picture, which is on the wire all the same.
    assert values(check(codes.run(code, context=context))) == ["<Figure size 640x480 with 1 Axes>"]
    endpoint = sandbox.get_endpoint(44772)
    body = {"code": code, "context": {"id": context.id, "language": "python"}}
    answer = httpx.post(f"http://{endpoint.endpoint}/code", json=body, headers=endpoint.headers, timeout=60)
    events = [json.loads(frame) for frame in answer.text.split("\n\n") if frame]
    results = [event["results"] for event in events if event["type"] == "result"]
    assert [result["image/png"][:11] for result in results] == ["iVBORw0KGgo"], answer.text[:500]


def test_an_error_is_told_with_its_name_and_place(codes):
    done = check(codes.run("print('before')\nmissing", language="python"))
    assert texts(done.logs.stdout) == ["before\n"]
    assert done.error.name == "NameError" and "missing" in done.error.value
    assert done.error.traceback


def test_contexts_share_nothing(codes):
    one, other = codes.create_context("python"), codes.create_context("python")
    check(codes.run("mine = 1", context=one))
    assert check(codes.run("mine", context=other)).error.name == "NameError"
    assert values(check(codes.run("mine", context=one))) == ["1"]
    assert {context.id for context in codes.list_contexts("python")} == {one.id, other.id}
    assert codes.get_context(one.id).language == "python"
    codes.delete_context(one.id)
    assert [context.id for context in codes.list_contexts("python")] == [other.id]
    with pytest.raises(SandboxException):
        codes.get_context(one.id)


def running(codes, context):
    """Code that would run for a minute, once it has begun: its thread, and where its outcome will be."""
    begun, seen = threading.Event(), {}

    def run():
        handlers = ExecutionHandlersSync(on_stdout=lambda _: begun.set())
        seen["done"] = codes.run("print('begun', flush=True)\nimport time\ntime.sleep(60)", context=context, handlers=handlers)

    # A failed test must not wait for it.
    runner = threading.Thread(target=run, daemon=True)
    runner.start()
    assert begun.wait(60)
    return runner, seen


def test_an_interrupt_ends_the_code_and_the_context_goes_on(codes):
    context = codes.create_context("python")
    check(codes.run("kept = 5", context=context))
    runner, seen = running(codes, context)
    codes.interrupt(context.id)
    runner.join(40)
    assert not runner.is_alive()
    assert check(seen["done"]).error.name == "KeyboardInterrupt"
    assert values(check(codes.run("kept", context=context))) == ["5"]


def test_a_killed_kernel_is_told_of_and_replaced(codes, sandbox):
    context = codes.create_context("python")
    pid = values(check(codes.run("kept = 1\nimport os\nos.getpid()", context=context)))[0]
    runner, seen = running(codes, context)
    assert sandbox.commands.run(f"kill -9 {pid}").exit_code == 0
    runner.join(40)
    assert not runner.is_alive()
    assert check(seen["done"]).error.name == "KernelDied"
    again = check(codes.run("kept", context=context))
    assert again.error.name == "NameError" and "new one" in "".join(texts(again.logs.stderr))
    assert values(check(codes.run("2 + 2", context=context))) == ["4"]


def test_bash_is_a_second_language(codes):
    one, other = codes.create_context("bash"), codes.create_context("bash")
    check(codes.run("cd /usr; greet() { echo \"hello $1\"; }", context=one))
    assert texts(check(codes.run("pwd; greet box", context=one)).logs.stdout) == ["/usr\n", "hello box\n"]
    assert check(codes.run("greet box", context=other)).error is not None
    assert {context.id for context in codes.list_contexts("bash")} == {one.id, other.id}
    codes.delete_contexts("bash")
    assert codes.list_contexts("bash") == []


def test_a_language_without_a_kernel_says_what_to_install(codes):
    with pytest.raises(SandboxException) as refused:
        codes.run("1", language="java")
    assert "no java kernel in this image" in str(refused.value)


def test_nothing_of_a_deleted_context_stays(codes, sandbox):
    context = codes.create_context("python")
    pid = values(check(codes.run("import os; os.getpid()", context=context)))[0]
    codes.delete_context(context.id)
    assert wait_for(lambda: sandbox.commands.run(f"kill -0 {pid}").exit_code != 0)


def test_three_contexts_at_once_with_the_asynchronous_client(server, async_config, image):
    async def scenario():
        sandbox = await Sandbox.create(
            image, timeout=timedelta(minutes=10), resource=RESOURCES, connection_config=async_config()
        )
        try:
            codes = (await CodeInterpreter.create(sandbox=sandbox)).codes
            contexts = await asyncio.gather(*(codes.create_context("python") for _ in range(3)))
            # Each waits for the others, so they have to run at the same time.
            code = (
                "import os, time\nopen('/tmp/met-{0}', 'w').close()\n"
                "while not all(os.path.exists(f'/tmp/met-{{n}}') for n in range(3)): time.sleep(0.01)\nown = {0}\nown"
            )
            done = await asyncio.gather(
                *(codes.run(code.format(number), context=context) for number, context in enumerate(contexts))
            )
            assert [values(check(run)) for run in done] == [["0"], ["1"], ["2"]]
            assert len({run.id for run in done}) == 3
            assert values(check(await codes.run("own", context=contexts[2]))) == ["2"]
        finally:
            delete(server, sandbox.id)
            await sandbox.close()

    asyncio.run(scenario())
