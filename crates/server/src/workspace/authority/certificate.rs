//! OpenSSH's user certificates, as its PROTOCOL.certkeys has them, signed with ed25519.
//!
//! Pure: keys, time and chance are given. The library that the SSH server of a box is made of could do this as well, but the server needs
//! one structure of it, and no protocol.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use rustls::{
    SignatureScheme,
    crypto::ring::sign::any_eddsa_type,
    pki_types::PrivatePkcs8KeyDer,
    sign::{Signer, SigningKey},
};
use sha2::{Digest, Sha256};

/// Longest line that may be a public key.
const MOST_LINE: usize = 4096;
const ED25519: &str = "ssh-ed25519";
/// What comes before the 32 bytes of a key in PKCS #8 (RFC 8410).
const PKCS8: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];
/// The type of certificates of users.
const USER: u32 = 1;
/// What a certificate permits beside running programs, in the order of their names; what the sandbox forbids stays forbidden.
const EXTENSIONS: [&str; 2] = ["permit-port-forwarding", "permit-pty"];

/// A public key that may be certified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PublicKey {
    kind: &'static Kind,
    blob: Vec<u8>,
}

/// What belongs to a key of one kind, behind its name.
#[derive(Debug, PartialEq, Eq)]
struct Kind {
    name: &'static str,
    certificate: &'static str,
    fields: &'static [Field],
}

#[derive(Debug, PartialEq, Eq)]
enum Field {
    Bytes(usize),
    Text(&'static str),
    /// Names what a security key is for.
    Application,
}

/// As in `authorized_keys` of the sandbox: no RSA.
const KINDS: [Kind; 6] = [
    Kind { name: ED25519, certificate: "ssh-ed25519-cert-v01@openssh.com", fields: &[Field::Bytes(32)] },
    Kind {
        name: "ecdsa-sha2-nistp256",
        certificate: "ecdsa-sha2-nistp256-cert-v01@openssh.com",
        fields: &[Field::Text("nistp256"), Field::Bytes(65)],
    },
    Kind {
        name: "ecdsa-sha2-nistp384",
        certificate: "ecdsa-sha2-nistp384-cert-v01@openssh.com",
        fields: &[Field::Text("nistp384"), Field::Bytes(97)],
    },
    Kind {
        name: "ecdsa-sha2-nistp521",
        certificate: "ecdsa-sha2-nistp521-cert-v01@openssh.com",
        fields: &[Field::Text("nistp521"), Field::Bytes(133)],
    },
    Kind {
        name: "sk-ssh-ed25519@openssh.com",
        certificate: "sk-ssh-ed25519-cert-v01@openssh.com",
        fields: &[Field::Bytes(32), Field::Application],
    },
    Kind {
        name: "sk-ecdsa-sha2-nistp256@openssh.com",
        certificate: "sk-ecdsa-sha2-nistp256-cert-v01@openssh.com",
        fields: &[Field::Text("nistp256"), Field::Bytes(65), Field::Application],
    },
];

impl PublicKey {
    /// From a line as `ssh-keygen` writes it: `ssh-ed25519 AAAA… comment`. `None` for anything else, options included.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let line = line.trim();
        if line.len() > MOST_LINE || line.chars().any(char::is_control) {
            return None;
        }
        let mut words = line.split_ascii_whitespace();
        let (name, data) = (words.next()?, words.next()?);
        let kind = KINDS.iter().find(|kind| kind.name == name)?;
        let blob = STANDARD.decode(data).ok()?;
        let mut rest = &blob[..];
        let proper = take(&mut rest)? == name.as_bytes()
            && kind.fields.iter().all(|field| {
                take(&mut rest).is_some_and(|bytes| match field {
                    Field::Bytes(length) => bytes.len() == *length,
                    Field::Text(text) => bytes == text.as_bytes(),
                    Field::Application => bytes.len() <= 255 && bytes.iter().all(u8::is_ascii_graphic),
                })
            })
            && rest.is_empty();
        proper.then_some(Self { kind, blob })
    }

    /// As programs show it: `SHA256:…`.
    pub(super) fn fingerprint(&self) -> String {
        let digest = STANDARD.encode(Sha256::digest(&self.blob));
        format!("SHA256:{}", digest.trim_end_matches('='))
    }

    /// Everything behind the name.
    fn fields(&self) -> &[u8] {
        &self.blob[4 + self.kind.name.len()..]
    }
}

/// A private key that signs.
pub(super) struct Signing {
    signer: Box<dyn Signer>,
    public: Vec<u8>,
}

/// What a certificate says beside the key.
pub(super) struct Statement<'a> {
    pub(super) nonce: &'a [u8],
    /// Which one it is, among those of the authority.
    pub(super) serial: u64,
    /// For logs.
    pub(super) key_id: &'a str,
    pub(super) principal: &'a str,
    /// Unix seconds.
    pub(super) valid_after: u64,
    pub(super) valid_before: u64,
}

impl Signing {
    /// Of the 32 bytes that are the secret.
    pub(super) fn of(secret: &[u8; 32]) -> Option<Self> {
        let der: Vec<u8> = PKCS8.iter().chain(secret).copied().collect();
        let key = any_eddsa_type(&PrivatePkcs8KeyDer::from(der)).ok()?;
        let public = SigningKey::public_key(&*key)?.as_ref().last_chunk::<32>()?.to_vec();
        Some(Self { signer: key.choose_scheme(&[SignatureScheme::ED25519])?, public })
    }

