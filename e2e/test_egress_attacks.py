"""Root in a sandbox against its own policy. What counts is what the other side has seen, not what the attacker was told."""

import base64
import json
import socket
from pathlib import Path

import pytest
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule

from egress_client import curl, run
from egress_world import BARE, FORBIDDEN, HOST, NAMES, RESOLVER
from stack import wait_for
from test_egress import api, create, stack, world  # noqa: F401 - fixtures

pytestmark = pytest.mark.sandglass

PROGRAM = Path(__file__).with_name("egress_attacks.py")
POLICY = NetworkPolicy(defaultAction="deny", egress=[NetworkRule(action="allow", target="allowed.test")])


@pytest.fixture
def box(create):  # noqa: F811
    made = create(POLICY)
    assert curl(made, "http://allowed.test/").code == 0
    return made


def attack(box, group):
    """What root inside was told, by attempt."""
    encoded = base64.b64encode(PROGRAM.read_bytes()).decode()
    addresses = {"allowed": NAMES["allowed.test"], "forbidden": FORBIDDEN, "resolver": RESOLVER, "host": HOST}
    done = run(box, f"id -u; echo {encoded} | base64 -d > /tmp/attacks.py; python3 /tmp/attacks.py {group} '{json.dumps(addresses)}'")
    lines = done.out.splitlines()
    assert done.code == 0 and lines[0] == "0", done
    told = dict(json.loads(line) for line in lines[1:])
    print(json.dumps(told, indent=1))
    return told


def test_the_world_sees_what_arrives(world):  # noqa: F811
    """Otherwise the tests below would say nothing."""
    before = len(world.strays())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.sendto(b"hello", (BARE, 5000))
        probe.settimeout(5)
        assert probe.recv(10) == b"hello"
    assert wait_for(lambda: len(world.strays()) > before)


def test_questions_carry_nothing_out(box, world):  # noqa: F811
    asked, strays = len(world.questions()), len(world.strays())
    told = attack(box, "names")
    assert len(told) > 25, told
    leaked = [line for line in world.questions()[asked:] if not line.endswith(" allowed.test") and line.split()[1:]]
    assert leaked == [] and world.strays()[strays:] == []


def test_packets_reach_nobody_else(box, world):  # noqa: F811
    strays = len(world.strays())
    told = attack(box, "packets")
    assert world.strays()[strays:] == [], told
    for refused in ("whole packets", "multipath TCP", "vsock", "link", "any protocol"):
        assert "Error" in told[refused], (refused, told[refused])


def test_requests_for_others_do_not_pass_as_allowed_ones(box, world):  # noqa: F811
    before = len(world.requests())
    told = attack(box, "streams")
    seen = [(one["path"], one["headers"].get("host"), one["at"]) for one in world.requests()[before:]]
    assert not [one for one in seen if "leak" in one[0] or one[1] not in ("allowed.test", None)], (seen, told)
    # What is allowed still works afterwards.
    assert curl(box, "https://allowed.test/").code == 0
