"""Servers on one PostgreSQL database and one Docker engine, of which one is killed: what the other goes on with."""

import pytest

from services import Postgres
from stack import wait_for
from workspace_stacks import client_of, on_engine
from workspaces import Workspaces

pytestmark = pytest.mark.sandglass

# What a build is left to its owner for after the last sign of life, until somebody looks, and the build itself.
TAKEOVER = 60 + 15 + 180


@pytest.fixture
def shared():
    """Settings of servers that share a database."""
    postgres = Postgres().start()
    yield {"store": {"type": "postgresql", "postgresql": {"dsn": postgres.dsn}}}
    postgres.close()


def test_builds_of_a_killed_server_are_finished_by_the_other(engine, git, shared):
    """One that needs nothing else, and one whose credential was on the disk of the server that was given it, and nowhere else."""
    # Long enough for both to have begun and neither to have ended when their server is killed.
    setup = {".sandbox/setup.sh": "#!/bin/sh\necho begun\nsleep 20\necho ran >> /var/setup.count\n"}
    free, private = git.repository(setup), git.repository(setup, "private/takeover")
    with on_engine(engine, **shared) as one, on_engine(engine, **shared) as other:
        with client_of(other, engine) as spaces:
            first = Workspaces(one.url, one.key)
            goes_on = first.start_build(free)["id"]
            cannot = first.start_build({"url": private.url, "credential": git.token_credential})["id"]
            for build in (goes_on, cannot):
                assert wait_for(lambda build=build: "\nbegun" in first.build_log(build), 60), first.build_log(build)
            one.kill()
            # To the other they are builds like its own: shown at once, and taken over when their owner was silent for long enough.
            assert spaces.build(goes_on)["status"]["state"] == "Running"
            seen = spaces.until_build(goes_on, "Succeeded", seconds=TAKEOVER)
            assert seen["attempt"] == 2, seen
            assert [image["imageBuildId"] for image in spaces.built_images()] == [goes_on]
            seen = spaces.until_build(cannot, "Failed", seconds=TAKEOVER)
            assert "credential" in str(seen["failure"]) or "secrets" in str(seen["failure"]), seen
            # What the dead server's attempts had made is gone.
            assert not engine.wait_clean(), engine.leftovers()
            identity = spaces.ready(free, imageBuild={"policy": "requireCached"})
            assert spaces.text(identity, "cat /var/setup.count") == "ran"


@pytest.mark.parametrize("moment", ["image_building", "booting"])
def test_a_sandbox_of_a_killed_server_is_finished_by_the_next_one(engine, git, shared, moment):
    """The next one has the same folder beside the store, which keeps the sockets and what is nobody else's to read; the database says what was under way."""
    hooks = {"image_building": "setup", "booting": "start"}
    script = "#!/bin/sh\necho begun\nsleep 4\necho ran >> /var/hook.count\n"
    repository = git.repository({f".sandbox/{hooks[moment]}.sh": script})
    with on_engine(engine, **shared) as one:
        store = {**shared["store"], "path": str(one.home / "store.db")}
        with on_engine(engine, start=False, home=one.home, store=store) as other:
            first = Workspaces(one.url, one.key)
            identity = first.begin(repository)
            first.until(identity, "Pending", reason=moment)
            one.kill()
            other.start()
            with client_of(other, engine) as spaces:
                spaces.made.append(identity)
                spaces.until_ready(identity, seconds=TAKEOVER)
                assert spaces.text(identity, "cat /var/hook.count") == "ran"
                assert len(spaces.builds_of(repository)) == 1
                assert wait_for(lambda: len(engine.containers()) == 1), engine.containers()
                attached = wait_for(lambda: spaces.show(identity)["agent"]["state"] == "Attached")
                assert attached, spaces.show(identity)
