//! Reads tar archives: v7, ustar, GNU (long names, sparse files) and pax.
//!
//! Does not touch the file system. Written here because the input is hostile: extension headers have a size limit, and
//! nothing is kept between entries, so memory stays constant. Invariant: every byte of the input is consumed in order,
//! so that a digest taken below this reader covers the whole archive.

use std::io::{self, Read};

use crate::compression::read_error;
use crate::error::ImageError;

pub(crate) const BLOCK: usize = 512;
/// Extension headers (long names, extended attributes) larger than this are refused.
const MAX_EXTENSION: u64 = 1 << 20;
const MAX_SPARSE_PARTS: usize = 1 << 16;

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    File,
    HardLink,
    Symlink,
    Character,
    Block,
    Directory,
    Fifo,
    /// Volume labels and the like, which are no files.
    Ignored,
}

/// One entry; its data is read from the [`TarReader`] before the next entry is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) path: Vec<u8>,
    pub(crate) kind: EntryKind,
    pub(crate) link: Vec<u8>,
    /// Bytes of data in the archive.
    pub(crate) size: u64,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: (i64, u32),
    pub(crate) device: (u32, u32),
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub(crate) sparse: Option<Sparse>,
}

/// Where the data of a sparse file goes.
#[derive(Clone, Debug)]
pub(crate) struct Sparse {
    pub(crate) parts: Vec<(u64, u64)>,
    pub(crate) real_size: u64,
}

/// What extension headers say about the entry after them.
#[derive(Default)]
struct Extensions {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<(i64, u32)>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

pub(crate) struct TarReader<R> {
    input: R,
    skip: fn(&mut R, u64) -> io::Result<()>,
    position: u64,
    remaining: u64,
    padding: u64,
    ended: bool,
}

impl<R: Read> TarReader<R> {
    pub(crate) fn new(input: R) -> Self {
        Self::with_skip(input, skip_by_reading)
    }

    /// Uses `skip` to pass over data nobody reads, for inputs that can seek.
    pub(crate) fn with_skip(input: R, skip: fn(&mut R, u64) -> io::Result<()>) -> Self {
        Self { input, skip, position: 0, remaining: 0, padding: 0, ended: false }
    }

    /// Returns the offset of the current entry's data in the input.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Says whether the archive's end marker was seen, as opposed to the mere end of the input.
    pub(crate) fn ended(&self) -> bool {
        self.ended
    }

    /// Returns the next entry, after skipping what is left of the current one.
    pub(crate) fn next_entry(&mut self) -> Result<Option<Entry>, ImageError> {
        let mut extensions = Extensions::default();
        loop {
            let rest = self.remaining + self.padding;
            self.skip_bytes(rest)?;
            (self.remaining, self.padding) = (0, 0);
            let Some(block) = self.read_header()? else {
                return Ok(None);
            };
            let size = number(&block[124..136])?;
            let size = u64::try_from(size).map_err(|_| ImageError::corrupt("negative entry size"))?;
            match block[156] {
                b'x' => read_pax(&self.read_extension(size)?, &mut extensions)?,
                b'L' => extensions.path = Some(until_nul(&self.read_extension(size)?).to_vec()),
                b'K' => extensions.link = Some(until_nul(&self.read_extension(size)?).to_vec()),
                // Global headers are comments in practice, and Docker ignores them too.
                b'g' => drop(self.read_extension(size)?),
                _ => return self.finish_entry(&block, size, extensions).map(Some),
            }
        }
    }

    /// Reads the current entry's data; zero at its end.
    pub(crate) fn read_data(&mut self, buf: &mut [u8]) -> Result<usize, ImageError> {
        let want = buf.len().min(usize::try_from(self.remaining).unwrap_or(usize::MAX));
        if want == 0 {
            return Ok(0);
        }
        let n = read_some(&mut self.input, &mut buf[..want]).map_err(read_error)?;
        if n == 0 {
            return Err(read_error(io::ErrorKind::UnexpectedEof.into()));
        }
        self.remaining -= n as u64;
        self.position += n as u64;
        Ok(n)
    }

