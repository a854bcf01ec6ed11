"""Repositories to make sandboxes from: git over HTTP and over ssh, in a network namespace that this machine and every sandbox reach.

As a program (`python git_servers.py FOLDER ADDRESS [CERTIFICATE KEY]`) it is the HTTP server, over TLS with a certificate; as a module it
makes the namespace, the servers, and the repositories in them. What stands first in a path decides how it is treated: `open` needs nobody,
`private` needs `USER` and `TOKEN`, `silent` never answers. Large files are served beside each repository, as git-lfs asks for them.
"""

import base64
import hashlib
import json
import os
import pwd
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

USER, TOKEN = "bot", "tok-3f9a7c5e1b2d4860"
HTTP_PORT, SSH_PORT, TLS_PORT = 8090, 2222, 8443
# Below a repository, where its large files are asked for.
LARGE = "/info/lfs/objects/"
AUTHOR = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    **{f"GIT_{who}_NAME": "Ann" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "ann@example.com" for who in ("AUTHOR", "COMMITTER")},
}


def git(folder, *arguments):
    """Runs git as the author of test repositories; answers what it printed."""
    options = ("-c", "protocol.file.allow=always", "-c", "init.defaultBranch=main", "-c", "gc.auto=0")
    command = ["git", *options, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **AUTHOR}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"git {' '.join(map(str, arguments))}: {done.stderr}")
    return done.stdout.strip()


class Repository:
    """A work tree in which tests commit, and the bare repository that the servers serve of it."""

    def __init__(self, servers, name):
        self.servers, self.name = servers, name
        self.bare = servers.root / f"{name}.git"
        self.work = servers.folder / "work" / name
        for folder in (self.bare, self.work):
            folder.mkdir(parents=True)
        git(self.bare, "init", "--quiet", "--bare", ".")
        # Sandboxes that ask for a commit alone get it.
        git(self.bare, "config", "uploadpack.allowAnySHA1InWant", "true")
        git(self.work, "init", "--quiet", ".")

    @property
    def url(self):
        return f"http://{self.servers.address}:{HTTP_PORT}/{self.name}.git"

    @property
    def tls_url(self):
        """Once the servers speak TLS."""
        return f"https://{self.servers.address}:{TLS_PORT}/{self.name}.git"

    @property
    def ssh_url(self):
        return f"ssh://{self.servers.user}@{self.servers.address}:{SSH_PORT}{self.bare}"

    @property
    def head(self):
        return git(self.work, "rev-parse", "HEAD")

    def commit(self, files, message="change"):
        """Writes files (path to text; None removes one; a text that begins with `#!` can be run), commits, pushes; answers the commit."""
        for path, text in files.items():
            place = self.work / path
            if text is None:
                place.unlink()
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
            place.chmod(0o755 if text.startswith("#!") else 0o644)
        git(self.work, "add", "--all")
        git(self.work, "commit", "--quiet", "--allow-empty", "-m", message)
        return self.push()

    def large(self, path, data):
        """Commits a pointer to a large file whose content (bytes) only the servers have; answers its id among the large files."""
        name = hashlib.sha256(data).hexdigest()
        (self.servers.folder / "large").mkdir(exist_ok=True)
        (self.servers.folder / "large" / name).write_bytes(data)
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{name}\nsize {len(data)}\n"
        self.commit({".gitattributes": f"{path} filter=lfs diff=lfs merge=lfs -text\n", path: pointer}, f"large {path}")
        return name

    def submodule(self, other, path):
        """Puts another repository into this one, by an address that holds wherever this one is cloned from."""
        depth = self.name.count("/")
        git(self.work, "submodule", "--quiet", "add", str(other.bare), path)
        relative = "../" * (depth + 1) + other.name + ".git"
        git(self.work, "config", "-f", ".gitmodules", f"submodule.{path}.url", relative)
        git(self.work, "add", "--all")
        git(self.work, "commit", "--quiet", "-m", f"submodule {path}")
        return self.push()

    def push(self):
        git(self.work, "push", "--quiet", "--force", self.bare, "+HEAD:refs/heads/main", "+refs/tags/*:refs/tags/*")
        return self.head


def free_block(first):
    """The first number from there on whose network `198.18.N.0` no interface of this machine is in."""
    told = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    for number in range(250):
        block = (first + number) % 250
        if f" 198.18.{block}." not in told:
            return block
    raise RuntimeError("every network below 198.18 is in use; remove those that ended runs have left")


