//! From the configuration to the keyring.

use std::{path::PathBuf, sync::Arc};

use super::{file::FileProvider, http::HttpProvider, keyring::Keyring, table::TableError};
use crate::config::{Config, TenantProvider as Kind};

/// Why the tenants cannot be looked up at all. The server does not start then: nobody could use it.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("the tenants file {} cannot be read: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("the tenants file {} is not valid: {source}", path.display())]
    Invalid { path: PathBuf, source: TableError },
    #[error("tenants.endpoint is missing")]
    NoEndpoint,
    #[error("tenants.auth_header and tenants.auth_token do not make a header")]
    AuthHeader,
    #[error("no client for the tenant provider: {0}")]
    Client(reqwest::Error),
}

/// The keyring of a configuration: its one key, or its tenants. Without either, authentication is off.
///
/// # Errors
/// When there are to be tenants and the provider cannot be set up.
pub async fn open(config: &Config) -> Result<Keyring, OpenError> {
    let Some(tenants) = &config.tenants else {
        return Ok(Keyring::single(config.server.api_key.as_ref().map(|key| key.expose())));
    };
    Ok(match tenants.provider {
        Kind::File => Keyring::tenants(Arc::new(FileProvider::open(&tenants.file).await?)),
        Kind::Http => Keyring::tenants(Arc::new(HttpProvider::new(tenants)?)),
    })
}
