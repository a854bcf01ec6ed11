//! The dependency rules: which crate may depend on which, and where a third-party crate may appear.
//!
//! They keep the domain crate compiling in seconds and a kernel call, an SQL statement or a wire type from leaking into a crate
//! that is meant to know nothing of it. A change here is a change of architecture and belongs in an ADR.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;

/// Workspace crates that a crate's own code (not its tests) may use.
const LAYERS: &[(&str, &[&str])] = &[
    ("sandglass-sandbox", &[]),
    ("sandglass-api", &["sandglass-sandbox"]),
    ("sandglass-builds", &["sandglass-sandbox"]),
    ("sandglass-images", &[]),
    ("sandglass-shim", &["sandglass-netlink"]),
    ("sandglass-proxy", &[]),
    ("sandglass-bridge", &[]),
    ("sandglass-ingress", &[]),
    ("sandglass-repository", &[]),
    ("sandglass-netlink", &[]),
    ("sandglass-egress", &["sandglass-netlink", "sandglass-proxy"]),
    ("sandglass-runtimes", &["sandglass-sandbox", "sandglass-images", "sandglass-shim"]),
    ("sandglass-supervise", &["sandglass-sandbox"]),
    ("sandglass-sshd", &[]),
    ("sandglass-webhooks", &["sandglass-sandbox"]),
    (
        "sandglass-agent",
        &[
            "sandglass-api",
            "sandglass-sandbox",
            "sandglass-proxy",
            "sandglass-supervise",
            "sandglass-sshd",
            "sandglass-bridge",
            "sandglass-repository",
        ],
    ),
    (
        "sandglass-server",
        &[
            "sandglass-api",
            "sandglass-bridge",
            "sandglass-builds",
            "sandglass-images",
            "sandglass-repository",
            "sandglass-supervise",
            "sandglass-ingress",
            "sandglass-proxy",
            "sandglass-runtimes",
            "sandglass-sandbox",
            "sandglass-shim",
            "sandglass-webhooks",
        ],
    ),
    (
        "sandglass",
        &[
            "sandglass-api",
            "sandglass-images",
            "sandglass-runtimes",
            "sandglass-sandbox",
            "sandglass-server",
            "sandglass-shim",
        ],
    ),
    (
        "sandglass-testkit",
        &["sandglass-api", "sandglass-images", "sandglass-runtimes", "sandglass-sandbox", "sandglass-server"],
    ),
    ("xtask", &[]),
];

/// Third-party crates that are walled in, with the only crates that may name them.
const WALLS: &[(&str, &[&str])] = &[
    ("sqlx", &["sandglass-server"]),
    ("bollard", &["sandglass-runtimes"]),
    ("kube", &["sandglass-runtimes"]),
    ("k8s-openapi", &["sandglass-runtimes"]),
    ("tonic", &["sandglass-runtimes"]),
    ("oci-client", &["sandglass-images"]),
    ("seccompiler", &["sandglass-shim", "sandglass-agent"]),
    ("russh", &["sandglass-sshd"]),
    ("rustix", KERNEL),
    ("libc", KERNEL),
    ("axum", &["sandglass-agent", "sandglass-server", "sandglass"]),
    ("clap", &["sandglass"]),
    ("rmcp", &["sandglass"]),
    ("anyhow", &["sandglass", "sandglass-server", "xtask"]),
];

/// Crates that may make system calls; the domain, the wire types and the proxy may not.
const KERNEL: &[&str] = &[
    "sandglass-netlink",
    "sandglass-egress",
    "sandglass-shim",
    "sandglass-sshd",
    "sandglass-agent",
    "sandglass-runtimes",
    "sandglass-images",
    "sandglass-repository",
    "sandglass-server",
    "sandglass",
];

const LINES_WARN: usize = 600;
const LINES_FAIL: usize = 900;

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let mut broken = Vec::new();
    layers(workspace, &mut broken);
    walls(workspace, &mut broken);
    file_sizes(workspace, &mut broken)?;
    if !broken.is_empty() {
        bail!("{}", broken.join("\n"));
    }
    println!("{} packages follow the dependency rules", workspace.packages.len());
    Ok(())
}

fn layers(workspace: &Workspace, broken: &mut Vec<String>) {
    let rules: BTreeMap<_, _> = LAYERS.iter().copied().collect();
    for package in &workspace.packages {
        let Some(allowed) = rules.get(package.name.as_str()) else {
            broken.push(format!("{}: no rule; add the crate to LAYERS in xtask/src/deps.rs", package.name));
            continue;
        };
        for dependency in &package.dependencies {
            let ours = rules.contains_key(dependency.name.as_str());
            let in_tests_only = dependency.kind.as_deref() == Some("dev");
            if ours && !in_tests_only && !allowed.contains(&dependency.name.as_str()) {
                broken.push(format!("{} must not depend on {}", package.name, dependency.name));
            }
        }
    }
}

fn walls(workspace: &Workspace, broken: &mut Vec<String>) {
    for package in &workspace.packages {
        for dependency in &package.dependencies {
            let wall = WALLS.iter().find(|(name, _)| *name == dependency.name);
            let in_tests_only = dependency.kind.as_deref() == Some("dev");
            if let Some((name, inside)) = wall
                && !in_tests_only
                && !inside.contains(&package.name.as_str())
            {
                broken.push(format!("{} must not depend on {name}; only {inside:?} may", package.name));
            }
        }
    }
}

/// Long files are where reviews stop reading.
fn file_sizes(workspace: &Workspace, broken: &mut Vec<String>) -> Result<()> {
    for package in &workspace.packages {
        let folder = package.manifest_path.parent().context("a manifest has a folder")?;
        for file in rust_files(folder)? {
            let text = std::fs::read_to_string(&file)
                .with_context(|| format!("failed to read {}", file.display()))?;
            let lines = text.lines().count();
            let name = file.strip_prefix(&workspace.root).unwrap_or(&file).display();
            if lines > LINES_FAIL {
                broken.push(format!("{name}: {lines} lines, the limit is {LINES_FAIL}"));
            } else if lines > LINES_WARN {
                println!("note: {name} has {lines} lines; above {LINES_WARN} a file wants splitting");
            }
        }
    }
    Ok(())
}

fn rust_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut waiting = vec![folder.to_path_buf()];
    while let Some(folder) = waiting.pop() {
        for entry in
            std::fs::read_dir(&folder).with_context(|| format!("failed to list {}", folder.display()))?
        {
            let entry = entry?;
            let path = entry.path();
            if entry.file_type()?.is_dir() {
                if entry.file_name() != "target" {
                    waiting.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    Ok(found)
}
