//! What each request does and answers.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, Stat, StatVfs};

use super::changes::{self, PERMISSIONS};
use super::handles::{Folder, Handles, MAX_HANDLES, Open};
use super::listing::{Names, attributes};
use super::wire::{self, Answers, Attributes, Malformed, Reader};
use super::{MAX_PACKET, MAX_PAYLOAD};

/// One answer to a listing holds this many names at most.
const NAMES: usize = 128;

const EXTENSIONS: [(&str, &str); 8] = [
    ("posix-rename@openssh.com", "1"),
    ("statvfs@openssh.com", "2"),
    ("fstatvfs@openssh.com", "2"),
    ("hardlink@openssh.com", "1"),
    ("fsync@openssh.com", "1"),
    ("lsetstat@openssh.com", "1"),
    ("limits@openssh.com", "1"),
    ("expand-path@openssh.com", "1"),
];

/// Why a request has no other answer than a status.
#[derive(Debug)]
pub(super) enum Status {
    Done,
    End,
    Malformed,
    Unsupported,
    NoHandle,
    TooMany,
    Failed(io::Error),
}

impl From<io::Error> for Status {
    fn from(error: io::Error) -> Self {
        Status::Failed(error)
    }
}

impl From<rustix::io::Errno> for Status {
    fn from(error: rustix::io::Errno) -> Self {
        Status::Failed(error.into())
    }
}

impl From<Malformed> for Status {
    fn from(_: Malformed) -> Self {
        Status::Malformed
    }
}

impl Status {
    fn code(&self) -> u32 {
        match self {
            Status::Done => 0,
            Status::End => 1,
            Status::Malformed => 5,
            Status::Unsupported => 8,
            Status::NoHandle | Status::TooMany => 4,
            Status::Failed(error) => match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP) => 2,
                Some(libc::EPERM | libc::EACCES) => 3,
                Some(libc::ENOSYS | libc::EOPNOTSUPP) => 8,
                _ => 4,
            },
        }
    }

    fn text(&self) -> String {
        match self {
            Status::Done => "Success".to_owned(),
            Status::End => "End of file".to_owned(),
            Status::Malformed => "Bad message".to_owned(),
            Status::Unsupported => "Operation unsupported".to_owned(),
            Status::NoHandle => "No such handle".to_owned(),
            Status::TooMany => "Too many open files".to_owned(),
            // What the kernel says, without the library's number behind it.
            Status::Failed(error) => {
                let text = error.to_string();
                text.split(" (os error").next().unwrap_or_default().to_owned()
            }
        }
    }
}

#[derive(Default)]
pub(super) struct Requests {
    handles: Handles,
    names: Names,
    /// Where bytes of files pass through.
    buffer: Vec<u8>,
}

type Answered = Result<(), Status>;

impl Requests {
    pub(super) fn new() -> Self {
        Requests { names: Names::load(), ..Requests::default() }
    }

    /// Answers one packet. An error is a packet without which nothing after it can be understood.
    pub(super) fn answer(&mut self, packet: &[u8], answers: &mut Answers) -> Result<(), Malformed> {
        let mut reader = Reader(packet);
        let kind = reader.byte()?;
        let id = reader.u32()?;
        if kind == wire::INIT {
            // In this one packet, the number is the peer's version and the answer's is ours.
            answers.packet(wire::VERSION, 3, |out| {
                for (name, version) in EXTENSIONS {
                    out.text(name.as_bytes());
                    out.text(version.as_bytes());
                }
            });
            return Ok(());
        }
        if let Err(status) = self.serve(kind, id, &mut reader, answers) {
            answers.packet(wire::STATUS, id, |out| {
                out.u32(status.code());
                out.text(status.text().as_bytes());
                out.text(b"");
            });
        }
        Ok(())
    }

