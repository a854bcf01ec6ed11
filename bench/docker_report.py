#!/usr/bin/env python3
"""Writes the Docker table of docs/performance.md from one run's raw results, between its two markers.

    docker_report.py [RESULTS.jsonl]     default: the last run; a quick run is only printed
"""

from report import milliseconds, publish

BEGIN, END = "<!-- docker:begin -->", "<!-- docker:end -->"
SIDES = ("sandglass", "reference")


def share(ours, base):
    return "–" if not ours or not base else f"{ours / base:.2f}"


class Table:
    def __init__(self, results):
        self.results = results
        self.rows = [("Measurement", "Sandglass", "Reference"), ("---", "---:", "---:")]

    def each(self, title, text):
        """`text` makes a cell from who is measured."""
        self.rows.append((title, *(text(who) or "–" for who in SIDES)))

    def beside_engine(self, title, name):
        def cell(who):
            ours, engine = self.results.figure(name, who), self.results.figure(name, f"engine beside {who}")
            return ours and engine and f"{milliseconds(ours)}, engine {milliseconds(engine)}: {share(ours, engine)}×"

        self.each(title, cell)

    def plain(self, title, name):
        self.each(title, lambda who: self.results.figure(name, who) and milliseconds(self.results.figure(name, who)))

    def load(self, title, name):
        def cell(who):
            line = self.results.one(name, who)
            return line and f"{line['rps']:.0f} req/s, p99 {milliseconds(line['p99'])}"

        self.each(title, cell)

    def proxied(self, title, name, key, **which):
        def cell(who):
            through = self.results.one(name, who, leg="proxy", **which).get(key)
            direct = self.results.one(name, who, leg="direct", **which).get(key)
            return through and direct and f"{share(through, direct)} of {direct:.0f}"

        self.each(title, cell)

    def memory(self, title, when):
        def cell(who):
            line = self.results.one("memory", who, when=when)
            return line and f"{line['rss_mib']:.0f} MiB, {line['threads']} threads"

        self.each(title, cell)

    def text(self):
        return "\n".join("| " + " | ".join(row) + " |" for row in self.rows)


def table(results):
    t = Table(results)
    alive = results.one("list").get("alive", 200)
    t.beside_engine("create → Running, p50", "create")
    t.beside_engine("8 creates at once, wall", "parallel_8")
    t.beside_engine("delete, p50", "delete")
    t.plain(f"list 20 of {alive}, p50", "list")
    t.plain("the same, 16 at once, p50", "list_16")
    t.plain("get, p50", "get")
    t.load("get at 64 connections", "get_64")
    t.load("GET /health at 64 connections", "health_64")
    for connections in (1, 16, 64):
        t.proxied(f"proxy, small body, {connections} connections: share of direct req/s", "proxy_small", "rps", connections=connections)
    t.proxied("proxy, 100 MB down: share of direct MB/s", "proxy_down", "best")
    t.proxied("proxy, 100 MB up: share of direct MB/s", "proxy_up", "best")
    t.plain(f"start → first complete list, {alive} alive, p50", "start_to_list")
    t.memory("memory, idle", "idle")
    t.memory("memory, after proxying", "after proxying")
    t.memory("memory, after a 20 MB body", "after a 20 MB body")
    t.memory(f"memory, {alive} alive", "many alive")
    return t.text()


if __name__ == "__main__":
    publish(table, ".latest-docker", BEGIN, END)
