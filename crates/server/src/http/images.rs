//! Local images: list, pull, import, remove, prune. Routes of ours; the lifecycle API has none for this.
//!
//! They need the operator: the store is shared, and its list would show one tenant what the others run.
//!
//! Long operations answer with JSON lines: progress, then exactly one `done` or `error` line. The work goes on when the client leaves, except
//! that an import ends with its upload.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use axum::{
    body::{Body, Bytes},
    extract::{Path, Request},
    response::{IntoResponse, Response},
};
use futures_util::StreamExt;
use http::{StatusCode, header};
use sandglass_images::{
    Credentials, Image, ImageDigest, ImageError, ImageErrorKind, ImageStore, Platform, Progress,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, sync::mpsc};

use super::{
    error::{ApiError, ApiResult, Code},
    middleware::auth::Operator,
    parse::{QueryString, RawBody},
};
use crate::telemetry::belonging;

/// Largest archive that an import accepts.
const MAX_ARCHIVE_BYTES: u64 = 64 << 30;

/// The store and who uses what is in it.
#[derive(Clone)]
pub struct Images {
    pub store: Arc<ImageStore>,
    /// Where archives lie while they are uploaded; on the disk of the images, not in the system's temporary directory.
    pub uploads: PathBuf,
    pub in_use: Arc<dyn Fn() -> BTreeSet<String> + Send + Sync>,
}

impl std::fmt::Debug for Images {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Images")
    }
}

/// One image as it is listed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ImageSummary {
    id: String,
    references: Vec<String>,
    size_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    created_at: Option<String>,
    platform: Platform,
    layers: usize,
}

impl From<&Image> for ImageSummary {
    fn from(image: &Image) -> Self {
        Self {
            id: image.id.to_string(),
            references: image.references.clone(),
            size_bytes: image.size_bytes,
            created_at: image.created_at.clone(),
            platform: image.platform.clone(),
            layers: image.layers.len(),
        }
    }
}

pub(super) fn of_image(error: &ImageError) -> ApiError {
    let code = match error.kind() {
        ImageErrorKind::InvalidReference
        | ImageErrorKind::Corrupt
        | ImageErrorKind::TooLarge
        | ImageErrorKind::Unsupported => Code::InvalidParameter,
        ImageErrorKind::NotFound => Code::ImageNotFound,
        ImageErrorKind::InUse => Code::ImageInUse,
        ImageErrorKind::Unauthorized | ImageErrorKind::Unreachable => Code::ImagePullFailed,
        ImageErrorKind::NoSpace => Code::NoSpace,
        ImageErrorKind::Io => Code::SandboxInternal,
    };
    ApiError::new(code, error.to_string())
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ImageError> + Send + 'static,
) -> ApiResult<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|e| of_image(&e)),
        Err(_) => Err(ApiError::internal()),
    }
}

