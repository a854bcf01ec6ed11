//! A session's pseudo-terminal: its size, its modes, its two ends.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::{Mutex, PoisonError};

use russh::Pty;
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::pty::OpenptFlags;
use rustix::termios::{
    ControlModes, InputModes, LocalModes, OptionalActions, OutputModes, SpecialCodeIndex, Termios, Winsize,
    tcgetattr, tcgetpgrp, tcsetattr, tcsetwinsize,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::launch::Account;

/// A longer name of a terminal's kind is nobody's terminal.
const MAX_KIND: usize = 128;
/// In the protocol, a character that is switched off.
const DISABLED: u32 = 255;

pub(crate) struct Terminal {
    /// What `TERM` is to be.
    pub kind: String,
    /// The file of the program's end, where it has a name.
    pub file: Option<OsString>,
    master: AsyncFd<OwnedFd>,
    /// The program's end, until it has it: while we keep it too, its end would go unnoticed.
    program: Mutex<Option<OwnedFd>>,
}

/// What a peer asks a terminal to be.
pub(crate) struct Shape<'a> {
    pub kind: &'a str,
    pub size: Size,
    pub modes: &'a [(Pty, u32)],
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub columns: u32,
    pub rows: u32,
    pub width: u32,
    pub height: u32,
}

impl Size {
    fn winsize(self) -> Winsize {
        let fit = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
        Winsize {
            ws_row: fit(self.rows),
            ws_col: fit(self.columns),
            ws_xpixel: fit(self.width),
            ws_ypixel: fit(self.height),
        }
    }
}

impl Terminal {
    pub(crate) fn open(shape: &Shape<'_>, account: &Account) -> io::Result<Self> {
        if shape.kind.len() > MAX_KIND || shape.kind.contains('\0') {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags)?;
        rustix::pty::unlockpt(&master)?;
        let name = rustix::pty::ptsname(&master, Vec::new()).ok();
        // By descriptor where the kernel can: the folder of terminals may be another one here.
        let program = rustix::pty::ioctl_tiocgptpeer(&master, flags).or_else(|error| {
            let name = name.as_ref().ok_or(error)?;
            let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
            rustix::fs::open(OsStr::from_bytes(name.as_bytes()), flags, Mode::empty())
        })?;
        // The user opens the terminal by name too; others neither read nor write it.
        let owner = (Some(Uid::from_raw(account.uid)), Some(Gid::from_raw(account.gid)));
        let _ = rustix::fs::fchown(&program, owner.0, owner.1);
        let _ = rustix::fs::fchmod(&program, Mode::RUSR | Mode::WUSR);
        tcsetwinsize(&master, shape.size.winsize())?;
        let mut termios = tcgetattr(&program)?;
        termios.input_modes |= InputModes::IUTF8;
        for (mode, value) in shape.modes {
            apply(&mut termios, *mode, *value);
        }
        // Speeds and a few modes mean nothing to a pseudo-terminal; what it does not take stays as it was.
        let _ = tcsetattr(&program, OptionalActions::Now, &termios);
        rustix::io::ioctl_fionbio(&master, true)?;
        Ok(Terminal {
            kind: shape.kind.to_owned(),
            file: name.map(|name| OsString::from_vec(name.into_bytes())),
            // SAFETY: an owned descriptor stays open and the same until it is dropped, which the result does last.
            master: unsafe { AsyncFd::register(master) }?,
            program: Mutex::new(Some(program)),
        })
    }

    /// Once only.
    pub(crate) fn take_program_end(&self) -> Option<OwnedFd> {
        self.program.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(crate) fn resize(&self, size: Size) {
        let _ = tcsetwinsize(self.master.get_ref(), size.winsize());
    }

    /// The process group that keys like Ctrl-C reach, which is rarely the shell.
    pub(crate) fn foreground(&self) -> Option<i32> {
        tcgetpgrp(self.master.get_ref()).ok().map(|group| group.as_raw_nonzero().get())
    }

    /// Zero at the end; a terminal without processes answers an error, which is its end.
    pub(crate) async fn read(&self, buffer: &mut [u8]) -> usize {
        let read = |fd: &OwnedFd| Ok(rustix::io::read(fd, &mut *buffer)?);
        self.master.async_io(Interest::READABLE, read).await.unwrap_or(0)
    }

    pub(crate) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let write = |fd: &OwnedFd| Ok(rustix::io::write(fd, bytes)?);
            let written = self.master.async_io(Interest::WRITABLE, write).await?;
            bytes = &bytes[written..];
        }
        Ok(())
    }
}

