//! The tools that work on files.
//!
//! Bound: `max_bytes` of a file, 1,000 entries of a directory or search out of an answer of at most 16 MiB.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use reqwest::{
    Method,
    header::{CONTENT_RANGE, HeaderMap},
};
use serde_json::{Map, Value, json};

use super::{
    arguments::{
        Encoding, FileCreateDirectories, FileList, FileMove, FileRead, FileReplaceContents, FileSearch,
        FileWrite, Paths,
    },
    call::Call,
    excerpt::without_cut_end,
    failure::Failure,
    results::{Done, Entries, EntryInfo, FileContent, Replacement, Replacements},
};
use crate::agent::{Agent, Ownership};

/// Entries of a directory or search that are returned.
const MOST_ENTRIES: usize = 1_000;
const LARGEST_READ: u32 = 1 << 20;

pub async fn read(call: Call, arguments: FileRead) -> Result<FileContent, Failure> {
    let by_line = arguments.offset.is_some() || arguments.limit.is_some();
    if by_line && arguments.range_header.is_some() {
        return Err(Failure::arguments("range_header counts bytes, offset and limit count lines: use one"));
    }
    let limit = arguments.max_bytes.clamp(1, LARGEST_READ) as usize;
    let agent = call.agent(arguments.sandbox_id.as_str()).await?;
    let mut query = vec![("path", arguments.path.clone())];
    query.extend(arguments.offset.map(|line| ("offset", line.to_string())));
    query.extend(arguments.limit.map(|lines| ("limit", lines.to_string())));
    let mut request = agent.request(Method::GET, "/files/download").query(&query);
    if let Some(range) = &arguments.range_header {
        request = request.header("range", range);
    }
    let mut response = agent.send(request).await?;
    let (start, size) = position(response.headers(), response.content_length());
    let mut bytes = Vec::new();
    while bytes.len() <= limit {
        let Some(piece) = response.chunk().await.map_err(|error| Failure::from(agent.broken(&error)))? else {
            break;
        };
        bytes.extend_from_slice(&piece);
    }
    let whole =
        Piece { start, size: size.filter(|_| !by_line), by_line, ranged: arguments.range_header.is_some() };
    whole.content(arguments.path, arguments.encoding, &bytes, limit)
}

/// Where an answer begins in its file, and how long the file is.
fn position(headers: &HeaderMap, length: Option<u64>) -> (u64, Option<u64>) {
    let range = headers.get(CONTENT_RANGE).and_then(|value| value.to_str().ok()?.strip_prefix("bytes "));
    match range.and_then(|range| range.split_once('/')) {
        None => (0, length),
        Some((range, size)) => {
            let start = range.split('-').next().and_then(|start| start.parse().ok());
            (start.unwrap_or(0), size.parse().ok())
        }
    }
}

/// What is known of bytes of a file.
struct Piece {
    start: u64,
    size: Option<u64>,
    by_line: bool,
    ranged: bool,
}

impl Piece {
    fn content(
        self,
        path: String,
        encoding: Encoding,
        bytes: &[u8],
        limit: usize,
    ) -> Result<FileContent, Failure> {
        let truncated = bytes.len() > limit;
        let mut kept = &bytes[..bytes.len().min(limit)];
        let content = match encoding {
            Encoding::Base64 => STANDARD.encode(kept),
            Encoding::Utf8 => {
                if truncated {
                    kept = without_cut_end(kept);
                }
                match std::str::from_utf8(kept) {
                    Ok(text) => text.to_owned(),
                    // A range may begin or end within a character.
                    Err(_) if self.ranged => String::from_utf8_lossy(kept).into_owned(),
                    Err(_) => {
                        let why = format!("{path} is not UTF-8 text; read it with encoding base64");
                        return Err(Failure::new("NOT_TEXT", why));
                    }
                }
            }
        };
        let next = self.start + kept.len() as u64;
        Ok(FileContent {
            path,
            content,
            encoding,
            bytes: kept.len() as u64,
            size: self.size,
            truncated,
            next_range_header: (truncated && !self.by_line).then(|| format!("bytes={next}-")),
        })
    }
}

pub async fn write(call: Call, arguments: FileWrite) -> Result<Done, Failure> {
    let content = match arguments.encoding {
        Encoding::Utf8 => arguments.content.into_bytes(),
        Encoding::Base64 => STANDARD
            .decode(arguments.content.trim())
            .map_err(|error| Failure::arguments(format!("content is not base64: {error}")))?,
    };
    let agent = call.agent(arguments.sandbox_id.as_str()).await?;
    let ownership = Ownership {
        mode: arguments.mode.map(spelled).transpose()?,
        owner: arguments.owner,
        group: arguments.group,
    };
    agent.write(&arguments.path, content, &ownership).await?;
    Ok(Done { status: "written" })
}

/// Permissions as the agent spells them: octal digits, read as a decimal number.
fn spelled(mode: u32) -> Result<u32, Failure> {
    match u32::from_str_radix(&mode.to_string(), 8) {
        Ok(bits) if bits <= 0o777 => Ok(mode),
        _ => Err(Failure::arguments(format!("{mode} are not permissions; write them like 644 or 755"))),
    }
}

pub async fn delete(call: Call, arguments: Paths) -> Result<Done, Failure> {
    remove(call, arguments, "/files").await
}

pub async fn delete_directories(call: Call, arguments: Paths) -> Result<Done, Failure> {
    remove(call, arguments, "/directories").await
}

async fn remove(call: Call, arguments: Paths, route: &str) -> Result<Done, Failure> {
    let paths = some(arguments.paths, "paths")?;
    let agent = call.agent(arguments.sandbox_id.as_str()).await?;
    let query: Vec<(&str, &str)> = paths.iter().map(|path| ("path", path.as_str())).collect();
    agent.send(agent.request(Method::DELETE, route).query(&query)).await?;
    Ok(Done { status: "deleted" })
}

