//! `sandglass image`: the images of a server.
//!
//! Long operations answer with lines of JSON: progress, and at last `done` or `error`. Invariant: an answer that ends
//! without either is a failure.

use std::{
    collections::HashMap,
    io::{self, IsTerminal, Read},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, Subcommand};
use futures_util::{StreamExt, stream};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use reqwest::{Body, Method, RequestBuilder};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_util::io::{ReaderStream, SyncIoBridge};

use crate::{
    Context,
    client::transport,
    lines::LineSplitter,
    output::{plain, relative},
};

const PIECE: usize = 256 << 10;
const TICK: Duration = Duration::from_millis(120);

/// Manage the images of the server
#[derive(Args, Debug)]
pub struct Image {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Add an image from an archive or directory: OCI layout, docker save, or a plain root file system
    Import {
        /// Archive (may be compressed), directory, or - for standard input
        path: PathBuf,
        /// Reference to give the image, e.g. tools:1
        #[arg(long)]
        name: Option<String>,
    },
    /// Get an image from a registry
    Pull {
        reference: String,
        /// User at the registry
        #[arg(long, requires = "password_stdin")]
        username: Option<String>,
        /// Read the password from standard input
        #[arg(long, requires = "username")]
        password_stdin: bool,
        /// Another platform than the server's own
        #[arg(long, value_name = "OS/ARCH")]
        platform: Option<String>,
    },
    /// List images
    #[command(visible_alias = "list")]
    Ls {
        /// Print ids only
        #[arg(short, long)]
        quiet: bool,
    },
    /// Remove images
    Rm {
        #[arg(required = true)]
        references: Vec<String>,
    },
    /// Remove what no image and no sandbox needs
    Prune,
}

impl Image {
    pub async fn run(self, context: &Context) -> Result<u8> {
        match self.action {
            Action::Import { path, name } => import(context, &path, name.as_deref()).await,
            Action::Pull { reference, username, platform, .. } => {
                pull(context, &reference, username, platform.as_deref()).await
            }
            Action::Ls { quiet } => list(context, quiet).await,
            Action::Rm { references } => remove(context, &references).await,
            Action::Prune => prune(context).await,
        }
    }
}

async fn pull(
    context: &Context,
    reference: &str,
    username: Option<String>,
    platform: Option<&str>,
) -> Result<u8> {
    let mut body = json!({ "reference": reference });
    if let Some(username) = username {
        let mut password = String::new();
        io::stdin().read_to_string(&mut password).context("cannot read the password")?;
        let password = password.trim_end_matches(['\r', '\n']);
        ensure!(!password.is_empty(), "standard input holds no password");
        body["auth"] = json!({ "username": username, "password": password });
    }
    if let Some(platform) = platform {
        let Some((os, arch)) = platform.split_once('/') else { bail!("write the platform like linux/amd64") };
        body["platform"] = json!({ "os": os, "arch": arch });
    }
    let request = context.client.request(Method::POST, &["images", "pull"])?.json(&body);
    added(context, request, Bars::new()).await
}

async fn import(context: &Context, path: &Path, name: Option<&str>) -> Result<u8> {
    let bars = Bars::new();
    let body = if path == Path::new("-") {
        let input = tokio::fs::File::from_std(std::fs::File::from(rustix::io::dup(io::stdin())?));
        upload(ReaderStream::with_capacity(input, PIECE), &bars, None)
    } else if path.is_dir() {
        packed(path.to_owned(), &bars)
    } else {
        let file =
            tokio::fs::File::open(path).await.with_context(|| format!("cannot read {}", path.display()))?;
        let length = file.metadata().await?.len();
        upload(ReaderStream::with_capacity(file, PIECE), &bars, Some(length))
    };
    let mut request = context.client.request(Method::POST, &["images", "import"])?;
    if let Some(name) = name {
        request = request.query(&[("name", name)]);
    }
    let request = request.header("content-type", "application/x-tar").body(body);
    added(context, request, bars).await
}

fn upload(
    pieces: impl stream::Stream<Item = io::Result<bytes::Bytes>> + Send + 'static,
    bars: &Bars,
    length: Option<u64>,
) -> Body {
    let bar = bars.upload(length);
    Body::wrap_stream(pieces.inspect(move |piece| {
        if let (Some(bar), Ok(piece)) = (&bar, piece) {
            bar.inc(piece.len() as u64);
        }
    }))
}

