//! The JSON documents images are described by: descriptors, manifests, indexes and configurations.
//!
//! Read leniently: unknown fields are ignored, and `null` is as good as absent, because tools differ. Invariant: nothing
//! here is trusted before its bytes were checked against a digest.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

use crate::error::ImageError;
use crate::image::{ImageConfig, ImageDigest, Platform};

/// Manifests and configurations larger than this are refused.
pub(crate) const MAX_DOCUMENT: u64 = 8 << 20;
/// More layers than this cannot be mounted.
const MAX_LAYERS: usize = 500;

/// What the manifest kinds are asked for in.
pub(crate) const MANIFEST_TYPES: &[&str] = &[
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) media_type: String,
    pub(crate) digest: ImageDigest,
    #[serde(default)]
    pub(crate) size: u64,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) annotations: BTreeMap<String, String>,
    #[serde(default)]
    pub(crate) platform: Option<DescribedPlatform>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct DescribedPlatform {
    #[serde(default, deserialize_with = "or_default")]
    os: String,
    #[serde(default, deserialize_with = "or_default")]
    architecture: String,
    #[serde(default, deserialize_with = "or_default")]
    variant: String,
}

/// Either form, told apart by content: media types are optional and sometimes wrong.
#[derive(Debug)]
pub(crate) enum Document {
    Manifest(Manifest),
    Index(Index),
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Index {
    pub(crate) manifests: Vec<Descriptor>,
}

impl Document {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ImageError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Probe {
            schema_version: Option<u32>,
            manifests: Option<serde::de::IgnoredAny>,
            #[serde(default)]
            fs_layers: Option<serde::de::IgnoredAny>,
        }
        let probe: Probe = parse(bytes, "manifest")?;
        if probe.schema_version == Some(1) || probe.fs_layers.is_some() {
            return Err(ImageError::Unsupported("a manifest of the old schema 1".to_owned()));
        }
        if probe.manifests.is_some() {
            return Ok(Self::Index(parse(bytes, "manifest list")?));
        }
        let manifest: Manifest = parse(bytes, "manifest")?;
        if manifest.layers.len() > MAX_LAYERS {
            return Err(ImageError::TooLarge(format!("an image of more than {MAX_LAYERS} layers")));
        }
        Ok(Self::Manifest(manifest))
    }
}

impl Index {
    /// Chooses the manifest for a platform; a variant other than the usual one is the second choice.
    pub(crate) fn choose(&self, wanted: &Platform) -> Result<&Descriptor, ImageError> {
        let fits = |d: &&Descriptor| {
            d.platform.as_ref().is_some_and(|p| p.os == wanted.os && p.architecture == wanted.arch)
        };
        let usual = |d: &&Descriptor| {
            let variant = d.platform.as_ref().map_or("", |p| &p.variant);
            matches!(
                (wanted.arch.as_str(), variant),
                (_, "") | ("amd64", "v1") | ("arm64", "v8") | ("arm", "v7")
            )
        };
        let candidates = || self.manifests.iter().filter(fits);
        if let Some(found) = candidates().find(usual).or_else(|| candidates().next()) {
            return Ok(found);
        }
        // An index of one manifest without a platform says nothing else.
        match self.manifests.as_slice() {
            [only] if only.platform.is_none() => Ok(only),
            _ => Err(ImageError::Unsupported(format!(
                "the image does not exist for {wanted}; {}",
                self.offered()
            ))),
        }
    }

    fn offered(&self) -> String {
        let mut names: Vec<String> = self
            .manifests
            .iter()
            .filter_map(|d| d.platform.as_ref())
            .filter(|p| p.os != "unknown")
            .map(|p| format!("{}/{}", p.os, p.architecture))
            .collect();
        names.sort();
        names.dedup();
        if names.is_empty() {
            "it names no platforms".to_owned()
        } else {
            format!("there is {}", names.join(", "))
        }
    }
}

/// What an image's configuration says.
#[derive(Debug)]
pub(crate) struct ParsedConfig {
    pub(crate) config: ImageConfig,
    pub(crate) platform: Platform,
    pub(crate) created: Option<String>,
    /// Layers, the lowest first.
    pub(crate) diff_ids: Vec<ImageDigest>,
}

#[derive(Deserialize)]
struct RawConfig {
    #[serde(default, deserialize_with = "or_default")]
    architecture: String,
    #[serde(default, deserialize_with = "or_default")]
    os: String,
    #[serde(default)]
    created: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    config: RawRun,
    #[serde(default)]
    rootfs: Option<RawRootfs>,
}