    /// Reads the input to its end, so that digests and checksums below cover all of it.
    pub(crate) fn drain(mut self) -> Result<R, ImageError> {
        io::copy(&mut self.input, &mut io::sink()).map_err(read_error)?;
        Ok(self.input)
    }

    fn read_header(&mut self) -> Result<Option<[u8; BLOCK]>, ImageError> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            match read_some(&mut self.input, &mut block[filled..]).map_err(read_error)? {
                0 if filled == 0 => return Ok(None),
                0 => return Err(read_error(io::ErrorKind::UnexpectedEof.into())),
                n => filled += n,
            }
        }
        self.position += BLOCK as u64;
        if block.iter().all(|&b| b == 0) {
            self.ended = true;
            return Ok(None);
        }
        check_sum(&block)?;
        Ok(Some(block))
    }

    fn read_extension(&mut self, size: u64) -> Result<Vec<u8>, ImageError> {
        if size > MAX_EXTENSION {
            return Err(ImageError::corrupt(format!("an extension header of {size} bytes")));
        }
        let mut data = vec![0; usize::try_from(size).expect("at most a mebibyte")];
        self.input.read_exact(&mut data).map_err(read_error)?;
        self.position += size;
        self.padding = padding(size);
        Ok(data)
    }

    fn finish_entry(
        &mut self,
        block: &[u8; BLOCK],
        size: u64,
        mut extensions: Extensions,
    ) -> Result<Entry, ImageError> {
        let path = extensions.path.take().unwrap_or_else(|| header_path(block));
        let kind = entry_kind(block[156], &path)?;
        let has_data = matches!(kind, EntryKind::File | EntryKind::Ignored);
        let size = if has_data { extensions.size.unwrap_or(size) } else { 0 };
        self.remaining = size;
        self.padding = padding(size);
        let sparse = if block[156] == b'S' { Some(self.read_sparse(block, size)?) } else { None };
        let id = |given: Option<u64>, field: &[u8]| -> Result<u32, ImageError> {
            let value = match given {
                Some(value) => value,
                None => u64::try_from(number(field)?).unwrap_or(u64::MAX),
            };
            // The largest id is the kernel's "leave it as it is".
            match u32::try_from(value) {
                Ok(id) if id != u32::MAX => Ok(id),
                _ => Err(ImageError::corrupt("an owner that is out of range")),
            }
        };
        let device =
            |field: &[u8]| u32::try_from(number(field)?).map_err(|_| ImageError::corrupt("a device number"));
        let is_device = matches!(kind, EntryKind::Character | EntryKind::Block);
        Ok(Entry {
            path,
            kind,
            link: extensions.link.take().unwrap_or_else(|| until_nul(&block[157..257]).to_vec()),
            size,
            mode: (number(&block[100..108])? & 0o7777) as u32,
            uid: id(extensions.uid, &block[108..116])?,
            gid: id(extensions.gid, &block[116..124])?,
            mtime: match extensions.mtime {
                Some(mtime) => mtime,
                None => (number(&block[136..148])?, 0),
            },
            device: if is_device { (device(&block[329..337])?, device(&block[337..345])?) } else { (0, 0) },
            xattrs: extensions.xattrs,
            sparse,
        })
    }

    /// Reads the old GNU map: four parts in the header, more in the blocks after it.
    fn read_sparse(&mut self, block: &[u8; BLOCK], size: u64) -> Result<Sparse, ImageError> {
        let bad = || ImageError::corrupt("the map of a sparse file");
        let mut parts = Vec::new();
        let mut take = |area: &[u8]| -> Result<(), ImageError> {
            for part in area.chunks_exact(24) {
                if part[0] == 0 {
                    break;
                }
                let offset = u64::try_from(number(&part[..12])?).map_err(|_| bad())?;
                let length = u64::try_from(number(&part[12..])?).map_err(|_| bad())?;
                parts.push((offset, length));
            }
            if parts.len() > MAX_SPARSE_PARTS { Err(bad()) } else { Ok(()) }
        };
        take(&block[386..482])?;
        let mut more = block[482] != 0;
        while more {
            let mut extension = [0; BLOCK];
            self.input.read_exact(&mut extension).map_err(read_error)?;
            self.position += BLOCK as u64;
            take(&extension[..504])?;
            more = extension[504] != 0;
        }
        let real_size = u64::try_from(number(&block[483..495])?).map_err(|_| bad())?;
        let mut end = 0;
        let mut total = 0;
        for &(offset, length) in &parts {
            let part_end = offset.checked_add(length).ok_or_else(bad)?;
            if offset < end || part_end > real_size {
                return Err(bad());
            }
            end = part_end;
            total += length;
        }
        if total != size {
            return Err(bad());
        }
        Ok(Sparse { parts, real_size })
    }

    fn skip_bytes(&mut self, count: u64) -> Result<(), ImageError> {
        if count > 0 {
            (self.skip)(&mut self.input, count).map_err(read_error)?;
            self.position += count;
        }
        Ok(())
    }
}

