//! `POST /files/upload`: pairs of metadata and file parts, streamed to disk.
//!
//! Nothing is put in place before the whole form has been read and found well-formed.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use http::Request;
use http::header::CONTENT_TYPE;
use http_body_util::BodyDataStream;
use hyper::body::Incoming;
use multer::{Field, Multipart};

use super::edit::Permission;
use super::stage::Stage;
use super::{Scope, blocking, blocking_empty};
use crate::accounts::Accounts;
use crate::http::query::{Object, first_json};
use crate::http::reply::{Code, Failure, Outcome};

const MAX_METADATA: usize = 1 << 20;
/// Small body chunks are gathered to this size before they go to the blocking pool.
const WRITE: usize = 256 << 10;

/// Where one file of the form goes.
struct Target {
    path: String,
    permission: Permission,
}

pub(super) async fn upload(scope: Scope, request: Request<Incoming>) -> Outcome {
    let boundary = request
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| multer::parse_boundary(value).ok())
        .ok_or_else(|| bad_form("request Content-Type isn't multipart/form-data"))?;
    let mut form = Multipart::new(BodyDataStream::new(request.into_body()), boundary);
    let mut targets: VecDeque<Target> = VecDeque::new();
    let mut staged: Vec<(Stage, Permission)> = Vec::new();
    let (mut metadata, mut files) = (0, 0);
    while let Some(field) = form.next_field().await.map_err(|e| bad_form(&e.to_string()))? {
        match field.name() {
            // Parts without a file name are plain form values, which the contract ignores.
            Some("metadata") if field.file_name().is_some() => {
                metadata += 1;
                targets.push_back(read_metadata(field).await?);
            }
            Some("file") if field.file_name().is_some() => {
                files += 1;
                let target = targets
                    .pop_front()
                    .ok_or_else(|| bad_form("a file part must come after the metadata part it belongs to"))?;
                staged.push((receive(&scope, &target.path, field).await?, target.permission));
            }
            _ => {}
        }
    }
    check_counts(metadata, files)?;
    blocking_empty(move || {
        for (stage, permission) in staged {
            let path = stage.commit()?;
            permission.apply(&path)?;
        }
        Ok(())
    })
    .await
}

fn bad_form(reason: &str) -> Failure {
    Failure::new(
        http::StatusCode::BAD_REQUEST,
        Code::InvalidFile,
        format!("invalid multipart form: {reason}"),
    )
}

fn check_counts(metadata: usize, files: usize) -> Result<(), Failure> {
    let failure = |code, message: String| Failure::new(http::StatusCode::BAD_REQUEST, code, message);
    match (metadata, files) {
        (0, _) => Err(failure(Code::InvalidFileMetadata, "metadata file is missing".into())),
        (_, 0) => Err(failure(Code::InvalidFileContent, "file is missing".into())),
        (m, f) if m != f => {
            Err(failure(Code::InvalidFile, format!("metadata and file count mismatch: {m} and {f}")))
        }
        _ => Ok(()),
    }
}

async fn read_metadata(mut field: Field<'_>) -> Result<Target, Failure> {
    let invalid =
        |message: String| Failure::new(http::StatusCode::BAD_REQUEST, Code::InvalidFileMetadata, message);
    let mut text = BytesMut::new();
    while let Some(chunk) = field.chunk().await.map_err(|e| bad_form(&e.to_string()))? {
        if text.len() + chunk.len() > MAX_METADATA {
            return Err(invalid("metadata part is too large".into()));
        }
        text.extend_from_slice(&chunk);
    }
    let object = first_json(&text).and_then(Object::new).map_err(|e| invalid(e.message))?;
    let path = object
        .string("path")
        .map_err(|e| invalid(e.message))?
        .filter(|p| !p.is_empty())
        .ok_or_else(|| invalid("metadata path is empty".into()))?;
    let permission = blocking(move || Permission::parse(&object, &Accounts::load())).await?;
    Ok(Target { path, permission })
}

async fn receive(scope: &Scope, raw: &str, mut field: Field<'_>) -> Result<Stage, Failure> {
    let path = scope.path(raw)?;
    let scope = scope.clone();
    let mut stage = blocking(move || Stage::create(&scope, &path)).await?;
    let mut gathered = BytesMut::new();
    while let Some(chunk) = field.chunk().await.map_err(|e| bad_form(&e.to_string()))? {
        // A chunk of a good size is written as it is, without another copy.
        let ready = if gathered.is_empty() && chunk.len() >= WRITE {
            chunk
        } else {
            gathered.extend_from_slice(&chunk);
            if gathered.len() < WRITE {
                continue;
            }
            gathered.split().freeze()
        };
        stage = write(stage, ready).await?;
    }
    stage = write(stage, gathered.freeze()).await?;
    stage.close();
    Ok(stage)
}

async fn write(mut stage: Stage, bytes: Bytes) -> Result<Stage, Failure> {
    if bytes.is_empty() {
        return Ok(stage);
    }
    blocking(move || stage.write(&bytes).map(|()| stage)).await
}
