"""From the address of a repository to an editor in a browser, an SSH session and a running dev server: `python demo_workspace.py [--out DIR]`.

Starts everything that it needs on this machine (a git server, a Sandglass server on the embedded runtime, a browser), uses the published command
line alone, prints each step with its time, and leaves nothing but the pictures and texts in DIR.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import expect, sync_playwright

import code_server
import workspace_image
from browsers import GUARD_MILLISECONDS, browser
from git_servers import GitServers
from stack import Stack, free_port, wait_for
from workspaces import SETTINGS

HERE = Path(__file__).parent
PROJECT = HERE / "demo/web"
OUT = HERE / "artifacts/demo"
WEB_PORT = 5173
# Where the server puts a repository of this name.
PLACE = "/workspace/hello"
SERVICES = ("ssh", "code-server", f"web:{WEB_PORT}=npm run dev")
# Against hanging only.
PATIENCE = 360


class Wrong(Exception):
    """Something is not as it was promised."""


def claim(holds, what):
    if not holds:
        raise Wrong(what)


class Story:
    """What is told while it happens: each step with its time, and what commands printed."""

    def __init__(self):
        self.begun = time.monotonic()
        self.times = []

    @contextmanager
    def step(self, title):
        begun = time.monotonic()
        print(f"\n== {title}", flush=True)
        yield
        took = time.monotonic() - begun
        self.times.append((title, took))
        print(f"== {took:.1f} s", flush=True)

    def summary(self):
        print("\nTimes")
        for title, took in self.times:
            print(f"{took:8.1f} s  {title}")
        print(f"{time.monotonic() - self.begun:8.1f} s  altogether", flush=True)


class User:
    """Somebody with a home, a key and the command line."""

    def __init__(self, stack, home):
        self.binary = stack.binary
        ssh = home / ".ssh"
        ssh.mkdir(mode=0o700, parents=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ssh / "id_ed25519"], check=True)
        self.environment = {
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "SANDGLASS_URL": stack.url,
            "SANDGLASS_API_KEY": stack.key,
            "NO_COLOR": "1",
        }

    def start(self, *arguments, **streams):
        return subprocess.Popen([self.binary, *map(str, arguments)], env=self.environment, stdin=subprocess.DEVNULL, text=True, **streams)

    def sandglass(self, *arguments):
        """Runs a command and shows it with what it prints; answers its standard output and everything that was shown."""
        told = [f"$ sandglass {shlex.join(map(str, arguments))}"]
        print(f"   {told[0]}", flush=True)
        with tempfile.TemporaryFile("w+") as out:
            with self.start(*arguments, stdout=out, stderr=subprocess.PIPE) as process:
                try:
                    for line in process.stderr:
                        told.append(line.rstrip("\n"))
                        print(f"   {told[-1]}", flush=True)
                    code = process.wait(PATIENCE)
                finally:
                    process.kill()
            out.seek(0)
            answer = out.read()
        for line in answer.splitlines():
            told.append(line)
            print(f"   {line}", flush=True)
        claim(code == 0, f"`sandglass {arguments[0]}` ended with {code}")
        return answer, "\n".join(told) + "\n"


def fields(answer):
    """What `up` prints at the end, by name."""
    pairs = (line.split(":", 1) for line in answer.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


@contextmanager
def forwarded(user, sandbox, port):
    """A port of the sandbox on this machine, until left."""
    command = ("ssh", "-L", f"{port}:127.0.0.1:{WEB_PORT}", sandbox, "sleep 3600")
    print(f"   $ sandglass {shlex.join(command)} &", flush=True)
    process = user.start(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        if not wait_for(lambda: process.poll() is not None or answers(port), PATIENCE):
            user.sandglass("logs", sandbox, "--service", "web")
            raise Wrong("the dev server does not answer")
        claim(process.poll() is None, f"`sandglass ssh -L` ended with {process.returncode}")
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait(PATIENCE)


def answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/", timeout=10, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def page_in(chromium):
    """A page with nothing remembered; says what it said if something goes wrong."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(GUARD_MILLISECONDS)
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"uncaught: {error}"))
    try:
        yield page
    except BaseException:
        if said:
            print(f"{page.url.partition('?')[0]}:", *said[-30:], sep="\n", flush=True)
        raise
    finally:
        context.close()


def message(text):
    return f'export const message = "{text}";\n'