fn skip_by_reading<R: Read>(input: &mut R, count: u64) -> io::Result<()> {
    if io::copy(&mut input.take(count), &mut io::sink())? == count {
        Ok(())
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

fn read_some(input: &mut impl Read, buf: &mut [u8]) -> io::Result<usize> {
    loop {
        match input.read(buf) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted && e.raw_os_error().is_some() => {}
            other => return other,
        }
    }
}

fn padding(size: u64) -> u64 {
    size.wrapping_neg() % BLOCK as u64
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|&b| b == 0).next().unwrap_or(bytes)
}

fn check_sum(block: &[u8; BLOCK]) -> Result<(), ImageError> {
    let bytes = block.iter().enumerate().map(|(i, &b)| if (148..156).contains(&i) { b' ' } else { b });
    let unsigned: i64 = bytes.clone().map(i64::from).sum();
    // Some old programs summed signed bytes.
    let signed: i64 = bytes.map(|b| i64::from(b as i8)).sum();
    let stored = number(&block[148..156])?;
    if stored == unsigned || stored == signed {
        Ok(())
    } else {
        Err(ImageError::corrupt("not a tar archive, or a header with a wrong checksum"))
    }
}

fn header_path(block: &[u8; BLOCK]) -> Vec<u8> {
    let name = until_nul(&block[..100]);
    let prefix = until_nul(&block[345..500]);
    // GNU archives keep other things where ustar has the prefix.
    if &block[257..263] == b"ustar\0" && !prefix.is_empty() {
        [prefix, b"/", name].concat()
    } else {
        name.to_vec()
    }
}

fn entry_kind(flag: u8, path: &[u8]) -> Result<EntryKind, ImageError> {
    Ok(match flag {
        b'0' | 0 | b'7' | b'S' if path.ends_with(b"/") => EntryKind::Directory,
        b'0' | 0 | b'7' | b'S' => EntryKind::File,
        b'1' => EntryKind::HardLink,
        b'2' => EntryKind::Symlink,
        b'3' => EntryKind::Character,
        b'4' => EntryKind::Block,
        b'5' => EntryKind::Directory,
        b'6' => EntryKind::Fifo,
        b'V' => EntryKind::Ignored,
        other => {
            let shown = char::from(other).escape_default();
            return Err(ImageError::Unsupported(format!("a tar entry of type '{shown}'")));
        }
    })
}

/// Reads a header number: octal text, or GNU's two's complement when the first bit is set.
fn number(field: &[u8]) -> Result<i64, ImageError> {
    let bad = || ImageError::corrupt("a tar header with a number that is none");
    if field[0] & 0x80 != 0 {
        let negative = field[0] & 0x40 != 0;
        let mut value: i128 = if negative { -1 } else { 0 };
        for (i, &byte) in field.iter().enumerate() {
            // The first bit is the marker; the sign is the second.
            let byte = match (i, negative) {
                (0, false) => byte & 0x7f,
                _ => byte,
            };
            value = (value << 8) | i128::from(byte);
        }
        return i64::try_from(value).map_err(|_| bad());
    }
    let text = field.trim_ascii_start();
    let text = until_nul(text).trim_ascii_end();
    let mut value: i64 = 0;
    for &byte in text {
        if !(b'0'..=b'7').contains(&byte) {
            return Err(bad());
        }
        value = value.checked_mul(8).ok_or_else(bad)? + i64::from(byte - b'0');
    }
    Ok(value)
}

