"""Steps of the measurements with repositories: until ready, until built, until a kill is noticed, one SSH session."""

import os
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path

from measure import now_ms

# Against hanging only.
PATIENCE = 300


def until(claim, seconds=PATIENCE, every=0.05):
    """Waits for a claim; an error when it does not come true."""
    deadline = time.monotonic() + seconds
    while not claim():
        if time.monotonic() > deadline:
            raise RuntimeError("waited in vain")
        time.sleep(every)


def ready(api, body, every=0.005, seconds=PATIENCE):
    """Asks for a sandbox; its id, and milliseconds until it was shown as of use."""
    begun, deadline = now_ms(), time.monotonic() + seconds
    sandbox = api.expect(202, "POST", "/v1/sandboxes", body)["id"]
    while True:
        shown = api.expect(200, "GET", f"/v1/sandboxes/{sandbox}")
        took = now_ms() - begun
        if shown["status"]["state"] == "Running":
            return sandbox, took
        if shown["status"]["state"] != "Pending" or time.monotonic() > deadline:
            raise RuntimeError(f"not ready: {shown}")
        time.sleep(every)


def built(api, body, every=0.025):
    """Asks for a build; the build when it ended well, and milliseconds until then."""
    begun, deadline = now_ms(), time.monotonic() + PATIENCE
    status, build = api.call("POST", "/v1/image-builds", body)
    if status not in (200, 202):
        raise RuntimeError(f"the build was answered {status}: {build}")
    while build["status"]["state"] != "Succeeded":
        if build["status"]["state"] in ("Failed", "Cancelled", "TimedOut") or time.monotonic() > deadline:
            raise RuntimeError(f"not built: {build}")
        time.sleep(every)
        build = api.expect(200, "GET", f"/v1/image-builds/{build['id']}")
    return build, now_ms() - begun


def kill_noticed(api, sandbox, pid):
    """Kills the agent; milliseconds until the sandbox is not shown as of use, and what is shown then."""
    begun, deadline = now_ms(), time.monotonic() + PATIENCE
    os.kill(pid, signal.SIGKILL)
    while True:
        shown = api.expect(200, "GET", f"/v1/sandboxes/{sandbox}")["status"]
        took = now_ms() - begun
        if shown["state"] in ("Failed", "Terminated") or shown.get("reason") not in ("ready", "degraded"):
            return took, shown
        if time.monotonic() > deadline:
            raise RuntimeError(f"not noticed: {shown}")
        time.sleep(0.005)


def ready_with_ssh(api, body):
    """A sandbox whose SSH server is up, and the public key of that server."""
    sandbox, _ = ready(api, body)
    found = {}

    def up():
        found.update(api.expect(200, "GET", f"/v1/sandboxes/{sandbox}/services/ssh"))
        return found["state"] == "Ready" and "hostKey" in found

    until(up, 60)
    return sandbox, found["hostKey"]["publicKey"]


def ssh_true(keys, host_key, host, environment, **options):
    """Milliseconds of one `ssh HOST true` from start to end, which believes that one key of the server."""
    known = keys.folder / f"known-{secrets.token_hex(4)}"
    known.write_text(f"known {host_key}\n")
    options = {
        "UserKnownHostsFile": known,
        "GlobalKnownHostsFile": "/dev/null",
        "HostKeyAlias": "known",
        "StrictHostKeyChecking": "yes",
        "IdentityFile": keys.pair("ann"),
        "IdentitiesOnly": "yes",
        "BatchMode": "yes",
        "LogLevel": "ERROR",
        "ConnectTimeout": "20",
        **options,
    }
    # ssh looks a port's key up under a name of its own.
    if "Port" in options:
        known.write_text(f"[known]:{options['Port']} {host_key}\nknown {host_key}\n")
    words = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    command = ["ssh", "-F", "none", *words, f"root@{host}", "true"]
    begun = now_ms()
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    took = now_ms() - begun
    known.unlink()
    if done.returncode:
        raise RuntimeError(f"ssh ended with {done.returncode}: {done.stderr.decode(errors='replace')[-400:]}")
    return took


def waiting_work(seconds):
    """A command of the shell that works and waits for about that long."""
    return f"for n in $(seq {seconds * 10}); do sha256sum /usr/bin/git >> /made/sums; sleep 0.08; done"


class Sshd:
    """OpenSSH's own server on loopback, which lets `ann` in."""

    def __init__(self, home, keys):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        keys.public("ann")
        authorized = home / "authorized"
        authorized.write_text(keys.public("ann") + "\n")
        self.host_key = " ".join(keys.public("loopback").split()[:2])
        lines = {
            "Port": self.port,
            "ListenAddress": "127.0.0.1",
            "HostKey": keys.pair("loopback"),
            "AuthorizedKeysFile": authorized,
            **{"PidFile": "none", "StrictModes": "no", "UsePAM": "no", "UseDNS": "no", "LogLevel": "ERROR"},
            **{"PasswordAuthentication": "no", "KbdInteractiveAuthentication": "no"},
            "PermitRootLogin": "prohibit-password",
            # Or bash would read the account's files, whatever they do.
            "SetEnv": "SHLVL=2",
        }
        config = home / "loopback_sshd"
        config.write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
        # Where the server, as root, shuts its unprivileged half in; the package's service makes it.
        Path("/run/sshd").mkdir(exist_ok=True)
        command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self.listens, 20)

    def listens(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self):
        self.process.terminate()
        self.process.wait()