class Demonstration:
    def __init__(self, out):
        self.out, self.story = out, Story()
        out.mkdir(parents=True, exist_ok=True)

    def keep(self, name, text):
        (self.out / name).write_text(text)

    def picture(self, page, name):
        page.screenshot(path=self.out / name)
        print(f"   picture: {self.out / name}", flush=True)

    def run(self):
        with ExitStack() as held:
            with self.story.step("the world: a git server with a Vite project, a Sandglass server, a base image with git, node and code-server"):
                servers = held.enter_context(GitServers())
                files = {str(path.relative_to(PROJECT)): path.read_text() for path in sorted(PROJECT.rglob("*")) if path.is_file()}
                repository = servers.repository(files, "open/hello")
                settings = {name: dict(keys) for name, keys in SETTINGS.items()}
                settings["builds"].update(base_image=workspace_image.NAME, cpu="2", memory="2Gi")
                stack = Stack(config=settings)
                held.callback(stack.close)
                stack.start()
                user = User(stack, stack.home / "user")
                user.sandglass("image", "import", "--name", workspace_image.NAME, workspace_image.provide(PROJECT))
            self.tell(stack, user, repository)
            with self.story.step("rm: both sandboxes go, and the server and the host have nothing left of them"):
                user.sandglass("rm", "--all")
                problems = stack.wait_clean()
                claim(not problems, "left over: " + "; ".join(problems))
            with self.story.step("the server stops"):
                claim(stack.stop() == 0, "the server did not end as it should")
            with self.story.step("its files are removed, and nothing else was left"):
                problems = stack.close()
                claim(not problems, "left over: " + "; ".join(problems))
        self.story.summary()

    def tell(self, stack, user, repository):
        address = f"{repository.url}#main"
        services = [word for service in SERVICES for word in ("--service", service)]
        limits = ("--cpu", "2", "--memory", "2Gi")
        with self.story.step("up: from the address to a sandbox that is ready; the image is built"):
            answer, told = user.sandglass("up", address, "--name", "hello", *services, *limits)
            self.keep("up-first.txt", without_links(told))
            shown = fields(answer)
            claim("image       built" in told and "setup │ added" in told, "the image was not built, or its log not shown")
            claim(shown["IDE"].startswith("http"), f"no link to the editor: {shown['IDE']}")
            _, told = user.sandglass("ps")
            self.keep("ps.txt", told)
        forwarded_port = free_port()
        with sync_playwright() as playwright, browser(playwright, stack.port, forwarded_port, stack.home) as chromium:
            with page_in(chromium) as editor, page_in(chromium) as site, forwarded(user, "hello", forwarded_port) as page:
                with self.story.step("the dev server: its page in a browser, through a port that ssh forwards"):
                    with site.expect_console_message(lambda said: "[vite] connected" in said.text):
                        site.goto(page)
                    heading = site.locator("#message")
                    expect(heading).to_have_text("Hello from the repository")
                    site.evaluate("window.kept = true")
                    self.picture(site, "1-dev-server.png")
                with self.story.step("the editor: the signed link of `up` opens it, a file is changed, the page changes"):
                    editor.goto(shown["IDE"])
                    claim("sandglass-access" not in editor.url, "the signature stays in the address")
                    edit(editor, message("Changed in the editor"))
                    expect(heading).to_have_text("Changed in the editor")
                    self.terminal(editor)
                    self.picture(editor, "2-editor.png")
                    self.picture(site, "3-dev-server-after-the-editor.png")
                with self.story.step("ssh: a command that works, and one that changes the page"):
                    _, told = user.sandglass("ssh", "hello", "--", f"cd {PLACE} && node --version && git log --oneline && git diff")
                    claim("Changed in the editor" in told, "ssh does not see what the editor wrote")
                    _, more = user.sandglass("ssh", "hello", "--", f"sed -i 's/in the editor/over ssh/' {PLACE}/message.js")
                    expect(heading).to_have_text("Changed over ssh")
                    claim(site.evaluate("window.kept"), "the page was loaded anew")
                    self.keep("terminal.txt", told + more)
                    self.picture(site, "4-dev-server-after-ssh.png")
        with self.story.step("what the dev server printed"):
            _, told = user.sandglass("logs", "hello", "--service", "web")
            self.keep("web-log.txt", told)
        with self.story.step("up once more: the image is there already"):
            _, told = user.sandglass("up", address, "--name", "again", *services, *limits)
            self.keep("up-second.txt", without_links(told))
            claim("image       cached" in told and "setup │" not in told, "the second up built again")

    @staticmethod
    def terminal(editor):
        """A command in the editor's own terminal."""
        code_server.type_into_terminal(editor, "#", "git status --short", "M message.js")


def edit(editor, content):
    """Opens `message.js`, replaces what is in it, and saves."""
    code_server.open_file(editor, "message.js", "Hello from the repository")
    editor.keyboard.press("Control+a")
    editor.keyboard.insert_text(content)
    editor.keyboard.press("Control+s")


def without_links(told):
    """Links let in whoever has them."""
    return re.sub(r"(sandglass-access=)[^&\s]+", r"\1…", told)


def main():
    parser = argparse.ArgumentParser(description="From the address of a repository to an editor, an SSH session and a dev server.")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where pictures and texts go [default: {OUT}]")
    arguments = parser.parse_args()
    if "SANDGLASS_BIN" not in os.environ:
        parser.error("set SANDGLASS_BIN to the built program, e.g. target/debug/sandglass")
    try:
        Demonstration(arguments.out.resolve()).run()
    except Wrong as wrong:
        print(f"\nNot as promised: {wrong}", file=sys.stderr)
        return 1
    print(f"Pictures and texts: {arguments.out.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
