//! User certificates: who signed them, for whom, for how long, with which limits.

use std::net::IpAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use russh::keys::Certificate;
use russh::keys::ssh_key::certificate::CertType;

use super::{Access, Grant, Refusal, parse_sources, source_matches};

/// Everything but the signatures, which the protocol has checked: the peer's by the certificate's key and the
/// authority's by the key that the certificate names. Whether that key is trusted is decided here.
pub(super) fn check(
    access: &Access,
    certificate: &Certificate,
    login: &str,
    now: SystemTime,
    source: Option<IpAddr>,
) -> Result<Grant, Refusal> {
    if !access.authorities.iter().any(|key| key.key_data() == certificate.signature_key()) {
        return Err(Refusal::Authority);
    }
    if certificate.cert_type() != CertType::User {
        return Err(Refusal::NotUser);
    }
    let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    if now < certificate.valid_after() || now >= certificate.valid_before() {
        return Err(Refusal::Validity);
    }
    // None at all would mean everybody; nobody wants that by accident.
    let named = |name: &String| name == login || (!access.sandbox.is_empty() && *name == access.sandbox);
    if !certificate.valid_principals().iter().any(named) {
        return Err(Refusal::Principal);
    }
    let extension = |name: &str| certificate.extensions().contains_key(name);
    let mut grant = Grant {
        terminal: extension("permit-pty"),
        forwarding: extension("permit-port-forwarding"),
        command: None,
    };
    for (name, value) in certificate.critical_options().iter() {
        match name.as_str() {
            "force-command" => grant.command = Some(value.clone()),
            "source-address" => {
                let sources = parse_sources(value).ok_or_else(|| Refusal::CriticalOption(name.clone()))?;
                if !source_matches(&sources, source) {
                    return Err(Refusal::Source);
                }
            }
            _ => return Err(Refusal::CriticalOption(name.clone())),
        }
    }
    Ok(grant)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use russh::keys::key::safe_rng;
    use russh::keys::ssh_key::certificate::Builder;
    use russh::keys::{Algorithm, PrivateKey};

    use super::*;

    fn key() -> PrivateKey {
        PrivateKey::random(&mut safe_rng(), Algorithm::Ed25519).unwrap()
    }

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    /// Valid from 100 to 200 for `ann`.
    fn signed(ca: &PrivateKey, change: impl FnOnce(&mut Builder)) -> Certificate {
        let mut builder =
            Builder::new_with_random_nonce(&mut safe_rng(), key().public_key(), 100, 200).unwrap();
        change(&mut builder);
        builder.sign(ca).unwrap()
    }

    fn for_ann(builder: &mut Builder) {
        builder.valid_principal("ann").unwrap();
    }

    fn access(ca: &PrivateKey) -> Access {
        Access { keys: vec![], authorities: vec![ca.public_key().clone()], sandbox: "sb-1".into() }
    }

    #[test]
    fn the_window_is_told_by_the_given_clock() {
        let ca = key();
        let certificate = signed(&ca, for_ann);
        let try_at = |seconds| access(&ca).certificate(&certificate, "ann", at(seconds), None);
        assert_eq!(try_at(99), Err(Refusal::Validity));
        assert!(try_at(100).is_ok() && try_at(199).is_ok());
        assert_eq!(try_at(200), Err(Refusal::Validity));
    }

    #[test]
    fn a_principal_is_the_login_or_the_sandbox() {
        let ca = key();
        let check = |certificate: &Certificate, login: &str| {
            access(&ca).certificate(certificate, login, at(150), None)
        };
        assert!(check(&signed(&ca, for_ann), "ann").is_ok());
        assert_eq!(check(&signed(&ca, for_ann), "bob"), Err(Refusal::Principal));
        let sandbox = signed(&ca, |builder| {
            builder.valid_principal("sb-1").unwrap();
        });
        assert!(check(&sandbox, "bob").is_ok());
        let everybody = signed(&ca, |builder| {
            builder.all_principals_valid().unwrap();
        });
        assert_eq!(check(&everybody, "ann"), Err(Refusal::Principal));
        let nameless = Access { sandbox: String::new(), ..access(&ca) };
        let empty = signed(&ca, |builder| {
            builder.valid_principal("").unwrap();
        });
        assert_eq!(nameless.certificate(&empty, "ann", at(150), None), Err(Refusal::Principal));
    }

    #[test]
    fn only_the_named_authority_counts_and_only_for_users() {
        let (ca, other) = (key(), key());
        let foreign = signed(&other, for_ann);
        assert_eq!(access(&ca).certificate(&foreign, "ann", at(150), None), Err(Refusal::Authority));
        let host = signed(&ca, |builder| {
            for_ann(builder);
            builder.cert_type(CertType::Host).unwrap();
        });
        assert_eq!(access(&ca).certificate(&host, "ann", at(150), None), Err(Refusal::NotUser));
    }

    #[test]
    fn critical_options_limit_or_refuse() {
        let ca = key();
        let with = |name: &str, value: &str| {
            signed(&ca, |builder| {
                for_ann(builder);
                builder.critical_option(name, value).unwrap();
            })
        };
        let check = |certificate: &Certificate, source: Option<IpAddr>| {
            access(&ca).certificate(certificate, "ann", at(150), source)
        };
        let forced = check(&with("force-command", "id"), None).unwrap();
        assert_eq!(forced.command.as_deref(), Some("id"));
        let sourced = with("source-address", "127.0.0.1/32");
        assert!(check(&sourced, Some([127, 0, 0, 1].into())).is_ok());
        assert_eq!(check(&sourced, Some([10, 0, 0, 1].into())), Err(Refusal::Source));
        assert_eq!(check(&sourced, None), Err(Refusal::Source));
        assert!(matches!(check(&with("source-address", "*"), None), Err(Refusal::CriticalOption(_))));
        assert_eq!(
            check(&with("verify-required", ""), None),
            Err(Refusal::CriticalOption("verify-required".into()))
        );
    }

    #[test]
    fn only_what_its_extensions_permit_is_granted() {
        let ca = key();
        let bare = signed(&ca, for_ann);
        let grant = access(&ca).certificate(&bare, "ann", at(150), None).unwrap();
        assert_eq!(grant, Grant { terminal: false, forwarding: false, command: None });
        let permitted = signed(&ca, |builder| {
            for_ann(builder);
            builder.extension("permit-pty", "").unwrap();
            builder.extension("permit-port-forwarding", "").unwrap();
        });
        assert_eq!(access(&ca).certificate(&permitted, "ann", at(150), None).unwrap(), Grant::EVERYTHING);
    }
}
