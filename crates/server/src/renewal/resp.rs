//! As much of the Redis protocol (RESP2) as a consumer and a producer of one list need.
//!
//! Own code rather than a client library: one blocking command on a connection of its own. Nothing that the other side sends can make
//! this hold more than [`LONGEST`] bytes or wait for longer than it was told.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use rustls_platform_verifier::ConfigVerifierExt as _;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader},
    net::{TcpStream, UnixStream},
};

/// The longest value that is kept; a longer one is read and thrown away.
const LONGEST: usize = 64 * 1024;
const LONGEST_LINE: u64 = 1024;
const CONNECT: Duration = Duration::from_secs(5);
/// How long a reply may take beyond what the command itself waits.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why an address is none.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    #[error("the address of Redis is not a URL")]
    Url,
    #[error("the address of Redis has an unknown scheme; use redis://, rediss:// or unix://")]
    Scheme,
    #[error("the address of Redis names no host or path")]
    Place,
    #[error("the address of Redis names a database that is not a number")]
    Database,
    #[error("TLS to Redis cannot be set up")]
    Tls(#[source] rustls::Error),
}

/// Why a connection is of no more use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    #[error("cannot connect")]
    Connect(#[source] io::Error),
    #[error("the connection broke")]
    Io(#[from] io::Error),
    #[error("no answer in time")]
    Timeout,
    /// Redis' own words.
    #[error("refused: {0}")]
    Refused(String),
    #[error("the other side does not speak the Redis protocol")]
    Protocol,
}

#[derive(Clone)]
enum Place {
    Tcp { host: String, port: u16, tls: Option<tokio_rustls::TlsConnector> },
    Unix(PathBuf),
}

/// Where Redis is and what it asks for.
#[derive(Clone)]
pub struct Address {
    place: Place,
    user: Option<String>,
    password: Option<String>,
    database: u32,
}

impl std::fmt::Debug for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Address").field("database", &self.database).finish_non_exhaustive()
    }
}

impl Address {
    /// `redis://[[user]:password@]host[:port][/database]`, `rediss://` for TLS, `unix:///path`; each with `?db=…&username=…&password=…`.
    pub fn parse(dsn: &str) -> Result<Self, AddressError> {
        let url = reqwest::Url::parse(dsn.trim()).map_err(|_| AddressError::Url)?;
        let place = match url.scheme() {
            "unix" | "redis+unix" => {
                let path = decoded(url.path());
                if path.len() < 2 || url.has_host() {
                    return Err(AddressError::Place);
                }
                Place::Unix(PathBuf::from(path))
            }
            scheme @ ("redis" | "rediss") => {
                let host = url.host_str().filter(|host| !host.is_empty()).unwrap_or("localhost");
                let tls = if scheme == "rediss" { Some(connector()?) } else { None };
                let host = host.trim_matches(['[', ']']).to_owned();
                Place::Tcp { host, port: url.port().unwrap_or(6379), tls }
            }
            _ => return Err(AddressError::Scheme),
        };
        let in_query =
            |wanted| url.query_pairs().find(|(name, _)| name == wanted).map(|(_, value)| value.into_owned());
        let in_path = match &place {
            Place::Tcp { .. } => {
                Some(url.path().trim_matches('/').to_owned()).filter(|path| !path.is_empty())
            }
            Place::Unix(_) => None,
        };
        let database = in_query("db").or(in_path).map_or(Ok(0), |text| text.parse());
        Ok(Self {
            place,
            user: Some(decoded(url.username())).filter(|user| !user.is_empty()).or(in_query("username")),
            password: url.password().map(decoded).or(in_query("password")),
            database: database.map_err(|_| AddressError::Database)?,
        })
    }

    /// A connection that is ready for commands.
    pub(crate) async fn connect(&self) -> Result<Connection, WireError> {
        let open = tokio::time::timeout(CONNECT, self.open()).await.map_err(|_| WireError::Timeout)?;
        let mut connection = Connection { stream: BufReader::new(open.map_err(WireError::Connect)?) };
        match (&self.user, &self.password) {
            (Some(user), Some(password)) => connection.demand(&["AUTH", user, password]).await?,
            (None, Some(password)) => connection.demand(&["AUTH", password]).await?,
            _ => {}
        }
        if self.database != 0 {
            connection.demand(&["SELECT", &self.database.to_string()]).await?;
        }
        Ok(connection)
    }

    async fn open(&self) -> io::Result<Box<dyn Stream>> {
        match &self.place {
            Place::Unix(path) => Ok(Box::new(UnixStream::connect(path).await?)),
            Place::Tcp { host, port, tls } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                let Some(tls) = tls else { return Ok(Box::new(stream)) };
                let name = rustls::pki_types::ServerName::try_from(host.clone()).map_err(io::Error::other)?;
                Ok(Box::new(tls.connect(name, stream).await?))
            }
        }
    }
}