class GitServers:
    """Made by entering it, gone when left."""

    def __init__(self, folder=None):
        self._own = None if folder else tempfile.TemporaryDirectory(prefix="sandglass-git-")
        self.folder = Path(folder or self._own.name)
        self.root = self.folder / "repositories"
        self.root.mkdir(parents=True, exist_ok=True)
        # Runs at the same time do not meet, nor does the world that egress policies are tried on.
        block = free_block(os.getpid() % 250)
        self.near_address, self.address = f"198.18.{block}.1", f"198.18.{block}.2"
        tag = f"{os.getpid():x}"[-6:]
        self.name, self.near = f"git{tag}", f"gi{tag}"
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        self.processes = []
        self.keys = {}
        self._number = 0

    def __enter__(self):
        try:
            self._namespace()
            self._http()
            self._ssh()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        for command in (("netns", "del", self.name), ("link", "del", self.near)):
            subprocess.run(["ip", *command], check=False, capture_output=True)
        if self._own:
            self._own.cleanup()

    def repository(self, files=None, name=None):
        """A repository with one commit; `name` is a path whose first part says how it is served. A name that is taken, by a test that runs
        once more, gets a number."""
        self._number += 1
        if name and (self.root / f"{name}.git").exists():
            name = f"{name}{self._number}"
        made = Repository(self, name or f"open/project{self._number}")
        made.commit(files or {"README": "hello\n"}, "first")
        return made

    @property
    def host(self):
        """As it stands in addresses."""
        return f"{self.address}:{HTTP_PORT}"

    @property
    def token_credential(self):
        return {"username": USER, "token": TOKEN}

    def key_credential(self, name="right"):
        """Of `right`, which the server knows, or `wrong`."""
        return {"privateKey": self.keys[name], "knownHosts": f"[{self.address}]:{SSH_PORT} {self.keys['host.pub']}"}

    def requests(self):
        """What the HTTP server was asked, oldest first."""
        try:
            return (self.folder / "requests.log").read_text().splitlines()
        except OSError:
            return []

    def over_tls(self):
        """Serves the same over TLS; answers the certificate of the authority behind it, which nobody trusts who was not told to."""
        authority = self.folder / "authority.pem"
        if authority.exists():
            return authority.read_text()

        def openssl(*arguments):
            subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, cwd=self.folder)

        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        openssl("req", *curve, "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=git server")
        (self.folder / "extensions").write_text(f"subjectAltName=IP:{self.address}\nbasicConstraints=critical,CA:false\n")
        # The last, so that what is half made is made again.
        openssl("req", "-x509", *curve, "-days", "2", "-keyout", "authority.key", "-out", "authority.new", "-subj", "/CN=private authority")
        signed = ("-CA", "authority.new", "-CAkey", "authority.key", "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", "tls.csr", *signed, "-out", "tls.pem", "-extfile", "extensions")
        self._http(self.folder / "tls.pem", self.folder / "tls.key")
        (self.folder / "authority.new").rename(authority)
        return authority.read_text()

    def _ip(self, line):
        subprocess.run(["ip", *line.split()], check=True)

    def _inside(self, *command, **keys):
        process = subprocess.Popen(["ip", "netns", "exec", self.name, *map(str, command)], **keys)
        self.processes.append(process)
        return process

    def _namespace(self):
        self._ip(f"netns add {self.name}")
        self._ip(f"link add {self.near} type veth peer name far netns {self.name}")
        self._ip(f"addr add {self.near_address}/30 dev {self.near}")
        self._ip(f"link set {self.near} up")
        self._ip(f"-n {self.name} addr add {self.address}/30 dev far")
        for link in ("lo", "far"):
            self._ip(f"-n {self.name} link set {link} up")
        self._ip(f"-n {self.name} route add default via {self.near_address}")

    def _http(self, *tls):
        server = self._inside(sys.executable, __file__, self.folder, self.address, *tls, stdout=subprocess.PIPE)
        if server.stdout.readline() != b"ready\n":
            raise RuntimeError("the git server does not start")

    def _ssh(self):
        for name in ("host", "right", "wrong"):
            path = self.folder / name
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)]
            subprocess.run(command, check=True)
            self.keys[name], self.keys[f"{name}.pub"] = path.read_text(), Path(f"{path}.pub").read_text().strip()
        (self.folder / "authorized").write_text(self.keys["right.pub"] + "\n")
        lines = {
            "Port": SSH_PORT,
            "ListenAddress": self.address,
            "HostKey": self.folder / "host",
            "AuthorizedKeysFile": self.folder / "authorized",
            **{"PidFile": "none", "StrictModes": "no", "UsePAM": "no", "UseDNS": "no", "LogLevel": "ERROR"},
            **{"PasswordAuthentication": "no", "KbdInteractiveAuthentication": "no"},
            "PermitRootLogin": "prohibit-password",
        }
        config = self.folder / "sshd_config"
        config.write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
        # Where the server, as root, shuts its unprivileged half in; the package's service makes it.
        Path("/run/sshd").mkdir(exist_ok=True)
        log = self.folder / "sshd.log"
        with open(log, "wb") as said:
            server = self._inside("/usr/sbin/sshd", "-D", "-e", "-f", config, stderr=said)
        why, patience = "", time.monotonic() + 60
        while server.poll() is None and time.monotonic() < patience:
            try:
                socket.create_connection((self.address, SSH_PORT), timeout=5).close()
                return
            except OSError as error:
                why = str(error)
                threading.Event().wait(0.05)
        raise RuntimeError(f"sshd does not start: {why}; it ended with {server.poll()}: {log.read_text(errors='replace')[-2000:]}")


