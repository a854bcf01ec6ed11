//! The one provider of cryptography of this program.

/// Makes sure that TLS clients can be made, whoever runs this crate. Whoever was first is as good: there is only one provider.
pub(crate) fn use_ring() {
    drop(rustls::crypto::ring::default_provider().install_default());
}
