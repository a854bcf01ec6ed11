"""Registries on loopback: Debian's `docker-registry`, and a stub that sends layers only when told to."""

import base64
import http.client
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from archives import MANIFEST, digest
from stack import free_port, wait_for

USER = "ann"
PASSWORD = "correct-horse-battery"
# bcrypt of the password, at the lowest cost.
PASSWORD_HASH = "$2b$04$CjxBd0u9h3qKjTUAQsD9aO68eR1twVcFK1d8vXQc0maPuVzcuExcm"


def basic(user, password):
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


class Registry:
    """Debian's registry with its data in `folder`."""

    def __init__(self, folder, private=False):
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.headers = {"Authorization": basic(USER, PASSWORD)} if private else {}
        config = (
            "version: 0.1\nlog: {level: error}\n"
            f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
            f"http: {{addr: '{self.address}'}}\n"
        )
        if private:
            (folder / "htpasswd").write_text(f"{USER}:{PASSWORD_HASH}\n")
            config += f"auth: {{htpasswd: {{realm: test, path: {folder}/htpasswd}}}}\n"
        (folder / "config.yml").write_text(config)
        self.process = subprocess.Popen(
            ["docker-registry", "serve", str(folder / "config.yml")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if not wait_for(self._answers):
            self.close()
            raise RuntimeError("docker-registry does not answer")

    def _answers(self):
        try:
            return self._call("GET", "/v2/")[0] == 200
        except OSError:
            return False

    def _call(self, method, path, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, {**self.headers, **headers})
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.headers
        finally:
            connection.close()

    def push(self, name, image, tag="latest"):
        for key, data in image.blobs().items():
            status, headers = self._call("POST", f"/v2/{name}/blobs/uploads/")
            assert status == 202, status
            place = urlsplit(headers["Location"])
            query = f"{place.query}&digest={key}".lstrip("&")
            assert self._call("PUT", f"{place.path}?{query}", data)[0] == 201
        kind = {"Content-Type": MANIFEST}
        assert self._call("PUT", f"/v2/{name}/manifests/{tag}", image.manifest, **kind)[0] == 201
        return f"{self.address}/{name}:{tag}"

    def close(self):
        self.process.terminate()
        self.process.wait()


class SlowRegistry:
    """Serves one image under any name; layers trickle a byte at a time until `released` is set."""

    def __init__(self, image, password=None):
        self.released = threading.Event()
        self.asked = threading.Event()
        blobs = image.blobs()
        slow = {digest(data) for data in image.packed}
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                if password and self.headers.get("Authorization") != basic(USER, password):
                    return self.answer(401, b"{}", **{"WWW-Authenticate": 'Basic realm="test"'})
                if self.path.rstrip("/") == "/v2":
                    return self.answer(200, b"{}")
                key = self.path.rpartition("/")[2]
                if "/manifests/" in self.path:
                    return self.answer(200, image.manifest, **{"Content-Type": MANIFEST})
                if key not in blobs:
                    return self.answer(404, b"{}")
                return self.trickle(blobs[key]) if key in slow else self.answer(200, blobs[key])

            do_HEAD = do_GET

            def answer(self, status, body, **headers):
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def trickle(self, body):
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                stub.asked.set()
                sent = 0
                try:
                    while not stub.released.wait(0.05):
                        self.wfile.write(body[sent : sent + 1])
                        sent += 1
                    self.wfile.write(body[sent:])
                except OSError:
                    # The puller gave up, which is what some tests are about.
                    self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