    fn blob(&self) -> Vec<u8> {
        let mut blob = Vec::new();
        put(&mut blob, ED25519.as_bytes());
        put(&mut blob, &self.public);
        blob
    }

    /// For those who are to believe it: `ssh-ed25519 AAAA…`.
    pub(super) fn public_key(&self) -> String {
        format!("{ED25519} {}", STANDARD.encode(self.blob()))
    }

    /// The line of a file `…-cert.pub`.
    pub(super) fn certify(&self, key: &PublicKey, said: &Statement<'_>) -> Option<String> {
        let mut text = Vec::new();
        put(&mut text, key.kind.certificate.as_bytes());
        put(&mut text, said.nonce);
        text.extend_from_slice(key.fields());
        text.extend_from_slice(&said.serial.to_be_bytes());
        text.extend_from_slice(&USER.to_be_bytes());
        put(&mut text, said.key_id.as_bytes());
        put(&mut text, &list(&[said.principal.as_bytes()]));
        text.extend_from_slice(&said.valid_after.to_be_bytes());
        text.extend_from_slice(&said.valid_before.to_be_bytes());
        // Critical options.
        put(&mut text, b"");
        put(&mut text, &list(&EXTENSIONS.map(|name| [name.as_bytes(), b""]).concat()));
        // Reserved.
        put(&mut text, b"");
        put(&mut text, &self.blob());
        let signature = self.signer.sign(&text).ok()?;
        put(&mut text, &list(&[ED25519.as_bytes(), &signature]));
        Some(format!("{} {}", key.kind.certificate, STANDARD.encode(text)))
    }
}

fn put(to: &mut Vec<u8>, bytes: &[u8]) {
    // Everything here is far shorter.
    to.extend_from_slice(&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes());
    to.extend_from_slice(bytes);
}

fn list(parts: &[&[u8]]) -> Vec<u8> {
    let mut all = Vec::new();
    parts.iter().for_each(|part| put(&mut all, part));
    all
}

fn take<'a>(from: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, rest) = from.split_first_chunk::<4>()?;
    let (bytes, rest) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
    *from = rest;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const KEY: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPKSUTyz1HwHReFVvD5obVsALAgJRNarH4TRpNePnAS ann@example";

    fn statement() -> Statement<'static> {
        Statement {
            nonce: &[1; 16],
            serial: 7,
            key_id: "sandbox sb-1",
            principal: "sb-1",
            valid_after: 100,
            valid_before: 400,
        }
    }

    #[test]
    fn the_vector_of_rfc_8032() {
        let secret = [
            0x9d, 0x61, 0xb1, 0x9d, 0xef, 0xfd, 0x5a, 0x60, 0xba, 0x84, 0x4a, 0xf4, 0x92, 0xec, 0x2c, 0xc4,
            0x44, 0x49, 0xc5, 0x69, 0x7b, 0x32, 0x69, 0x19, 0x70, 0x3b, 0xac, 0x03, 0x1c, 0xae, 0x7f, 0x60,
        ];
        let public = Signing::of(&secret).unwrap().public;
        assert_eq!(&public[..4], [0xd7, 0x5a, 0x98, 0x01]);
    }

    #[test]
    fn openssh_reads_what_is_signed() {
        let signing = Signing::of(&[3; 32]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        for kind in ["ed25519", "ecdsa"] {
            let path = folder.path().join(kind);
            let made =
                Command::new("ssh-keygen").args(["-q", "-t", kind, "-N", "", "-f"]).arg(&path).status();
            assert!(made.unwrap().success());
            let line = std::fs::read_to_string(path.with_extension("pub")).unwrap();
            let key = PublicKey::parse(&line).unwrap();
            let certificate = folder.path().join("cert.pub");
            std::fs::write(&certificate, signing.certify(&key, &statement()).unwrap()).unwrap();
            let shown =
                Command::new("ssh-keygen").arg("-Lf").arg(&certificate).env("TZ", "UTC").output().unwrap();
            let shown = String::from_utf8(shown.stdout).unwrap();
            let authority = PublicKey::parse(&signing.public_key()).unwrap().fingerprint();
            for part in [
                "user certificate",
                &key.fingerprint(),
                &authority,
                "Key ID: \"sandbox sb-1\"",
                "Serial: 7",
                "from 1970-01-01T00:01:40 to 1970-01-01T00:06:40",
                "sb-1",
                "Critical Options: (none)",
                "permit-port-forwarding",
                "permit-pty",
            ] {
                assert!(shown.contains(part), "{part}: {shown}");
            }
        }
    }

    #[test]
    fn only_whole_keys_of_known_kinds_are_keys() {
        assert_eq!(PublicKey::parse(KEY), PublicKey::parse(&format!(" {KEY}\n")));
        let bare: Vec<&str> = KEY.split(' ').collect();
        assert!(PublicKey::parse(&bare[..2].join(" ")).is_some());
        for wrong in [
            "",
            "ssh-ed25519",
            "ssh-ed25519 AAAA",
            "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAAQ==",
            &format!("restrict {KEY}"),
            &format!("{KEY}\n{KEY}"),
            &KEY.replace("ssh-ed25519 ", "ecdsa-sha2-nistp256 "),
            &KEY.replace("PnAS", ""),
            &"a".repeat(9000),
        ] {
            assert_eq!(PublicKey::parse(wrong), None, "{wrong:.60}");
        }
    }
}
