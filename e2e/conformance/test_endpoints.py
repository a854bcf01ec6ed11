"""Where a port of a sandbox is reached."""

import pytest
from target import UNKNOWN, coded, invalid

PARAMETER = "SANDBOX::INVALID_PARAMETER"


def endpoint(target, sandbox, port, mount="/v1", **keys):
    return target.call("GET", f"{mount}/sandboxes/{sandbox}/endpoints/{port}", **keys)


@pytest.mark.parametrize("port", [1, 8080, 18080, 44772, 65535])
def test_direct(target, web, port):
    answer = endpoint(target, web, port)
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) <= {"endpoint", "headers"} and "://" not in answer.json()["endpoint"]
    # Where endpoints go through the server they carry the mount that was asked.
    assert endpoint(target, web, port, mount="").json()["endpoint"] == answer.json()["endpoint"].replace("/v1/", "/")


@pytest.mark.docker
@pytest.mark.parametrize("port", [44772, 18080, 9000])
def test_shape_on_a_bridge(target, web, port):
    host, _, path = endpoint(target, web, port).json()["endpoint"].partition("/")
    assert path == f"proxy/{port}" and 1024 <= int(host.rpartition(":")[2]) <= 65535


@pytest.mark.docker
def test_port_8080_has_its_own_mapping(target, web):
    own = endpoint(target, web, 8080).json()["endpoint"]
    agent = endpoint(target, web, 44772).json()["endpoint"].partition("/")[0]
    assert "/" not in own and own != agent


def test_direct_endpoint_works(target, web):
    import httpx

    answer = endpoint(target, web, 8080).json()
    told = httpx.get(f"http://{answer['endpoint']}/echo", headers=answer.get("headers"), timeout=60)
    assert told.status_code == 200 and told.json()["method"] == "GET"


@pytest.mark.parametrize("port", ["0", "65536", "99999999999", "-1"])
def test_port_out_of_range(target, web, port):
    coded(endpoint(target, web, port), 400, "DOCKER::INVALID_PORT")


@pytest.mark.parametrize("port", ["x", "80x", "8.5", "%20"])
def test_port_is_no_number(target, web, port):
    invalid(endpoint(target, web, port), ["path", "port"])


def test_unknown_sandbox(target):
    coded(endpoint(target, UNKNOWN, 80), 404, "DOCKER::SANDBOX_NOT_FOUND")


@pytest.mark.parametrize("word", ["true", "1", "yes", "on", "T", "Y", "TRUE"])
def test_through_the_server(target, web, word):
    answer = endpoint(target, web, 8080, params={"use_server_proxy": word})
    assert answer.json()["endpoint"] == f"{target.domain}/v1/sandboxes/{web}/proxy/8080"


@pytest.mark.parametrize("word", ["false", "0", "no", "off", "f", "n"])
def test_not_through_the_server(target, web, word):
    assert endpoint(target, web, 8080, params={"use_server_proxy": word}).json() == endpoint(target, web, 8080).json()


@pytest.mark.parametrize("word", ["", "perhaps", "2"])
def test_no_such_word(target, web, word):
    invalid(endpoint(target, web, 8080, params={"use_server_proxy": word}), ["query", "use_server_proxy"])


def test_mount_and_host_are_kept(target, web):
    asked = {"params": {"use_server_proxy": "true"}, "headers": {"Host": "there.example:8123"}}
    assert endpoint(target, web, 80, **asked).json()["endpoint"] == f"there.example:8123/v1/sandboxes/{web}/proxy/80"
    assert endpoint(target, web, 80, mount="", **asked).json()["endpoint"] == f"there.example:8123/sandboxes/{web}/proxy/80"


@pytest.mark.parametrize("value", ["2000000000", "0", "-5"])
def test_expires_is_not_for_this_runtime(target, web, value):
    coded(endpoint(target, web, 80, params={"expires": value}), 400, "SANDBOX::API_NOT_SUPPORTED")


def test_expires_comes_before_port_and_existence(target):
    coded(endpoint(target, UNKNOWN, 0, params={"expires": "2000000000"}), 400, "SANDBOX::API_NOT_SUPPORTED")


def test_expires_and_the_server_proxy(target, web):
    coded(endpoint(target, web, 80, params={"expires": "2000000000", "use_server_proxy": "true"}), 400, PARAMETER)


@pytest.mark.parametrize("value", ["", "soon", "1.5"])
def test_expires_is_no_number(target, web, value):
    invalid(endpoint(target, web, 80, params={"expires": value}), ["query", "expires"])


def test_paused_one_still_resolves_to_the_same(target, idle):
    before = endpoint(target, idle, 44772).json()
    assert target.call("POST", f"/v1/sandboxes/{idle}/pause").status_code == 202
    assert endpoint(target, idle, 44772).json() == before
    assert target.call("POST", f"/v1/sandboxes/{idle}/resume").status_code == 202
    assert endpoint(target, idle, 44772).json() == before
