//! The bodies about pools.

use sandglass_api::lifecycle::CreateSandboxRequest;
use sandglass_sandbox::pool::Capacity;
use serde_json::Value;

use crate::http::{error::ApiResult, fields::Findings, pools::template_request};

/// What a pool is asked to be.
#[derive(Debug)]
pub struct NewPool {
    pub name: String,
    pub capacity: Capacity,
    /// What its boxes are made as, of an image or a repository; `None` for a pod template.
    pub request: Option<CreateSandboxRequest>,
}

fn capacity(findings: &mut Findings, value: &Value) -> Option<Capacity> {
    let object = findings.object(value)?;
    let mut bound = |name: &str| {
        let bound = findings.required(object, name, |f, v| f.integer(v, 0, i64::MAX));
        bound.and_then(|bound| u64::try_from(bound).ok())
    };
    let (buffer_max, buffer_min) = (bound("bufferMax"), bound("bufferMin"));
    let (pool_max, pool_min) = (bound("poolMax"), bound("poolMin"));
    Some(Capacity {
        buffer_min: buffer_min?,
        buffer_max: buffer_max?,
        pool_min: pool_min?,
        pool_max: pool_max?,
    })
}

fn dns_like(text: &str) -> bool {
    let edge = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.first().is_some_and(|c| edge(*c))
        && bytes.last().is_some_and(|c| edge(*c))
        && bytes.iter().all(|c| edge(*c) || *c == b'-')
}

/// The body that creates a pool: of an image, of a repository, or of a pod template.
pub fn new_pool(value: &Value) -> ApiResult<NewPool> {
    let mut findings = Findings::new("body");
    let mut of_ours = None;
    let read = findings.object(value).and_then(|object| {
        let pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
        let name = findings.required(object, "name", |f, v| f.shaped(v, 253, pattern, dns_like));
        let given = |name: &str| object.get(name).is_some_and(|value| !value.is_null());
        if (given("image") || given("repository")) && !given("template") {
            of_ours = Some(template_request(object));
        } else {
            findings.required(object, "template", |f, v| f.map(v, |_, item| Some(item.clone())));
        }
        let capacity = findings.required(object, "capacitySpec", capacity);
        Some((name?, capacity?))
    });
    let (name, capacity) = findings.finish(read)?;
    let request = of_ours.map(|request| super::create::create(&request)).transpose()?;
    Ok(NewPool { name, capacity, request })
}

/// The body that resizes a pool.
pub fn resized_pool(value: &Value) -> ApiResult<Capacity> {
    let mut findings = Findings::new("body");
    let capacity =
        findings.object(value).and_then(|object| findings.required(object, "capacitySpec", capacity));
    findings.finish(capacity)
}
