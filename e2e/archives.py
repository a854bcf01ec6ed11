"""Image archives made in memory: layers, `docker save`, OCI layouts, plain root file systems.

Owns the formats only; what a good or hostile image contains is up to the tests. Needs nothing beyond the standard library
and, for images that run something, Debian's static busybox.
"""

import gzip
import hashlib
import io
import json
import tarfile
from functools import cache
from pathlib import Path

BUSYBOX = Path("/bin/busybox")
# The programs that the tests call; each a link to busybox.
APPLETS = "sh cat echo env false head id kill ls mkdir printf pwd rm seq sleep sync tail touch true wc yes dd".split()
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def file(name, content=b"", mode=0o644):
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    return entry, content


def directory(name, mode=0o755):
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    return entry, b""


def link(name, target, kind=tarfile.SYMTYPE):
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry, b""


def whiteout(path):
    parent, _, name = path.rpartition("/")
    return file(f"{parent}/.wh.{name}" if parent else f".wh.{name}")


def layer(*entries):
    """An uncompressed tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry, content in entries:
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


@cache
def busybox():
    """A layer with a shell and the usual small programs, two accounts, and nothing else."""
    links = [link(f"bin/{name}", "busybox") for name in APPLETS]
    accounts = [
        file("etc/passwd", b"root:x:0:0::/root:/bin/sh\nworker:x:1234:1235::/home/worker:/bin/sh\n"),
        file("etc/group", b"root:x:0:\nworkers:x:1235:\nextra:x:77:\n"),
    ]
    return layer(directory("bin"), file("bin/busybox", BUSYBOX.read_bytes(), 0o755), *links, directory("etc"), *accounts)


class Image:
    """Layers, the lowest first, and a configuration as the image specification has it (`Env`, `User`, ...)."""

    def __init__(self, *layers, **config):
        self.layers = layers
        self.config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "created": "2020-01-02T03:04:05Z",
                "config": config,
                "rootfs": {"type": "layers", "diff_ids": [digest(data) for data in layers]},
            }
        ).encode()
        # A fixed time keeps the digests the same.
        self.packed = [gzip.compress(data, 1, mtime=0) for data in layers]

    @property
    def id(self):
        return digest(self.config)

    @property
    def manifest(self):
        def describe(kind, data):
            return {"mediaType": kind, "digest": digest(data), "size": len(data)}

        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": describe(CONFIG, self.config),
            "layers": [describe(LAYER, data) for data in self.packed],
        }
        return json.dumps(manifest).encode()

    def blobs(self):
        return {digest(data): data for data in [self.config, *self.packed]}

    def docker_save(self, *tags):
        names = [f"{number}/layer.tar" for number in range(len(self.layers))]
        manifest = [{"Config": "config.json", "RepoTags": list(tags), "Layers": names}]
        return layer(
            file("manifest.json", json.dumps(manifest).encode()),
            file("config.json", self.config),
            *[file(name, data) for name, data in zip(names, self.layers, strict=True)],
        )

    def layout(self, name=None):
        """The files of an OCI layout: path to content."""
        described = {"mediaType": MANIFEST, "digest": digest(self.manifest), "size": len(self.manifest)}
        if name:
            described["annotations"] = {"io.containerd.image.name": name}
        blobs = {**self.blobs(), digest(self.manifest): self.manifest}
        return {
            "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
            "index.json": json.dumps({"schemaVersion": 2, "manifests": [described]}).encode(),
            **{f"blobs/sha256/{key.removeprefix('sha256:')}": data for key, data in blobs.items()},
        }

    def layout_archive(self, name=None):
        return layer(*[file(path, data) for path, data in self.layout(name).items()])

    def write_layout(self, folder, name=None):
        for path, data in self.layout(name).items():
            place = Path(folder, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        return folder