fn connector() -> Result<tokio_rustls::TlsConnector, AddressError> {
    crate::tls::use_ring();
    let config = rustls::ClientConfig::with_platform_verifier().map_err(AddressError::Tls)?;
    Ok(Arc::new(config).into())
}

fn decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// What was taken from the list.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Popped {
    Value(Vec<u8>),
    /// There was one, but it was too long to be kept.
    TooLong,
    /// Nothing came in time.
    Nothing,
}

#[derive(Debug, PartialEq, Eq)]
enum Reply {
    Line(String),
    Value(Vec<u8>),
    TooLong,
    Nil,
    Array(usize),
}

/// One connection. After an error it must be dropped.
pub(crate) struct Connection {
    stream: BufReader<Box<dyn Stream>>,
}

impl Connection {
    /// `BRPOP`: takes the oldest value, waiting for at most `seconds`.
    pub(crate) async fn pop(&mut self, key: &str, seconds: u32) -> Result<Popped, WireError> {
        let limit = Duration::from_secs(u64::from(seconds)) + PATIENCE;
        let timeout = seconds.to_string();
        let reply = async {
            self.write(&["BRPOP", key, &timeout]).await?;
            match self.read().await? {
                Reply::Nil => return Ok(Popped::Nothing),
                Reply::Array(2) => {}
                _ => return Err(WireError::Protocol),
            }
            let _key = self.read().await?;
            match self.read().await? {
                Reply::Value(value) => Ok(Popped::Value(value)),
                Reply::TooLong => Ok(Popped::TooLong),
                _ => Err(WireError::Protocol),
            }
        };
        tokio::time::timeout(limit, reply).await.map_err(|_| WireError::Timeout)?
    }

    /// A command that is answered with `OK`, a number or an error.
    async fn demand(&mut self, words: &[&str]) -> Result<(), WireError> {
        self.demand_all(&[words]).await
    }

    /// Several of them in one round trip.
    pub(crate) async fn demand_all(&mut self, commands: &[&[&str]]) -> Result<(), WireError> {
        let reply = async {
            for command in commands {
                self.write(command).await?;
            }
            for _ in commands {
                let Reply::Line(_) = self.read().await? else { return Err(WireError::Protocol) };
            }
            Ok(())
        };
        tokio::time::timeout(PATIENCE, reply).await.map_err(|_| WireError::Timeout)?
    }

