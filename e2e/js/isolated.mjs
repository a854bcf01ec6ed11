// Isolated sessions through the JavaScript SDK; says `walk complete` at the end.
import assert from "node:assert/strict";
import { ConnectionConfig, Sandbox } from "@alibaba-group/opensandbox";

const { OPEN_SANDBOX_DOMAIN: domain, OPEN_SANDBOX_API_KEY: apiKey, E2E_IMAGE: image } = process.env;
const useServerProxy = Boolean(process.env.E2E_THROUGH_PROXY);
const texts = (done) => done.logs.stdout.map((message) => message.text);

async function session(isolation) {
  const request = { workspace: { path: "/workspace/js", mode: "rw" }, share_net: false, idle_timeout_seconds: 60 };
  const made = await isolation.create(request);
  assert.equal(made.info.workspace.path, "/workspace/js");
  await made.run("export KEPT=1; cd /tmp");
  assert.deepEqual(texts(await made.run("echo $KEPT $PWD $ONCE", { envs: { ONCE: "x" } })), ["1 /tmp x"]);
  const failed = await made.run("exit 3");
  assert.equal(failed.exitCode, 3);
  assert.equal((await made.run("sleep 30", { timeout_seconds: 1 })).error.name, "RuntimeError");
  assert.ok((await made.get()).idle_remaining_seconds <= 60);
  assert.equal((await isolation.attach(made.sessionId)).info.workspace.mode, "rw");
  await files(made);
  assert.ok((await isolation.list()).some((one) => one.session_id === made.sessionId));
  await made.delete();
  await assert.rejects(made.get(), /SESSION_NOT_FOUND/);
}

async function files(made) {
  const { files } = made;
  await files.createDirectories([{ path: "/workspace/js/d", mode: 755 }]);
  await files.writeFiles([{ path: "/workspace/js/d/f", data: "one" }]);
  assert.equal(await files.readFile("/workspace/js/d/f"), "one");
  assert.deepEqual(texts(await made.run("stat -c %a /workspace/js/d/f")), ["644"]);
  await files.replaceContents([{ path: "/workspace/js/d/f", oldContent: "one", newContent: "two" }]);
  await files.moveFiles([{ src: "/workspace/js/d/f", dest: "/workspace/js/g" }]);
  assert.deepEqual((await files.search({ path: "/workspace/js", pattern: "g" })).map((f) => f.path), ["/workspace/js/g"]);
  await files.setPermissions([{ path: "/workspace/js/g", mode: 600 }]);
  assert.equal((await files.getFileInfo(["/workspace/js/g"]))["/workspace/js/g"].mode, 600);
  await files.deleteFiles(["/workspace/js/g"]);
  await files.deleteDirectories(["/workspace/js/d"]);
}

async function main() {
  const box = await Sandbox.create({
    image,
    connectionConfig: new ConnectionConfig({ domain, apiKey, useServerProxy }),
    timeoutSeconds: 300,
    extensions: { "bootstrap.execd.isolation": "enable" },
    resource: { cpu: "1", memory: "512Mi" },
  });
  try {
    const found = await box.isolation.capabilities();
    assert.ok(found.available, found.message);
    await session(box.isolation);
    assert.deepEqual(texts(await box.isolation.runOnce("echo once", "/workspace/js")), ["once"]);
  } finally {
    await box.kill();
    await box.close();
  }
  console.log("walk complete");
}

await main();