/// `GET /images`
pub async fn list(_: Operator, images: Images) -> ApiResult<Response> {
    let found = blocking(move || images.store.list()).await?;
    let items: Vec<ImageSummary> = found.iter().map(ImageSummary::from).collect();
    Ok(axum::Json(json!({ "items": items })).into_response())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PullRequest {
    reference: String,
    #[serde(default)]
    auth: Option<Auth>,
    #[serde(default)]
    platform: Option<Platform>,
}

#[derive(Deserialize)]
struct Auth {
    username: String,
    password: String,
}

/// `POST /images/pull`
pub async fn pull(_: Operator, images: Images, body: RawBody) -> ApiResult<Response> {
    let wanted: PullRequest = serde_json::from_value(body.required()?).map_err(|_| {
        ApiError::invalid_parameter(
            "the body must be {reference, auth?: {username, password}, platform?: {os, arch}}",
        )
    })?;
    let (tell, lines) = mpsc::channel(64);
    tokio::spawn(belonging(async move {
        let auth = wanted.auth.map(|a| Credentials { username: a.username, password: a.password });
        let report = progress_lines(tell.clone());
        let pulled = images.store.pull(&wanted.reference, auth, wanted.platform, &report).await;
        finish(&tell, pulled.as_ref()).await;
    }));
    Ok(streamed(lines))
}

/// `POST /images/import?name=`
pub async fn import(_: Operator, images: Images, request: Request) -> ApiResult<Response> {
    let query = QueryString::parse(request.uri().query());
    let name = query.last("name").filter(|n| !n.is_empty()).map(str::to_owned);
    let archive = receive(&images.uploads, request.into_body()).await?;
    let (tell, lines) = mpsc::channel(64);
    tokio::task::spawn_blocking(move || {
        let report = progress_lines(tell.clone());
        let imported = images.store.import(archive.path(), name.as_deref(), &report);
        drop(archive);
        let runtime = tokio::runtime::Handle::current();
        match imported {
            Ok(all) if !all.is_empty() => {
                for image in &all {
                    runtime.block_on(finish(&tell, Ok(image)));
                }
            }
            Ok(_) => runtime
                .block_on(finish(&tell, Err(&ImageError::Corrupt("the archive holds no image".into())))),
            Err(error) => runtime.block_on(finish(&tell, Err(&error))),
        }
    });
    Ok(streamed(lines))
}

/// Writes the upload to a file that disappears with its handle.
async fn receive(uploads: &std::path::Path, body: Body) -> ApiResult<tempfile::NamedTempFile> {
    let file = tempfile::NamedTempFile::new_in(uploads).map_err(|_| no_room())?;
    let mut out = tokio::fs::File::from_std(file.reopen().map_err(|_| no_room())?);
    let mut size = 0u64;
    let mut chunks = body.into_data_stream();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|_| ApiError::invalid_parameter("the upload ended early"))?;
        size += chunk.len() as u64;
        if size > MAX_ARCHIVE_BYTES {
            return Err(ApiError::invalid_parameter("the archive is larger than 64 GiB"));
        }
        out.write_all(&chunk).await.map_err(|_| no_room())?;
    }
    out.flush().await.map_err(|_| no_room())?;
    Ok(file)
}

fn no_room() -> ApiError {
    ApiError::new(Code::NoSpace, "the archive cannot be written to the server's state directory")
}

/// `DELETE /images/{reference}`
pub async fn remove(_: Operator, images: Images, Path(reference): Path<String>) -> ApiResult<Response> {
    let used = (images.in_use)();
    let gone =
        blocking(move || images.store.remove(&reference, &|id: &ImageDigest| used.contains(id.as_str())))
            .await?;
    Ok(axum::Json(gone).into_response())
}

/// `POST /images/prune`
pub async fn prune(_: Operator, images: Images) -> ApiResult<Response> {
    let used = (images.in_use)();
    let gone = blocking(move || images.store.collect_garbage(&|id: &ImageDigest| used.contains(id.as_str())))
        .await?;
    Ok(axum::Json(gone).into_response())
}

/// Progress that nobody has read yet is dropped rather than holding up the work.
fn progress_lines(tell: mpsc::Sender<Value>) -> impl Fn(Progress) + Send + Sync {
    move |progress: Progress| {
        let mut line = json!({
            "event": "progress",
            "phase": progress.phase,
            "current": progress.current,
            "layers": progress.layers,
        });
        if let Some(layer) = &progress.layer {
            line["layer"] = json!(layer.short());
        }
        if let Some(total) = progress.total {
            line["total"] = json!(total);
        }
        let _ = tell.try_send(line);
    }
}

async fn finish(tell: &mpsc::Sender<Value>, outcome: Result<&Image, &ImageError>) {
    let line = match outcome {
        Ok(image) => json!({ "event": "done", "image": ImageSummary::from(image) }),
        Err(error) => {
            let error = of_image(error);
            json!({ "event": "error", "code": error.code, "message": error.message })
        }
    };
    // A client that left does not learn the outcome; that is all.
    let _ = tell.send(line).await;
}

fn streamed(mut lines: mpsc::Receiver<Value>) -> Response {
    let body = futures_util::stream::poll_fn(move |cx| lines.poll_recv(cx)).map(|line| {
        let mut text = line.to_string();
        text.push('\n');
        Ok::<_, std::convert::Infallible>(Bytes::from(text))
    });
    let headers = [(header::CONTENT_TYPE, "application/x-ndjson"), (header::CACHE_CONTROL, "no-cache")];
    (StatusCode::OK, headers, Body::from_stream(body)).into_response()
}