/// Reads `length key=value\n` records.
fn read_pax(mut data: &[u8], extensions: &mut Extensions) -> Result<(), ImageError> {
    let bad = || ImageError::corrupt("a malformed pax header");
    while !data.is_empty() {
        let space = data.iter().take(20).position(|&b| b == b' ').ok_or_else(bad)?;
        let length: usize = text(&data[..space])?.parse().map_err(|_| bad())?;
        if length <= space + 1 || length > data.len() || data[length - 1] != b'\n' {
            return Err(bad());
        }
        let record = &data[space + 1..length - 1];
        data = &data[length..];
        let equals = record.iter().position(|&b| b == b'=').ok_or_else(bad)?;
        pax_record(&record[..equals], &record[equals + 1..], extensions)?;
    }
    Ok(())
}

fn pax_record(key: &[u8], value: &[u8], extensions: &mut Extensions) -> Result<(), ImageError> {
    let bad = || ImageError::corrupt("a malformed pax header");
    match key {
        // An empty value takes an earlier one back.
        b"path" => extensions.path = Some(value.to_vec()).filter(|v| !v.is_empty()),
        b"linkpath" => extensions.link = Some(value.to_vec()).filter(|v| !v.is_empty()),
        b"size" => extensions.size = Some(text(value)?.parse().map_err(|_| bad())?),
        b"uid" => extensions.uid = Some(text(value)?.parse().map_err(|_| bad())?),
        b"gid" => extensions.gid = Some(text(value)?.parse().map_err(|_| bad())?),
        b"mtime" => extensions.mtime = Some(pax_time(text(value)?).ok_or_else(bad)?),
        _ if key.starts_with(b"GNU.sparse.") => {
            return Err(ImageError::Unsupported(
                "sparse files in pax form; use GNU tar's --format=gnu".to_owned(),
            ));
        }
        _ => {
            if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                extensions.xattrs.retain(|(n, _)| n != name);
                extensions.xattrs.push((name.to_vec(), value.to_vec()));
            }
        }
    }
    Ok(())
}

fn text(bytes: &[u8]) -> Result<&str, ImageError> {
    std::str::from_utf8(bytes).map_err(|_| ImageError::corrupt("a malformed pax header"))
}

/// Reads `[-]seconds[.fraction]`; the fraction of a negative time counts back from its second.
fn pax_time(text: &str) -> Option<(i64, u32)> {
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanos: u32 = digits.parse().ok()?;
    let whole: i64 = seconds.parse().ok()?;
    if seconds.starts_with('-') && nanos > 0 {
        Some((whole.checked_sub(1)?, 1_000_000_000 - nanos))
    } else {
        Some((whole, nanos))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_are_octal_or_binary() {
        assert_eq!(number(b"0000644\0").unwrap(), 0o644);
        assert_eq!(number(b"   644 \0").unwrap(), 0o644);
        assert_eq!(number(&[0; 8]).unwrap(), 0);
        assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 1, 0]).unwrap(), 256);
        assert_eq!(number(&[0xff; 12]).unwrap(), -1);
        assert!(number(b"00x0644\0").is_err());
        assert!(number(&[0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).is_err());
    }

    #[test]
    fn pax_times_keep_nanoseconds() {
        assert_eq!(pax_time("12.5"), Some((12, 500_000_000)));
        assert_eq!(pax_time("-1.25"), Some((-2, 750_000_000)));
        assert_eq!(pax_time("7"), Some((7, 0)));
        assert_eq!(pax_time("7.x"), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_input_panics(mut data in prop::collection::vec(any::<u8>(), 0..2048), fix in any::<bool>()) {
            if fix && data.len() >= BLOCK {
                data[148..156].fill(b' ');
                let sum: u32 = data[..BLOCK].iter().map(|&b| u32::from(b)).sum();
                data[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            }
            let mut reader = TarReader::new(&data[..]);
            while let Ok(Some(_)) = reader.next_entry() {}
        }
    }
}
