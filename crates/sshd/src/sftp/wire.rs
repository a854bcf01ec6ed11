//! Packets of the SFTP protocol, version 3: numbers, texts and attributes, read and written.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub(super) const INIT: u8 = 1;
pub(super) const VERSION: u8 = 2;
pub(super) const OPEN: u8 = 3;
pub(super) const CLOSE: u8 = 4;
pub(super) const READ: u8 = 5;
pub(super) const WRITE: u8 = 6;
pub(super) const LSTAT: u8 = 7;
pub(super) const FSTAT: u8 = 8;
pub(super) const SETSTAT: u8 = 9;
pub(super) const FSETSTAT: u8 = 10;
pub(super) const OPENDIR: u8 = 11;
pub(super) const READDIR: u8 = 12;
pub(super) const REMOVE: u8 = 13;
pub(super) const MKDIR: u8 = 14;
pub(super) const RMDIR: u8 = 15;
pub(super) const REALPATH: u8 = 16;
pub(super) const STAT: u8 = 17;
pub(super) const RENAME: u8 = 18;
pub(super) const READLINK: u8 = 19;
pub(super) const SYMLINK: u8 = 20;
pub(super) const STATUS: u8 = 101;
pub(super) const HANDLE: u8 = 102;
pub(super) const DATA: u8 = 103;
pub(super) const NAME: u8 = 104;
pub(super) const ATTRS: u8 = 105;
pub(super) const EXTENDED: u8 = 200;
pub(super) const EXTENDED_REPLY: u8 = 201;

/// The packet is not what its type says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// The rest of a packet that is being read.
pub(super) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn byte(&mut self) -> Result<u8, Malformed> {
        Ok(self.take(1)?[0])
    }

    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        self.take(4)?.try_into().map(u32::from_be_bytes).map_err(|_| Malformed)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Malformed> {
        self.take(8)?.try_into().map(u64::from_be_bytes).map_err(|_| Malformed)
    }

    pub(super) fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let count = self.u32()?;
        self.take(usize::try_from(count).map_err(|_| Malformed)?)
    }

    /// The empty path is the current directory. No path of the system holds a zero byte.
    pub(super) fn path(&mut self) -> Result<&'a Path, Malformed> {
        match self.bytes()? {
            b"" => Ok(Path::new(".")),
            bytes if bytes.contains(&0) => Err(Malformed),
            bytes => Ok(Path::new(OsStr::from_bytes(bytes))),
        }
    }

    pub(super) fn attributes(&mut self) -> Result<Attributes, Malformed> {
        let flags = self.u32()?;
        let mut attributes = Attributes::default();
        if flags & SIZE != 0 {
            attributes.size = Some(self.u64()?);
        }
        if flags & OWNER != 0 {
            attributes.owner = Some((self.u32()?, self.u32()?));
        }
        if flags & PERMISSIONS != 0 {
            attributes.permissions = Some(self.u32()?);
        }
        if flags & TIMES != 0 {
            attributes.times = Some((self.u32()?, self.u32()?));
        }
        if flags & EXTENSIONS != 0 {
            for _ in 0..self.u32()? {
                self.bytes()?;
                self.bytes()?;
            }
        }
        Ok(attributes)
    }
}

const SIZE: u32 = 1;
const OWNER: u32 = 2;
const PERMISSIONS: u32 = 4;
const TIMES: u32 = 8;
const EXTENSIONS: u32 = 0x8000_0000;

/// What is known or wished of a file; times are seconds of access and change since 1970.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Attributes {
    pub size: Option<u64>,
    pub owner: Option<(u32, u32)>,
    /// With the kind of the file in answers; only the lower twelve bits count in requests.
    pub permissions: Option<u32>,
    pub times: Option<(u32, u32)>,
}

/// Answers, one after another, each with its length in front.
#[derive(Debug, Default)]
pub(super) struct Answers {
    pub bytes: Vec<u8>,
}

impl Answers {
    /// One whole answer.
    pub(super) fn packet(&mut self, kind: u8, id: u32, fill: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.push(kind);
        self.u32(id);
        fill(self);
        let length = u32::try_from(self.bytes.len() - start - 4).unwrap_or(u32::MAX);
        self.bytes[start..start + 4].copy_from_slice(&length.to_be_bytes());
    }

    pub(super) fn u32(&mut self, number: u32) {
        self.bytes.extend_from_slice(&number.to_be_bytes());
    }

    pub(super) fn u64(&mut self, number: u64) {
        self.bytes.extend_from_slice(&number.to_be_bytes());
    }

    pub(super) fn text(&mut self, bytes: &[u8]) {
        self.u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.bytes.extend_from_slice(bytes);
    }

    pub(super) fn attributes(&mut self, attributes: &Attributes) {
        let Attributes { size, owner, permissions, times } = attributes;
        let flag = |there: bool, flag: u32| if there { flag } else { 0 };
        self.u32(
            flag(size.is_some(), SIZE)
                | flag(owner.is_some(), OWNER)
                | flag(permissions.is_some(), PERMISSIONS)
                | flag(times.is_some(), TIMES),
        );
        if let Some(size) = size {
            self.u64(*size);
        }
        for (first, second) in owner.iter() {
            self.u32(*first);
            self.u32(*second);
        }
        if let Some(permissions) = permissions {
            self.u32(*permissions);
        }
        for (accessed, changed) in times.iter() {
            self.u32(*accessed);
            self.u32(*changed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_survive_the_wire() {
        let attributes = Attributes {
            size: Some(1 << 40),
            owner: Some((1, 2)),
            permissions: Some(0o100_644),
            times: Some((3, 4)),
        };
        for attributes in [attributes, Attributes::default()] {
            let mut answers = Answers::default();
            answers.attributes(&attributes);
            assert_eq!(Reader(&answers.bytes).attributes(), Ok(attributes));
        }
    }

    #[test]
    fn what_is_cut_off_is_malformed() {
        assert_eq!(Reader(&[0, 0, 0, 5, b'a']).bytes(), Err(Malformed));
        assert_eq!(Reader(&[255, 255, 255, 255]).bytes(), Err(Malformed));
        assert_eq!(Reader(&[0, 0]).u32(), Err(Malformed));
        assert_eq!(Reader(&[0, 0, 0, 1, 0]).path(), Err(Malformed));
        assert_eq!(Reader(&[0, 0, 0, 0]).path(), Ok(Path::new(".")));
        assert_eq!(Reader(&[0x80, 0, 0, 0, 255, 255, 255, 255]).attributes(), Err(Malformed));
    }
}