    fn serve(&mut self, kind: u8, id: u32, request: &mut Reader<'_>, answers: &mut Answers) -> Answered {
        match kind {
            wire::OPEN => return self.open(id, request, answers),
            wire::CLOSE => drop(self.handles.remove(request.bytes()?).ok_or(Status::NoHandle)?),
            wire::READ => return self.read(id, request, answers),
            wire::WRITE => self.write(request)?,
            wire::LSTAT => return tell(id, &rustix::fs::lstat(request.path()?)?, answers),
            wire::STAT => return tell(id, &rustix::fs::stat(request.path()?)?, answers),
            wire::FSTAT => {
                let file = self.handles.either(request.bytes()?).ok_or(Status::NoHandle)?;
                return tell(id, &rustix::fs::fstat(file)?, answers);
            }
            wire::SETSTAT => changes::set_by_path(request.path()?, &request.attributes()?)?,
            wire::FSETSTAT => {
                let file = self.handles.either(request.bytes()?).ok_or(Status::NoHandle)?;
                changes::set_by_file(file, &request.attributes()?)?;
            }
            wire::OPENDIR => return self.open_folder(id, request, answers),
            wire::READDIR => return self.list(id, request, answers),
            wire::REMOVE => rustix::fs::unlinkat(CWD, request.path()?, AtFlags::empty())?,
            wire::RMDIR => std::fs::remove_dir(request.path()?)?,
            wire::MKDIR => {
                let (path, wish) = (request.path()?, request.attributes()?);
                let mode = wish.permissions.map_or(0o777, |mode| mode & PERMISSIONS);
                std::fs::DirBuilder::new().mode(mode).create(path)?;
            }
            wire::REALPATH => return name(id, &changes::real(request.path()?)?, answers),
            wire::READLINK => return name(id, &std::fs::read_link(request.path()?)?, answers),
            wire::RENAME => changes::rename(request.path()?, request.path()?)?,
            // The target comes first: every client has it so, whatever was once written down.
            wire::SYMLINK => std::os::unix::fs::symlink(request.path()?, request.path()?)?,
            wire::EXTENDED => return self.extended(id, request, answers),
            _ => return Err(Status::Unsupported),
        }
        Err(Status::Done)
    }

    fn extended(&mut self, id: u32, request: &mut Reader<'_>, answers: &mut Answers) -> Answered {
        match request.bytes()? {
            b"posix-rename@openssh.com" => std::fs::rename(request.path()?, request.path()?)?,
            b"hardlink@openssh.com" => std::fs::hard_link(request.path()?, request.path()?)?,
            b"lsetstat@openssh.com" => changes::set_by_link(request.path()?, &request.attributes()?)?,
            b"fsync@openssh.com" => {
                self.handles.file(request.bytes()?).ok_or(Status::NoHandle)?.sync_all()?;
            }
            b"statvfs@openssh.com" => return room(id, &rustix::fs::statvfs(request.path()?)?, answers),
            b"fstatvfs@openssh.com" => {
                let file = self.handles.either(request.bytes()?).ok_or(Status::NoHandle)?;
                return room(id, &rustix::fs::fstatvfs(file)?, answers);
            }
            b"expand-path@openssh.com" => return expand(id, request.path()?, answers),
            b"limits@openssh.com" => {
                answers.packet(wire::EXTENDED_REPLY, id, |out| {
                    for limit in [MAX_PACKET, MAX_PAYLOAD, MAX_PAYLOAD, MAX_HANDLES] {
                        out.u64(limit as u64);
                    }
                });
                return Ok(());
            }
            _ => return Err(Status::Unsupported),
        }
        Err(Status::Done)
    }

    fn open(&mut self, id: u32, request: &mut Reader<'_>, answers: &mut Answers) -> Answered {
        const READ: u32 = 1;
        const WRITE: u32 = 2;
        const APPEND: u32 = 4;
        const CREATE: u32 = 8;
        const TRUNCATE: u32 = 16;
        const EXCLUSIVE: u32 = 32;
        let (path, flags, wish) = (request.path()?, request.u32()?, request.attributes()?);
        if self.handles.is_full() {
            return Err(Status::TooMany);
        }
        let asked = |flag: u32| flags & flag != 0;
        let mut options = File::options();
        options.read(asked(READ)).write(asked(WRITE)).append(asked(APPEND));
        options.truncate(asked(TRUNCATE) && !asked(APPEND));
        options.create(asked(CREATE)).create_new(asked(CREATE) && asked(EXCLUSIVE));
        options.mode(wish.permissions.map_or(0o666, |mode| mode & PERMISSIONS));
        options.custom_flags(libc::O_NOCTTY);
        let file = options.open(path)?;
        if asked(TRUNCATE) && asked(APPEND) {
            file.set_len(0)?;
        }
        self.opened(id, Open::File(file), answers)
    }

