"""Servers that make sandboxes from repositories, on either runtime, with the image that repositories are built on.

Made by entering them; when left, what they did not clear away is an error.
"""

from contextlib import contextmanager

import git_image
from docker_stack import DockerStack
from stack import Stack
from workspaces import SETTINGS, Workspaces, give_image


def settings(sections):
    """Those of every such server, and those of a test."""
    made = {name: dict(keys) for name, keys in SETTINGS.items()}
    made["builds"]["base_image"] = git_image.NAME
    made["workspaces"] = {"failed_retention_seconds": 2, "shutdown_grace_seconds": 5}
    for name, keys in sections.items():
        made.setdefault(name, {}).update(keys)
    return made


@contextmanager
def embedded(images=None, binary=None, **sections):
    """On the embedded runtime; `images` are more of them by name, `binary` what is started in place of the program."""
    stack = Stack(binary=binary, config=settings(sections))
    problems = []
    try:
        stack.start()
        client = Workspaces(stack.url, stack.key)
        for name, image in {git_image.NAME: git_image.image(), **(images or {})}.items():
            give_image(client, image, name)
        client.close()
        yield stack
    finally:
        problems = stack.close()
    assert not problems, "\n".join(problems)


@contextmanager
def on_engine(engine, start=True, home=None, **sections):
    """On a Docker engine, which keeps the images that it is given. `home` is that of a server before it."""
    if not engine.text("images", "-q", git_image.NAME):
        engine.call("load", input=git_image.image().docker_save(git_image.NAME))
    stack = DockerStack(engine, config=settings(sections), home=home)
    problems = []
    try:
        yield stack.start() if start else stack
    except BaseException:
        # What it had, and nobody knows any more, is not for the next one to be blamed for.
        stack.close()
        engine.sweep()
        raise
    finally:
        problems = stack.close()
    assert not problems, "\n".join(problems)


@contextmanager
def client_of(stack, place=None):
    """A client of a server: deletes what was made through it, and then nothing may be left at `place`, the host or the engine.

    A test that fails with its server killed, or that leaves something, does not take the tests after it along, nor its own second attempt.
    """
    stack.revive()
    client = Workspaces(stack.url, stack.key)
    yield client
    stack.revive()
    client.close()
    left = (place or stack).wait_clean()
    try:
        if left:
            stack.sweep()
            if place:
                place.sweep()
    finally:
        assert not left, left
