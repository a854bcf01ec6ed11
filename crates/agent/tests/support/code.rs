//! `/code`: real kernels, from the interpreter that SANDGLASS_KERNELS_PYTHON names (`e2e/requirements-kernels.txt`).

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Agent, Answer, until};

const PYTHON: &str = "SANDGLASS_KERNELS_PYTHON";

/// The `PATH` on which the test kernels are; says so when there are none, and fails where nothing may be left out.
fn path() -> Option<String> {
    let python = std::env::var_os(PYTHON).map(PathBuf::from).filter(|python| python.is_file());
    let Some(bin) = python.as_deref().and_then(Path::parent) else {
        assert!(std::env::var_os("CI").is_none(), "{PYTHON} does not name an interpreter with kernels");
        eprintln!("SKIPPED: {PYTHON} does not name an interpreter with kernels");
        return None;
    };
    Some(format!("{}:/usr/bin:/bin", bin.display()))
}

/// An agent that finds the test kernels; also what the machine has beside them stays out.
fn start() -> Option<Agent> {
    let path = path()?;
    Some(Agent::start_with(&[], &[("PATH", &path), ("HOME", "/nonexistent"), ("JUPYTER_PORT", "1")]))
}

struct Ran(Vec<Value>);

impl Ran {
    fn of(answer: &Answer) -> Self {
        assert_eq!(answer.status, 200, "{}", answer.text());
        let text = answer.text();
        let events: Vec<Value> =
            text.split("\n\n").filter(|f| !f.is_empty()).map(|f| serde_json::from_str(f).unwrap()).collect();
        let terminal = events.iter().filter(|e| e["type"] == "error" || e["type"] == "execution_complete");
        assert_eq!(terminal.count(), 1, "{text}");
        assert_eq!(events[0]["type"], "init");
        Ran(events)
    }

    fn kinds(&self) -> Vec<&str> {
        let kinds = self.0.iter().map(|event| event["type"].as_str().unwrap());
        kinds.filter(|kind| *kind != "ping").collect()
    }

    fn text(&self, kind: &str) -> String {
        self.0.iter().filter(|e| e["type"] == kind).map(|e| e["text"].as_str().unwrap_or("")).collect()
    }

    fn results(&self) -> Vec<&Value> {
        self.0.iter().filter(|event| event["type"] == "result").map(|event| &event["results"]).collect()
    }

    fn error(&self) -> &Value {
        &self.0.last().unwrap()["error"]
    }
}

