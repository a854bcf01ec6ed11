#!/usr/bin/env python3
"""The restart loop: random operations in parallel while the server is killed, round after round.

After every round the server is started again on the same state directory, and what it then says and what is on the host is
compared with what its clients were told. Nothing may be lost, doubled, left over, or stuck on its way between two states.

    restart.py [--rounds 200] [--seconds 240] [--seed N] [--workers 4] [--runtime embedded|docker]

With `docker` on a private engine, and with snapshots among the operations: afterwards no container, volume, published port,
image or row may be without an owner.

Stops at the first violated promise and says which. The same seed makes the same choices, though not the same timing.
Needs SANDGLASS_BIN and root; only the standard library.
"""

import argparse
import http.client
import os
import random
import re
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from datetime import datetime, timedelta, timezone

from docker_engine import BUSYBOX, ID, Engine
from docker_stack import DockerStack
from stack import Stack

SETTLE_SECONDS = 10
# How long after its end a sandbox may still be seen: the server's own loop plus one restart.
EXPIRY_GRACE = timedelta(seconds=6)
GONE = "gone"
STABLE = {"Running", "Paused", "Failed", "Terminated"}
FEW, MANY = 5, 12
CUT = (OSError, http.client.HTTPException)


def utc():
    return datetime.now(timezone.utc)


def parsed(text):
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


class Box:
    """What the clients were told of one sandbox."""

    def __init__(self, identity, operation, expires, settled):
        self.id, self.operation = identity, operation
        self.expires = {expires}
        self.states = {"Running"}
        # Pending when the answer came: refusals are legal until a round has shown it running.
        self.settled = settled
        self.busy = False
        self.deletion = None
        self.shim_killed = False

    @property
    def expiring(self):
        return min(self.expires) < utc() + timedelta(seconds=45)

    def __str__(self):
        ends = sorted(end.isoformat() for end in self.expires)
        return f"{self.id} states={sorted(self.states)} ends={ends} deletion={self.deletion} shim_killed={self.shim_killed}"


class Violation(Exception):
    pass


