//! What the demo shows, stage by stage, with the time each took.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use reqwest::multipart::Part;
use serde_json::json;

use super::leftovers::Traces;
use crate::{
    agent::{Agent, Target},
    client::{Client, Route},
    events::Event,
    output::Output,
};

const PAGE: &str = "<h1>Hello from inside a sandbox</h1>\n";
const NOTE: &str = "written from outside, kept inside\n";
const PAGE_PORT: u16 = 8000;
/// How long the server inside may take to listen.
const SERVES_WITHIN: Duration = Duration::from_secs(10);

/// A web server for one page, with what nearly every system has.
const SERVE: &str = r#"
cd /tmp/demo || exit 1
if command -v python3 >/dev/null; then
  exec python3 -m http.server 8000
fi
exec perl -MIO::Socket::INET -e '
  my $listener = IO::Socket::INET->new(LocalPort => 8000, Listen => 8, ReuseAddr => 1) or die $@;
  while (my $client = $listener->accept) {
    while (<$client>) { last if /^\r?\n$/ }
    open my $file, "<", "index.html" or die $!;
    my $page = join "", <$file>;
    print $client "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\nContent-Length: ",
      length $page, "\r\n\r\n", $page;
    close $client;
  }'
"#;

const GREETING: &str =
    r#"echo "I am process $$ of $(hostname), user $(id -un)"; for i in 1 2 3; do echo "line $i"; done"#;

/// Where results are announced.
#[derive(Debug, Clone, Copy)]
pub struct Board {
    output: Output,
}

impl Board {
    pub fn new(output: Output) -> Self {
        Self { output }
    }

    /// One stage and what it took.
    pub fn done(&self, what: &str, took: Duration) -> Result<()> {
        let millis = took.as_secs_f64() * 1e3;
        if self.output.is_json() {
            let rounded = (millis * 1e3).round() / 1e3;
            return self.output.line(&json!({ "stage": what, "milliseconds": rounded }).to_string());
        }
        self.output.line(&format!("{what:<44}{millis:>9.1} ms"))
    }

    /// A line that a sandbox printed.
    fn said(&self, bytes: &[u8]) -> Result<()> {
        if self.output.is_json() {
            return Ok(());
        }
        self.output.line(&format!("  | {}", String::from_utf8_lossy(bytes).trim_end()))
    }
}

/// Everything between the start and the end of the server.
pub async fn play(client: &Client, board: &Board, traces: &mut Traces) -> Result<()> {
    let begun = Instant::now();
    let id = create(client, traces).await?;
    board.done("create a sandbox", begun.elapsed())?;

    let begun = Instant::now();
    let agent = Agent::connect_new(client, &id).await?;
    greet(&agent, board).await?;
    board.done("run a command in it", begun.elapsed())?;

    let begun = Instant::now();
    write_and_read(&agent).await?;
    board.done("write a file and read it back", begun.elapsed())?;

    let begun = Instant::now();
    serve_and_fetch(client, &agent, &id).await?;
    board.done("serve a page inside, fetch it from outside", begun.elapsed())?;
    traces.look_inside(&id);

    let begun = Instant::now();
    ensure!(client.delete(&id).await?, "the sandbox had disappeared before it was removed");
    board.done("remove the sandbox", begun.elapsed())
}

async fn create(client: &Client, traces: &mut Traces) -> Result<String> {
    let body = json!({
        "image": { "uri": "host" },
        "timeout": 600,
        "resourceLimits": {},
        "extensions": { "sandglass.entrypoint": "none" },
        "metadata": { "name": "demo" },
    });
    let mut sandbox = client.create(&body).await.context("the sandbox could not be created")?;
    let id = sandbox.id().to_owned();
    traces.remember(&id);
    while sandbox.state() != "Running" {
        if sandbox.is_over() {
            bail!("the sandbox did not start: {} ({})", sandbox.message(), sandbox.reason());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        sandbox = client.get(&id).await?;
    }
    Ok(id)
}

async fn greet(agent: &Agent, board: &Board) -> Result<()> {
    let mut events = agent.run(&json!({ "argv": ["sh", "-c", GREETING] })).await?;
    let mut lines = 0;
    loop {
        match events.next().await? {
            Some(Event::Stdout(bytes) | Event::Stderr(bytes)) => {
                for line in bytes.split_inclusive(|byte| *byte == b'\n') {
                    lines += 1;
                    board.said(line)?;
                }
            }
            Some(Event::Started(_)) => {}
            Some(Event::Completed) => break,
            Some(Event::Failed(failure)) => bail!("the command failed: {}", failure.value),
            Some(Event::Refused { message, .. }) => bail!("the command failed: {message}"),
            None => bail!("the command's output was cut"),
        }
    }
    ensure!(lines == 4, "the command printed {lines} lines instead of 4");
    Ok(())
}

async fn write_and_read(agent: &Agent) -> Result<()> {
    let target = Target { path: "/tmp/demo/note".to_owned(), permissions: 0o600 };
    agent.upload(&target, Part::text(NOTE)).await?;
    let mut download = agent.download(&target.path).await?;
    let mut read = Vec::new();
    while let Some(chunk) = download.next().await? {
        read.extend_from_slice(&chunk);
    }
    ensure!(read == NOTE.as_bytes(), "the file reads differently from what was written");
    Ok(())
}

async fn serve_and_fetch(client: &Client, agent: &Agent, id: &str) -> Result<()> {
    let target = Target { path: "/tmp/demo/index.html".to_owned(), permissions: 0o644 };
    agent.upload(&target, Part::text(PAGE)).await?;
    let mut events = agent.run(&json!({ "argv": ["sh", "-c", SERVE], "background": true })).await?;
    let mut command = String::new();
    while let Some(event) = events.next().await? {
        if let Event::Started(id) = event {
            command = id;
        }
    }
    let endpoint = client.endpoint(id, PAGE_PORT, Route::ThroughServer).await?;
    let url = format!("{}://{}/index.html", client.profile().scheme(), endpoint.address);
    let headers = client.endpoint_headers(&endpoint)?;
    let begun = Instant::now();
    loop {
        let answer = client.http().get(&url).headers(headers.clone()).send().await;
        if let Ok(answer) = answer
            && answer.status().is_success()
        {
            let page = answer.text().await?;
            ensure!(page == PAGE, "another page came back than was served");
            return Ok(());
        }
        if begun.elapsed() > SERVES_WITHIN {
            let (said, _) = agent.command_output(&command, 0).await?;
            bail!(
                "the page could not be fetched; the server inside said: {}",
                String::from_utf8_lossy(&said)
            );
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
