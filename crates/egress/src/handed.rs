//! What the supervisor holds and hands to each worker: the state, and every socket that somebody else could take while there is no worker.
//!
//! Where the sandbox shares our network it may listen on any port that is free. Invariant: ours never are, so nobody is ever asked in our
//! place, or shown the token.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::{FdFlags, fcntl_setfd};

use crate::firewall::{Placement, Ports};
use crate::settings::Settings;
use crate::state::State;

/// What a descriptor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    State,
    Control,
    Questions,
    QuestionStreams,
    Gate,
    /// A connection to the control API that waits for a worker.
    Call,
}

const WORDS: [(Role, &str); 6] = [
    (Role::State, "state"),
    (Role::Control, "control"),
    (Role::Questions, "questions"),
    (Role::QuestionStreams, "question-streams"),
    (Role::Gate, "gate"),
    (Role::Call, CALL),
];

const CALL: &str = "call";

/// Descriptors with their roles. They stay open here while workers come and go.
#[derive(Debug)]
pub struct Handed(Vec<(Role, OwnedFd)>);

/// The same, as a worker uses them.
#[derive(Debug)]
pub struct Taken {
    pub state: State,
    pub control: Vec<TcpListener>,
    pub questions: Vec<UdpSocket>,
    pub question_streams: Vec<TcpListener>,
    pub gate: Vec<TcpListener>,
    pub calls: Vec<TcpStream>,
}

/// Where each part of the program listens.
pub fn ports(settings: &Settings) -> Ports {
    Ports { gate: settings.intercept.port, control: settings.api.port(), ..Ports::default() }
}

impl Handed {
    /// Makes the state and binds every socket.
    pub fn make(settings: &Settings) -> io::Result<Self> {
        let (place, ports) = (&settings.placement, ports(settings));
        let mut handed = Self(vec![(Role::State, State::create()?.as_fd().try_clone_to_owned()?)]);
        let control = control(settings.api)?;
        // While there is no worker the supervisor takes connections, and must not be held up by it.
        control.set_nonblocking(true)?;
        handed.add(Role::Control, vec![control]);
        handed.add(Role::Questions, at_gates(place, ports.dns, UdpSocket::bind)?);
        handed.add(Role::QuestionStreams, at_gates(place, ports.dns, TcpListener::bind)?);
        handed.add(Role::Gate, at_gates(place, ports.gate, TcpListener::bind)?);
        Ok(handed)
    }

    fn add(&mut self, role: Role, descriptors: Vec<impl Into<OwnedFd>>) {
        self.0.extend(descriptors.into_iter().map(|descriptor| (role, descriptor.into())));
    }

    /// How a worker is told of them.
    pub fn words(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|(role, descriptor)| {
            let word = WORDS.iter().find(|(known, _)| known == role).map_or("", |(_, word)| word);
            format!("{word}={}", descriptor.as_raw_fd())
        })
    }

    /// The listeners of the control API.
    pub fn control(&self) -> impl Iterator<Item = &OwnedFd> {
        self.0.iter().filter(|(role, _)| *role == Role::Control).map(|(_, descriptor)| descriptor)
    }

    /// Their numbers, which have to stay open over the execution of a worker.
    pub fn numbers(&self) -> Vec<RawFd> {
        self.0.iter().map(|(_, descriptor)| descriptor.as_raw_fd()).collect()
    }
}

/// How a worker is told of a connection that has waited for it.
pub fn call(number: RawFd) -> String {
    format!("{CALL}={number}")
}

impl Taken {
    /// Takes what the words of the command line say. Each number may be there once.
    pub fn from_words<'a>(words: impl Iterator<Item = &'a str>) -> io::Result<Self> {
        let mut state = None;
        let (mut control, mut questions, mut streams, mut gate, mut calls) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for word in words {
            let (role, descriptor) = take(word)?;
            match role {
                Role::State => state = Some(State::from(descriptor)),
                Role::Control => control.push(unblocked_listener(descriptor)?),
                Role::Questions => {
                    let socket = UdpSocket::from(descriptor);
                    socket.set_nonblocking(true)?;
                    questions.push(socket);
                }
                Role::QuestionStreams => streams.push(unblocked_listener(descriptor)?),
                Role::Gate => gate.push(unblocked_listener(descriptor)?),
                Role::Call => {
                    let call = TcpStream::from(descriptor);
                    call.set_nonblocking(true)?;
                    calls.push(call);
                }
            }
        }
        let state = state.ok_or_else(|| unusable("no state"))?;
        Ok(Self { state, control, questions, question_streams: streams, gate, calls })
    }
}

