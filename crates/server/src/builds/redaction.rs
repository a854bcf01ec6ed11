//! The filter of build logs: every secret and credential of the build, in every form in which it may be written.

use sandglass_builds::{
    ports::{Filter, Filters},
    submission::Confidential,
};
use sandglass_repository::{
    Credential,
    redact::{RedactStream, Redactor},
};

/// See the module documentation.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Redaction;

/// Every value that must not be shown.
pub(super) fn values(confidential: &Confidential) -> Vec<String> {
    let secrets = confidential.secrets.values().map(|secret| secret.expose().to_owned());
    let credentials = confidential.credentials.values().filter_map(|written| {
        match serde_json::from_str(written.expose()).ok()? {
            Credential::Token { token, .. } => Some(token.expose().to_owned()),
            Credential::SshKey { private_key, .. } => Some(private_key.expose().to_owned()),
            Credential::SecretRef { .. } => None,
        }
    });
    secrets.chain(credentials).collect()
}

impl Filters for Redaction {
    fn filter(&self, confidential: &Confidential) -> Box<dyn Filter> {
        let values = values(confidential);
        Box::new(Redacting(Some(Redactor::new(values.iter().map(String::as_str)).stream())))
    }
}

struct Redacting(Option<RedactStream>);

impl Filter for Redacting {
    fn pass(&mut self, chunk: &[u8]) -> Vec<u8> {
        self.0.as_mut().map(|stream| stream.push(chunk)).unwrap_or_default()
    }

    fn finish(&mut self) -> Vec<u8> {
        self.0.take().map(RedactStream::finish).unwrap_or_default()
    }
}
