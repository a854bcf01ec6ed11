//! The tools that keep copies of sandboxes.

use reqwest::Method;
use serde_json::{Map, Value, json};

use super::{
    arguments::{SnapshotCreate, SnapshotList, SnapshotOnly},
    call::Call,
    failure::Failure,
    results::{Done, Pagination, SnapshotInfo, SnapshotPage},
};

pub async fn create(call: Call, arguments: SnapshotCreate) -> Result<SnapshotInfo, Failure> {
    let mut body = Map::new();
    if let Some(name) = arguments.name {
        body.insert("name".into(), json!(name));
    }
    let path = ["sandboxes", arguments.sandbox_id.as_str(), "snapshots"];
    let made = call.client().call(Method::POST, &path, Some(&Value::Object(body))).await?;
    Ok(SnapshotInfo::of(&made))
}

pub async fn get(call: Call, arguments: SnapshotOnly) -> Result<SnapshotInfo, Failure> {
    let path = ["snapshots", arguments.snapshot_id.as_str()];
    Ok(SnapshotInfo::of(&call.client().call(Method::GET, &path, None).await?))
}

pub async fn list(call: Call, arguments: SnapshotList) -> Result<SnapshotPage, Failure> {
    let mut query = vec![("page", arguments.page.to_string()), ("pageSize", arguments.page_size.to_string())];
    query.extend(arguments.sandbox_id.map(|id| ("sandboxId", id.as_str().to_owned())));
    query.extend(arguments.name.map(|name| ("name", name)));
    let answer = call.client().page(&["snapshots"], &query).await?;
    let items = answer.get("items").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    Ok(SnapshotPage {
        snapshots: items.iter().map(SnapshotInfo::of).collect(),
        pagination: Pagination::of(&answer),
    })
}

pub async fn delete(call: Call, arguments: SnapshotOnly) -> Result<Done, Failure> {
    let request = call.client().request(Method::DELETE, &["snapshots", arguments.snapshot_id.as_str()])?;
    call.client().send(request).await?;
    Ok(Done { status: "deleted" })
}