fn unblocked_listener(descriptor: OwnedFd) -> io::Result<TcpListener> {
    let listener = TcpListener::from(descriptor);
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn take(word: &str) -> io::Result<(Role, OwnedFd)> {
    let (name, number) = word.split_once('=').ok_or_else(|| unusable(word))?;
    let role = WORDS.iter().find(|(_, known)| *known == name).ok_or_else(|| unusable(word))?.0;
    let number: RawFd = number.parse().ok().filter(|number| *number > 2).ok_or_else(|| unusable(word))?;
    // SAFETY: the number is only looked at here; nothing is owned before it is known to be open.
    let seen = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl_setfd(seen, FdFlags::CLOEXEC)?;
    // SAFETY: the supervisor has left this descriptor to us, and nobody else in this process knows it.
    Ok((role, unsafe { OwnedFd::from_raw_fd(number) }))
}

fn unusable(word: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("not handed down by a supervisor: {word}"))
}

/// Where there is no IPv6 at all, the IPv4 counterpart of the address.
fn control(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address) {
        Err(error) if address.ip().is_unspecified() && error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {
            TcpListener::bind(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port()))
        }
        other => other,
    }
}

/// Out of reach of everybody but those whose packets are redirected; one for each family.
fn at_gates<T: AsFd>(
    placement: &Placement,
    port: u16,
    bind: impl Fn(SocketAddr) -> io::Result<T>,
) -> io::Result<Vec<T>> {
    let bind = |address: IpAddr| bind(SocketAddr::new(address, port));
    match placement {
        // Redirected packets come for the interface's own address, whichever that is.
        Placement::Gateway { down, .. } => {
            let socket = bind(Ipv4Addr::UNSPECIFIED.into())?;
            only_from(&socket, down)?;
            Ok(vec![socket])
        }
        Placement::Shared { .. } => {
            let mut bound = vec![bind(Ipv4Addr::LOCALHOST.into())?];
            match bind(Ipv6Addr::LOCALHOST.into()) {
                Ok(socket) => bound.push(socket),
                Err(error) if has_no_family(&error) => {}
                Err(error) => return Err(error),
            }
            Ok(bound)
        }
    }
}

fn only_from(socket: &impl AsFd, interface: &str) -> io::Result<()> {
    // SAFETY: the pointer is to as many bytes as are given, which live longer than the call.
    let done = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_BINDTODEVICE,
            interface.as_ptr().cast(),
            interface.len() as libc::socklen_t,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Without IPv6 nothing can be sent by it either.
fn has_no_family(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_handed_down_can_be_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut handed = Handed(Vec::new());
        handed.add(Role::State, vec![State::create().unwrap().as_fd().try_clone_to_owned().unwrap()]);
        handed.add(Role::Control, vec![listener]);
        let waiting = TcpStream::connect(address).unwrap();
        let caller = waiting.local_addr().unwrap();
        let mut words: Vec<_> = handed.words().collect();
        words.push(call(std::os::fd::IntoRawFd::into_raw_fd(waiting)));
        assert!(words[0].starts_with("state=") && words[1].starts_with("control="), "{words:?}");
        // The process that takes them has its own.
        handed.0.into_iter().for_each(|(_, descriptor)| _ = std::os::fd::IntoRawFd::into_raw_fd(descriptor));
        let taken = Taken::from_words(words.iter().map(String::as_str)).unwrap();
        assert_eq!(taken.control[0].local_addr().unwrap(), address);
        assert!(taken.questions.is_empty());
        assert_eq!(taken.calls[0].local_addr().unwrap(), caller);
    }

    #[test]
    fn other_words_are_refused() {
        for words in [&[][..], &["control"], &["state=1"], &["other=3"], &["state=987654"]] {
            assert!(Taken::from_words(words.iter().copied()).is_err(), "{words:?}");
        }
    }
}
