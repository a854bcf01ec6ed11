//! The body of a create: shape first, all mistakes together; then the rules across fields, the first broken one.

use sandglass_api::lifecycle::{
    CreateSandboxRequest, CredentialProxyConfig, ENTRYPOINT_EXTENSION, HostVolume, ImageAuth, ImageSpec,
    LifecycleHook, LifecycleHooks, OssfsVolume, POOL_REF_EXTENSION, PeriodicLifecycleHook, PlatformSpec,
    PvcVolume, Volume,
};
use serde_json::Value;

use super::{repository, seed, small::policy_value};
use crate::http::{error::ApiResult, fields::Findings};

/// Decodes and checks what needs no configuration.
pub fn create(value: &Value) -> ApiResult<CreateSandboxRequest> {
    let value = seed::canonical(value)?;
    let mut findings = Findings::new("body");
    let request = request(&mut findings, &value);
    if findings.count() == 0
        && let Some(request) = &request
    {
        repository::check_source(request)?;
    }
    if findings.count() == 0
        && let Some(request) = &request
        && let Some(broken) = broken_rule(request)
    {
        findings.broken(&broken);
    }
    findings.finish(request)
}

fn request(f: &mut Findings, value: &Value) -> Option<CreateSandboxRequest> {
    let object = f.object(value)?;
    Some(CreateSandboxRequest {
        image: f.optional(object, "image", image),
        snapshot_id: f.optional(object, "snapshotId", Findings::string),
        template_id: f.optional(object, "templateId", Findings::nonempty),
        platform: f.optional(object, "platform", platform),
        timeout: f.optional(object, "timeout", |f, v| f.integer(v, 60, i64::MAX)),
        resource_limits: f.optional(object, "resourceLimits", Findings::string_map),
        resource_requests: f.optional(object, "resourceRequests", Findings::string_map),
        env: f.optional(object, "env", Findings::nullable_map),
        metadata: f.optional(object, "metadata", Findings::string_map),
        lifecycle: f.optional(object, "lifecycle", hooks),
        entrypoint: f.optional(object, "entrypoint", |f, v| f.strings(v, 1)),
        network_policy: f.optional(object, "networkPolicy", policy_value),
        credential_proxy: f.optional(object, "credentialProxy", |f, v| {
            let object = f.object(v)?;
            let enabled = f.optional(object, "enabled", Findings::boolean).unwrap_or(false);
            Some(CredentialProxyConfig { enabled })
        }),
        secure_access: f.optional(object, "secureAccess", Findings::boolean).unwrap_or(false),
        volumes: f.optional(object, "volumes", |f, v| f.list(v, 0, volume)),
        extensions: f.optional(object, "extensions", Findings::string_map),
        wake_on_access: f.optional(object, "wakeOnAccess", Findings::boolean),
        repository: f.optional(object, "repository", repository::repository),
        image_build: f.optional(object, "imageBuild", repository::image_build),
        boot: f.optional(object, "boot", repository::boot),
        services: f.optional(object, "services", repository::services),
        policies: f.optional(object, "policies", repository::policies),
        agent: f.optional(object, "agent", repository::agent),
    })
}

fn image(f: &mut Findings, value: &Value) -> Option<ImageSpec> {
    let object = f.object(value)?;
    let uri = f.required(object, "uri", Findings::string);
    let auth = f.optional(object, "auth", |f, v| {
        let object = f.object(v)?;
        let username = f.required(object, "username", Findings::string);
        let password = f.required(object, "password", Findings::string);
        Some(ImageAuth { username: username?, password: password? })
    });
    Some(ImageSpec { uri: uri?, auth })
}

fn platform(f: &mut Findings, value: &Value) -> Option<PlatformSpec> {
    let object = f.object(value)?;
    let os = f.required(object, "os", Findings::string);
    let arch = f.required(object, "arch", Findings::string);
    Some(PlatformSpec { os: os?, arch: arch? })
}