impl Agent {
    /// Asks for a run; the answer comes on the connection, however long the kernel takes.
    fn ask(&self, context: &Value, code: &str) -> TcpStream {
        let mut stream = self.connect();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let body = json!({ "code": code, "context": context }).to_string();
        write!(
            stream,
            "POST /code HTTP/1.1\r\nHost: b\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        stream
    }

    fn code(&self, context: &Value, code: &str) -> Answer {
        let mut raw = Vec::new();
        self.ask(context, code).read_to_end(&mut raw).unwrap();
        crate::support::parse(&raw)
    }

    fn python(&self, code: &str) -> Ran {
        Ran::of(&self.code(&json!({ "language": "python" }), code))
    }

    fn within(&self, id: &str, code: &str) -> Ran {
        Ran::of(&self.code(&json!({ "id": id }), code))
    }

    fn context(&self, body: &Value) -> String {
        let mut stream = self.connect();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let body = body.to_string();
        write!(
            stream,
            "POST /code/context HTTP/1.1\r\nHost: b\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut raw = Vec::new();
        stream.read_to_end(&mut raw).unwrap();
        let answer = crate::support::parse(&raw);
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["id"].as_str().unwrap().to_owned()
    }
}

#[test]
fn python_keeps_its_state_and_says_everything() {
    let Some(agent) = start() else { return };
    let ran = agent.python("1+1");
    assert_eq!(ran.kinds(), ["init", "execution_count", "result", "execution_complete"]);
    assert_eq!((&ran.results()[0]["text"], &ran.0[2]["execution_count"]), (&json!("2"), &json!(1)));
    let ran =
        agent.python("import sys\nx = 20\nprint('out', flush=True)\nprint('err', file=sys.stderr)\nx + 2");
    assert_eq!((ran.text("stdout").as_str(), ran.text("stderr").as_str()), ("out\n", "err\n"));
    assert_eq!(agent.python("x").results()[0]["text"], "20");
    let ran = agent.python("print('before')\nno_such_name");
    assert_eq!(ran.kinds(), ["init", "stdout", "execution_count", "status", "error"]);
    assert_eq!(ran.error()["ename"], "NameError");
    let trace = ran.error()["traceback"].as_array().unwrap();
    assert!(trace.iter().any(|line| line.as_str().unwrap().contains("\u{1b}[")), "{trace:?}");
    let listed = agent.get("/code/contexts").json();
    assert_eq!((listed.as_array().unwrap().len(), &listed[0]["language"]), (1, &json!("python")));
    assert_eq!(listed[0]["id"], ran.0[0]["text"]);
}

#[test]
fn plots_are_results() {
    let Some(agent) = start() else { return };
    let ran = agent.python("import matplotlib.pyplot as plot\nplot.plot([1, 2])\nplot.show()");
    let image = ran.results()[0]["image/png"].as_str().unwrap();
    assert!(image.starts_with("iVBORw0KGgo"), "{}", &image[..20]);
    let ran = agent.python("from IPython.display import display, HTML\nh = display(HTML('<b>1</b>'), display_id=True)\nh.update(HTML('<b>2</b>'))");
    let html: Vec<&Value> = ran.results().iter().map(|result| &result["text/html"]).collect();
    assert_eq!(html, ["<b>1</b>", "<b>2</b>"]);
}

#[test]
fn late_output_of_one_run_is_not_in_the_next() {
    let Some(agent) = start() else { return };
    // A task keeps the run that made it; a bare thread's output the kernel itself takes for that of the running code.
    let late = "import asyncio\nasync def late():\n    await asyncio.sleep(0.3)\n    print('late')\n    globals()['said'] = 1\n\
        task = asyncio.get_running_loop().create_task(late())";
    agent.python(late);
    let ran = agent.python("while 'said' not in globals(): await asyncio.sleep(0.01)\nprint('own')");
    assert_eq!(ran.text("stdout"), "own\n");
}

#[test]
fn contexts_are_apart_and_run_at_the_same_time() {
    let Some(agent) = start() else { return };
    let agent = Arc::new(agent);
    let folder = agent.path("made/for/it");
    let first = agent.context(&json!({ "language": "python", "cwd": folder }));
    let second = agent.context(&json!({ "language": "Python" }));
    agent.within(&first, "here = 1");
    assert_eq!(agent.within(&second, "here").error()["ename"], "NameError");
    assert_eq!(
        agent.within(&first, "import os; os.getcwd()").results()[0]["text"],
        format!("'{}'", folder.display())
    );
    assert_eq!(agent.get(&format!("/code/contexts/{first}")).json()["cwd"], json!(folder));
    // Each waits until the other runs, which one after the other they never would.
    let meet = "import os, time\nopen(NAME, 'w')\nwhile not all(map(os.path.exists, ['/A', '/B'])): time.sleep(0.01)";
    let meet = meet.replace("'/A', '/B'", &format!("'{0}/a', '{0}/b'", agent.dir.path().display()));
    let start = Arc::new(Barrier::new(2));
    let runs: Vec<_> = [(&first, "a"), (&second, "b")]
        .map(|(id, name)| {
            let code = meet.replace("NAME", &format!("'{}'", agent.path(name).display()));
            let (agent, start, id) = (Arc::clone(&agent), Arc::clone(&start), id.clone());
            std::thread::spawn(move || {
                start.wait();
                agent.within(&id, &code).kinds().last().map(|kind| (*kind).to_owned())
            })
        })
        .into();
    for run in runs {
        assert_eq!(run.join().unwrap().as_deref(), Some("execution_complete"));
    }
    let listed = |query: &str| agent.get(&format!("/code/contexts{query}")).json().as_array().unwrap().len();
    assert_eq!((listed(""), listed("?language=python"), listed("?language=bash")), (2, 2, 0));
    assert_eq!(agent.delete(&format!("/code/contexts/{first}")).status, 200);
    for gone in
        [agent.delete(&format!("/code/contexts/{first}")), agent.get(&format!("/code/contexts/{first}"))]
    {
        assert_eq!((gone.status, gone.json()["code"].as_str()), (404, Some("CONTEXT_NOT_FOUND")));
    }
    assert_eq!(agent.code(&json!({ "id": first }), "1").status, 404);
    assert_eq!(agent.delete("/code/contexts?language=python").status, 200);
    assert_eq!(listed(""), 0);
}

#[test]
fn an_interrupt_ends_the_code_and_not_the_kernel() {
    let Some(agent) = start() else { return };
    let agent = Arc::new(agent);
    let id = agent.context(&json!({ "language": "python" }));
    let runner = {
        let (agent, id, begun) = (Arc::clone(&agent), id.clone(), agent.path("begun"));
        std::thread::spawn(move || {
            let code = format!("kept = 7\nopen('{}', 'w')\nimport time\ntime.sleep(100)", begun.display());
            agent.within(&id, &code).error()["ename"].clone()
        })
    };
    until(|| agent.path("begun").exists().then_some(()));
    let busy = agent.code(&json!({ "id": id }), "1");
    assert_eq!((busy.status, busy.json()["message"].as_str()), (500, Some("session is busy")));
    assert_eq!(agent.delete(&format!("/code?id={id}")).status, 200);
    assert_eq!(runner.join().unwrap(), "KeyboardInterrupt");
    assert_eq!(agent.within(&id, "kept").results()[0]["text"], "7");
    // Nothing runs: nothing happens.
    assert_eq!(agent.delete(&format!("/code?id={id}")).status, 200);
    assert_eq!(agent.within(&id, "kept").results()[0]["text"], "7");
    assert_eq!(agent.delete("/code?id=nobody").status, 500);
}

#[test]
fn a_dead_kernel_is_told_of_and_replaced() {
    let Some(agent) = start() else { return };
    let id = agent.context(&json!({ "language": "python" }));
    // A kernel hands its output to a thread of its own: only what has been seen outside has certainly left it.
    let seen = agent.path("seen");
    let code = format!(
        "import os, signal, time\nkept = 1\nprint('last words', flush=True)\n\
         while not os.path.exists('{}'): time.sleep(0.01)\nos.kill(os.getpid(), signal.SIGKILL)",
        seen.display()
    );
    let mut stream = agent.ask(&json!({ "id": id }), &code);
    let mut raw = Vec::new();
    while !String::from_utf8_lossy(&raw).contains("last words") {
        let mut some = [0; 4096];
        let read = stream.read(&mut some).unwrap();
        assert!(read > 0, "{}", String::from_utf8_lossy(&raw));
        raw.extend_from_slice(&some[..read]);
    }
    std::fs::write(&seen, "").unwrap();
    stream.read_to_end(&mut raw).unwrap();
    let ran = Ran::of(&crate::support::parse(&raw));
    assert_eq!(ran.error()["ename"], "KernelDied");
    assert_eq!(ran.text("stdout"), "last words\n");
    let ran = agent.within(&id, "kept");
    assert!(ran.text("stderr").contains("this is a new one"), "{}", ran.text("stderr"));
    assert_eq!(ran.error()["ename"], "NameError");
}

#[test]
fn a_kernel_whose_code_leaves_gets_no_more_code() {
    let Some(agent) = start() else { return };
    let id = agent.context(&json!({ "language": "python" }));
    // It runs on for a moment after the answer: what comes in that moment must not get lost.
    for _ in 0..3 {
        assert_eq!(agent.within(&id, "kept = 1\nexit()").kinds().last(), Some(&"execution_complete"));
        let ran = agent.within(&id, "'kept' in globals()");
        assert!(ran.text("stderr").contains("its code ended it"), "{}", ran.text("stderr"));
        assert_eq!(ran.results()[0]["text"], "False");
    }
}

#[test]
fn a_client_that_leaves_does_not_end_its_run_and_deleting_ends_everything() {
    let Some(agent) = start() else { return };
    let id = agent.context(&json!({ "language": "python" }));
    let (begun, done) = (agent.path("begun"), agent.path("done"));
    let code = format!(
        "import os, time, subprocess\nopen('{}', 'w')\nprint('x' * 100000)\ntime.sleep(0.5)\nopen('{}', 'w')\n",
        begun.display(),
        done.display()
    );
    let body = json!({ "code": code, "context": { "id": id } }).to_string();
    let mut stream = agent.connect();
    write!(stream, "POST /code HTTP/1.1\r\nHost: b\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    until(|| begun.exists().then_some(()));
    drop(stream);
    until(|| done.exists().then_some(()));
    until(|| (agent.code(&json!({ "id": id }), "1").status == 200).then_some(()));
    let ran = agent
        .within(&id, "import os\nchild = subprocess.Popen(['sleep', '1000'])\nprint(os.getpid(), child.pid)");
    assert_eq!(agent.delete(&format!("/code/contexts/{id}")).status, 200);
    for pid in ran.text("stdout").split_whitespace() {
        // A zombie has no command line.
        let gone = || std::fs::read(format!("/proc/{pid}/cmdline")).map_or(true, |line| line.is_empty());
        until(|| gone().then_some(()));
    }
}

#[test]
fn deleting_a_context_ends_its_run_with_an_error() {
    let Some(agent) = start() else { return };
    let agent = Arc::new(agent);
    let id = agent.context(&json!({ "language": "python" }));
    let begun = agent.path("begun");
    let runner = {
        let (agent, id, begun) = (Arc::clone(&agent), id.clone(), begun.clone());
        std::thread::spawn(move || {
            agent
                .within(&id, &format!("open('{}', 'w')\nimport time\ntime.sleep(100)", begun.display()))
                .error()
                .clone()
        })
    };
    until(|| begun.exists().then_some(()));
    assert_eq!(agent.delete(&format!("/code/contexts/{id}")).status, 200);
    assert_eq!(runner.join().unwrap()["ename"], "ContextDeleted");
}

#[test]
fn much_output_arrives_whole_and_too_much_is_owned_up_to() {
    let Some(agent) = start() else { return };
    let ran = agent.python("for i in range(20000): print(i, 'é' * 50)");
    let wanted: String = (0..20_000).map(|i| format!("{i} {}\n", "é".repeat(50))).collect();
    assert_eq!(ran.text("stdout"), wanted);
    let ran = agent.python("print('x' * 3_000_000, end='')");
    assert_eq!(ran.text("stdout").len(), 3_000_000);
    let ran = agent.python("print('x' * 20_000_000)\n1");
    assert!(ran.text("stderr").contains("left out"), "{}", ran.text("stderr"));
    assert_eq!(ran.results()[0]["text"], "1");
}

#[test]
fn kernels_get_the_env_file_and_none_of_the_secrets() {
    let Some(path) = path() else { return };
    let env = [("PATH", path.as_str()), ("EXECD_ACCESS_TOKEN", "s3cret"), ("JUPYTER_PORT", "1")];
    let agent = Agent::start_with(&[], &env);
    std::fs::write(agent.path("env"), "FROM_FILE='a b'\n").unwrap();
    let headers = [("X-EXECD-ACCESS-TOKEN", "s3cret")];
    let code = "import os\nprint(os.environ['FROM_FILE'], [k for k in os.environ if k.startswith('EXECD')])";
    let body = json!({ "code": code, "context": { "language": "python" } }).to_string();
    let ran = Ran::of(&agent.send("POST", "/code", &headers, body.as_bytes()));
    assert_eq!(ran.text("stdout"), "a b []\n");
}

#[test]
fn bash_has_a_kernel_too() {
    let Some(agent) = start() else { return };
    let bash = json!({ "language": "bash" });
    assert_eq!(
        Ran::of(&agent.code(&bash, "cd /usr; f() { echo \"f $1\"; }; x=1")).kinds().last(),
        Some(&"execution_complete")
    );
    assert_eq!(Ran::of(&agent.code(&bash, "pwd; f $x")).text("stdout"), "/usr\nf 1\n");
    assert_eq!(Ran::of(&agent.code(&bash, "false")).error()["evalue"], "1");
}

#[test]
fn without_kernels_it_says_what_to_install() {
    let empty = tempfile::tempdir().unwrap();
    let agent = Agent::start_with(
        &[],
        &[("PATH", &empty.path().display().to_string()), ("HOME", "/nonexistent"), ("JUPYTER_PORT", "1")],
    );
    for (language, words) in [
        ("python", "pip install ipykernel"),
        ("bash", "pip install bash_kernel"),
        ("cobol", "unknown language: cobol"),
        ("sql", "sql is not available"),
    ] {
        let answer = agent.post("/code", &json!({ "code": "1", "context": { "language": language } }));
        assert_eq!((answer.status, answer.json()["code"].as_str()), (500, Some("RUNTIME_ERROR")));
        assert!(answer.json()["message"].as_str().unwrap().contains(words), "{}", answer.text());
    }
    assert_eq!(agent.get("/code/contexts").text(), "[]");
    for (method, path, status) in [
        ("GET", "/code/contexts?language=sql", 500),
        ("DELETE", "/code/contexts", 400),
        ("GET", "/code/contexts/x", 404),
        ("DELETE", "/code", 400),
        ("GET", "/code/what", 404),
    ] {
        assert_eq!(agent.send(method, path, &[], b"").status, status, "{method} {path}");
    }
    assert_eq!(agent.post("/code", &json!({ "context": { "language": "python" } })).status, 400);
    assert_eq!(agent.send("POST", "/code/context", &[], b"{").status, 400);
}

#[test]
fn code_without_a_language_is_a_command_and_the_readiness_port_answers() {
    let port = crate::support::free_port();
    let agent = Agent::start_with(&[], &[("JUPYTER_PORT", &port.to_string())]);
    let answer = agent.post("/code", &json!({ "code": "echo plain" }));
    assert!(answer.text().contains("\"stdout\",\"text\":\"plain\""), "{}", answer.text());
    let background = json!({ "code": "true", "context": { "language": "background-command" } });
    assert_eq!(agent.post("/code", &background).text().matches("\n\n").count(), 2);
    let script = format!("bash -c 'exec 3<>/dev/tcp/127.0.0.1/{port}' && exit 0 || exit 1");
    assert!(agent.shell(&script).text().contains("execution_complete"));
}

/// A Jupyter server of the test's own; ended with its kernels.
struct Jupyter(std::process::Child);

impl Jupyter {
    fn start(path: &str, port: u16, folder: &Path) -> Self {
        let mut command = std::process::Command::new(std::env::var_os(PYTHON).unwrap());
        command
            .args([
                "-m",
                "jupyter_server",
                "--allow-root",
                "--no-browser",
                "--ip=127.0.0.1",
                "--port-retries=0",
            ])
            .arg(format!("--port={port}"))
            .args(["--IdentityProvider.token=secret", "--ServerApp.root_dir=/"])
            .env("PATH", path)
            .env("HOME", folder)
            .current_dir(folder)
            .stdin(std::process::Stdio::null())
            .stderr(std::process::Stdio::null());
        Jupyter(command.spawn().unwrap())
    }
}

impl Drop for Jupyter {
    fn drop(&mut self) {
        let asked = std::process::Command::new("kill").arg(self.0.id().to_string()).status();
        if !asked.is_ok_and(|status| status.success()) {
            let _ = self.0.kill();
        }
        let _ = self.0.wait();
    }
}

#[test]
fn the_jupyter_server_of_an_image_is_used() {
    let Some(path) = path() else { return };
    let folder = tempfile::tempdir().unwrap();
    let port = crate::support::free_port();
    let _server = Jupyter::start(&path, port, folder.path());
    let host = format!("http://127.0.0.1:{port}");
    let env = [("PATH", path.as_str()), ("JUPYTER_HOST", host.as_str()), ("JUPYTER_TOKEN", "secret")];
    let agent = Arc::new(Agent::start_with(&[], &env));
    let id = agent.context(&json!({ "language": "python", "cwd": agent.path("made") }));
    let ran = agent.within(&id, "import os, time\nkept = 3\nprint(os.getcwd())\nkept");
    assert_eq!(ran.text("stdout"), format!("{}\n", agent.path("made").display()));
    assert_eq!(ran.results()[0]["text"], "3");
    let runner = {
        let (agent, id, begun) = (Arc::clone(&agent), id.clone(), agent.path("begun"));
        std::thread::spawn(move || {
            let code = format!("open('{}', 'w')\ntime.sleep(100)", begun.display());
            agent.within(&id, &code).error()["ename"].clone()
        })
    };
    until(|| agent.path("begun").exists().then_some(()));
    assert_eq!(agent.delete(&format!("/code?id={id}")).status, 200);
    assert_eq!(runner.join().unwrap(), "KeyboardInterrupt");
    assert_eq!(agent.within(&id, "kept").results()[0]["text"], "3");
    assert_eq!(agent.within(&id, "os.kill(os.getpid(), 9)").error()["ename"], "KernelDied");
    let ran = agent.within(&id, "1+1");
    assert!(ran.text("stderr").contains("this is a new one"), "{}", ran.text("stderr"));
    assert_eq!(ran.results()[0]["text"], "2");
    assert_eq!(agent.delete(&format!("/code/contexts/{id}")).status, 200);
    let java = agent.code(&json!({ "language": "java" }), "1");
    assert!(java.json()["message"].as_str().unwrap().contains("no java kernel"), "{}", java.text());
}
