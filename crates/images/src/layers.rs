//! Layers: how one is unpacked, checked and put in its place.
//!
//! Invariant: `layers/<diff id>` appears by one rename, after its content was digested and written to the disk.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::error::ImageError;
use crate::image::ImageDigest;
use crate::lock::Workspace;
use crate::store::Inner;
use crate::unpack::{LayerFacts, Unpacking, unpack};

const FACTS: &str = "layer.json";
const BUFFER: usize = 256 << 10;
/// How many bytes pass between two reports.
const REPORT_EVERY: u64 = 1 << 20;

/// A layer's archive, compressed or not.
pub(crate) struct LayerArchive {
    pub(crate) data: Box<dyn Read + Send>,
    pub(crate) length: u64,
}

/// How an unpack is watched and stopped.
pub(crate) struct Watch<'a> {
    /// Receives the bytes read so far.
    pub(crate) report: &'a (dyn Fn(u64) + Send + Sync),
    pub(crate) cancelled: &'a AtomicBool,
}

/// A layer that is unpacked in a workspace and not yet in its place.
pub(crate) struct UnpackedLayer {
    dir: PathBuf,
    pub(crate) diff_id: ImageDigest,
}

impl Inner {
    pub(crate) fn layer_facts(&self, diff_id: &ImageDigest) -> Result<Option<LayerFacts>, ImageError> {
        let path = self.layer_dir(diff_id).join(FACTS);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map(Some)
                .map_err(|e| ImageError::Corrupt(format!("{}: {e}", path.display()))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(ImageError::io(format!("reading {}", path.display()), e)),
        }
    }

    pub(crate) fn has_layer(&self, diff_id: &ImageDigest) -> bool {
        self.layer_dir(diff_id).join(FACTS).exists()
    }

    /// The lock to hold while a layer is being made, so that it is made once.
    pub(crate) fn layer_lock(&self, diff_id: &ImageDigest) -> PathBuf {
        self.lock_path(&format!("layer-{}", diff_id.hex()))
    }

    /// Unpacks an archive into a workspace, and checks it against `expected`.
    pub(crate) fn unpack_layer(
        &self,
        workspace: &Workspace,
        archive: LayerArchive,
        expected: Option<&ImageDigest>,
        watch: &Watch<'_>,
    ) -> Result<UnpackedLayer, ImageError> {
        let dir = tempfile::Builder::new()
            .prefix("layer-")
            .tempdir_in(workspace.path())
            .map_err(|e| ImageError::io("making a temporary directory", e))?;
        let target = dir.path().join("fs");
        make_root(&target)?;
        let length = archive.length;
        let counted = Counted { inner: archive.data, count: 0, reported: 0, report: watch.report };
        let input = BufReader::with_capacity(BUFFER, counted);
        let job = Unpacking {
            target: &target,
            scratch: workspace.path(),
            limits: &self.options.limits,
            compressed: length,
            cancelled: watch.cancelled,
            verified_later: expected.is_some(),
        };
        let (diff_id, facts) = unpack(input, &job)?;
        if let Some(expected) = expected.filter(|expected| **expected != diff_id) {
            return Err(ImageError::Corrupt(format!("a layer's content is {diff_id}, not {expected}")));
        }
        let text = serde_json::to_vec(&facts).expect("numbers are plain JSON");
        fs::write(dir.path().join(FACTS), text).map_err(|e| ImageError::io("writing a layer's facts", e))?;
        Ok(UnpackedLayer { dir: dir.keep(), diff_id })
    }

    /// Puts a layer in its place; does nothing when it is there already.
    pub(crate) fn place_layer(&self, layer: UnpackedLayer) -> Result<(), ImageError> {
        let failed = |e: io::Error| ImageError::io("putting a layer in its place", e);
        let dir = File::open(&layer.dir).map_err(failed)?;
        // Otherwise a power failure could leave the name and lose the files, and nothing would notice.
        rustix::fs::syncfs(&dir).map_err(|e| failed(e.into()))?;
        let place = self.layer_dir(&layer.diff_id);
        match fs::rename(&layer.dir, &place) {
            Ok(()) => {}
            Err(_) if self.has_layer(&layer.diff_id) => return Ok(()),
            Err(e) => return Err(failed(e)),
        }
        let parent = place.parent().unwrap_or(&place);
        File::open(parent).and_then(|d| d.sync_all()).map_err(failed)
    }
}

fn make_root(target: &Path) -> Result<(), ImageError> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::create_dir(target)
        .and_then(|()| fs::set_permissions(target, fs::Permissions::from_mode(0o755)))
        .map_err(|e| ImageError::io("making a layer's directory", e))
}

/// Reports how much has been read.
struct Counted<'a> {
    inner: Box<dyn Read + Send>,
    count: u64,
    reported: u64,
    report: &'a (dyn Fn(u64) + Send + Sync),
}

impl Read for Counted<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.count += n as u64;
        if self.count - self.reported >= REPORT_EVERY || (n == 0 && self.reported != self.count) {
            self.reported = self.count;
            (self.report)(self.count);
        }
        Ok(n)
    }
}

/// Reads a small document whole, and refuses a large one.
pub(crate) fn read_document(mut data: impl BufRead, limit: u64) -> Result<Vec<u8>, ImageError> {
    let mut bytes = Vec::new();
    (&mut data).take(limit + 1).read_to_end(&mut bytes).map_err(crate::compression::read_error)?;
    if bytes.len() as u64 > limit {
        return Err(ImageError::TooLarge(format!("a manifest or configuration of more than {limit} bytes")));
    }
    Ok(bytes)
}
