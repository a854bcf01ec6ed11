//! `sandglass ingress`: the gateway in the foreground.

mod go_flags;
mod table;

use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use sandglass_server::{
    config::{Choice as _, LogConfig, LogLevel, Secret},
    gateway::{self, AuditSettings, Generation, IntentSettings, Keys, Options, Park, RedisList, RouteFrom},
    renewal::RedisAddress,
    telemetry::logs,
};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use self::go_flags::{Given, Parsed};
use self::table::FLAGS;

/// Run the gateway in front of the sandboxes of a server
#[derive(Args, Debug)]
#[command(disable_help_flag = true)]
pub struct Ingress {
    /// Flags as the OpenSandbox ingress takes them, with one dash or two; --help lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
    flags: Vec<String>,
}

impl Ingress {
    /// Serves until told to stop.
    pub fn run(self) -> Result<u8> {
        let given = match go_flags::parse(FLAGS, &self.flags)? {
            Parsed::Given(given) => given,
            Parsed::Help => {
                help().lines().for_each(crate::output::note);
                return Ok(0);
            }
        };
        let level = given.text("log-level");
        let words = LogLevel::WORDS.iter().find(|(word, _)| word.eq_ignore_ascii_case(level));
        let (_, level) = words.context("-log-level is none of error, warn, info and debug")?;
        let options = options(&given, |name| std::env::var(name).ok())?;
        rustls::crypto::ring::default_provider().install_default().ok();
        let log = LogConfig { level: *level, ..LogConfig::default() };
        logs::init(&log, std::env::var("SANDGLASS_LOG").ok().as_deref()).context("cannot set up logging")?;
        if options.route == RouteFrom::Nowhere {
            tracing::warn!("the mode is neither header nor uri: every request will be refused");
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(async {
            let mut terminate = signal(SignalKind::terminate())?;
            let mut interrupt = signal(SignalKind::interrupt())?;
            let stop = CancellationToken::new();
            let told = stop.clone();
            tokio::spawn(async move {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                told.cancel();
            });
            gateway::run(options, stop).await?;
            anyhow::Ok(())
        })?;
        Ok(0)
    }
}

fn help() -> String {
    let mut text = "Run the gateway in front of the sandboxes of a server\n\nUsage: sandglass ingress --server=URL [flags]\n".to_owned();
    for flag in FLAGS {
        let default =
            if flag.default.is_empty() { String::new() } else { format!(" [default: {}]", flag.default) };
        // Writing to a string cannot fail.
        let _ = write!(text, "\n  --{}\n      {}{default}", flag.name, flag.about);
    }
    text
}

fn options(given: &Given, variable: impl Fn(&str) -> Option<String>) -> Result<Options> {
    let or_variable = |flag: &str, name: &str| {
        given.given(flag).map(str::to_owned).or_else(|| variable(name)).filter(|text| !text.trim().is_empty())
    };
    provider(given)?;
    let server = or_variable("server", "SANDGLASS_INGRESS_SERVER").context(
        "-server is missing: the address of the Sandglass server to learn from (look-ups in Kubernetes come with the Kubernetes runtime)",
    )?;
    let server =
        server.trim().parse().ok().filter(|url: &gateway::Url| matches!(url.scheme(), "http" | "https"));
    let keys = or_variable("secure-access-keys", "OPENSANDBOX_SECURE_ACCESS_KEYS").unwrap_or_default();
    Ok(Options {
        listen: listen(given.text("host"), given.number("port")?),
        server: server.context("-server is not an http(s) address")?,
        key: key(given.given("key-file").map(Path::new), variable("SANDGLASS_INGRESS_KEY"))?,
        route: match given.text("mode") {
            // A host name is looked at in this mode too.
            "header" | "wildcard" => RouteFrom::HeaderOrHost,
            "uri" => RouteFrom::Path,
            _ => RouteFrom::Nowhere,
        },
        keys: Keys::parse(&keys).context("-secure-access-keys cannot be read")?,
        accepts: match given.text("secure-access-signature") {
            "full" => Generation::Full,
            "short" => Generation::Short,
            _ => bail!("-secure-access-signature is full or short"),
        },
        intents: intents(given, or_variable("renew-intent-redis-dsn", "SANDGLASS_INGRESS_REDIS_DSN"))?,
        audit: audit(given)?,
        park: given.switch("wake-enabled")?.then_some(Park {
            patience: given.duration("wake-park-budget")?,
            most: given.number("wake-park-max")?,
        }),
        published_on: published_on(given.text("published-host"))?,
        patience: given.duration("sync-timeout")?,
        limits: gateway::GatewayLimits {
            connections: given.number("max-connections")?,
            head: given.duration("header-timeout")?,
            drain: given.duration("drain-timeout")?,
        },
        tls: tls(given)?,
    })
}

fn provider(given: &Given) -> Result<()> {
    match given.text("provider-type") {
        "" | "sandglass" => Ok(()),
        "batchsandbox" | "agent-sandbox" | "fast-sandbox" => {
            bail!(
                "look-ups in Kubernetes come with the Kubernetes runtime; leave -provider-type out and give -server"
            )
        }
        _ => bail!("unknown -provider-type; leave it out and give -server"),
    }
}

fn listen(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

fn key(file: Option<&Path>, variable: Option<String>) -> Result<Secret> {
    let text = match file {
        Some(file) => std::fs::read_to_string(file)
            .with_context(|| format!("cannot read the key in {}", file.display()))?,
        None => variable.unwrap_or_default(),
    };
    let text = text.trim();
    ensure!(!text.contains(['\r', '\n', '\0']), "the key is not one line");
    Ok(Secret::new(text))
}

fn intents(given: &Given, dsn: Option<String>) -> Result<Option<IntentSettings>> {
    // Below zero means the same as zero.
    let interval = u64::try_from(given.number::<i64>("renew-intent-min-interval")?).unwrap_or(0);
    let interval = std::time::Duration::from_secs(interval);
    if !given.switch("renew-intent-enabled")? {
        let direct = given.switch("renew-through-server")?;
        return Ok(direct.then_some(IntentSettings { redis: None, interval }));
    }
    let dsn = dsn.unwrap_or_else(|| given.text("renew-intent-redis-dsn").to_owned());
    let redis = RedisList {
        address: RedisAddress::parse(&dsn).context("-renew-intent-redis-dsn")?,
        key: given.text("renew-intent-queue-key").to_owned(),
        longest: u64::try_from(given.number::<i64>("renew-intent-queue-max-len")?).unwrap_or(0),
    };
    Ok(Some(IntentSettings { redis: Some(redis), interval }))
}

fn audit(given: &Given) -> Result<Option<AuditSettings>> {
    if !given.switch("audit-enabled")? {
        return Ok(None);
    }
    let url = given.text("audit-webhook-url").parse().ok();
    let url = url.filter(|url: &gateway::Url| matches!(url.scheme(), "http" | "https"));
    Ok(Some(AuditSettings {
        url: url.context("-audit-webhook-url is not an http(s) address")?,
        queue: given.number("audit-queue-size")?,
        timeout: given.duration("audit-timeout")?,
    }))
}

fn published_on(text: &str) -> Result<Option<IpAddr>> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).context("-published-host is not an address")
}

