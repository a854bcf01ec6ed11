"""The command line for sandboxes that are made from repositories: up, build, ssh, code, and what others show of them."""

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager

import httpx
import pytest

import git_servers
from git_servers import TOKEN, USER
from stack import free_port, wait_for
from workspace_stacks import embedded

pytestmark = pytest.mark.sandglass

PATIENCE = 180
# Tells what it was given, so that tests can look for it.
SETUP = '#!/bin/sh\necho "setting up"\nprintf %s "${NPM_TOKEN:-none}" | sha256sum | cut -c1-12 > /var/token\n'
PAGE = "from inside\n"


@pytest.fixture(scope="module")
def stack():
    with embedded() as made:
        yield made


class Line:
    """The command line of a user with a home and a key of their own."""

    def __init__(self, stack, home):
        self.stack, self.home = stack, home
        (home / ".ssh").mkdir(mode=0o700)
        key = home / ".ssh" / "id_ed25519"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        self.environment = {
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "SANDGLASS_URL": stack.url,
            "SANDGLASS_API_KEY": stack.key,
            "GIT_CONFIG_NOSYSTEM": "1",
        }

    def start(self, *arguments, cwd=None, env=None, **streams):
        command = [self.stack.binary, *map(str, arguments)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        return subprocess.Popen(
            command, cwd=cwd or self.home, env={**self.environment, **(env or {})}, text=True, **pipes
        )

    def run(self, *arguments, code=0, cwd=None, env=None, stdin=None):
        """Exit code, standard output and standard error; the first has to be `code`."""
        streams = {"stdin": subprocess.PIPE} if stdin is not None else {}
        with self.start(*arguments, cwd=cwd, env=env, **streams) as process:
            try:
                out, err = process.communicate(stdin, timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                pytest.fail(f"{arguments} did not end\n{out}\n{err}")
        assert process.returncode == code, f"{arguments} ended with {process.returncode}\n{out}\n{err}"
        return out, err

    def up(self, *arguments, **more):
        """The sandbox that is ready, and what was told on the way."""
        out, err = self.run("up", "-o", "json", *arguments, **more)
        return json.loads(out), err

    def tool(self, *arguments, stdin=None, check=True):
        """A program of this machine in the user's environment."""
        done = subprocess.run(
            [*map(str, arguments)], env=self.environment, input=stdin, capture_output=True, text=True,
            cwd=self.home, timeout=PATIENCE, check=False,
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done


@pytest.fixture
def line(stack, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    made = Line(stack, home)
    yield made
    made.run("rm", "--all")
    left = stack.wait_clean()
    if left:
        stack.sweep()
    assert not left, left


# ---------------------------------------------------------------- up


def test_up_builds_once_and_prints_the_ways_in(line, git):
    repository = git.repository({".sandbox/setup.sh": SETUP, "README": "up\n"})
    out, err = line.run("up", f"{repository.url}#main", "--name", "first")
    assert "setup │ setting up" in err and "\n  ready " in err, err
    assert "image       built" in err and "\n  sync " in err, err
    fields = dict(entry.split(":", 1) for entry in out.splitlines())
    identity = fields["Id"].strip()
    assert fields["SSH"].strip() == f"sandglass ssh {identity}", out
    assert fields["Stop"].strip() == f"sandglass rm {identity}", out

    shown, err = line.up(repository.url)
    assert "image       cached" in err and "setting up" not in err, err
    assert {way["kind"] for way in shown["addresses"]} == {"ssh", "ide"}

    table, _ = line.run("ps", "--no-trunc")
    row = next(entry for entry in table.splitlines() if identity in entry)
    assert f"{repository.url}#main" in row and " ready " in row and row.endswith("first"), table
    told, _ = line.run("inspect", "first")
    assert "Repository:" in told and "ssh Ready" in told, told


def test_a_working_tree_stands_for_its_remote(line, git, tmp_path):
    repository = git.repository({"README": "one\n"})
    tree = tmp_path / "tree"
    git_servers.git(tmp_path, "clone", "--quiet", repository.url, tree)
    (tree / "scratch").write_text("not committed\n")
    shown, err = line.up("--exact", cwd=tree)
    assert "not committed" in err, err
    place = shown["source"]["repositories"][0]["path"]
    out, _ = line.run("exec", shown["id"], "--", "sh", "-c", f"cat {place}/README; ls {place}")
    assert out == "one\nREADME\n"

    (tree / "README").write_text("two\n")
    git_servers.git(tree, "commit", "--quiet", "-am", "two")
    _, err = line.run("up", tree, code=1)
    assert "git push -u origin main" in err, err


def test_a_setup_that_fails_says_where_and_how(line, git):
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\necho before the end\nexit 7\n"})
    out, err = line.run("up", repository.url, code=1)
    assert out == "" and "before the end" in err, err
    assert "image_build_failed" in err and "exit code 7" in err, err
    _, err = line.run("build", repository.url, "--follow", "--force", code=1)
    assert "exit code 7" in err and "step setup" in err, err


def test_an_address_without_a_repository(line, git):
    _, err = line.run("up", f"http://{git.host}/open/nothing.git", code=1)
    assert "repository_" in err, err


def test_ctrl_c_on_the_way_leaves_nothing(line, git):
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\necho waiting\nsleep 600\n"})
    process = line.start("up", repository.url)
    told = ""
    for text in process.stderr:
        told += text
        if "│ waiting" in text:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, told + err
    assert wait_for(lambda: line.run("ps", "-q")[0].strip() == ""), line.run("ps")
    # The build was nobody's but this sandbox's.
    assert wait_for(lambda: line.run("build", "ls", "-q", "--state", "Running")[0].strip() == ""), line.run("build", "ls")


def test_secrets_and_tokens_are_named_and_shown_nowhere(line, git):
    repository = git.repository({".sandbox/setup.sh": SETUP}, name="private/named")
    environment = {"NPM_TOKEN": "npm-4b9d20c1f7e8", "GIT_TOKEN": TOKEN}
    asked = ["--secret", "NPM_TOKEN", "--token", "GIT_TOKEN", "--token-user", USER]
    shown, err = line.up(repository.url, *asked, env=environment)
    out, _ = line.run("exec", shown["id"], "--", "cat", "/var/token")
    assert len(out.strip()) == 12
    told = err + json.dumps(shown) + line.run("inspect", "-o", "json", shown["id"])[0] + line.run("events", shown["id"])[0]
    for secret in environment.values():
        assert secret not in told
    _, err = line.run("up", repository.url, "--secret", "NPM_TOKEN", code=1)
    assert "no such variable" in err, err


# ---------------------------------------------------------------- build


def test_images_are_built_ahead_listed_and_removed(line, git):
    repository = git.repository({".sandbox/setup.sh": SETUP})
    out, err = line.run("build", repository.url, "--follow", "--tag", "latest")
    image = out.strip()
    assert "setup │ setting up" in err and len(image) == 36, err
    again, err = line.run("build", repository.url)
    assert again.strip() == image and "--force" in err, err
    builds = json.loads(line.run("build", "ls", "-o", "json")[0])
    build = next(found for found in builds if found.get("imageId") == image)
    log, _ = line.run("build", "logs", build["id"][:13])
    assert "setting up" in log, log
    table, _ = line.run("build", "images")
    assert any(image in row and "latest" in row and "Ready" in row for row in table.splitlines()), table
    line.run("build", "cancel", build["id"], code=1)
    line.run("build", "rm", "--force", image)
    assert wait_for(lambda: not any(image in row and "Ready" in row for row in line.run("build", "images")[0].splitlines()))


# ---------------------------------------------------------------- services


WEB = "web:3000=mkdir -p /srv/page && printf 'from inside\\n' > /srv/page/index.html && echo serving && exec busybox httpd -f -p 3000 -h /srv/page"


@contextmanager
def ended(process):
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


def test_ssh_in_all_its_ways(line, git, tmp_path):
    repository = git.repository({"README": "ssh\n"})
    shown, _ = line.up(repository.url, "--name", "box", "--service", "ssh", "--service", WEB)
    identity = shown["id"]
    place = shown["source"]["repositories"][0]["path"]
    out, _ = line.run("ssh", "box", f"cat {place}/README; exit 3", code=3)
    assert out == "ssh\n"
    out, _ = line.run("ssh", identity, "cat", stdin="through and back\n")
    assert out == "through and back\n"

    block, _ = line.run("ssh-config", "box")
    config = line.home / ".ssh" / "config"
    config.write_text(block)
    config.chmod(0o600)
    ssh = ["ssh", "-F", config, "-o", "BatchMode=yes"]
    assert line.tool(*ssh, "box", "id -un").stdout == "root\n"
    sent = tmp_path / "sent.bin"
    sent.write_bytes(os.urandom(3 << 20))
    batch = f"put {sent} /tmp/sent.bin\nget /tmp/sent.bin {tmp_path}/back.bin\n"
    line.tool("sftp", "-F", config, "-b", "-", "box", stdin=batch)
    assert (tmp_path / "back.bin").read_bytes() == sent.read_bytes()

    # Whoever pretends to be the sandbox is not believed.
    known = next((line.home / ".local/state/sandglass/ssh").glob("*.known_hosts"))
    other = (line.home / ".ssh" / "id_ed25519.pub").read_text().split()[:2]
    known.write_text(f"{identity} {' '.join(other)}\n")
    refused = line.tool("ssh", "-F", "/dev/null", *options(block), "-o", "BatchMode=yes", "box", "true", check=False)
    assert refused.returncode == 255 and "verification failed" in refused.stderr.lower(), refused.stderr

    port = free_port()
    forwarded = line.start("ssh", "-L", f"{port}:127.0.0.1:3000", "box", "sleep 600")
    with ended(forwarded):
        assert wait_for(lambda: page(f"http://127.0.0.1:{port}/") == PAGE)

    # A key of the user's is let in without any certificate.
    proxy = next(entry.strip() for entry in block.splitlines() if entry.strip().startswith("ProxyCommand"))
    line.run("ssh", "--refresh", "box")
    own = ["-o", proxy.replace(" ", "=", 1), "-o", f"HostKeyAlias={identity}", "-o", f"UserKnownHostsFile={known}"]
    key = line.home / ".ssh" / "id_ed25519"
    assert line.tool("ssh", "-F", "/dev/null", *own, "-o", "BatchMode=yes", "-i", key, "root@box", "echo in").stdout == "in\n"

    begun = time.monotonic()
    assert line.tool(*ssh, "box", "true").returncode == 0
    print(f"ssh with a new certificate took {time.monotonic() - begun:.3f} s")


def options(block):
    """The settings of a block but for what asks for certificates, as options."""
    entries = [entry.strip().split(" ", 1) for entry in block.splitlines() if entry.startswith("    ")]
    return [word for name, value in entries for word in ("-o", f"{name}={value}")]


def page(address):
    try:
        return httpx.get(address, timeout=5, trust_env=False).text
    except (httpx.HTTPError, OSError):
        return None


def test_a_service_is_opened_in_a_browser_and_its_output_read(line, git):
    repository = git.repository({"README": "web\n"})
    shown, _ = line.up(repository.url, "--service", WEB, "--service", "terminal", "--port", "3000")
    identity = shown["id"]
    assert [way["kind"] for way in shown["addresses"]] == ["app"]
    out, _ = line.run("code", identity, "--service", "web")
    with httpx.Client(follow_redirects=True, trust_env=False, timeout=30) as browser:
        assert browser.get(out.strip()).text == PAGE
    log, _ = line.run("logs", identity, "--service", "web")
    assert "serving" in log, log
    _, err = line.run("logs", identity, "--service", "nothing", code=1)
    assert "web" in err, err
    _, err = line.run("code", identity, code=1)
    assert "--service code-server" in err, err


def test_an_editor_that_the_image_has_not_is_said_to_be_missing(line, git):
    repository = git.repository({"README": "code\n"})
    shown, _ = line.up(repository.url)
    _, err = line.run("code", shown["id"], code=1)
    assert "code-server" in err and "install" in err, err