/// A directory as a tar stream. A directory that cannot be read makes the stream fail, not end.
fn packed(directory: PathBuf, bars: &Bars) -> Body {
    let (writer, reader) = tokio::io::duplex(PIECE);
    let bridge = SyncIoBridge::new(writer);
    let packing = tokio::task::spawn_blocking(move || {
        let mut archive = tar::Builder::new(bridge);
        archive.follow_symlinks(false);
        archive.append_dir_all(".", &directory)?;
        archive.into_inner()?.shutdown()
    });
    let end = stream::once(async { packing.await.unwrap_or_else(|panic| Err(io::Error::other(panic))) })
        .filter_map(|result| async { result.err().map(Err) });
    upload(ReaderStream::with_capacity(reader, PIECE).chain(Box::pin(end)), bars, None)
}

#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Line {
    Progress {
        phase: String,
        layer: Option<String>,
        current: Option<u64>,
        total: Option<u64>,
    },
    Done {
        image: Value,
    },
    Error {
        #[serde(default)]
        code: String,
        message: String,
    },
    #[serde(other)]
    Other,
}

/// Sends a request that adds images (an archive may hold several), shows its progress and prints their ids.
async fn added(context: &Context, request: RequestBuilder, mut bars: Bars) -> Result<u8> {
    let mut response = context.client.send(request).await?;
    let mut lines = LineSplitter::default();
    let mut images = Vec::new();
    loop {
        let chunk =
            response.chunk().await.map_err(|error| transport(context.client.profile().base(), &error))?;
        if let Some(chunk) = &chunk {
            lines.push(chunk)?;
            while let Some(line) = lines.next_line() {
                images.extend(take(line, &mut bars)?);
            }
        } else {
            images.extend(take(lines.finish(), &mut bars)?);
            break;
        }
    }
    bars.clear();
    ensure!(!images.is_empty(), "the server's answer ended before the image was complete");
    if context.output.is_json() {
        context.output.json(&images)?;
        return Ok(0);
    }
    for image in &images {
        context.output.line(image.get("id").and_then(Value::as_str).unwrap_or_default())?;
    }
    Ok(0)
}

fn take(line: &[u8], bars: &mut Bars) -> Result<Option<Value>> {
    if line.trim_ascii().is_empty() {
        return Ok(None);
    }
    match serde_json::from_slice(line).context("the server sent a damaged progress line")? {
        Line::Progress { phase, layer, current, total } => bars.show(&phase, layer, current, total),
        Line::Done { image } => return Ok(Some(image)),
        Line::Error { code, message } => {
            bars.clear();
            bail!("{message}{}", if code.is_empty() { String::new() } else { format!(" ({code})") });
        }
        Line::Other => {}
    }
    Ok(None)
}

/// Progress bars on a terminal, nothing elsewhere.
struct Bars {
    screen: Option<MultiProgress>,
    layers: HashMap<String, ProgressBar>,
}

impl Bars {
    fn new() -> Self {
        Self { screen: io::stderr().is_terminal().then(MultiProgress::new), layers: HashMap::new() }
    }

    fn upload(&self, length: Option<u64>) -> Option<ProgressBar> {
        let bar = self.screen.as_ref()?.add(bar(length));
        bar.set_message("sending");
        Some(bar)
    }

    fn show(&mut self, phase: &str, layer: Option<String>, current: Option<u64>, total: Option<u64>) {
        let Some(screen) = &self.screen else { return };
        let short =
            layer.as_deref().map(|id| id.trim_start_matches("sha256:").chars().take(12).collect::<String>());
        let bar = self.layers.entry(layer.unwrap_or_default()).or_insert_with(|| screen.add(bar(total)));
        if let Some(total) = total {
            bar.set_length(total);
        }
        bar.set_position(current.unwrap_or(0));
        let message = short.map_or_else(|| phase.to_owned(), |short| format!("{short} {phase}"));
        bar.set_message(plain(&message).into_owned());
    }

    fn clear(&self) {
        if let Some(screen) = &self.screen {
            // The terminal may be gone; there is nothing left to tidy up then.
            let _ = screen.clear();
        }
    }
}

fn bar(length: Option<u64>) -> ProgressBar {
    let bar = match length {
        Some(length) => ProgressBar::new(length),
        None => ProgressBar::new_spinner(),
    };
    let template = if length.is_some() {
        "{msg:30} [{bar:30}] {bytes}/{total_bytes}"
    } else {
        "{msg:30} {spinner} {bytes}"
    };
    bar.set_style(ProgressStyle::with_template(template).expect("a constant template").progress_chars("=> "));
    bar.enable_steady_tick(TICK);
    bar
}

