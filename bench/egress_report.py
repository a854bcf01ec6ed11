#!/usr/bin/env python3
"""Writes the network policy's table of docs/performance.md from one run's raw results, between its two markers.

    egress_report.py [RESULTS.jsonl]     default: the last run; a quick run is only printed
"""

from report import milliseconds, publish

BEGIN, END = "<!-- egress:begin -->", "<!-- egress:end -->"
WITHOUT, WITH = "without a policy", "with a policy"


def table(results):
    rows = [("Measurement", "Without a policy", "With a policy", ""), ("---", "---:", "---:", "---:")]
    for key in ("p50", "p90"):
        bare, held = (results.figure("https_connection", who, key) for who in (WITHOUT, WITH))
        if bare and held:
            title = f"`curl` of a small page by HTTPS: name, connection, handshake, answer, {key}"
            rows.append((title, milliseconds(bare), milliseconds(held), f"+ {milliseconds(held - bare)}"))
    ways = {"plain": "plain text from port 8080", "https": "by HTTPS", "http": "by HTTP, each request read by the gate"}
    for name, way in ways.items():
        bare, held = (results.one(f"download_{name}", who) for who in (WITHOUT, WITH))
        if bare and held:
            title = f"download of {bare['megabytes']} MiB, {way}"
            rows.append((title, f"{bare['p50']:.0f} MB/s", f"{held['p50']:.0f} MB/s", f"{held['p50'] / bare['p50']:.2f}×"))
    for rules in (1, 100, 4000):
        for name, title in (("policy_answered", "is answered"), ("policy_felt", "is felt inside")):
            figures = results.one(name, WITH, rules=rules).get("summary")
            if figures:
                cell = f"{milliseconds(figures['p50'])}, at most {milliseconds(figures['max'])}"
                rows.append((f"a policy of {rules:,} rules {title}", "–", cell, ""))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    publish(table, ".latest-egress", BEGIN, END)