fn some<T>(list: Vec<T>, name: &str) -> Result<Vec<T>, Failure> {
    if list.is_empty() { Err(Failure::arguments(format!("{name} is empty"))) } else { Ok(list) }
}

pub async fn list(call: Call, arguments: FileList) -> Result<Entries, Failure> {
    let agent = call.agent(arguments.sandbox_id.as_str()).await?;
    let query = [("path", arguments.path), ("depth", arguments.depth.max(1).to_string())];
    entries(&agent, "/directories/list", &query).await
}

pub async fn search(call: Call, arguments: FileSearch) -> Result<Entries, Failure> {
    let agent = call.agent(arguments.sandbox_id.as_str()).await?;
    let query = [("path", arguments.path), ("pattern", arguments.pattern)];
    entries(&agent, "/files/search", &query).await
}

async fn entries(agent: &Agent, route: &str, query: &[(&str, String)]) -> Result<Entries, Failure> {
    let answer = agent.json(agent.request(Method::GET, route).query(query)).await?;
    let all = answer.as_array().map(Vec::as_slice).unwrap_or_default();
    Ok(Entries {
        result: all.iter().take(MOST_ENTRIES).map(EntryInfo::of).collect(),
        total: all.len() as u64,
        truncated: all.len() > MOST_ENTRIES,
    })
}

pub async fn create_directories(call: Call, arguments: FileCreateDirectories) -> Result<Done, Failure> {
    let mut body = Map::new();
    for entry in some(arguments.entries, "entries")? {
        let mode = spelled(entry.mode.unwrap_or(755))?;
        let wanted = json!({ "mode": mode, "owner": entry.owner, "group": entry.group });
        body.insert(entry.path, wanted);
    }
    let agent = call.agent(arguments.sandbox_id.as_str()).await?;
    agent.send(agent.request(Method::POST, "/directories").json(&Value::Object(body))).await?;
    Ok(Done { status: "created" })
}

pub async fn relocate(call: Call, arguments: FileMove) -> Result<Done, Failure> {
    let moves: Vec<Value> = some(arguments.entries, "entries")?
        .into_iter()
        .map(|entry| json!({ "src": entry.source, "dest": entry.destination }))
        .collect();
    let agent = call.agent(arguments.sandbox_id.as_str()).await?;
    agent.send(agent.request(Method::POST, "/files/mv").json(&moves)).await?;
    Ok(Done { status: "moved" })
}

/// One request for each entry: the agent takes one for a path, and entries may name a path twice.
pub async fn replace_contents(call: Call, arguments: FileReplaceContents) -> Result<Replacements, Failure> {
    let entries = some(arguments.entries, "entries")?;
    let agent = call.agent(arguments.sandbox_id.as_str()).await?;
    let mut result = Vec::new();
    for (index, entry) in entries.into_iter().enumerate() {
        let body = json!({ &entry.path: { "old": entry.old_content, "new": entry.new_content } });
        let request = agent.request(Method::POST, "/files/replace").query(&[("verbose", "true")]);
        let answer = agent.json(request.json(&body)).await.map_err(|error| {
            Failure::from(error)
                .while_doing(&format!("entry {index} ({}), after those before it", entry.path))
        })?;
        let count = answer.get(&entry.path).and_then(|found| found.get("replacedCount"));
        let replaced_count = count.and_then(Value::as_u64).unwrap_or(0);
        result.push(Replacement { path: entry.path, replaced_count });
    }
    Ok(Replacements { result })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(piece: Piece, bytes: &[u8], limit: usize) -> Result<FileContent, Failure> {
        piece.content("/a".into(), Encoding::Utf8, bytes, limit)
    }

    fn whole(size: u64) -> Piece {
        Piece { start: 0, size: Some(size), by_line: false, ranged: false }
    }

    #[test]
    fn a_long_text_is_cut_at_a_character_and_says_where_to_go_on() {
        let file = "ab\u{20ac}cd";
        let cut = text(whole(7), file.as_bytes(), 4).unwrap();
        assert_eq!((cut.content.as_str(), cut.bytes, cut.truncated), ("ab", 2, true));
        assert_eq!(cut.next_range_header.as_deref(), Some("bytes=2-"));
        let rest = Piece { start: 2, size: Some(7), by_line: false, ranged: true };
        let rest = text(rest, &file.as_bytes()[2..], 64).unwrap();
        assert_eq!(
            (rest.content.as_str(), rest.truncated, rest.next_range_header),
            ("\u{20ac}cd", false, None)
        );
    }

    #[test]
    fn bytes_that_are_no_text_are_refused_as_text_and_given_as_base64() {
        assert_eq!(text(whole(2), &[0xff, 0xfe], 64).unwrap_err().code(), "NOT_TEXT");
        let given = whole(2).content("/a".into(), Encoding::Base64, &[0xff, 0xfe], 64).unwrap();
        assert_eq!(given.content, "//4=");
    }

    #[test]
    fn a_ranged_answer_tells_where_it_stands() {
        let mut headers = HeaderMap::new();
        assert_eq!(position(&headers, Some(9)), (0, Some(9)));
        headers.insert(CONTENT_RANGE, "bytes 5-8/100".parse().unwrap());
        assert_eq!(position(&headers, Some(4)), (5, Some(100)));
    }

    #[test]
    fn permissions_are_octal_digits() {
        assert_eq!(spelled(755).unwrap(), 755);
        for wrong in [778, 1777, 8] {
            assert!(spelled(wrong).is_err(), "{wrong}");
        }
    }
}