class Loop:
    def __init__(self, options):
        self.options = options
        self.random = random.Random(options.seed)
        self.docker = options.runtime == "docker"
        self.engine = Engine().start().images(BUSYBOX) if self.docker else None
        self.stack = DockerStack(self.engine) if self.docker else Stack()
        self.boxes = {}
        self.snapshots = {}
        self.lost_creates = {}
        self.lock = threading.Lock()
        self.halt = threading.Event()
        self.problems = []
        self.counts = Counter()
        self.starts = []

    # ------------------------------------------------------------ one round

    def round(self):
        self.halt.clear()
        workers = [
            threading.Thread(target=self.work, args=(self.random.random(),)) for _ in range(self.options.workers)
        ]
        for worker in workers:
            worker.start()
        time.sleep(self.random.uniform(0.03, 1.5 if self.docker else 0.45))
        if self.random.random() < 0.15:
            self.kill_a_shim()
        if self.random.random() < 0.1:
            self.counts["stopped by SIGTERM"] += 1
            self.stack.stop()
        else:
            self.stack.kill()
        self.halt.set()
        for worker in workers:
            worker.join(60)
            if worker.is_alive():
                raise Violation("a client still waits for a server that is gone")
        if self.random.random() < 0.1:
            self.kill_a_shim()
        if self.random.random() < 0.2:
            time.sleep(self.random.uniform(0.1, 0.5))
        begun = time.monotonic()
        self.stack.start()
        self.starts.append(time.monotonic() - begun)
        client = self.stack.client()
        try:
            self.find_lost_creates(client)
            self.settle(client)
            self.settle_snapshots(client)
            self.finish_deletions(client)
            self.use_one(client)
        finally:
            client.close()
        if self.problems:
            raise Violation("\n".join(self.problems))

    def work(self, seed):
        """A client: one operation after the other until the server is gone."""
        choices = random.Random(seed)
        client = self.stack.client(timeout=30)
        try:
            while not self.halt.is_set():
                time.sleep(choices.uniform(0, 0.03))
                if not self.operate(client, choices):
                    return
        finally:
            client.close()

    def operate(self, client, choices):
        """One random operation; false when the connection was cut."""
        with self.lock:
            free = [box for box in self.boxes.values() if not box.busy and not box.deletion and not box.expiring]
            box = choices.choice(free) if free else None
            creates = len(self.boxes) + len(self.lost_creates)
            chance = choices.random()
            if box is None or (creates < MANY and chance < (0.6 if creates < FEW else 0.25)):
                box, name = None, "create"
            else:
                weights = [4 if creates > FEW else 1, 3, 3, 0.4, *([2, 2] if self.docker else [])]
                names = ["delete", "toggle", "renew", "expire", *(["save", "forget"] if self.docker else [])]
                name = choices.choices(names, weights)[0]
                box.busy = True
        try:
            return getattr(self, name)(client, box, choices)
        finally:
            if box:
                box.busy = False

    # ------------------------------------------------------------ operations

    def attempt(self, client, method, path, body=None, headers=None):
        """(status, answer), or None when the server went away: the outcome is then unknown."""
        try:
            return client.call(method, path, body, headers)
        except CUT:
            return None

    def create(self, client, _, choices):
        operation = uuid.uuid4().hex
        answer = self.attempt(client, *self.creation(operation))
        with self.lock:
            if answer is None:
                self.lost_creates[operation] = True
                self.counts["create, cut off"] += 1
                return False
            self.counts["create"] += 1
            self.remember(operation, *answer)
        return True

    def creation(self, operation):
        body = {
            "image": {"uri": BUSYBOX if self.docker else "host"},
            "entrypoint": ["sleep", "3600"],
            "timeout": 3600,
            "resourceLimits": {"cpu": "200m", "memory": "64Mi"},
            "metadata": {"op": operation},
        }
        if self.docker:
            claim = {"claimName": f"restart-{operation}", "deleteOnSandboxTermination": True}
            body["volumes"] = [{"name": "data", "pvc": claim, "mountPath": "/data"}]
        return "POST", "/v1/sandboxes", body, {"Idempotency-Key": operation}

    def remember(self, operation, status, answer):
        if status != 202:
            self.problems.append(f"create answered {status}: {answer}")
            return None
        settled = answer["status"]["state"] == "Running"
        box = Box(answer["id"], operation, parsed(answer["expiresAt"]), settled)
        self.boxes[box.id] = box
        self.stack.known.add(box.id)
        return box

    def delete(self, client, box, choices):
        answer = self.attempt(client, "DELETE", f"/v1/sandboxes/{box.id}")
        box.deletion = "unknown" if answer is None else "confirmed"
        self.counts["delete" if answer else "delete, cut off"] += 1
        if answer and answer[0] != 204 and not (answer[0] == 404 and box.shim_killed):
            self.problems.append(f"delete answered {answer}: {box}")
        return answer is not None

    def toggle(self, client, box, choices):
        """Pauses what runs and resumes what is paused."""
        name, source, target = ("pause", "Running", "Paused")
        if box.states == {"Paused"}:
            name, source, target = ("resume", "Paused", "Running")
        answer = self.attempt(client, "POST", f"/v1/sandboxes/{box.id}/{name}")
        self.counts[name if answer else f"{name}, cut off"] += 1
        if answer is None:
            box.states |= {source, target}
            return False
        if answer[0] == 202:
            box.states = {target}
        elif box.settled and box.states == {source} and not box.shim_killed:
            self.problems.append(f"{name} answered {answer}: {box}")
        return True

    def renew(self, client, box, choices):
        return self.renew_to(client, box, utc() + timedelta(seconds=choices.randint(120, 3000)))

    def expire(self, client, box, choices):
        return self.renew_to(client, box, utc() + timedelta(seconds=choices.randint(2, 4)))

    def renew_to(self, client, box, end):
        # Whole milliseconds are what the server keeps, so that the answer can be compared exactly.
        end = end.replace(microsecond=end.microsecond // 1000 * 1000)
        body = {"expiresAt": end.isoformat()}
        answer = self.attempt(client, "POST", f"/v1/sandboxes/{box.id}/renew-expiration", body)
        self.counts["renew" if answer else "renew, cut off"] += 1
        if answer is None:
            box.expires.add(end)
            return False
        if answer[0] != 200:
            if not box.shim_killed:
                self.problems.append(f"renew answered {answer}: {box}")
        elif parsed(answer[1]["expiresAt"]) != end:
            self.problems.append(f"renew to {end} answered {answer}")
        else:
            box.expires = {end}
        return True

    def save(self, client, box, choices):
        """A snapshot; what became of one whose answer was cut off is seen after the restart."""
        answer = self.attempt(client, "POST", f"/v1/sandboxes/{box.id}/snapshots", {"name": box.id})
        self.counts["snapshot" if answer else "snapshot, cut off"] += 1
        if answer and answer[0] == 202:
            self.snapshots[answer[1]["id"]] = "there"
        elif answer and box.settled and box.states == {"Running"} and not box.shim_killed:
            self.problems.append(f"snapshot answered {answer}: {box}")
        return answer is not None

    def forget(self, client, box, choices):
        """Deletes some snapshot."""
        with self.lock:
            known = [snapshot for snapshot, state in self.snapshots.items() if state == "there"]
            snapshot = choices.choice(known) if known else None
            if snapshot is None:
                return True
            self.snapshots[snapshot] = "unknown"
        answer = self.attempt(client, "DELETE", f"/v1/snapshots/{snapshot}")
        self.counts["snapshot deleted" if answer else "snapshot deleted, cut off"] += 1
        if answer and answer[0] == 204:
            self.snapshots[snapshot] = "deleted"
        elif answer and answer[0] == 409:
            # Still being made, or in use.
            self.snapshots[snapshot] = "there"
        elif answer:
            self.problems.append(f"deleting snapshot {snapshot} answered {answer}")
        return answer is not None

    def kill_a_shim(self):
        if self.docker:
            return self.kill_a_container()
        with self.lock:
            free = [box for box in self.boxes.values() if not box.busy and not box.deletion and not box.expiring]
            if not free:
                return
            box = self.random.choice(free)
            shims = {shim.pid for shim in self.stack.shims()}
            pid = self.stack.document(box.id, "state.json").get("shimPid")
            if pid not in shims:
                return
            box.shim_killed = True
            box.states = {"Failed", "Terminated", GONE}
            os.kill(pid, signal.SIGKILL)
            self.counts["shim killed"] += 1

    def kill_a_container(self):
        with self.lock:
            free = [box for box in self.boxes.values() if not box.busy and not box.deletion and not box.expiring]
            if not free:
                return
            box = self.random.choice(free)
            box.shim_killed = True
            box.states = {"Failed", "Terminated", GONE}
        status, _ = self.engine.api("POST", f"/containers/sandbox-{box.id}/kill")
        self.counts["container killed" if status == 204 else "container not killed"] += 1

    # ------------------------------------------------------------ after the restart

    def find_lost_creates(self, client):
        """A create whose answer was cut off: the same idempotency key must lead to the same sandbox."""
        for operation in list(self.lost_creates):
            there = [s for s in client.sandboxes() if s.get("metadata", {}).get("op") == operation]
            if len(there) > 1:
                raise Violation(f"one create made {[s['id'] for s in there]}")
            if there and self.random.random() < 0.3:
                self.boxes[there[0]["id"]] = Box(there[0]["id"], operation, parsed(there[0]["expiresAt"]), False)
            else:
                box = self.remember(operation, *client.call(*self.creation(operation)))
                if box and there and box.id != there[0]["id"]:
                    raise Violation(f"the repeated create made {box.id} beside {there[0]['id']}")
                self.counts["create, repeated"] += 1
            del self.lost_creates[operation]

    def settle(self, client):
        """Polls until everything is as it was promised, at most SETTLE_SECONDS."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            listed = {sandbox["id"]: sandbox for sandbox in client.sandboxes()}
            found = self.differences(listed)
            found += self.left(listed) if not found else []
            # What disappeared between the list and the look at the host is looked at again.
            if not found:
                break
            if time.monotonic() > deadline:
                raise Violation("\n".join(found))
            time.sleep(0.03)
        for box in list(self.boxes.values()):
            sandbox = listed.get(box.id)
            if sandbox is None:
                del self.boxes[box.id]
            else:
                box.states, box.expires, box.settled = {sandbox["status"]["state"]}, {parsed(sandbox["expiresAt"])}, True

    def left(self, listed):
        if not self.docker:
            return self.stack.leftovers(listed)
        # Snapshots have a look of their own, when they have settled.
        volumes = {f"restart-{box.operation}" for box in self.boxes.values() if box.id in listed}
        found = self.engine.leftovers(listed, snapshots=self.engine.snapshots(), volumes=volumes)
        found += [f"row of {owner} in {table}" for table, owner in self.stack.rows() if owner not in listed]
        ports = Counter()
        for container in self.engine.containers(ID):
            ports.update(port["PublicPort"] for port in container["Ports"] if port.get("PublicPort"))
        return found + [f"port {port} is published {times} times" for port, times in ports.items() if times > 1]

    def settle_snapshots(self, client):
        if not self.docker:
            return
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            page = client.call("GET", "/v1/snapshots?pageSize=200")[1]
            rows = {row["id"]: row["status"]["state"] for row in page["items"]}
            images = self.engine.snapshots()
            found = [f"snapshot {one} is still {state}" for one, state in rows.items() if state not in ("Ready", "Failed")]
            found += [f"snapshot {one} is Ready without an image" for one, state in rows.items() if state == "Ready" and one not in images]
            found += [f"image of snapshot {one}, which nobody knows" for one in images - rows.keys()]
            found += [f"snapshot {one} is lost" for one, state in self.snapshots.items() if state == "there" and one not in rows]
            found += [f"snapshot {one} was deleted and is listed" for one, state in self.snapshots.items() if state == "deleted" and one in rows]
            if not found:
                break
            if time.monotonic() > deadline:
                raise Violation("\n".join(found))
            time.sleep(0.1)
        self.snapshots = {one: "there" for one in rows}
        for one in list(rows)[8:]:
            status, answer = client.call("DELETE", f"/v1/snapshots/{one}")
            if status != 204:
                raise Violation(f"deleting snapshot {one} answered {status} {answer}")
            del self.snapshots[one]

    def differences(self, listed):
        found = [f"nobody asked for {sandbox}" for identity, sandbox in listed.items() if identity not in self.boxes]
        operations = Counter(sandbox.get("metadata", {}).get("op") for sandbox in listed.values())
        found += [f"{times} sandboxes of one create {op}" for op, times in operations.items() if times > 1]
        for box in self.boxes.values():
            found += self.difference(box, listed.get(box.id))
        return found

    def difference(self, box, sandbox):
        now = utc()
        if sandbox is None:
            may_be_gone = box.deletion or box.shim_killed or min(box.expires) <= now
            return [] if may_be_gone else [f"lost: {box}"]
        state, end = sandbox["status"]["state"], parsed(sandbox["expiresAt"])
        if box.deletion == "confirmed":
            return [f"deleted and still listed as {state}: {box}"]
        if max(box.expires) + EXPIRY_GRACE < now:
            return [f"past its end and still listed as {state}: {box}"]
        if end not in box.expires:
            return [f"ends at {end.isoformat()}, which nobody was told: {box}"]
        if state not in STABLE:
            return [f"still {state}: {box}"]
        allowed = box.states | ({"Failed", "Terminated"} if box.shim_killed else set())
        if state not in allowed and end > now:
            return [f"is {state} ({sandbox['status']}): {box}"]
        return []

    def finish_deletions(self, client):
        """Deletes what was half deleted or lost its shim; both must work, and leave nothing."""
        for box in list(self.boxes.values()):
            if box.deletion or box.shim_killed:
                status, answer = client.call("DELETE", f"/v1/sandboxes/{box.id}")
                if status not in (204, 404):
                    raise Violation(f"delete answered {status} {answer}: {box}")
                box.deletion = "confirmed"
        if any(box.deletion for box in self.boxes.values()):
            self.settle(client)

    def use_one(self, client):
        """A sandbox that survived must also still work."""
        running = [box for box in self.boxes.values() if box.states == {"Running"} and not box.expiring]
        if not running:
            return
        box = self.random.choice(running)
        path = f"/v1/sandboxes/{box.id}/proxy/44772/command"
        status, _, body = client.raw("POST", path, {"command": "echo alive"})
        if status != 200 or b'"alive"' not in body or b"execution_complete" not in body:
            raise Violation(f"a command in {box} answered {status}: {body[:500]}")
        self.counts["command"] += 1

    # ------------------------------------------------------------ the whole loop

    def run(self):
        begun = time.monotonic()
        rounds, failure = 0, None
        try:
            self.stack.start()
            while rounds < self.options.rounds and time.monotonic() - begun < self.options.seconds:
                self.round()
                rounds += 1
                if rounds % 20 == 0:
                    print(f"round {rounds}: {len(self.boxes)} sandboxes, {time.monotonic() - begun:.0f} s", flush=True)
        except (Violation, RuntimeError, *CUT) as error:
            failure = f"round {rounds + 1}, seed {self.options.seed}: {error}"
            self.halt.set()
            print(f"server log, last lines:\n{self.stack.tail()}")
            self.print_stories(str(error))
        if self.stack.server.poll() is not None:
            self.stack.start(wait=False)
            time.sleep(1)
        left = self.stack.close()
        if self.engine:
            left = [*(left or []), *self.engine.wait_clean()]
            self.engine.close()
        if not failure and left:
            failure = "left over at the end:\n" + "\n".join(left)
        enough = rounds >= self.options.rounds / 2
        if not failure and not enough:
            failure = f"only {rounds} of {self.options.rounds} rounds in {self.options.seconds} s"
        self.report(rounds, time.monotonic() - begun)
        if failure:
            print(f"FAILED {failure}")
        print(f"restart: {rounds} passed, {1 if failure else 0} failed")
        return 1 if failure else 0

    def print_stories(self, text):
        """What the log says of every sandbox that the failure names, reads left out."""
        lines = [line for line in self.stack.log.read_text(errors="replace").splitlines() if "method=GET" not in line]
        for identity in set(re.findall(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}", text)):
            print(f"of {identity}:")
            print("\n".join([line for line in lines if identity in line][-30:]))

    def report(self, rounds, seconds):
        for name, count in sorted(self.counts.items()):
            print(f"  {name:<22} {count}")
        if self.starts:
            starts = sorted(self.starts)
            print(f"  start until ready      p50 {starts[len(starts) // 2]:.3f} s, max {starts[-1]:.3f} s")
        print(f"  {rounds} rounds in {seconds:.0f} s, seed {self.options.seed}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=240, help="stop after this time; half the rounds must be done")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--runtime", choices=["embedded", "docker"], default="embedded")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 31)
    print(f"restart loop: {options.rounds} rounds, at most {options.seconds:.0f} s, seed {options.seed}", flush=True)
    return Loop(options).run()


if __name__ == "__main__":
    sys.exit(main())