fn hooks(f: &mut Findings, value: &Value) -> Option<LifecycleHooks> {
    let object = f.object(value)?;
    f.only(object, &["preStart", "preStop", "periodic"]);
    let hook = |f: &mut Findings, v: &Value, most: i64| {
        let object = f.object(v)?;
        f.only(object, &["command", "timeoutSeconds"]);
        let command = f.required(object, "command", command);
        let timeout_seconds = f.optional(object, "timeoutSeconds", |f, v| f.integer(v, 1, most));
        Some(LifecycleHook { command: command?, timeout_seconds })
    };
    let pre_start = f.optional(object, "preStart", |f, v| hook(f, v, 10_800));
    let pre_stop = f.optional(object, "preStop", |f, v| hook(f, v, 60));
    let periodic = f.optional(object, "periodic", |f, v| {
        let all = f.list(v, 0, periodic)?;
        let mut names: Vec<&str> = all.iter().map(|hook| hook.name.trim()).collect();
        names.sort_unstable();
        if names.windows(2).any(|pair| pair[0] == pair[1]) {
            f.broken("periodic hooks must have different names");
        }
        Some(all)
    });
    Some(LifecycleHooks { pre_start, pre_stop, periodic })
}

fn command(f: &mut Findings, value: &Value) -> Option<Vec<String>> {
    let words = f.strings(value, 1)?;
    if words[0].trim().is_empty() {
        f.broken("the command must not be blank");
        return None;
    }
    Some(words)
}

fn not_blank(f: &mut Findings, value: &Value) -> Option<String> {
    let text = f.string(value)?;
    if text.trim().is_empty() {
        f.broken("must not be blank");
        return None;
    }
    Some(text)
}

fn periodic(f: &mut Findings, value: &Value) -> Option<PeriodicLifecycleHook> {
    let object = f.object(value)?;
    f.only(object, &["name", "schedule", "command", "timeoutSeconds"]);
    let name = f.required(object, "name", not_blank);
    let schedule = f.required(object, "schedule", not_blank);
    let command = f.required(object, "command", command);
    let timeout_seconds = f.optional(object, "timeoutSeconds", |f, v| f.integer(v, 1, 300));
    Some(PeriodicLifecycleHook { name: name?, schedule: schedule?, command: command?, timeout_seconds })
}

fn dns_label(text: &str) -> bool {
    let edge = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.first().is_some_and(|c| edge(*c))
        && bytes.last().is_some_and(|c| edge(*c))
        && bytes.iter().all(|c| edge(*c) || *c == b'-')
}

const DNS_LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";

fn volume(f: &mut Findings, value: &Value) -> Option<Volume> {
    let object = f.object(value)?;
    let before = f.count();
    let name = f.required(object, "name", |f, v| f.shaped(v, 63, DNS_LABEL, dns_label));
    let host = f.optional(object, "host", |f, v| {
        let object = f.object(v)?;
        let path = f.required(object, "path", |f, v| f.shaped(v, 4096, r"^(/|[A-Za-z]:[\\/])", host_path));
        Some(HostVolume { path: path? })
    });
    let pvc = f.optional(object, "pvc", pvc);
    let ossfs = f.optional(object, "ossfs", ossfs);
    let mount_path =
        f.required(object, "mountPath", |f, v| f.shaped(v, 4096, "^/.*", |text| text.starts_with('/')));
    let read_only = f.optional(object, "readOnly", Findings::boolean).unwrap_or(false);
    let sub_path = f.optional(object, "subPath", Findings::string);
    let backends =
        [host.is_some(), pvc.is_some(), ossfs.is_some()].into_iter().filter(|given| *given).count();
    if f.count() == before && backends != 1 {
        f.broken("exactly one of host, pvc and ossfs must be given");
    }
    Some(Volume { name: name?, host, pvc, ossfs, mount_path: mount_path?, read_only, sub_path })
}

fn host_path(text: &str) -> bool {
    let bytes = text.as_bytes();
    text.starts_with('/')
        || bytes.first().is_some_and(u8::is_ascii_alphabetic)
            && bytes.get(1) == Some(&b':')
            && matches!(bytes.get(2), Some(b'/' | b'\\'))
}

fn quantity(text: &str) -> bool {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = &text[number.len()..];
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"].contains(&unit)
        && number
            .split_once('.')
            .map_or_else(|| digits(number), |(whole, part)| digits(whole) && digits(part))
}

