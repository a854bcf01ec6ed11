#!/usr/bin/env python3
"""Writes the table of docs/performance.md from one run's raw results, between its two markers.

    report.py [RESULTS.jsonl]     default: the last run; a quick run is only printed
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


class Results:
    def __init__(self, path):
        self.lines = [json.loads(line) for line in path.read_text().splitlines()]

    def one(self, name, who="sandglass", **more):
        """The last line of that name, or an empty one."""
        for line in reversed(self.lines):
            if line["name"] == name and line["who"] == who and all(line.get(k) == v for k, v in more.items()):
                return line
        return {}

    def figure(self, name, who="sandglass", key="p50"):
        return self.one(name, who).get("summary", {}).get(key)


def milliseconds(value):
    if value is None:
        return "–"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def ratio(ours, theirs):
    return "" if not ours or not theirs else f"{theirs / ours:.0f}×" if theirs / ours >= 10 else f"{theirs / ours:.1f}×"


def plain(value, unit=""):
    return "–" if value is None else f"{value}{unit}"


def table(results):
    rows = [("Measurement", "Sandglass", "Beside it", "Ratio"), ("---", "---:", "---:", "---:")]

    def compare(title, name, other, key="p50"):
        ours, theirs = results.figure(name, key=key), results.figure(name, other, key)
        beside = f"{milliseconds(theirs)} ({other})" if theirs is not None else "–"
        rows.append((title, milliseconds(ours), beside, ratio(ours, theirs)))

    alive = results.one("list").get("alive", 200)
    compare("create → first `true` has ended, plain HTTP, p50", "create_exec", "docker")
    compare("the same, p99", "create_exec", "docker", "p99")
    compare("Python SDK: `Sandbox.create` → `commands.run(\"true\")`, p50", "sdk_create_run", "reference")
    compare("foreground `true` in a living sandbox, p50", "warm_true", "reference")
    burst, theirs = results.one("burst"), results.one("burst", "reference")
    if burst:
        title = f"{burst['count']} creates at once until each has run a command"
        beside = "–" if not theirs else f"{milliseconds(theirs['wall_ms'])}, {theirs['failures']} failed (reference)"
        ours = f"{milliseconds(burst['wall_ms'])}, {burst['failures']} failed"
        rows.append((title, ours, beside, ratio(burst["wall_ms"], theirs.get("wall_ms"))))
    compare(f"list 20 of {alive} living sandboxes, p50", "list", "reference")
    compare("start → listening, p50", "startup", "reference")
    restart = results.one("restart").get("alive")
    compare(f"start after `kill -9` with {restart} alive → complete list, p50", "restart", "reference")
    for mode in ("proxied", "direct"):
        line = results.one("stdout", mode=mode)
        if line:
            title = f"{line['megabytes']} MB of standard output through `/command`, {mode}"
            rows.append((title, f"{line['best']} MB/s, agent peak {line['agent_peak_rss_mib']} MiB", "–", ""))
    dense = results.one("density")
    if dense:
        each = (dense["shim_pss_kib"] or 0) + (dense["agent_pss_kib"] or 0)
        rows += [
            (f"server memory (RSS), {dense['alive']} alive", plain(dense["server_rss_mib"], " MiB"), "–", ""),
            ("shim and agent per sandbox, PSS", f"{each} KiB", "–", ""),
            ("shim / agent per sandbox, RSS", f"{dense['shim_rss_kib']} / {dense['agent_rss_kib']} KiB", "–", ""),
            ("available memory less per sandbox", plain(dense["memory_available_less_kib_each"], " KiB"), "–", ""),
        ]
        first, last = results.figure("create_first_50"), results.figure("create_last_50")
        rows.append((f"create, four at a time: first 50 / last 50 of {dense['alive']}, p50",
                     f"{milliseconds(first)} / {milliseconds(last)}", "–", ""))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def facts(results):
    m = results.one("machine", "machine")
    # Absent where the environment of the measurement has none.
    reference = f"reference server {m['reference']}, " if m["reference"] else ""
    return (
        f"{m['cores']} cores ({m['processor']}), {m['memory_gib']} GiB, Linux {m['kernel']}; Sandglass {m['sandglass']}, "
        f"Docker {m['docker']} with runc {m['runc']}, {reference}SDK {m['sdk']}, "
        f"Python {m['python']}. Load average before: {m['load_before']}."
    )


def publish(table, latest, begin, end):
    """Writes the table of the run that the command line names, or of the last one, between the page's two markers."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results" / (HERE / "results" / latest).read_text().strip()
    results = Results(path)
    text = f"{facts(results)}\n\n{table(results)}\n\nRaw values: `bench/results/{path.name}`."
    if results.one("machine", "machine").get("quick"):
        print(text)
        return
    head, rest = PAGE.read_text().split(begin)
    _, foot = rest.split(end)
    PAGE.write_text(f"{head}{begin}\n{text}\n{end}{foot}")
    print(f"wrote {PAGE.name} from {path.name}")


if __name__ == "__main__":
    publish(table, ".latest", BEGIN, END)
