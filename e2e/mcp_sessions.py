"""Sessions with `sandglass mcp`, over both transports, for the tests of it."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time

import mcp
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

PROGRAM = os.environ.get("SANDGLASS_BIN", "")
# Guards against hanging; nothing here measures.
PATIENCE = 90


def environment(server, **extra):
    return {**os.environ, "SANDGLASS_URL": server.url, "SANDGLASS_API_KEY": server.key, **extra}


class Served:
    """`sandglass mcp` over HTTP, as a process of its own."""

    def __init__(self, server, *arguments, **extra):
        self.process = subprocess.Popen(
            [PROGRAM, "mcp", "--transport", "streamable-http", "--port", "0", *arguments],
            env=environment(server, **extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = self.process.stderr.readline()
        found = re.search(r"http://\S+/mcp", self.said)
        if not found:
            self.process.kill()
            raise AssertionError(self.said + self.process.communicate()[1])
        self.url = found[0]

    def stop(self):
        """Ends it as an operator does; what it printed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            out, err = self.process.communicate(timeout=PATIENCE)
        finally:
            self.process.kill()
        assert self.process.returncode == 0, err
        assert not out
        return self.said + err


class Tools:
    """Calls tools, checks the shape of every answer, and keeps all text for the search for the key."""

    def __init__(self, session):
        self.session = session
        self.texts = []

    async def answer(self, tool, arguments, **options):
        answer = await asyncio.wait_for(self.session.call_tool(tool, arguments, **options), PATIENCE)
        self.texts.append(answer.model_dump_json())
        return answer

    async def __call__(self, tool, **arguments):
        answer = await self.answer(tool, arguments)
        text = answer.content[0].text
        assert not answer.is_error, f"{tool}: {text}"
        assert json.loads(text) == answer.structured_content
        return answer.structured_content

    async def refused(self, tool, **arguments):
        """The code and text of a failure."""
        answer = await self.answer(tool, arguments)
        assert answer.is_error, f"{tool}: {answer.content[0].text}"
        error = answer.meta["sandglass/error"]
        assert error["message"] in answer.content[0].text and error["code"] in answer.content[0].text
        return error["code"], answer.content[0].text


@contextlib.asynccontextmanager
async def connected(server, transport, *arguments, **extra):
    """A session; what the program said goes to `tools.said` at the end."""
    with tempfile.TemporaryFile("w+") as errors, contextlib.ExitStack() as stack:
        if transport == "stdio":
            served = None
            parameters = mcp.StdioServerParameters(
                command=PROGRAM, args=["mcp", *arguments], env=environment(server, **extra)
            )
            streams = stdio_client(parameters, errlog=errors)
        else:
            served = Served(server, *arguments, **extra)
            stack.callback(served.process.kill)
            streams = streamable_http_client(served.url)
        async with streams as (reader, writer, *_), mcp.ClientSession(reader, writer) as session:
            greeting = await asyncio.wait_for(session.initialize(), PATIENCE)
            tools = Tools(session)
            tools.greeting = greeting
            yield tools
        errors.seek(0)
        tools.said = served.stop() if served else errors.read()
        for text in [tools.said, *tools.texts]:
            assert server.key not in text


def run(body):
    asyncio.run(asyncio.wait_for(body, 4 * PATIENCE))


async def until(claim):
    """Asks again and again until something is true."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        value = await claim()
        if value:
            return value
        await asyncio.sleep(0.1)
    raise AssertionError("it did not become true")
