// The walk of the JavaScript SDK; says `walk complete` at the end. Every answer that has no body must parse: the SDK
// throws on an empty answer without a length.
import assert from "node:assert/strict";
import { ConnectionConfig, Sandbox, SandboxManager, SandboxApiException } from "@alibaba-group/opensandbox";

const { OPEN_SANDBOX_DOMAIN: domain, OPEN_SANDBOX_API_KEY: apiKey, E2E_IMAGE: image } = process.env;
const useServerProxy = Boolean(process.env.E2E_THROUGH_PROXY);
const connectionConfig = () => new ConnectionConfig({ domain, apiKey, useServerProxy });
const texts = (messages) => messages.map((message) => message.text);
const later = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

async function until(claim, what) {
  for (let attempt = 0; attempt < 100; attempt++) {
    if (await claim()) return;
    await later(50);
  }
  assert.fail(`did not happen: ${what}`);
}

async function commands(box) {
  const done = await box.commands.run("printf 'a\\n\\nb\\n'; echo err >&2; exit 7");
  assert.deepEqual(texts(done.logs.stdout), ["a", "\n", "b"]);
  assert.deepEqual(texts(done.logs.stderr), ["err"]);
  assert.equal(done.exitCode, 7);
  const options = { workingDirectory: "/tmp", envs: { E2E: "x" } };
  assert.deepEqual(texts((await box.commands.run("echo $PWD $E2E", options)).logs.stdout), ["/tmp x"]);

  const started = await box.commands.run("echo bg; sleep 0.3", { background: true });
  await until(async () => !(await box.commands.getCommandStatus(started.id)).running, "the background command ends");
  assert.equal((await box.commands.getBackgroundCommandLogs(started.id)).content, "bg\n");

  const long = await box.commands.run("sleep 60", { background: true });
  await box.commands.interrupt(long.id);
  assert.equal((await box.commands.getCommandStatus(long.id)).running, false);

  const begun = Date.now();
  const killed = await box.commands.run("sleep 30", { timeoutSeconds: 1 });
  assert.ok(Date.now() - begun < 10_000 && killed.exitCode !== 0);

  await sessions(box);
}

async function sessions(box) {
  const { commands } = box;
  const id = await commands.createSession({ workingDirectory: "/tmp/js-session" });
  await commands.runInSession(id, "export KEPT=1; f() { echo \"f $KEPT\"; }; text='two\nlines'");
  const done = await commands.runInSession(id, "f; echo \"$text\"; echo err >&2; pwd");
  assert.equal(done.id, id);
  assert.deepEqual(texts(done.logs.stdout), ["f 1", "two", "lines", "err", "/tmp/js-session"]);
  assert.equal((await commands.runInSession(id, "exit 7")).exitCode, 7);
  const elsewhere = await commands.runInSession(id, "f; pwd", { workingDirectory: "/tmp" });
  assert.deepEqual(texts(elsewhere.logs.stdout), ["f 1", "/tmp"]);
  const begun = Date.now();
  const late = await commands.runInSession(id, "sleep 30", { timeoutSeconds: 1 });
  assert.ok(Date.now() - begun < 10_000 && late.exitCode === -1);
  await commands.deleteSession(id);
  await assert.rejects(
    commands.runInSession(id, "true"),
    (error) => error instanceof SandboxApiException && error.statusCode === 404,
  );
}

async function files(box) {
  const { files } = box;
  await files.createDirectories([{ path: "/tmp/js", mode: 755 }]);
  await files.writeFiles([
    { path: "/tmp/js/a", data: "l1\nl2\nl3\n", mode: 644 },
    { path: "/tmp/js/b", data: new Uint8Array([0, 1, 255]) },
  ]);
  async function* pieces() {
    yield new TextEncoder().encode("one ");
    yield new TextEncoder().encode("two");
  }
  await files.writeFiles([{ path: "/tmp/js/streamed", data: pieces() }]);
  assert.equal(await files.readFile("/tmp/js/streamed"), "one two");
  assert.equal(await files.readFile("/tmp/js/a", { range: "bytes=0-1" }), "l1");
  assert.equal(await files.readFile("/tmp/js/a", { offset: 2, limit: 1 }), "l2");
  assert.deepEqual([...(await files.readBytes("/tmp/js/b"))], [0, 1, 255]);
  const info = (await files.getFileInfo(["/tmp/js/a"]))["/tmp/js/a"];
  assert.equal(info.mode, 644);
  assert.ok(Math.abs(info.modifiedAt.getTime() - Date.now()) < 60_000);
  assert.equal((await files.search({ path: "/tmp/js", pattern: "*" })).length, 3);
  assert.equal((await files.listDirectory({ path: "/tmp/js", depth: 1 })).length, 3);
  await files.replaceContents([{ path: "/tmp/js/a", oldContent: "l2", newContent: "L2" }]);
  const counted = await files.replaceContentsDetailed([{ path: "/tmp/js/a", oldContent: "l", newContent: "L" }]);
  assert.equal(counted[0].replacedCount, 2);
  await files.moveFiles([{ src: "/tmp/js/a", dest: "/tmp/js/c" }]);
  await files.setPermissions([{ path: "/tmp/js/c", mode: 600 }]);
  assert.equal(await files.readFile("/tmp/js/c"), "L1\nL2\nL3\n");
  await files.deleteFiles(["/tmp/js/b"]);
  await files.deleteDirectories(["/tmp/js"]);
  await assert.rejects(files.readFile("/tmp/js/c"), (error) => error instanceof SandboxApiException && error.statusCode === 404);
}

async function main() {
  const manager = SandboxManager.create({ connectionConfig: connectionConfig() });
  const box = await Sandbox.create({
    image,
    connectionConfig: connectionConfig(),
    timeoutSeconds: 300,
    metadata: { walk: "js" },
    env: { FROM_CREATE: "yes" },
    resource: { cpu: "500m", memory: "256Mi" },
  });
  try {
    const info = await box.getInfo();
    assert.equal(info.status.state, "Running");
    assert.deepEqual(texts((await box.commands.run("echo $FROM_CREATE")).logs.stdout), ["yes"]);
    await commands(box);
    await files(box);
    const renewed = await box.renew(540);
    assert.equal(new Date((await box.getInfo()).expiresAt).getTime(), new Date(renewed.expiresAt).getTime());
    assert.deepEqual((await box.patchMetadata({ walk: null, b: "1" })).metadata, { b: "1" });
    const listed = await manager.listSandboxInfos({ metadata: { b: "1" }, states: ["Running"] });
    assert.ok(listed.items.some((item) => item.id === box.id));
    await box.pause();
    assert.equal((await manager.getSandboxInfo(box.id)).status.state, "Paused");
    const again = await box.resume();
    assert.deepEqual(texts((await again.commands.run("echo resumed")).logs.stdout), ["resumed"]);
    assert.ok((await box.getEndpoint(8080)).endpoint);
    const metrics = await box.getMetrics();
    assert.ok(metrics.cpuCount > 0);
  } finally {
    await box.kill();
    await box.close();
  }
  await assert.rejects(manager.getSandboxInfo(box.id), (error) => error.statusCode === 404 && Boolean(error.requestId));
  await manager.close();
  console.log("walk complete");
}

await main();
