//! `POST /files/upload`: pairs of metadata and file parts, streamed to disk.
//!
//! Nothing is put in place before the whole form has been read and found well-formed.
//! Memory: one part's head or metadata, one piece of content, and [`MAX_WAITING`] bytes for the files of the form.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

use super::edit::Permission;
use super::multipart::{BadForm, Event, Head, Parser};
use super::stage::Stage;
use super::{Scope, listen_on};
use crate::accounts::Accounts;
use crate::http::query::{Object, first_json};
use crate::http::reply::{Code, Failure, Outcome};

const MAX_METADATA: usize = 64 << 10;
/// Small body chunks are gathered to this size before they go to the disk.
const WRITE: usize = 256 << 10;
/// What the files of one form may take in memory until all of it has arrived, at [`FILE_COST`] and its path each.
const MAX_WAITING: usize = 32 << 20;
const FILE_COST: usize = 1024;

pub(super) async fn upload(scope: Scope, request: Request<Incoming>) -> Outcome {
    let kind = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let parser = Parser::new(kind);
    let mut body = request.into_body();
    let received = match parser {
        Ok(parser) => receive(&scope, parser, &mut body).await,
        Err(error) => Err(bad_form(&error)),
    };
    match received {
        Ok(files) => {
            let commit =
                move || files.into_iter().try_for_each(|(stage, permission)| stage.commit(&permission));
            scope.blocking_empty(commit).await
        }
        Err(failure) => {
            listen_on(body);
            Err(failure)
        }
    }
}

/// A file of the form: all of it is on the disk, but not in its place.
type Waiting = (Stage, Permission);

async fn receive(scope: &Scope, parser: Parser, body: &mut Incoming) -> Result<Vec<Waiting>, Failure> {
    let mut form = Form {
        scope,
        parser,
        part: Part::Other,
        targets: VecDeque::new(),
        files: Vec::new(),
        cost: 0,
        metadata: 0,
    };
    let read = form.read(body).await.and_then(|()| form.check());
    let Form { part, files, .. } = form;
    if let Err(failure) = read {
        // Nothing is left behind by the time that the client knows.
        let remove = move || {
            drop((part, files));
            Ok(())
        };
        scope.blocking(remove).await?;
        return Err(failure);
    }
    Ok(files)
}

/// Where one file of the form goes.
struct Target {
    path: String,
    permission: Permission,
}

/// The part that is being read.
enum Part {
    /// Plain form values, which the contract ignores, and whatever else there is.
    Other,
    Metadata(BytesMut),
    File {
        stage: Box<Stage>,
        permission: Permission,
        gathered: BytesMut,
    },
}

struct Form<'a> {
    scope: &'a Scope,
    parser: Parser,
    part: Part,
    targets: VecDeque<Target>,
    files: Vec<Waiting>,
    /// What `targets` and `files` have taken.
    cost: usize,
    metadata: usize,
}

