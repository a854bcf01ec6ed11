//! Builds the static agent, shim and egress gate and hands their paths to `binaries.rs`, so that one `sandglass` file carries them.
//!
//! A nested cargo with a target directory of its own: the static link flags must not reach build scripts, proc macros or the server.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

const TARGET: &str = "x86_64-unknown-linux-gnu";

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../..");
    // The three programs and every crate of ours that is in one of them.
    let watched =
        ["agent", "bridge", "egress", "netlink", "repository", "sandbox", "shim", "sshd", "supervise"];
    for watched in watched {
        println!("cargo::rerun-if-changed={}", root.join("crates").join(watched).join("src").display());
        println!(
            "cargo::rerun-if-changed={}",
            root.join("crates").join(watched).join("Cargo.toml").display()
        );
    }
    println!("cargo::rerun-if-changed={}", root.join("Cargo.lock").display());

    // Packagers (and checks that never run a box) may bring the binaries instead of having them built.
    println!("cargo::rerun-if-env-changed=SANDGLASS_GUEST_DIR");
    if let Some(dir) = env::var_os("SANDGLASS_GUEST_DIR") {
        name_binaries(Path::new(&dir));
        return;
    }

    // Release builds carry the small, fast binaries; development builds the ones that compile quickly.
    let profile = if env::var("PROFILE").as_deref() == Ok("release") { "guest" } else { "guest-dev" };
    let target_dir = guest_target_dir();
    build(&root, profile, &target_dir);
    name_binaries(&target_dir.join(TARGET).join(profile));
}

fn name_binaries(dir: &Path) {
    for (variable, binary) in [
        ("SANDGLASS_AGENT_BINARY", "sandglass-agent"),
        ("SANDGLASS_SHIM_BINARY", "sandglass-shim"),
        ("SANDGLASS_EGRESS_BINARY", "sandglass-egress"),
    ] {
        let path = dir.join(binary);
        assert!(path.is_file(), "there is no {}", path.display());
        println!("cargo::rustc-env={variable}={}", path.display());
        println!("cargo::rustc-env={variable}_HASH={}", content_hash(&path));
    }
}

/// Names the content. Computed here, because computing it in a running server would bring all of these programs into its memory.
fn content_hash(path: &Path) -> String {
    use std::hash::Hasher;
    let content = std::fs::read(path).expect("it was just built");
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(&content);
    format!("{:016x}", hasher.finish())
}

/// `<target>/guest`, beside the profile directory that holds this build script's output.
fn guest_target_dir() -> PathBuf {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let target = out.ancestors().nth(4).unwrap_or(&out);
    target.join("guest")
}

fn build(root: &Path, profile: &str, target_dir: &Path) {
    let mut cargo = Command::new(env::var_os("CARGO").expect("cargo sets it"));
    cargo
        .current_dir(root)
        .args(["build", "--locked", "--bins"])
        .args([
            "--package",
            "sandglass-agent",
            "--package",
            "sandglass-shim",
            "--package",
            "sandglass-egress",
        ])
        .args(["--profile", profile, "--target", TARGET, "--target-dir"])
        .arg(target_dir)
        .env("RUSTFLAGS", "-C target-feature=+crt-static --cfg getrandom_backend=\"linux_getrandom\"")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WRAPPER")
        .env_remove("RUSTC_WORKSPACE_WRAPPER");
    // The outer cargo's description of this package must not leak into the inner build.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_CFG_")
            || text.starts_with("CARGO_PKG_")
            || text.starts_with("CARGO_FEATURE_")
        {
            cargo.env_remove(&name);
        }
    }
    let status = cargo.status().expect("cargo can be started");
    assert!(status.success(), "building the static programs failed: {status}");
}
