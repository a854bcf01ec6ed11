#!/usr/bin/env python3
"""Writes the agent's table of docs/performance.md from one run's raw results, between its two markers.

    agent_report.py [RESULTS.jsonl]     default: the last run; a quick run is only printed
"""

from report import milliseconds, publish

BEGIN, END = "<!-- agent:begin -->", "<!-- agent:end -->"


def table(results):
    rows = [("Measurement", "Agent", "Beside it", "Ratio"), ("---", "---:", "---:", "---:")]

    def time(title, name, who="agent", keys=("p50", "p99")):
        found = [results.figure(name, who, key) for key in keys]
        if found[0] is not None:
            rows.append((title, " / ".join(map(milliseconds, found)), "–", ""))

    time("foreground `true`, raw HTTP on loopback, by the shell, p50 / p99", "shell_true")
    time("the same as argv, p50 / p99", "argv_true")
    time("the same through the server into a sandbox, p50 / p99", "shell_true", "sandbox")
    time("from the program's exit to the end of the stream, p50 / p99", "exit_to_end")
    lines, plain = results.figure("lines_sdk", "agent"), results.figure("lines_sdk", "plain server")
    if lines and plain:
        count = results.one("lines_sdk", "agent")["lines"]
        cells = (f"{count:,} short lines through the Python SDK", milliseconds(lines), f"{milliseconds(plain)} (plain server)")
        rows.append((*cells, f"{plain / lines:.2f}×"))
    raw = results.one("lines_raw", "agent")
    if raw:
        rows.append(("the same, read by nobody who parses", f"{milliseconds(raw['value'])}, +{raw['grown_kib'] / 1024:.1f} MiB", "–", ""))
    for name in ("upload", "download"):
        ours, beside, through = (results.one(name, who) for who in ("agent", "plain server", "sandbox"))
        if ours and beside:
            cells = (f"{name} of {ours['megabytes']} MiB", f"{ours['p50']:.0f} MB/s, +{ours['grown_kib'] / 1024:.1f} MiB")
            rows.append((*cells, f"{beside['p50']:.0f} MB/s (plain server)", f"{ours['p50'] / beside['p50']:.2f}×"))
        if through:
            rows.append(("the same through the server into a sandbox", f"{through['p50']:.0f} MB/s", "–", ""))
    idle = results.one("idle", "agent")
    if idle:
        rows.append(("memory (RSS) when idle, size of the program", f"{idle['rss_kib'] / 1024:.1f} MiB, {idle['binary_bytes'] / 1e6:.1f} MB", "–", ""))
    time("from starting the program to listening, p50 / p99", "exec_to_listening")
    time("terminal: from a key to its echo, p50 / p99", "pty_echo")
    for name, title in (("kernel_start", "Python kernel: start"), ("kernel_run", "Python kernel: `1+1`")):
        ours, beside = results.figure(name, "agent"), results.figure(name, "jupyter_client")
        if ours:
            ratio = f"{beside / ours:.2f}×" if beside else ""
            rows.append((f"{title}, p50", milliseconds(ours), f"{milliseconds(beside)} (jupyter_client)" if beside else "–", ratio))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    publish(table, ".latest-agent", BEGIN, END)
