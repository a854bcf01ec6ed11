#!/usr/bin/env python3
"""Runs a command beside a private Docker engine, and removes the engine afterwards.

    with_docker.py COMMAND…

The command finds the engine's address in SANDGLASS_TEST_DOCKER and an image with a shell in SANDGLASS_TEST_DOCKER_IMAGE.
The exit code is the command's, or 1 when it left containers or volumes behind.
"""

import os
import subprocess
import sys

from docker_engine import BUSYBOX, Engine, busybox_tree


def main():
    engine = Engine(live_restore=False).start()
    try:
        engine.call("import", "--change", "ENV PATH=/usr/bin:/bin", "-", BUSYBOX, input=busybox_tree())
        environment = {**os.environ, "SANDGLASS_TEST_DOCKER": engine.host, "SANDGLASS_TEST_DOCKER_IMAGE": BUSYBOX}
        code = subprocess.run(sys.argv[1:], env=environment, check=False).returncode
    finally:
        problems = engine.close()
    for problem in problems:
        print(f"left on the engine: {problem}", file=sys.stderr)
    return code or bool(problems)


if __name__ == "__main__":
    sys.exit(main())
