"""Repositories that are not got by a plain clone: large files beside git, servers behind an authority of their own."""

import pytest

import git_image
from archives import Image, directory, file, layer
from stack import wait_for
from workspace_stacks import client_of, embedded

pytestmark = pytest.mark.sandglass

LARGE, TRUSTING = "large-base:test", "trusting-base:test"
AUTHORITIES = "etc/ssl/certs/ca-certificates.crt"
# As the package of git-lfs writes it, so that git in the box knows what a pointer stands for.
FILTERS = '[filter "lfs"]\n\tclean = git-lfs clean -- %f\n\tsmudge = git-lfs smudge -- %f\n\tprocess = git-lfs filter-process\n\trequired = true\n'
# Shows its own certificates to the server alone; the rest of this machine goes on trusting what it trusts.
TRUSTING_SERVER = """#!/bin/sh
exec unshare --mount sh -c 'mount --bind {authorities} /{system} && exec {binary} "$@"' sandglass "$@"
"""


def with_large_files():
    program = "/usr/bin/git-lfs"
    with open(program, "rb") as read:
        entries = [directory("usr"), directory("usr/bin"), file(program[1:], read.read(), 0o755)]
    more = layer(*entries, directory("etc"), file("etc/gitconfig", FILTERS.encode()))
    return Image(*git_image.layers(), more, Env=["PATH=/usr/local/bin:/usr/bin:/bin"])


def with_authority(authorities):
    """Its programs trust these, as after `update-ca-certificates`."""
    folders = (directory("etc"), directory("etc/ssl"), directory("etc/ssl/certs"))
    more = layer(*folders, file(AUTHORITIES, authorities.encode()))
    return Image(*git_image.layers(), more, Env=["PATH=/usr/local/bin:/usr/bin:/bin"])


@pytest.fixture(scope="module")
def stack():
    with embedded({LARGE: with_large_files()}) as made:
        yield made


# ---------------------------------------------------------------- large files


def on(image, kind="hooks", **more):
    return {"recipe": {"type": kind, "image": image}, **more}


def test_large_files_are_there_for_the_setup_and_in_the_box(spaces, git):
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\nsha256sum < model.bin > /var/digest\n"}, "private/large")
    name = repository.large("model.bin", b"\0weight\xff" * 40_000)
    source = {"url": repository.url, "lfs": True, "credential": git.token_credential}
    identity = spaces.ready(source, imageBuild=on(LARGE))
    place = spaces.show(identity)["source"]["repositories"][0]["path"]
    look = f"cat /var/digest; sha256sum < {place}/model.bin; git -C {place} status --porcelain"
    assert spaces.text(identity, look) == f"{name}  -\n{name}  -"
    # The image has it: nobody gets it again.
    got = [line for line in git.requests() if name in line]
    assert got and all("with credential" in line for line in got), got
    second = spaces.ready(source, imageBuild=on(LARGE))
    assert spaces.text(second, look) == f"{name}  -\n{name}  -"
    assert [line for line in git.requests() if name in line] == got
    assert len(spaces.builds_of(repository)) == 1
    # Another commit's is got by the box, which boots from the image of the one before.
    other = repository.large("model.bin", b"other\xfe" * 50_000)
    third = spaces.ready(source, imageBuild=on(LARGE))
    assert spaces.text(third, f"sha256sum < {place}/model.bin") == f"{other}  -"
    assert wait_for(lambda: len(spaces.builds_of(repository)) == 2)
    newest = max(spaces.builds_of(repository), key=lambda build: build["createdAt"])
    spaces.until_build(newest["id"], "Succeeded")


def test_large_files_without_a_build(spaces, git):
    repository = git.repository({"README": "x\n"})
    name = repository.large("data/film.bin", b"\1film" * 100_000)
    identity = spaces.ready({"url": repository.url, "lfs": True, "depth": 1}, imageBuild=on(LARGE, "none", policy="never"))
    place = spaces.show(identity)["source"]["repositories"][0]["path"]
    assert spaces.text(identity, f"sha256sum < {place}/data/film.bin") == f"{name}  -"


def test_large_files_that_nobody_asked_for_stay_pointers(spaces, git):
    repository = git.repository({"README": "x\n"})
    name = repository.large("model.bin", b"large")
    for policy in ("ifMissing", "never"):
        identity = spaces.ready(repository, imageBuild=on(LARGE, "none", policy=policy))
        place = spaces.show(identity)["source"]["repositories"][0]["path"]
        assert f"oid sha256:{name}" in spaces.text(identity, f"cat {place}/model.bin")
    assert not [line for line in git.requests() if name in line]


def test_a_large_file_that_the_server_has_not_fails_the_build(spaces, git):
    repository = git.repository({"README": "x\n"})
    name = repository.large("model.bin", b"lost")
    (git.folder / "large" / name).unlink()
    shown = spaces.failed({"url": repository.url, "lfs": True}, imageBuild=on(LARGE, "none"))
    assert shown["status"]["reason"] == "image_build_failed", shown
    assert shown["lastFailure"]["phase"] == "clone", shown
    (build,) = spaces.builds_of(repository)
    assert name[:12] in spaces.build_log(build["id"]) or "model.bin" in spaces.build_log(build["id"]), spaces.build_log(build["id"])


# ---------------------------------------------------------------- TLS


def test_a_git_server_whose_authority_nobody_knows_is_refused(spaces, git):
    git.over_tls()
    repository = git.repository()
    shown = spaces.failed({"url": repository.tls_url})
    assert shown["status"]["reason"] == "repository_unreachable", shown
    assert not [line for line in git.requests() if repository.name in line]


def test_a_git_server_of_a_private_authority_that_machine_and_image_trust(git, tmp_path, stack):
    authority = git.over_tls()
    bundle, program = tmp_path / "authorities.crt", tmp_path / "sandglass"
    with open(f"/{AUTHORITIES}") as system:
        bundle.write_text(system.read() + authority)
    program.write_text(TRUSTING_SERVER.format(authorities=bundle, system=AUTHORITIES, binary=stack.binary))
    program.chmod(0o755)
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\ncp version /var/version\n", "version": "1\n"}, "private/tls")
    source = {"url": repository.tls_url, "credential": git.token_credential}
    with embedded({TRUSTING: with_authority(bundle.read_text())}, str(program)) as trusting, client_of(trusting) as spaces:
        recipe = on(TRUSTING)
        identity = spaces.ready(source, imageBuild=recipe)
        place = spaces.show(identity)["source"]["repositories"][0]["path"]
        assert spaces.text(identity, f"cat /var/version {place}/version") == "1\n1"
        # The box itself fetches, for its boot and for people in it.
        commit = repository.commit({"version": "2\n"})
        for policy in ("ifMissing", "never"):
            identity = spaces.ready(source, imageBuild={**recipe, "policy": policy})
            assert spaces.text(identity, f"cat {place}/version; git -C {place} ls-remote origin HEAD") == f"2\n{commit}\tHEAD"
