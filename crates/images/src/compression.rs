//! Decompression of layers and archives, chosen by content.
//!
//! Owns gzip (several members), zstd (several and skippable frames) and plain data. Invariant: memory stays constant
//! whatever the input claims.

use std::io::{self, BufRead, Read};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::StreamingDecoder;

use crate::error::ImageError;

/// How a stream is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    Plain,
    Gzip,
    Zstd,
}

impl Compression {
    /// Tells by the first bytes; formats that are known but cannot be read are refused by name.
    pub(crate) fn detect(head: &[u8]) -> Result<Self, ImageError> {
        match head {
            [0x1f, 0x8b, ..] => Ok(Self::Gzip),
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Ok(Self::Zstd),
            [b'B', b'Z', b'h', b'1'..=b'9', b'1', b'A', b'Y', ..] => {
                Err(ImageError::Unsupported("bzip2 archives; use gzip or zstd".to_owned()))
            }
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => {
                Err(ImageError::Unsupported("xz archives; use gzip or zstd".to_owned()))
            }
            _ => Ok(Self::Plain),
        }
    }
}

/// Wraps `input` in the decoder its first bytes ask for.
pub(crate) fn decompress<'a>(
    mut input: impl BufRead + Send + 'a,
) -> Result<Box<dyn Read + Send + 'a>, ImageError> {
    let head = input.fill_buf().map_err(read_error)?;
    Ok(match Compression::detect(head)? {
        Compression::Plain => Box::new(input),
        Compression::Gzip => Box::new(MultiGzDecoder::new(input)),
        Compression::Zstd => Box::new(ZstdReader { state: ZstdState::Between(input) }),
    })
}

/// Sorts a failed read: the operating system's failures stay what they are, anything else is the data's fault.
pub(crate) fn read_error(error: io::Error) -> ImageError {
    if let Some(passed) = error.get_ref().and_then(|inner| inner.downcast_ref::<LimitPassed>()) {
        return ImageError::TooLarge(passed.0.clone());
    }
    if error.raw_os_error().is_some() || error.kind() == io::ErrorKind::Interrupted {
        return ImageError::io("reading image data", error);
    }
    ImageError::Corrupt(match error.kind() {
        io::ErrorKind::UnexpectedEof => "the data ends too early".to_owned(),
        _ => error.to_string(),
    })
}

/// A limit that a reader found passed; travels inside an [`io::Error`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct LimitPassed(pub(crate) String);

struct ZstdReader<R: BufRead> {
    state: ZstdState<R>,
}

enum ZstdState<R: BufRead> {
    Between(R),
    // The decoder holds its tables inline; boxed so that the enum stays small.
    Within(Box<StreamingDecoder<R, ruzstd::decoding::FrameDecoder>>),
    Ended,
}

impl<R: BufRead> Read for ZstdReader<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        loop {
            match std::mem::replace(&mut self.state, ZstdState::Ended) {
                ZstdState::Ended => return Ok(0),
                ZstdState::Between(input) => self.state = next_frame(input)?,
                ZstdState::Within(mut decoder) => match decoder.read(buf)? {
                    0 => self.state = ZstdState::Between(decoder.into_inner()),
                    n => {
                        self.state = ZstdState::Within(decoder);
                        return Ok(n);
                    }
                },
            }
        }
    }
}

/// Skips skippable frames and opens the next real one, if there is one.
fn next_frame<R: BufRead>(mut input: R) -> io::Result<ZstdState<R>> {
    loop {
        let head = input.fill_buf()?;
        if head.is_empty() {
            return Ok(ZstdState::Ended);
        }
        if !(0x50..=0x5f).contains(&head[0]) {
            let decoder = StreamingDecoder::new(input).map_err(|e| invalid(e.to_string()))?;
            return Ok(ZstdState::Within(Box::new(decoder)));
        }
        let mut header = [0; 8];
        input.read_exact(&mut header)?;
        if header[1..4] != [0x2a, 0x4d, 0x18] {
            return Err(invalid("not a zstd frame"));
        }
        let length = u64::from(u32::from_le_bytes([header[4], header[5], header[6], header[7]]));
        if io::copy(&mut (&mut input).take(length), &mut io::sink())? != length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

fn invalid(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.into())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn gzip(data: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(data: &[u8]) -> Vec<u8> {
        ruzstd::encoding::compress_to_vec(data, ruzstd::encoding::CompressionLevel::Fastest)
    }

    fn read(data: &[u8]) -> Result<Vec<u8>, ImageError> {
        let mut out = Vec::new();
        decompress(data)?.read_to_end(&mut out).map_err(read_error)?;
        Ok(out)
    }

    #[test]
    fn every_format_and_several_members_are_read() {
        assert_eq!(read(b"plain").unwrap(), b"plain");
        assert_eq!(read(&[gzip(b"one "), gzip(b"two")].concat()).unwrap(), b"one two");
        let skippable = [&[0x52, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"xyz"].concat();
        let frames = [skippable.clone(), zstd(b"one "), skippable, zstd(b"two")].concat();
        assert_eq!(read(&frames).unwrap(), b"one two");
    }

    #[test]
    fn damage_is_corrupt_and_foreign_formats_are_unsupported() {
        use crate::error::ImageErrorKind::*;
        let packed = gzip(&vec![7; 100_000]);
        assert_eq!(read(&packed[..packed.len() - 9]).unwrap_err().kind(), Corrupt);
        let packed = zstd(&(0..100_000_u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>());
        assert_eq!(read(&packed[..packed.len() / 2]).unwrap_err().kind(), Corrupt);
        assert_eq!(read(b"\xfd7zXZ\0...").unwrap_err().kind(), Unsupported);
    }
}