/// One mode of the protocol's encoding; those that Linux has no use for are left out.
fn apply(termios: &mut Termios, mode: Pty, value: u32) {
    let on = value != 0;
    if let Some(index) = special_code(mode) {
        termios.special_codes[index] = if value == DISABLED { 0 } else { u8::try_from(value).unwrap_or(0) };
        return;
    }
    let (input, output) = (&mut termios.input_modes, &mut termios.output_modes);
    let (local, control) = (&mut termios.local_modes, &mut termios.control_modes);
    match mode {
        Pty::IGNPAR => input.set(InputModes::IGNPAR, on),
        Pty::PARMRK => input.set(InputModes::PARMRK, on),
        Pty::INPCK => input.set(InputModes::INPCK, on),
        Pty::ISTRIP => input.set(InputModes::ISTRIP, on),
        Pty::INLCR => input.set(InputModes::INLCR, on),
        Pty::IGNCR => input.set(InputModes::IGNCR, on),
        Pty::ICRNL => input.set(InputModes::ICRNL, on),
        Pty::IXON => input.set(InputModes::IXON, on),
        Pty::IXANY => input.set(InputModes::IXANY, on),
        Pty::IXOFF => input.set(InputModes::IXOFF, on),
        Pty::IMAXBEL => input.set(InputModes::IMAXBEL, on),
        Pty::IUTF8 => input.set(InputModes::IUTF8, on),
        Pty::ISIG => local.set(LocalModes::ISIG, on),
        Pty::ICANON => local.set(LocalModes::ICANON, on),
        Pty::ECHO => local.set(LocalModes::ECHO, on),
        Pty::ECHOE => local.set(LocalModes::ECHOE, on),
        Pty::ECHOK => local.set(LocalModes::ECHOK, on),
        Pty::ECHONL => local.set(LocalModes::ECHONL, on),
        Pty::NOFLSH => local.set(LocalModes::NOFLSH, on),
        Pty::TOSTOP => local.set(LocalModes::TOSTOP, on),
        Pty::IEXTEN => local.set(LocalModes::IEXTEN, on),
        Pty::ECHOCTL => local.set(LocalModes::ECHOCTL, on),
        Pty::ECHOKE => local.set(LocalModes::ECHOKE, on),
        Pty::OPOST => output.set(OutputModes::OPOST, on),
        Pty::ONLCR => output.set(OutputModes::ONLCR, on),
        Pty::OCRNL => output.set(OutputModes::OCRNL, on),
        Pty::ONOCR => output.set(OutputModes::ONOCR, on),
        Pty::ONLRET => output.set(OutputModes::ONLRET, on),
        Pty::PARENB => control.set(ControlModes::PARENB, on),
        Pty::PARODD => control.set(ControlModes::PARODD, on),
        Pty::CS8 if on => control.insert(ControlModes::CS8),
        _ => {}
    }
}

fn special_code(mode: Pty) -> Option<SpecialCodeIndex> {
    Some(match mode {
        Pty::VINTR => SpecialCodeIndex::VINTR,
        Pty::VQUIT => SpecialCodeIndex::VQUIT,
        Pty::VERASE => SpecialCodeIndex::VERASE,
        Pty::VKILL => SpecialCodeIndex::VKILL,
        Pty::VEOF => SpecialCodeIndex::VEOF,
        Pty::VEOL => SpecialCodeIndex::VEOL,
        Pty::VEOL2 => SpecialCodeIndex::VEOL2,
        Pty::VSTART => SpecialCodeIndex::VSTART,
        Pty::VSTOP => SpecialCodeIndex::VSTOP,
        Pty::VSUSP => SpecialCodeIndex::VSUSP,
        Pty::VREPRINT => SpecialCodeIndex::VREPRINT,
        Pty::VWERASE => SpecialCodeIndex::VWERASE,
        Pty::VLNEXT => SpecialCodeIndex::VLNEXT,
        Pty::VDISCARD => SpecialCodeIndex::VDISCARD,
        _ => return None,
    })
}
