#!/usr/bin/env python3
"""Writes the proxy's table of docs/performance.md from one run's raw results, between its two markers.

    proxy_report.py [RESULTS.jsonl]     default: the last run; a quick run is only printed
"""

from report import milliseconds, publish

BEGIN, END = "<!-- proxy:begin -->", "<!-- proxy:end -->"


def table(results):
    rows = [("Measurement", "Direct", "Sandglass", "nginx", "Reference: direct, proxy"), ("---", *["---:"] * 4)]

    def rate(title, name):
        direct, ours, nginx, beside, reference = (
            results.one(name, who).get("p50") for who in ("direct", "sandglass", "nginx", "beside the reference", "reference")
        )
        if direct and ours:
            unit = results.one(name, "direct")["unit"]
            theirs = f"{beside:.0f}, {reference:.0f}: {reference / beside:.2f}×" if beside and reference else "–"
            cells = (f"{value:.0f}: {value / direct:.2f}×" if value else "–" for value in (ours, nginx))
            rows.append((f"{title}, {unit}", f"{direct:.0f}", *cells, theirs))

    def time(title, name, key):
        direct, ours, nginx, beside, reference = (
            results.figure(name, who, key) for who in ("direct", "sandglass", "nginx", "beside the reference", "reference")
        )
        if direct and ours:
            theirs = f"{milliseconds(beside)}, {milliseconds(reference)}" if beside and reference else "–"
            cells = (f"{milliseconds(value)}: {value / direct:.2f}×" if value else "–" for value in (ours, nginx))
            rows.append((f"{title}, {key}", milliseconds(direct), *cells, theirs))

    rate("small body, 64 connections", "small")
    rate("small body, one connection", "one")
    for name in ("download", "upload"):
        rate(f"{name} of {results.one(name, 'direct').get('megabytes')} MiB", name)
    time("WebSocket: from a frame to its echo, with the client library `websockets`", "echo_library", "p50")
    time("the same by bare sockets", "echo", "p50")
    time("the same by bare sockets", "echo", "p99")
    time("from a server-sent event to its arrival", "event_delay", "p50")
    time("from a server-sent event to its arrival", "event_delay", "p99")
    idle = results.one("idle_websockets")
    if idle:
        cell = f"{idle['rss_kib'] / 1024:.1f} MiB, before {idle['before_kib'] / 1024:.1f} MiB"
        rows.append((f"memory of the server with {idle['count']:,} idle WebSockets (RSS)", "–", cell, "–", "–"))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    publish(table, ".latest-proxy", BEGIN, END)