async fn list(context: &Context, quiet: bool) -> Result<u8> {
    let answer = context.client.call(Method::GET, &["images"], None).await?;
    let images = answer.get("items").or(Some(&answer)).and_then(Value::as_array).cloned().unwrap_or_default();
    let id = |image: &Value| image.get("id").and_then(Value::as_str).unwrap_or_default().to_owned();
    if context.output.is_json() {
        context.output.json(&images)?;
    } else if quiet {
        context.output.text(&images.iter().map(id).collect::<Vec<_>>().join("\n"))?;
    } else {
        let now = jiff::Timestamp::now();
        let rows: Vec<_> = images.iter().flat_map(|image| rows(image, &id(image), now)).collect();
        context.output.table(&["REFERENCE", "ID", "SIZE", "CREATED"], &rows)?;
    }
    Ok(0)
}

fn rows(image: &Value, id: &str, now: jiff::Timestamp) -> Vec<Vec<String>> {
    let short: String = id.trim_start_matches("sha256:").chars().take(12).collect();
    let size = image.get("sizeBytes").and_then(Value::as_u64).map_or_else(|| "-".to_owned(), size);
    let created =
        image.get("createdAt").and_then(Value::as_str).map_or_else(|| "-".to_owned(), |at| relative(at, now));
    let mut names: Vec<String> = image
        .get("references")
        .and_then(Value::as_array)
        .map(|list| list.iter().filter_map(Value::as_str).map(str::to_owned).collect())
        .unwrap_or_default();
    if names.is_empty() {
        names.push("<none>".to_owned());
    }
    names.into_iter().map(|name| vec![name, short.clone(), size.clone(), created.clone()]).collect()
}

fn size(bytes: u64) -> String {
    indicatif::HumanBytes(bytes).to_string()
}

async fn remove(context: &Context, references: &[String]) -> Result<u8> {
    for reference in references {
        let request = context.client.request(Method::DELETE, &["images", reference])?;
        context.client.send(request).await?;
        if !context.output.is_json() {
            context.output.line(reference)?;
        }
    }
    if context.output.is_json() {
        context.output.json(&references)?;
    }
    Ok(0)
}

async fn prune(context: &Context) -> Result<u8> {
    let request = context.client.request(Method::POST, &["images", "prune"])?;
    let text = context.client.send(request).await?.text().await?;
    let answer: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
    if context.output.is_json() {
        context.output.json(&answer)?;
    } else {
        let count = |key: &str| answer.get(key).and_then(Value::as_array).map_or(0, Vec::len);
        let number = |key: &str| answer.get(key).and_then(Value::as_u64).unwrap_or(0);
        let (images, layers, freed) = (count("images"), number("layers"), size(number("bytes")));
        context.output.line(&format!("removed {images} images and {layers} layers, freed {freed}"))?;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_lines_end_in_done_or_error() {
        let mut bars = Bars { screen: None, layers: HashMap::new() };
        let progress =
            br#"{"event":"progress","phase":"download","layer":"sha256:ab","current":1,"total":2}"#;
        assert!(take(progress, &mut bars).unwrap().is_none());
        assert!(take(b"", &mut bars).unwrap().is_none());
        assert!(take(br#"{"event":"news"}"#, &mut bars).unwrap().is_none());
        assert!(take(br#"{"event":"done","image":{"id":"sha256:ab"}}"#, &mut bars).unwrap().is_some());
        let error =
            take(br#"{"event":"error","code":"IMAGE::NOT_FOUND","message":"no such image"}"#, &mut bars);
        assert_eq!(error.unwrap_err().to_string(), "no such image (IMAGE::NOT_FOUND)");
        assert!(take(b"<html>", &mut bars).is_err());
    }

    #[test]
    fn an_image_without_references_is_still_listed() {
        let now = "2030-01-01T00:00:00Z".parse().unwrap();
        let image = json!({ "id": "sha256:0123456789abcdef", "references": [], "sizeBytes": 1024 });
        let listed = rows(&image, "sha256:0123456789abcdef", now);
        assert_eq!(listed, [["<none>", "0123456789ab", "1.00 KiB", "-"].map(str::to_owned).to_vec()]);
    }
}
