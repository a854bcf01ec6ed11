"""From the request to a sandbox that is ready, with a box that waits and without one.

    python3 bench/pool_bench.py URL KEY IMAGE [ROUNDS]

The server has to run already and is used as it is. Prints one line of JSON for each way.
"""

import json
import statistics
import sys
import time

import httpx


def quantiles(millis):
    cut = statistics.quantiles(millis, n=100, method="inclusive")
    return {"n": len(millis), "p50": round(cut[49], 2), "p95": round(cut[94], 2), "max": round(max(millis), 2)}


def one(client, body):
    begun = time.perf_counter()
    answer = client.post("/v1/sandboxes", json=body)
    answer.raise_for_status()
    sandbox, state = answer.json()["id"], answer.json()["status"]["state"]
    while state == "Pending":
        time.sleep(0.001)
        state = client.get(f"/v1/sandboxes/{sandbox}").json()["status"]["state"]
    taken = (time.perf_counter() - begun) * 1000
    assert state == "Running", state
    return sandbox, taken


def waits(client, least):
    while client.get("/v1/pools/bench").json()["status"]["available"] < least:
        time.sleep(0.01)


def main(url, key, image, rounds=50):
    client = httpx.Client(base_url=url, headers={"OPEN-SANDBOX-API-KEY": key}, timeout=60)
    common = {"timeout": 600, "entrypoint": ["sleep", "1d"], "resourceLimits": {}}
    cold, warm = [], []
    for _ in range(int(rounds)):
        sandbox, taken = one(client, {**common, "image": {"uri": image}})
        cold.append(taken)
        client.delete(f"/v1/sandboxes/{sandbox}")
    capacity = {"bufferMin": 2, "bufferMax": 2, "poolMin": 0, "poolMax": 10}
    client.post("/v1/pools", json={"name": "bench", "image": {"uri": image}, "capacitySpec": capacity}).raise_for_status()
    try:
        for _ in range(int(rounds)):
            waits(client, 2)
            sandbox, taken = one(client, {**common, "extensions": {"poolRef": "bench"}})
            warm.append(taken)
            client.delete(f"/v1/sandboxes/{sandbox}")
    finally:
        client.delete("/v1/pools/bench")
    print(json.dumps({"way": "cold", "image": image, **quantiles(cold)}))
    print(json.dumps({"way": "pool", "image": image, **quantiles(warm)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
