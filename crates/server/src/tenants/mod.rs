//! Tenants: who calls, by which key, and what of the server is theirs.
//!
//! Owns the keys (one, or each tenant's own from a provider) and the answer to "may this caller know of that resource".
//! Does not own the routes, which ask it.
//!
//! Invariant: a key is hashed when it is read and never kept, logged or sent anywhere but to the provider that knows it.

mod cache;
mod file;
mod http;
mod keyring;
mod open;
mod principal;
mod table;

pub use self::http::HttpProvider;
pub use file::FileProvider;
pub use keyring::{Caller, Denied, KeyDigest, Keyring, ProviderUnavailable, TenantProvider};
pub use open::{OpenError, open};
pub use principal::{Principal, Tenant};
pub use table::TableError;
