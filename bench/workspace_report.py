#!/usr/bin/env python3
"""Writes the repositories' table of docs/performance.md from one run's raw results, between its two markers.

    workspace_report.py [RESULTS.jsonl]     default: the last run; a quick run is only printed
"""

from report import milliseconds, publish

BEGIN, END = "<!-- workspace:begin -->", "<!-- workspace:end -->"


class Table:
    def __init__(self, results):
        self.results = results
        self.rows = [("Measurement", "p50", "p90", "n", "Beside it, p50"), ("---", "---:", "---:", "---:", "---")]

    def row(self, title, name, who, *besides):
        """`besides` are (title, name, who) of what was taken in turns."""
        figures = self.results.one(name, who).get("summary")
        if figures:
            found = [(what, self.results.figure(other, whose)) for what, other, whose in besides]
            cells = [f"{what} {milliseconds(value)}" for what, value in found if value is not None]
            self.rows.append((title, milliseconds(figures["p50"]), milliseconds(figures["p90"]), str(figures["n"]), ", ".join(cells) or "–"))

    def text(self):
        return "\n".join("| " + " | ".join(row) + " |" for row in self.rows)


def more(results, who):
    """By how much our build takes longer than the engine's."""
    ours, engine = results.figure("build", who), results.figure("build", f"engine beside {who}")
    return f" ({(ours / engine - 1) * 100:+.0f} % over `docker build`)" if ours and engine else ""


def table(results):
    t = Table(results)
    for who, title in (("embedded", "embedded"), ("docker", "Docker")):
        t.row(f"{title}: repository with a built image → Ready", "create", who,
              ("sandbox of the image alone", "create", f"image alone, {who}"),
              ("`git ls-remote`", "ls_remote", f"git beside {who} create"),
              ("the engine's create and start", "create", f"engine beside {who}"))
        t.row(f"{title}: sandbox of a pool → Running", "pool", who, ("without a pool", "pool", f"without a pool, {who}"))
        t.row(f"{title}: repository's box of a pool → Ready", "repository_pool", who,
              ("from its assignment", "repository_pool", f"from its assignment, {who}"),
              ("`git ls-remote`", "ls_remote", f"git beside {who} repository_pool"))
        t.row(f"{title}: build of what is built, answered with the image", "rebuild", who,
              ("`git ls-remote`", "ls_remote", f"git beside {who} rebuild"))
        t.row(f"{title}: build of a Dockerfile{more(results, who)}", "build", who,
              ("`docker build`", "build", f"engine beside {who}"), ("`git clone`", "clone", f"git beside {who}"))
        for step in ("clone", "build", "sanitize", "export"):
            t.row(f"{title}: of it, the step `{step}`", f"build_step_{step}", who)
        t.row(f"{title}: `kill -9` of the agent → `Failed` is shown", "agent_killed", who)
        floor = ("OpenSSH's server on loopback", "ssh_true", f"OpenSSH, {who}")
        t.row(f"{title}: `ssh … true` through the server", "ssh_true", f"server, {who}", floor)
        t.row(f"{title}: `ssh … true` to the box's address", "ssh_true", f"box, {who}", floor)
    many, idle = results.one("heartbeat_cpu", "embedded"), results.one("idle_cpu", "embedded")
    if many:
        title = f"processor of the server, heartbeats of {many['agents']:,} idle agents, % of a core"
        beside = f"no agents {idle['p50']:.1f}; memory {many['rss_mib']} MiB (RSS)"
        t.rows.append((title, f"{many['p50']:.1f}", f"{many['p90']:.1f}", f"{many['n']} × 15 s", beside))
    return t.text()


if __name__ == "__main__":
    publish(table, ".latest-workspace", BEGIN, END)
