"""A browser as a person uses it: Debian's chromium, with every host name of the gateway led to it."""

import ctypes
import os
import re
import secrets
import socket
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import expect

ARTIFACTS = Path(__file__).parent / "artifacts"
# Against hanging only.
GUARD_MILLISECONDS = 180_000
# Of this run, for its report.
PICTURES = []
CLONE_NEWNET = 0x40000000


class Network:
    """A network of loopback alone, where ports lead to the same ports of the host.

    Chromium drops its connections (ERR_NETWORK_CHANGED) when an interface or an address of its network comes or goes, and
    those of sandboxes come and go all the time.
    """

    def __init__(self, *ports):
        self.name = f"sge-{secrets.token_hex(4)}"
        subprocess.run(["ip", "netns", "add", self.name], check=True)
        subprocess.run(["ip", "-n", self.name, "link", "set", "lo", "up"], check=True)
        entering = threading.Thread(target=self._listen, args=(ports,))
        self.listeners = {}
        entering.start()
        entering.join()
        for port, listener in self.listeners.items():
            threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()

    def _listen(self, ports):
        """In a thread of its own, which is the only one that changes its network."""
        libc = ctypes.CDLL(None, use_errno=True)
        inside = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            if libc.setns(inside, CLONE_NEWNET) == 0:
                self.listeners = {port: socket.create_server(("127.0.0.1", port), backlog=128) for port in ports}
        finally:
            os.close(inside)

    def _accept(self, listener, port):
        while True:
            try:
                inner, _ = listener.accept()
            except OSError:
                # Nobody but `close` ends it.
                return
            try:
                outer = socket.create_connection(("127.0.0.1", port))
            except OSError:
                # Nobody listens outside, which a browser has to see as well.
                inner.close()
                continue
            for source, sink in ((inner, outer), (outer, inner)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass(source, sink):
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for end in (source, sink):
                end.close()

    def close(self):
        for listener in self.listeners.values():
            # Closing alone would not wake who waits on it.
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        subprocess.run(["ip", "netns", "del", self.name], check=True)


@contextmanager
def browser(playwright, server_port, gateway_port, folder):
    """Pages of *.sandbox.example come from the gateway on loopback, whose certificate nobody has signed."""
    network = Network(server_port, gateway_port)
    program = folder / "chromium"
    program.write_text(f'#!/bin/sh\nexec ip netns exec {network.name} chromium "$@"\n')
    program.chmod(0o755)
    rules = f"MAP *.sandbox.example 127.0.0.1:{gateway_port}"
    # No sandbox of its own: it runs as root and only sees what the tests make.
    arguments = ["--no-sandbox", f"--host-resolver-rules={rules}", "--ignore-certificate-errors"]
    expect.set_options(timeout=GUARD_MILLISECONDS)
    try:
        made = playwright.chromium.launch(executable_path=program, args=arguments, timeout=GUARD_MILLISECONDS)
        try:
            yield made
        finally:
            made.close()
    finally:
        network.close()


@contextmanager
def page_of(browser, name):
    """A page with nothing remembered; how it looked in the end is kept as a picture, and what it said is shown if it failed."""
    context = browser.new_context(ignore_https_errors=True, viewport={"width": 1200, "height": 800})
    context.set_default_timeout(GUARD_MILLISECONDS)
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"uncaught: {error}"))
    page.on("requestfailed", lambda request: said.append(f"failed: {request.url} {request.failure}"))
    ARTIFACTS.mkdir(exist_ok=True)
    picture = ARTIFACTS / f"{re.sub(r'[^a-z0-9-]+', '-', name)}.png"
    try:
        yield page
    except BaseException:
        print(f"{page.url}:", *said[-60:], sep="\n")
        raise
    finally:
        page.screenshot(path=picture)
        PICTURES.append(picture)
        context.close()