#[derive(Deserialize)]
struct RawRootfs {
    #[serde(default, deserialize_with = "or_default")]
    diff_ids: Vec<ImageDigest>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct RawRun {
    #[serde(deserialize_with = "or_default")]
    env: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    user: String,
    #[serde(deserialize_with = "or_default")]
    working_dir: String,
    #[serde(deserialize_with = "words")]
    entrypoint: Vec<String>,
    #[serde(deserialize_with = "words")]
    cmd: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    labels: BTreeMap<String, Option<String>>,
    stop_signal: Option<String>,
    #[serde(deserialize_with = "or_default")]
    exposed_ports: BTreeMap<String, serde::de::IgnoredAny>,
}

impl ParsedConfig {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ImageError> {
        let raw: RawConfig = parse(bytes, "image configuration")?;
        let rootfs = raw
            .rootfs
            .ok_or_else(|| ImageError::Unsupported("not a container image: it has no layers".to_owned()))?;
        if rootfs.diff_ids.len() > MAX_LAYERS {
            return Err(ImageError::TooLarge(format!("an image of more than {MAX_LAYERS} layers")));
        }
        let host = Platform::default();
        Ok(Self {
            platform: Platform {
                os: if raw.os.is_empty() { host.os } else { raw.os },
                arch: if raw.architecture.is_empty() { host.arch } else { raw.architecture },
            },
            created: raw.created.filter(|c| !c.is_empty()),
            diff_ids: rootfs.diff_ids,
            config: raw.config.into(),
        })
    }
}

impl From<RawRun> for ImageConfig {
    fn from(raw: RawRun) -> Self {
        // An entry without a value sets the variable to nothing; one without a name cannot be set at all.
        let split = |entry: String| match entry.split_once('=') {
            Some((name, value)) => (name.to_owned(), value.to_owned()),
            None => (entry, String::new()),
        };
        Self {
            env: raw.env.into_iter().map(split).filter(|(name, _)| !name.is_empty()).collect(),
            user: raw.user,
            working_dir: raw.working_dir,
            entrypoint: raw.entrypoint,
            cmd: raw.cmd,
            labels: raw.labels.into_iter().map(|(k, v)| (k, v.unwrap_or_default())).collect(),
            stop_signal: raw.stop_signal.filter(|s| !s.is_empty()),
            exposed_ports: raw.exposed_ports.into_keys().collect(),
        }
    }
}

/// Refuses layers that are no file system archives, such as those of charts and signatures.
pub(crate) fn check_layer_type(media_type: &str) -> Result<(), ImageError> {
    let is_archive = media_type.is_empty()
        || (media_type.starts_with("application/vnd.oci.image.layer.") && !media_type.contains("encrypted"))
        || media_type.starts_with("application/vnd.docker.image.rootfs.");
    if is_archive {
        return Ok(());
    }
    let shown: String = media_type.chars().take(100).collect();
    Err(ImageError::Unsupported(format!("a layer of type {shown:?}")))
}

fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8], what: &str) -> Result<T, ImageError> {
    serde_json::from_slice(bytes).map_err(|e| ImageError::Corrupt(format!("{what}: {e}")))
}

fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// A list of words, or one string as very old tools wrote it.
fn words<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Words {
        Many(Vec<String>),
        One(String),
    }
    Ok(match Option::deserialize(deserializer)? {
        None => Vec::new(),
        Some(Words::Many(words)) => words,
        Some(Words::One(word)) => vec![word],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sloppy_configuration_is_read() {
        let parsed = ParsedConfig::parse(
            br#"{"architecture":"amd64","os":"linux","created":"","rootfs":{"type":"layers","diff_ids":null},
            "config":{"Env":["PATH=/bin","EMPTY=","BARE","=odd","A=b=c"],"Cmd":null,"Entrypoint":"/run","Labels":null,
            "ExposedPorts":{"80/tcp":{}},"User":null,"WorkingDir":"/w","Volumes":null,"Unknown":7}}"#,
        )
        .unwrap();
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(
            parsed.config.env,
            [pair("PATH", "/bin"), pair("EMPTY", ""), pair("BARE", ""), pair("A", "b=c")]
        );
        assert_eq!(parsed.config.entrypoint, ["/run"]);
        assert!(parsed.config.cmd.is_empty() && parsed.created.is_none());
        assert_eq!(parsed.config.exposed_ports, ["80/tcp"]);
        assert!(ParsedConfig::parse(br#"{"config":null,"rootfs":{"diff_ids":[]}}"#).is_ok());
        assert!(ParsedConfig::parse(b"{}").is_err());
    }

    #[test]
    fn a_platform_is_chosen_with_its_usual_variant() {
        let digest = |n: u8| ImageDigest::of(&[n]);
        let entry = |n: u8, os: &str, arch: &str, variant: &str| {
            format!(
                r#"{{"digest":"{}","size":1,"platform":{{"os":"{os}","architecture":"{arch}","variant":"{variant}"}}}}"#,
                digest(n)
            )
        };
        let text = format!(
            r#"{{"schemaVersion":2,"manifests":[{},{},{},{}]}}"#,
            entry(0, "unknown", "unknown", ""),
            entry(1, "linux", "arm", "v6"),
            entry(2, "linux", "arm", "v7"),
            entry(3, "linux", "amd64", "")
        );
        let Document::Index(index) = Document::parse(text.as_bytes()).unwrap() else {
            panic!("not an index")
        };
        let choose = |arch: &str| index.choose(&Platform { os: "linux".into(), arch: arch.into() });
        assert_eq!(choose("arm").unwrap().digest, digest(2));
        assert_eq!(choose("amd64").unwrap().digest, digest(3));
        let message = choose("riscv64").unwrap_err().to_string();
        assert!(message.contains("linux/riscv64") && message.contains("linux/amd64, linux/arm"), "{message}");
    }
}