    fn open_folder(&mut self, id: u32, request: &mut Reader<'_>, answers: &mut Answers) -> Answered {
        let path = request.path()?;
        if self.handles.is_full() {
            return Err(Status::TooMany);
        }
        let folder = File::options().read(true).custom_flags(libc::O_DIRECTORY).open(path)?;
        let listing = Dir::read_from(&folder)?;
        self.opened(id, Open::Folder(Folder { listing, folder }), answers)
    }

    fn opened(&mut self, id: u32, open: Open, answers: &mut Answers) -> Answered {
        let handle = self.handles.insert(open).ok_or(Status::TooMany)?;
        answers.packet(wire::HANDLE, id, |out| out.text(&handle));
        Ok(())
    }

    fn read(&mut self, id: u32, request: &mut Reader<'_>, answers: &mut Answers) -> Answered {
        let file = self.handles.file(request.bytes()?).ok_or(Status::NoHandle)?;
        let (offset, wanted) = (request.u64()?, request.u32()?);
        self.buffer.resize(usize::try_from(wanted).unwrap_or(MAX_PAYLOAD).min(MAX_PAYLOAD), 0);
        let count = loop {
            match file.read_at(&mut self.buffer, offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        if count == 0 {
            return Err(Status::End);
        }
        answers.packet(wire::DATA, id, |out| out.text(&self.buffer[..count]));
        Ok(())
    }

    fn write(&mut self, request: &mut Reader<'_>) -> Answered {
        let file = self.handles.file(request.bytes()?).ok_or(Status::NoHandle)?;
        let (offset, bytes) = (request.u64()?, request.bytes()?);
        // A file opened to append takes them at its end whatever the offset.
        Ok(file.write_all_at(bytes, offset)?)
    }

    fn list(&mut self, id: u32, request: &mut Reader<'_>, answers: &mut Answers) -> Answered {
        let Folder { listing, folder } = self.handles.folder(request.bytes()?).ok_or(Status::NoHandle)?;
        let mut found = Vec::new();
        while found.len() < NAMES {
            let Some(entry) = listing.read() else { break };
            let entry = entry?;
            // One that has gone meanwhile was not there.
            if let Ok(stat) = rustix::fs::statat(&*folder, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
                found.push((entry.file_name().to_bytes().to_vec(), stat));
            }
        }
        if found.is_empty() {
            return Err(Status::End);
        }
        answers.packet(wire::NAME, id, |out| {
            out.u32(u32::try_from(found.len()).unwrap_or(0));
            for (file, stat) in &found {
                out.text(file);
                out.text(&self.names.line(std::ffi::OsStr::from_bytes(file), stat));
                out.attributes(&attributes(stat));
            }
        });
        Ok(())
    }
}

fn tell(id: u32, stat: &Stat, answers: &mut Answers) -> Answered {
    answers.packet(wire::ATTRS, id, |out| out.attributes(&attributes(stat)));
    Ok(())
}

fn name(id: u32, path: &Path, answers: &mut Answers) -> Answered {
    answers.packet(wire::NAME, id, |out| {
        out.u32(1);
        out.text(path.as_os_str().as_bytes());
        out.text(path.as_os_str().as_bytes());
        out.attributes(&Attributes::default());
    });
    Ok(())
}

/// `~` is the home directory; that of somebody else is not looked up.
fn expand(id: u32, path: &Path, answers: &mut Answers) -> Answered {
    let expanded = match path.strip_prefix("~") {
        Ok(rest) => {
            let home = std::env::var_os("HOME").unwrap_or_else(|| "/".into());
            Path::new(&home).join(rest)
        }
        Err(_) if path.as_os_str().as_bytes().starts_with(b"~") => return Err(Status::Unsupported),
        Err(_) => path.to_owned(),
    };
    name(id, &changes::real(&expanded)?, answers)
}

fn room(id: u32, stat: &StatVfs, answers: &mut Answers) -> Answered {
    answers.packet(wire::EXTENDED_REPLY, id, |out| {
        let numbers = [
            stat.f_bsize,
            stat.f_frsize,
            stat.f_blocks,
            stat.f_bfree,
            stat.f_bavail,
            stat.f_files,
            stat.f_ffree,
            stat.f_favail,
            stat.f_fsid,
            // Of the flags, the protocol knows "read only" and "no set-user-id", with the kernel's numbers.
            stat.f_flag.bits() & 3,
            stat.f_namemax,
        ];
        numbers.into_iter().for_each(|number| out.u64(number));
    });
    Ok(())
}