fn pvc(f: &mut Findings, value: &Value) -> Option<PvcVolume> {
    let object = f.object(value)?;
    let claim_name = f.required(object, "claimName", |f, v| f.shaped(v, 253, DNS_LABEL, dns_label));
    Some(PvcVolume {
        create_if_not_exists: f.optional(object, "createIfNotExists", Findings::boolean).unwrap_or(true),
        delete_on_sandbox_termination: f
            .optional(object, "deleteOnSandboxTermination", Findings::boolean)
            .unwrap_or(false),
        storage_class: f.optional(object, "storageClass", Findings::string),
        storage: f.optional(object, "storage", |f, v| {
            f.shaped(v, 64, r"^\d+(\.\d+)?(Ki|Mi|Gi|Ti|Pi|Ei)?$", quantity)
        }),
        access_modes: f.optional(object, "accessModes", |f, v| f.strings(v, 0)),
        claim_name: claim_name?,
    })
}

fn ossfs(f: &mut Findings, value: &Value) -> Option<OssfsVolume> {
    let object = f.object(value)?;
    let bucket = f.required(object, "bucket", |f, v| f.bounded(v, 3, 63));
    let endpoint = f.required(object, "endpoint", Findings::nonempty);
    let version =
        f.optional(object, "version", |f, v| f.word(v, &["1.0", "2.0"])).unwrap_or_else(|| "2.0".to_owned());
    let options = f.optional(object, "options", |f, v| f.strings(v, 0));
    let access_key_id = f.required(object, "accessKeyId", Findings::nonempty);
    let access_key_secret = f.required(object, "accessKeySecret", Findings::nonempty);
    Some(OssfsVolume {
        bucket: bucket?,
        endpoint: endpoint?,
        version,
        options,
        access_key_id,
        access_key_secret,
    })
}

fn given(text: Option<&str>) -> bool {
    text.is_some_and(|t| !t.trim().is_empty())
}

/// The first rule across fields that is broken, in the documented order.
fn broken_rule(request: &CreateSandboxRequest) -> Option<String> {
    let says = |text: &str| Some(text.to_owned());
    if request.env.as_ref().is_some_and(|env| env.contains_key("OPENSANDBOX_LIFECYCLE")) {
        return says("env must not contain OPENSANDBOX_LIFECYCLE");
    }
    if given(request.template_id.as_deref()) {
        return template_rule(request);
    }
    let extension = |name: &str| request.extensions.as_ref().and_then(|e| e.get(name)).map(String::as_str);
    if given(extension(POOL_REF_EXTENSION)) {
        if request.lifecycle.is_some() {
            return says("lifecycle cannot be combined with a pool");
        }
        return given(request.snapshot_id.as_deref())
            .then(|| "snapshotId cannot be combined with a pool".to_owned());
    }
    if request.credential_proxy.as_ref().is_some_and(|p| p.enabled) && request.network_policy.is_none() {
        return says("credentialProxy needs a networkPolicy");
    }
    if request.repository.is_some() {
        return None;
    }
    let image = given(request.image.as_ref().map(|i| i.uri.as_str()));
    if image == given(request.snapshot_id.as_deref()) {
        return says("exactly one of image and snapshotId must be given");
    }
    let chosen = matches!(extension(ENTRYPOINT_EXTENSION), Some("image" | "none"));
    if image && request.entrypoint.is_none() && !chosen {
        return says("entrypoint is required with an image");
    }
    if request.resource_limits.is_none() {
        return says("resourceLimits is required; it may be empty");
    }
    None
}

fn template_rule(request: &CreateSandboxRequest) -> Option<String> {
    let present = [
        ("credentialProxy", request.credential_proxy.is_some()),
        ("entrypoint", request.entrypoint.is_some()),
        ("env", request.env.is_some()),
        ("image", request.image.is_some()),
        ("lifecycle", request.lifecycle.is_some()),
        ("platform", request.platform.is_some()),
        ("resourceLimits", request.resource_limits.is_some()),
        ("resourceRequests", request.resource_requests.is_some()),
        ("secureAccess", request.secure_access),
        ("snapshotId", given(request.snapshot_id.as_deref())),
        ("volumes", request.volumes.is_some()),
    ];
    let named: Vec<&str> = present.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
    if !named.is_empty() {
        return Some(format!("these cannot be combined with templateId: {}", named.join(", ")));
    }
    request.timeout.is_none().then(|| "timeout is required with templateId".to_owned())
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