class Backend(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder = None
    scheme = "http"
    lock = threading.Lock()

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def serve(self):
        authorization = self.headers.get("Authorization", "")
        with self.lock, open(self.folder / "requests.log", "a") as log:
            log.write(f"{self.client_address[0]} {self.command} {self.path} {'with' if authorization else 'without'} credential\n")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = self.path.split("/")[1]
        if kind == "silent":
            threading.Event().wait(600)
            return
        expected = "Basic " + base64.b64encode(f"{USER}:{TOKEN}".encode()).decode()
        if kind == "private" and authorization != expected:
            self.answer(401, headers=[("WWW-Authenticate", 'Basic realm="git"')])
            return
        repository, large, name = self.path.partition(LARGE)
        if large and name == "batch":
            self.large_files(repository, json.loads(body), authorization)
        elif large:
            self.large_file(name)
        else:
            self.backend(body)

    def large_files(self, repository, asked, authorization):
        """Where each of the wanted files is, and with which credential it is got: the one of this request."""
        base = f"{self.scheme}://{self.headers['Host']}{repository}{LARGE}"
        header = {"Authorization": authorization} if authorization else {}
        told = []
        for one in asked["objects"]:
            known = {"oid": one["oid"], "size": one["size"], "authenticated": True}
            if (self.folder / "large" / Path(one["oid"]).name).is_file():
                told.append({**known, "actions": {"download": {"href": base + one["oid"], "header": header}}})
            else:
                told.append({**known, "error": {"code": 404, "message": "no such object"}})
        answer = json.dumps({"transfer": "basic", "objects": told}).encode()
        self.answer(200, answer, [("Content-Type", "application/vnd.git-lfs+json")])

    def large_file(self, name):
        path = self.folder / "large" / Path(name).name
        if path.is_file():
            self.answer(200, path.read_bytes(), [("Content-Type", "application/octet-stream")])
        else:
            self.answer(404)

    def backend(self, body):
        path, _, query = self.path.partition("?")
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.folder / "repositories"),
            "GIT_HTTP_EXPORT_ALL": "1",
            **AUTHOR,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "REMOTE_ADDR": self.client_address[0],
            # Pushes are taken from whoever got this far.
            "REMOTE_USER": USER,
        }
        done = subprocess.run(["git", "http-backend"], input=body, env=environment, stdout=subprocess.PIPE, check=False)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        status, headers = 200, []
        for line in head.decode().split("\r\n"):
            name, _, value = line.partition(":")
            if name.lower() == "status":
                status = int(value.split()[0])
            elif name:
                headers.append((name, value.strip()))
        self.answer(status, content, headers)

    do_GET = do_POST = serve


def main():
    Backend.folder, address, tls = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    server = ThreadingHTTPServer((address, TLS_PORT if tls else HTTP_PORT), Backend)
    server.daemon_threads = True
    if tls:
        Backend.scheme = "https"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        # The handshake is each connection's own, in its thread: a silent client holds up nobody.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