    async fn write(&mut self, words: &[&str]) -> Result<(), WireError> {
        let mut command = format!("*{}\r\n", words.len());
        for word in words {
            command.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        self.stream.write_all(command.as_bytes()).await?;
        self.stream.flush().await?;
        Ok(())
    }

    async fn line(&mut self) -> Result<String, WireError> {
        let mut line = Vec::new();
        (&mut self.stream).take(LONGEST_LINE).read_until(b'\n', &mut line).await?;
        let Some(line) = line.strip_suffix(b"\r\n") else {
            let end = if line.is_empty() { io::ErrorKind::UnexpectedEof.into() } else { WireError::Protocol };
            return Err(end);
        };
        Ok(String::from_utf8_lossy(line).into_owned())
    }

    async fn read(&mut self) -> Result<Reply, WireError> {
        let line = self.line().await?;
        let rest = line.get(1..).unwrap_or_default();
        match line.as_bytes().first() {
            Some(b'+' | b':') => Ok(Reply::Line(rest.to_owned())),
            Some(b'-') => Err(WireError::Refused(rest.to_owned())),
            Some(b'*') if rest == "-1" => Ok(Reply::Nil),
            Some(b'*') => Ok(Reply::Array(rest.parse().map_err(|_| WireError::Protocol)?)),
            Some(b'$') if rest == "-1" => Ok(Reply::Nil),
            Some(b'$') => self.value(rest.parse().map_err(|_| WireError::Protocol)?).await,
            _ => Err(WireError::Protocol),
        }
    }

    async fn value(&mut self, length: usize) -> Result<Reply, WireError> {
        let reply = if length > LONGEST {
            let mut rest = (&mut self.stream).take(length as u64);
            tokio::io::copy_buf(&mut rest, &mut tokio::io::sink()).await?;
            Reply::TooLong
        } else {
            let mut value = vec![0; length];
            self.stream.read_exact(&mut value).await?;
            Reply::Value(value)
        };
        let mut end = [0; 2];
        self.stream.read_exact(&mut end).await?;
        if end == *b"\r\n" { Ok(reply) } else { Err(WireError::Protocol) }
    }
}

impl From<io::ErrorKind> for WireError {
    fn from(kind: io::ErrorKind) -> Self {
        Self::Io(kind.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn over(replies: &[u8]) -> Connection {
        // What is written goes nowhere in particular; what is read is the script.
        let script = tokio::io::join(io::Cursor::new(replies.to_vec()), tokio::io::sink());
        Connection { stream: BufReader::new(Box::new(script)) }
    }

    #[test]
    fn addresses_are_read() {
        let tcp = |dsn: &str| match Address::parse(dsn).unwrap() {
            Address { place: Place::Tcp { host, port, tls }, user, password, database } => {
                (host, port, tls.is_some(), user, password, database)
            }
            Address { .. } => panic!("{dsn}"),
        };
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(tcp("redis://r"), ("r".into(), 6379, false, None, None, 0));
        assert_eq!(tcp("redis://:p%40%2f@r:1/3"), ("r".into(), 1, false, None, text("p@/"), 3));
        assert_eq!(tcp("redis://u:p@[::1]:1?db=4"), ("::1".into(), 1, false, text("u"), text("p"), 4));
        assert!(tcp("rediss://r").2);
        let unix = Address::parse("unix:///run/re%20dis.sock?db=2&password=secret").unwrap();
        assert!(matches!(&unix.place, Place::Unix(path) if path == std::path::Path::new("/run/re dis.sock")));
        assert_eq!((unix.password.as_deref(), unix.database), (Some("secret"), 2));
        assert!(!format!("{unix:?}").contains("secret"));
        for (wrong, error) in [
            ("", "not a URL"),
            ("http://r", "scheme"),
            ("redis://r/x", "database"),
            ("unix:///", "path"),
            ("unix://run/x", "path"),
        ] {
            assert!(Address::parse(wrong).unwrap_err().to_string().contains(error), "{wrong}");
        }
    }

    #[tokio::test]
    async fn replies_are_read_as_the_protocol_says() {
        let mut connection = over(b"*2\r\n$1\r\nk\r\n$5\r\na\r\nb!\r\n*-1\r\n*2\r\n$1\r\nk\r\n$0\r\n\r\n");
        assert_eq!(connection.pop("k", 1).await.unwrap(), Popped::Value(b"a\r\nb!".to_vec()));
        assert_eq!(connection.pop("k", 1).await.unwrap(), Popped::Nothing);
        assert_eq!(connection.pop("k", 1).await.unwrap(), Popped::Value(Vec::new()));
        assert!(matches!(connection.pop("k", 1).await, Err(WireError::Io(_))));
    }

    #[tokio::test]
    async fn several_commands_go_in_one_round_trip() {
        let commands: &[&[&str]] = &[&["LPUSH", "k", "v"], &["LTRIM", "k", "0", "9"]];
        assert!(over(b":1\r\n+OK\r\n").demand_all(commands).await.is_ok());
        let refused = over(b":1\r\n-OOM\r\n").demand_all(commands).await;
        assert!(matches!(refused, Err(WireError::Refused(text)) if text == "OOM"));
        assert!(matches!(over(b":1\r\n").demand_all(commands).await, Err(WireError::Io(_))));
    }

    #[tokio::test]
    async fn a_value_that_is_too_long_is_skipped_and_the_next_one_is_read() {
        let long = LONGEST + 1;
        let mut script = format!("*2\r\n$1\r\nk\r\n${long}\r\n{}\r\n", "x".repeat(long)).into_bytes();
        script.extend_from_slice(b"*2\r\n$1\r\nk\r\n$2\r\nok\r\n");
        let mut connection = over(&script);
        assert_eq!(connection.pop("k", 1).await.unwrap(), Popped::TooLong);
        assert_eq!(connection.pop("k", 1).await.unwrap(), Popped::Value(b"ok".to_vec()));
    }

    #[tokio::test(start_paused = true)]
    async fn whatever_else_comes_is_an_error() {
        let refused = over(b"-WRONGTYPE not a list\r\n").pop("k", 1).await;
        assert!(matches!(refused, Err(WireError::Refused(text)) if text.starts_with("WRONGTYPE")));
        for nonsense in [
            &b"HTTP/1.1 400 Bad Request\r\n\r\n"[..],
            b"*3\r\n",
            b"*99999999999999999999999\r\n",
            b"*2\r\n$1\r\nk\r\n+OK\r\n",
            b"*2\r\n$1\r\nk\r\n$2\r\nokxx",
            b"$-2\r\n",
            b"\r\n",
            &[b'+'; 5000],
        ] {
            assert!(matches!(over(nonsense).pop("k", 1).await, Err(WireError::Protocol)), "{nonsense:?}");
        }
        // Somebody who accepts and never answers.
        let (silent, _other) = tokio::io::duplex(64);
        let mut connection = Connection { stream: BufReader::new(Box::new(silent)) };
        assert!(matches!(connection.pop("k", 1).await, Err(WireError::Timeout)));
    }
}