fn tls(given: &Given) -> Result<Option<(PathBuf, PathBuf)>> {
    match (given.text("tls-cert"), given.text("tls-key")) {
        ("", "") => Ok(None),
        (cert, key) if !cert.is_empty() && !key.is_empty() => Ok(Some((cert.into(), key.into()))),
        _ => bail!("-tls-cert and -tls-key only go together"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Options> {
        let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let variable = |name: &str| (name == "SANDGLASS_INGRESS_KEY").then(|| "key".to_owned());
        match go_flags::parse(FLAGS, &arguments)? {
            Parsed::Given(given) => options(&given, variable),
            Parsed::Help => bail!("help"),
        }
    }

    #[test]
    fn command_lines_of_the_reference_work() {
        let line = "--server=http://s:1 -port 1 --namespace x --log-level=debug -mode uri --secure-access-keys k=eA== \
                    --renew-intent-enabled --renew-intent-redis-dsn redis://u:p@r:1/2 --renew-intent-min-interval -1 \
                    --audit-enabled=true --audit-webhook-url http://a/b --activity-enabled --kubeconfig=/x --wake-retry-factor 1.3";
        let options = read(line).unwrap();
        assert_eq!((options.listen.as_str(), options.route), ("0.0.0.0:1", RouteFrom::Path));
        assert_eq!(options.intents.unwrap().interval, std::time::Duration::ZERO);
        assert!(!options.keys.is_empty() && options.audit.is_some() && options.park.is_some());
        assert_eq!(read("-server http://s -mode nope").unwrap().route, RouteFrom::Nowhere);
        assert!(read("-server http://s -wake-enabled=false").unwrap().park.is_none());
        assert!(read("-server http://s -host ::1").unwrap().listen.starts_with("[::1]:"));
    }

    #[test]
    fn what_does_not_start() {
        for (line, word) in [
            ("", "-server is missing"),
            ("-server ftp://s", "not an http(s) address"),
            ("-server http://s -provider-type batchsandbox", "Kubernetes runtime"),
            ("-provider-type=agent-sandbox", "Kubernetes runtime"),
            ("-server http://s -provider-type x", "unknown -provider-type"),
            ("-server http://s -secure-access-keys K=eA==", "-secure-access-keys"),
            ("-server http://s -secure-access-keys k=eA", "-secure-access-keys"),
            (
                "-server http://s -renew-intent-enabled -renew-intent-redis-dsn nope",
                "-renew-intent-redis-dsn",
            ),
            ("-server http://s -audit-enabled", "-audit-webhook-url"),
            ("-server http://s -tls-cert x", "only go together"),
            ("-server http://s -key-file /does/not/exist", "cannot read the key"),
            ("-server http://s -unknown 1", "no flag"),
        ] {
            let error = format!("{:#}", read(line).unwrap_err());
            assert!(error.contains(word), "{line}: {error}");
        }
    }

    #[test]
    fn the_help_names_every_flag_once() {
        let text = help();
        for flag in FLAGS {
            assert_eq!(text.matches(&format!("--{}\n", flag.name)).count(), 1, "{}", flag.name);
        }
    }
}
