"""A git server for tests: git-http-backend behind Basic authentication, and a large-file store.

Run with the folder of bare repositories; prints its port. What stands first in a path decides how it is treated:
`open` needs no user, `private` needs bot and the token of the environment, `silent` never answers, `broken` answers 500,
`moved` redirects to where the environment says, `old` speaks the first version of the protocol alone. Each request is a line of `requests.log`.
"""

import base64
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse

ROOT = sys.argv[1]
TOKEN = os.environ["SERVER_TOKEN"]
USER = os.environ.get("SERVER_USER", "bot")
MOVED = os.environ.get("SERVER_MOVED_TO", "")
LOCK = threading.Lock()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

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
        with LOCK, open(os.path.join(ROOT, "requests.log"), "a") as log:
            log.write(f"{self.command} {self.path} {'with' if authorization else 'without'} credential\n")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = self.path.split("/")[1]
        if kind == "silent":
            threading.Event().wait(120)
            return
        if kind == "broken":
            return self.answer(500)
        if kind == "moved":
            return self.answer(302, headers=[("Location", MOVED + self.path[len("/moved"):])])
        if kind in ("private", "lfs"):
            expected = "Basic " + base64.b64encode(f"{USER}:{TOKEN}".encode()).decode()
            if authorization != expected:
                return self.answer(401, headers=[("WWW-Authenticate", 'Basic realm="git"')])
        if self.path.endswith("/info/lfs/objects/batch"):
            return self.batch(json.loads(body), authorization)
        if kind == "lfs":
            with open(os.path.join(ROOT, "lfs", os.path.basename(self.path)), "rb") as file:
                return self.answer(200, file.read())
        self.backend(body)

    def batch(self, request, authorization):
        base = f"http://{self.headers['Host']}/lfs/"
        objects = [
            {
                "oid": wanted["oid"],
                "size": wanted["size"],
                "actions": {"download": {"href": base + wanted["oid"], "header": {"Authorization": authorization}}},
            }
            for wanted in request["objects"]
        ]
        body = json.dumps({"transfer": "basic", "objects": objects}).encode()
        self.answer(200, body, [("Content-Type", "application/vnd.git-lfs+json")])

    def backend(self, body):
        path, _, query = self.path.partition("?")
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": ROOT,
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "PATH_INFO": urllib.parse.unquote(path),
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": "" if path.startswith("/old/") else self.headers.get("Git-Protocol", ""),
            "REMOTE_ADDR": "127.0.0.1",
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


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
print(server.server_port, flush=True)
server.serve_forever()