impl Form<'_> {
    async fn read(&mut self, body: &mut Incoming) -> Result<(), Failure> {
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| bad_form(&BadForm::Truncated))?;
            if let Ok(data) = frame.into_data() {
                self.push(data).await?;
            }
        }
        Ok(())
    }

    async fn push(&mut self, data: Bytes) -> Result<(), Failure> {
        self.parser.push(data);
        while let Some(event) = self.parser.next().map_err(|e| bad_form(&e))? {
            match event {
                Event::Begin(head) => self.begin(&head).await?,
                Event::Data(data) => self.data(data).await?,
                Event::End => self.end().await?,
            }
        }
        Ok(())
    }

    async fn begin(&mut self, head: &Head) -> Result<(), Failure> {
        self.part = match head.name.as_str() {
            "metadata" if head.is_file => Part::Metadata(BytesMut::new()),
            "file" if head.is_file => {
                let Target { path, permission } = self.targets.pop_front().ok_or_else(|| {
                    refuse(Code::InvalidFile, "a file part must come after the metadata part it belongs to")
                })?;
                let path = self.scope.path(&path)?;
                let view = self.scope.clone();
                let stage = self.scope.blocking(move || Stage::create(&view, &path).map(Box::new)).await?;
                Part::File { stage, permission, gathered: BytesMut::new() }
            }
            _ => Part::Other,
        };
        Ok(())
    }

    async fn data(&mut self, data: Bytes) -> Result<(), Failure> {
        match &mut self.part {
            Part::Other => {}
            Part::Metadata(text) if text.len() + data.len() > MAX_METADATA => {
                return Err(refuse(Code::InvalidFileMetadata, "metadata part is too large"));
            }
            Part::Metadata(text) => text.extend_from_slice(&data),
            Part::File { gathered, .. } => {
                // A chunk of a good size is written as it is, without another copy.
                let ready = if gathered.is_empty() && data.len() >= WRITE {
                    data
                } else {
                    gathered.extend_from_slice(&data);
                    if gathered.len() < WRITE {
                        return Ok(());
                    }
                    gathered.split().freeze()
                };
                self.write(ready).await?;
            }
        }
        Ok(())
    }

    async fn write(&mut self, bytes: Bytes) -> Result<(), Failure> {
        if let Part::File { mut stage, permission, gathered } = std::mem::replace(&mut self.part, Part::Other)
        {
            let stage = self.scope.blocking(move || stage.write(&bytes).map(|()| stage)).await?;
            self.part = Part::File { stage, permission, gathered };
        }
        Ok(())
    }

    async fn end(&mut self) -> Result<(), Failure> {
        match std::mem::replace(&mut self.part, Part::Other) {
            Part::Other => Ok(()),
            Part::Metadata(text) => self.add_target(&text).await,
            Part::File { mut stage, permission, gathered } => {
                let close = move || {
                    stage.write(&gathered)?;
                    stage.close(&permission)?;
                    Ok((*stage, permission))
                };
                let file = self.scope.blocking(close).await?;
                self.files.push(file);
                Ok(())
            }
        }
    }

    async fn add_target(&mut self, text: &[u8]) -> Result<(), Failure> {
        self.metadata += 1;
        let target = read_metadata(self.scope, text).await?;
        self.cost += target.path.len() + FILE_COST;
        if self.cost > MAX_WAITING {
            return Err(refuse(Code::InvalidFile, "too many files in one form"));
        }
        self.targets.push_back(target);
        Ok(())
    }

    fn check(&self) -> Result<(), Failure> {
        self.parser.finish().map_err(|e| bad_form(&e))?;
        match (self.metadata, self.files.len()) {
            (0, _) => Err(refuse(Code::InvalidFileMetadata, "metadata file is missing")),
            (_, 0) => Err(refuse(Code::InvalidFileContent, "file is missing")),
            (m, f) if m != f => {
                Err(refuse(Code::InvalidFile, &format!("metadata and file count mismatch: {m} and {f}")))
            }
            _ => Ok(()),
        }
    }
}

fn bad_form(reason: &BadForm) -> Failure {
    refuse(Code::InvalidFile, &format!("invalid multipart form: {reason}"))
}

fn refuse(code: Code, message: &str) -> Failure {
    Failure::new(StatusCode::BAD_REQUEST, code, message)
}

async fn read_metadata(scope: &Scope, text: &[u8]) -> Result<Target, Failure> {
    let invalid = |message: &str| refuse(Code::InvalidFileMetadata, message);
    let object = first_json(text).and_then(Object::new).map_err(|e| invalid(&e.message))?;
    let path = object
        .string("path")
        .map_err(|e| invalid(&e.message))?
        .filter(|p| !p.is_empty())
        .ok_or_else(|| invalid("metadata path is empty"))?;
    let permission = scope.blocking(move || Permission::parse(&object, &Accounts::load())).await?;
    Ok(Target { path, permission })
}
