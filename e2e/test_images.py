"""Images: imports, pulls, what an image's configuration does to a sandbox, and archives that mean harm."""

import contextlib
import gzip
import json
import os
import subprocess
import tarfile
import time
from urllib.parse import quote

import pytest

from archives import BUSYBOX, Image, busybox, directory, file, layer, link, whiteout
from plain import Plain
from registries import PASSWORD, USER, Registry, SlowRegistry
from stack import Stack, free_port, wait_for

pytestmark = pytest.mark.sandglass

PULL_FAILED = "DOCKER::SANDBOX_IMAGE_PULL_FAILED"


@pytest.fixture(scope="module")
def stack():
    """A server of this module's own, so that nobody else's images are in its store."""
    made = Stack(config={"embedded": {"create_grace_ms": 1500}})
    try:
        made.start()
        yield made
    finally:
        problems = made.close()
    assert not problems, "\n".join(problems)


@pytest.fixture
def plain(stack):
    """After every test no sandbox is left, nor anything half-made in the image store."""
    made = Plain(stack.url, stack.key)
    yield made
    made.close()
    assert not stack.wait_clean()
    assert wait_for(lambda: not unfinished(stack)), unfinished(stack)


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    started = Registry(tmp_path_factory.mktemp("registry"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    started = Registry(tmp_path_factory.mktemp("private"), private=True)
    yield started
    started.close()


@pytest.fixture
def load(plain, tmp_path):
    """Imports an image under a name and removes it again when the test is over."""
    names = []

    def add(name, *layers, **config):
        answer = upload(plain, Image(*layers, **config).docker_save(), name)
        assert answer[-1]["event"] == "done", answer
        names.append(name)
        return name

    yield add
    for identity in plain.made:
        plain.delete(identity)
    for name in names:
        removed = plain.http.delete(f"/v1/images/{quote(name, safe='')}")
        assert removed.status_code in (200, 404), removed.text


def upload(plain, archive, name=None):
    """The lines that an import answers with."""
    query = {"name": name} if name else {}
    answer = plain.http.post("/v1/images/import", params=query, content=archive)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def unfinished(stack):
    return sorted(entry.name for entry in (stack.state / "images/tmp").iterdir())


def stored(stack):
    """Names of all records and layers on the disk."""
    return {str(path.relative_to(stack.state)) for part in ("images", "layers") for path in (stack.state / "images" / part).iterdir()}


def listed(plain):
    return {image["id"]: image["references"] for image in plain.http.get("/v1/images").json()["items"]}


def cli(stack, *arguments, **keys):
    return subprocess.run(
        [stack.binary, *arguments],
        env={**os.environ, "SANDGLASS_URL": stack.url, "SANDGLASS_API_KEY": stack.key},
        capture_output=True,
        text=True,
        timeout=60,
        **keys,
    )


def refused(answer, status, code, *words):
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    for word in words:
        assert word in answer.json()["message"], answer.text


# ---------------------------------------------------------------- imports and the store


def archives(folder):
    """One of each form; all are of the same content but the plain one, which has no configuration."""
    image = Image(busybox(), Env=["FORM=any"])
    (folder / "root.tar").write_bytes(busybox())
    (folder / "root.tar.gz").write_bytes(gzip.compress(busybox(), 1))
    (folder / "saved.tar").write_bytes(image.docker_save("forms:saved"))
    (folder / "layout.tar").write_bytes(image.layout_archive("forms:layout"))
    image.write_layout(folder / "layout", "forms:folder")
    return image


@pytest.mark.parametrize(
    "form, name",
    [
        ("root.tar", "forms:root"),
        ("root.tar.gz", "forms:gz"),
        ("saved.tar", None),
        ("layout.tar", None),
        ("layout", None),
        ("saved.tar", "forms:renamed"),
    ],
)
def test_every_form_of_archive_is_imported_and_runs(stack, plain, tmp_path, form, name):
    image = archives(tmp_path)
    done = cli(stack, "image", "import", str(tmp_path / form), *(["--name", name] if name else []))
    assert done.returncode == 0, done.stderr
    reference = name or {"saved.tar": "forms:saved", "layout.tar": "forms:layout", "layout": "forms:folder"}[form]
    identity = done.stdout.strip()
    if "root" not in form:
        assert identity == image.id
    assert listed(plain)[identity] == [reference]
    assert reference in cli(stack, "image", "ls").stdout
    assert identity in cli(stack, "image", "ls", "-q").stdout.split()
    box = plain.create(reference)
    assert plain.text(box, "echo $((6 * 7)); echo ${FORM-none}") == ("42\nnone" if "root" in form else "42\nany")
    plain.delete(box)
    removed = cli(stack, "image", "rm", reference)
    assert removed.returncode == 0, removed.stderr
    assert identity not in listed(plain)


def test_an_archive_from_standard_input(stack, plain):
    done = subprocess.run(
        [stack.binary, "image", "import", "-", "--name", "piped"],
        env={**os.environ, "SANDGLASS_URL": stack.url, "SANDGLASS_API_KEY": stack.key},
        input=busybox(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert cli(stack, "run", "piped", "--", "echo", "piped in").stdout == "piped in\n"
    assert cli(stack, "image", "rm", "piped").returncode == 0


def test_an_image_in_use_is_not_removed(stack, plain, load):
    name = load("used:1", busybox())
    box = plain.create(name)
    answer = plain.http.delete(f"/v1/images/{quote(name, safe='')}")
    refused(answer, 409, "IMAGE::IN_USE")
    by_command = cli(stack, "image", "rm", name)
    assert by_command.returncode != 0 and "in use" in by_command.stderr
    assert cli(stack, "image", "prune").returncode == 0
    assert plain.text(box, "cat /etc/group").startswith("root:")
    plain.delete(box)
    assert cli(stack, "image", "rm", name).returncode == 0
    refused(plain.http.delete(f"/v1/images/{quote(name, safe='')}"), 404, "IMAGE::NOT_FOUND")


def test_prune_takes_what_has_no_name_and_leaves_the_rest(stack, plain, load):
    before = stored(stack)
    load("moving:1", busybox(), layer(file("old")))
    old = set(listed(plain))
    load("moving:1", busybox(), layer(file("new")))
    (nameless,) = [image for image, names in listed(plain).items() if not names]
    assert nameless in old
    done = cli(stack, "image", "prune")
    assert done.returncode == 0 and "1 images and 1 layers" in done.stdout, done
    assert nameless not in listed(plain) and any(names == ["moving:1"] for names in listed(plain).values())
    assert cli(stack, "image", "rm", "moving:1").returncode == 0
    assert stored(stack) == before


# ---------------------------------------------------------------- pulls


def test_a_pull_by_hand_and_one_by_a_create(stack, plain, registry):
    reference = registry.push("tools/one", Image(busybox(), Env=["A=1"]), "v1")
    done = cli(stack, "image", "pull", reference)
    assert done.returncode == 0, done.stderr
    assert listed(plain)[done.stdout.strip()] == [reference]
    other = registry.push("tools/two", Image(busybox(), Env=["A=2"]), "v2")
    box = plain.create(other)
    assert plain.text(box, "echo $A") == "2"
    plain.delete(box)
    assert cli(stack, "image", "rm", reference, other).returncode == 0


def test_a_private_registry_wants_the_right_password_and_nobody_hears_the_wrong_one(stack, plain, private):
    image = Image(busybox(), Env=["PRIVATE=yes"])
    uri = private.push("secret/tools", image)
    before = stored(stack)
    wrong = "hunter2-is-wrong"
    for auth in [None, {"username": USER, "password": wrong}]:
        answer = plain.post({"uri": uri, **({"auth": auth} if auth else {})})
        refused(answer, 500, PULL_FAILED, private.address)
        assert wrong not in answer.text
    assert plain.made == [] and stored(stack) == before
    pulled = cli(stack, "image", "pull", uri, "--username", USER, "--password-stdin", input=wrong)
    assert pulled.returncode != 0 and PULL_FAILED in pulled.stderr and wrong not in pulled.stderr
    box = plain.create({"uri": uri, "auth": {"username": USER, "password": PASSWORD}})
    assert plain.text(box, "echo $PRIVATE") == "yes"
    assert PASSWORD not in plain.get(box).text + plain.http.get(f"/v1/sandboxes/{box}/diagnostics/inspect").text
    plain.delete(box)
    log = stack.log.read_text()
    assert wrong not in log and PASSWORD not in log
    for part in ("server.db", "server.db-wal"):
        with contextlib.suppress(FileNotFoundError):
            database = (stack.state / part).read_bytes()
            assert wrong.encode() not in database and PASSWORD.encode() not in database
    assert cli(stack, "image", "rm", uri).returncode == 0


def test_an_image_that_the_registry_does_not_have(stack, plain, registry):
    uri = f"{registry.address}/no/such:image"
    refused(plain.post(uri), 500, PULL_FAILED, "not found")
    done = cli(stack, "image", "pull", uri)
    assert done.returncode != 0 and "not found" in done.stderr and "IMAGE::NOT_FOUND" in done.stderr
    assert plain.made == []


def test_a_registry_that_nobody_runs(plain):
    uri = f"127.0.0.1:{free_port()}/tools:1"
    answer = plain.post(uri)
    if answer.status_code == 202:
        identity = answer.json()["id"]
        assert wait_for(lambda: plain.state(identity) == "Failed")
        message = plain.status(identity)["message"]
    else:
        refused(answer, 500, PULL_FAILED)
        message = answer.json()["message"]
    assert "cannot be reached" in message, message


@pytest.mark.parametrize("uri", ["UPPER/Case:1", "a b", "-x", "x:", "x@sha256:12", "http://127.0.0.1/x", "../x", "x:" + "t" * 200])
def test_a_reference_that_is_none(plain, uri):
    answer = plain.post(uri)
    refused(answer, 400, "SANDBOX::INVALID_PARAMETER")
    assert plain.made == []


@pytest.fixture
def slow():
    stub = SlowRegistry(Image(busybox(), layer(file("slow", os.urandom(4000)))))
    yield stub
    stub.close()


def pending(plain, slow):
    answer = plain.post(f"{slow.address}/slow:1")
    assert answer.status_code == 202 and answer.json()["status"]["state"] == "Pending", answer.text
    identity = answer.json()["id"]
    assert plain.status(identity) | {"state": "Pending", "reason": "PREPARING_IMAGE"} == plain.status(identity)
    return identity


def test_a_slow_pull_is_pending_and_then_runs(stack, plain, slow):
    identity = pending(plain, slow)
    endpoint = plain.http.get(f"/v1/sandboxes/{identity}/endpoints/44772")
    assert endpoint.status_code == 200 and endpoint.json()["endpoint"].endswith(f"{identity}/proxy/44772"), endpoint.text
    refused(plain.agent("GET", identity, "ping"), 502, "BACKEND_CONNECTION_FAILED")
    assert plain.http.post(f"/v1/sandboxes/{identity}/pause").status_code == 409
    slow.released.set()
    assert wait_for(lambda: plain.state(identity) == "Running"), plain.status(identity)
    assert plain.agent("GET", identity, "ping").status_code == 200
    assert plain.text(identity, "wc -c < /slow") == "4000"
    plain.delete(identity)
    assert cli(stack, "image", "rm", f"{slow.address}/slow:1").returncode == 0


def test_a_delete_ends_a_slow_pull_at_once(stack, plain, slow):
    before = stored(stack)
    identity = pending(plain, slow)
    # Nobody has released the registry yet.
    assert plain.delete(identity) == 204
    assert plain.get(identity).status_code == 404
    assert wait_for(lambda: not unfinished(stack)), unfinished(stack)
    assert stored(stack) == before


def test_an_image_that_changed_under_its_digest_is_refused(stack, plain):
    image = Image(busybox())
    image.packed = [gzip.compress(layer(file("other")), 1, mtime=0)]
    stub = SlowRegistry(image)
    stub.released.set()
    before = stored(stack)
    refused(plain.post(f"{stub.address}/liar:1"), 500, PULL_FAILED, "damaged or hostile")
    assert stored(stack) == before
    stub.close()


# ---------------------------------------------------------------- what the configuration does


def test_environment_and_a_working_directory_that_is_made(plain, load):
    name = load("config:env", busybox(), Env=["PATH=/bin:/opt", "COLOUR=blue"], WorkingDir="/not/yet/there")
    box = plain.create(name, env={"COLOUR": "red", "MORE": "1"})
    assert plain.text(box, "pwd; echo $PATH $COLOUR $MORE") == "/not/yet/there\n/bin:/opt red 1"
    assert plain.text(plain.create(name), "echo $COLOUR") == "blue"


@pytest.mark.parametrize(
    "user, uid, gid",
    [
        ("1234", 1234, 1235),
        ("4321", 4321, 0),
        ("4321:99", 4321, 99),
        ("worker", 1234, 1235),
        ("worker:extra", 1234, 77),
        ("worker:55", 1234, 55),
    ],
)
def test_the_user_of_the_image(plain, load, user, uid, gid):
    name = load("config:user", busybox(), User=user)
    box = plain.create(name, ["sh", "-c", "echo $(id -u):$(id -g); sleep 600"])
    assert wait_for(lambda: f"{uid}:{gid}" in plain.logs(box)), plain.logs(box)
    assert plain.text(box, "echo $(id -u):$(id -g)") == f"{uid}:{gid}"


def test_a_user_that_the_image_does_not_know(plain, load):
    name = load("config:nobody", busybox(), User="nobody-here")
    answer = plain.post(name)
    assert answer.status_code == 400 and "nobody-here" in answer.json()["message"], answer.text
    assert plain.made == []


def test_entrypoint_and_command_of_the_image(plain, load):
    script = "echo from the image: $0 $1; sleep 600"
    name = load("config:entry", busybox(), Entrypoint=["/bin/sh", "-c", script], Cmd=["zero", "one"])
    own = plain.create(name, None, extensions={"sandglass.entrypoint": "image"})
    assert wait_for(lambda: "from the image: zero one" in plain.logs(own)), plain.logs(own)
    other = plain.create(name, ["/bin/sh", "-c", "echo replaced $#; sleep 600"])
    assert wait_for(lambda: "replaced 0" in plain.logs(other)), plain.logs(other)


def test_an_image_without_an_entrypoint_of_its_own(plain, load):
    name = load("config:none", busybox())
    answer = plain.post(name, None, extensions={"sandglass.entrypoint": "image"})
    refused(answer, 400, "DOCKER::INVALID_ENTRYPOINT")
    assert plain.made == []


@pytest.mark.parametrize("program", ["/no/such/program", "no-such-program", "/etc/passwd", "/etc"])
def test_an_entrypoint_that_cannot_run(stack, plain, load, program):
    name = load("config:broken", busybox())
    answer = plain.post(name, [program, "--flag"])
    refused(answer, 400, "DOCKER::INVALID_ENTRYPOINT", program)
    assert plain.made == [] and stack.directories() == set()


def test_an_image_of_one_program_and_nothing_else(plain, load):
    name = load("bare:1", layer(file("busybox", BUSYBOX.read_bytes(), 0o755)))
    box = plain.create(name, ["/busybox", "sleep", "600"])
    assert plain.text(box, ["/busybox", "echo", "argv works"]) == "argv works"
    assert plain.write(box, "/data/in/deep", b"\x00\x01binary").status_code == 200
    assert plain.read(box, "/data/in/deep").content == b"\x00\x01binary"
    assert plain.text(box, ["/busybox", "ls", "/dev/null", "/proc/self/stat", "/tmp"]).startswith("/dev/null")
    failed = plain.run(box, "echo needs a shell")
    assert not failed.complete and "no shell" in json.dumps(failed.error), failed


def test_boxes_of_one_image_do_not_see_each_others_writes(plain, load):
    name = load("shared:1", busybox(), layer(file("shared", b"of the image\n")))
    one, two = plain.create(name), plain.create(name)
    plain.text(one, "echo changed > /shared; echo x > /only-one; rm /etc/group")
    assert plain.text(two, "cat /shared; ls /only-one 2>/dev/null || echo none; head -n 1 /etc/group").split("\n") == [
        "of the image",
        "none",
        "root:x:0:",
    ]
    plain.delete(one)
    assert plain.text(plain.create(name), "cat /shared /etc/group").startswith("of the image")


def test_whiteouts_hide_what_is_below(plain, load):
    name = load(
        "layers:1",
        busybox(),
        layer(directory("d"), file("d/gone"), file("d/kept", b"kept"), directory("o"), file("o/old"), file("gone")),
        layer(whiteout("gone"), whiteout("d/gone"), file("o/.wh..wh..opq"), file("o/new"), whiteout("never-was")),
        layer(file("d/added"), file("gone", b"back")),
    )
    box = plain.create(name)
    assert plain.text(box, "ls -a /d /o; cat /gone").split() == "/d: . .. added kept /o: . .. new back".split()


# ---------------------------------------------------------------- archives that mean harm


def truncated():
    archive = layer(file("a", b"x" * 5000), file("b", b"y" * 5000))
    return archive[: len(archive) // 2]


def entry_of(size):
    """A header that promises more than will ever come."""
    header = tarfile.TarInfo("huge")
    header.size = size
    return header.tobuf(tarfile.GNU_FORMAT)


def sparse(size):
    """A file of holes: no bytes in the archive, `size` when it is read."""
    header = tarfile.TarInfo("holes")
    header.type = tarfile.GNUTYPE_SPARSE
    raw = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    raw[483:495] = b"%011o\0" % size
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    return bytes(raw[:512]) + bytes(1024)


def saved(**image):
    """A `docker save` archive that says so, with a configuration of one layer and nothing else."""
    return layer(file("manifest.json", json.dumps([image]).encode()), file("config.json", Image(busybox()).config))


HOSTILE = {
    "text": (b"this is no archive", "damaged"),
    "nothing": (b"", ""),
    "cut short": (truncated(), "damaged"),
    "cut gzip": (gzip.compress(busybox(), 1)[:100_000], "damaged"),
    "leads out": (layer(file("../x", b"evil")), "../x"),
    "leads out later": (layer(file("a/../../x", b"evil")), "a/../../x"),
    "absolute": (layer(file("/etc/x", b"evil")), "/etc/x"),
    "hard link out": (layer(link("l", "../../../../etc/passwd", tarfile.LNKTYPE)), "/etc/passwd"),
    "too deep": (layer(file("d/" * 300 + "f")), ""),
    "a promise of 30 GiB": (entry_of(30 << 30), "too large"),
    "holes of 30 GiB": (sparse(30 << 30), "too large"),
    "holes of 30 GiB, packed": (gzip.compress(sparse(30 << 30)), "too large"),
    "lying save": (saved(Config="../absent.json", Layers=[]), "absent.json"),
    "a save without its layer": (saved(Config="config.json", Layers=["gone.tar"]), "gone.tar"),
    "lying layout": (layer(file("oci-layout", b"{}"), file("index.json", b"[]")), "damaged"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_archive_that_means_harm_is_refused_and_leaves_nothing(stack, plain, tmp_path, kind):
    archive, word = HOSTILE[kind]
    before, names = stored(stack), listed(plain)
    last = upload(plain, archive, "hostile:1")[-1]
    assert last["event"] == "error" and last["code"] == "SANDBOX::INVALID_PARAMETER", last
    assert word in last["message"], last
    (tmp_path / "hostile.tar").write_bytes(archive)
    done = cli(stack, "image", "import", str(tmp_path / "hostile.tar"))
    assert done.returncode != 0 and done.stdout == "" and last["message"] in done.stderr, done
    assert stored(stack) == before and listed(plain) == names and unfinished(stack) == []


def test_nothing_is_written_through_a_link(stack, plain, load, tmp_path):
    inside = tmp_path / "victim"
    inside.mkdir()
    name = load(
        "links:1",
        busybox(),
        layer(link("out", str(inside)), file("out/file", b"evil"), link("up", "../../../.."), file("up/tmp-x", b"evil")),
    )
    assert list(inside.iterdir()) == []
    box = plain.create(name)
    assert plain.text(box, "cat /out/file /up/tmp-x") == "evilevil"


def test_what_an_upload_leaves_when_it_breaks_off(stack, plain):
    before = stored(stack)
    client = stack.client()
    client.connection.connect()
    head = f"POST /v1/images/import HTTP/1.1\r\nHost: x\r\nOPEN-SANDBOX-API-KEY: {stack.key}\r\nContent-Length: 9999999\r\n\r\n"
    client.connection.sock.sendall(head.encode() + busybox()[:200_000])
    client.close()
    # It begins before it breaks off.
    time.sleep(0.3)
    assert wait_for(lambda: unfinished(stack) == [] and not held_open(stack)), (unfinished(stack), held_open(stack))
    assert stored(stack) == before


def held_open(stack):
    """Files in the temporary directory that the server still has open."""
    found = []
    for entry in os.scandir(f"/proc/{stack.server.pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(entry.path)
            found += [target] if target.startswith("/tmp/.tmp") else []
    return found
