//! The log: one record a line on standard error, or in files that rotate.
//!
//! A line carries time, level, the id of the request it belongs to (`-` for none), the target and the fields. The request
//! id is the record's own field `request_id`, or that of the request that the task works for ([`current`]).
//!
//! Secrets are kept out twice: [`crate::config::Secret`] prints as `***`, and fields named in [`NEVER_LOGGED`] are
//! replaced here, whoever wrote them. Request and response bodies, command lines and environments of sandboxes are never
//! logged at all.

use std::fmt::{self, Write as _};
use std::io;
use std::path::PathBuf;
use std::sync::Mutex;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::{FilterFn, LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry};

use super::{current, rotation::RotatingFile};
use crate::config::{LogConfig, LogFormat, LogLevel};

/// The target of the one record a request; goes to the access file when files are on.
pub const ACCESS_TARGET: &str = "sandglass::access";

/// Fields whose values are replaced in every record.
pub const NEVER_LOGGED: &[&str] = &[
    "access_token",
    "api_key",
    "auth",
    "auth_token",
    "authorization",
    "cookie",
    "credentials",
    "dsn",
    "env",
    "password",
    "route_token",
    "secret",
    "token",
];

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("failed to open the log file {}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("the log filter is not of the form `info,sandglass_server::engine=debug`")]
    Filter,
    #[error("logging has already been set up")]
    Twice,
}

/// Sets up logging for the whole process. `filter` (`info,sandglass_server::engine=debug`) replaces the configured level.
///
/// # Errors
///
/// When a log file cannot be opened, the filter is malformed, or logging is already set up.
pub fn init(config: &LogConfig, filter: Option<&str>) -> Result<(), LogError> {
    let subscriber = subscriber(config, filter)?;
    tracing::subscriber::set_global_default(subscriber).map_err(|_| LogError::Twice)
}

fn subscriber(config: &LogConfig, filter: Option<&str>) -> Result<impl Subscriber + Send + Sync, LogError> {
    let targets = targets(config.level, filter)?;
    let layers: Vec<BoxedLayer> = if config.file_enabled {
        let open = |path: &PathBuf| {
            RotatingFile::open(path, config.file_max, config.file_backup_count)
                .map_err(|source| LogError::File { path: path.clone(), source })
        };
        let (main, access) = (open(&config.file_path)?, open(&config.access_file_path)?);
        vec![
            lines(config.format, Mutex::new(main))
                .with_filter(about(|target| target != ACCESS_TARGET))
                .boxed(),
            lines(config.format, Mutex::new(access))
                .with_filter(about(|target| target == ACCESS_TARGET))
                .boxed(),
        ]
    } else {
        vec![lines(config.format, io::stderr)]
    };
    Ok(tracing_subscriber::registry().with(layers.with_filter(targets)))
}

type BoxedLayer = Box<dyn Layer<Registry> + Send + Sync>;

fn lines<W>(format: LogFormat, writer: W) -> BoxedLayer
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    tracing_subscriber::fmt::layer().event_format(Lines { format }).with_writer(writer).boxed()
}

fn about(wanted: fn(&str) -> bool) -> FilterFn<impl Fn(&Metadata<'_>) -> bool> {
    // Spans pass, because either file may need their request id.
    FilterFn::new(move |metadata: &Metadata<'_>| metadata.is_span() || wanted(metadata.target()))
}

/// The level is ours; libraries are heard from `warn` on, or not even that when ours is `error`.
fn targets(level: LogLevel, filter: Option<&str>) -> Result<Targets, LogError> {
    if let Some(filter) = filter.filter(|filter| !filter.trim().is_empty()) {
        return filter.parse().map_err(|_| LogError::Filter);
    }
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    Ok(Targets::new().with_target("sandglass", level).with_default(level.min(LevelFilter::WARN)))
}

/// The fields of a record, secrets already replaced.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Fields {
    fn put(&mut self, field: &Field, value: Value) {
        let name = field.name().trim_start_matches("r#");
        let value = if NEVER_LOGGED.contains(&name) { Value::from("***") } else { value };
        self.0.insert(name.to_owned(), value);
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, Value::from(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, Value::from(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, Value::from(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, Value::from(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, Value::from(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, Value::from(value));
    }

    /// An error is written with its causes: they are what the reader needs.
    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        let mut text = value.to_string();
        let mut source = value.source();
        while let Some(cause) = source {
            let _infallible = write!(text, ": {cause}");
            source = cause.source();
        }
        self.put(field, Value::from(text));
    }
}

struct Lines {
    format: LogFormat,
}

struct Line<'a> {
    time: String,
    level: Level,
    target: &'a str,
    request: Option<String>,
    message: String,
    fields: Map<String, Value>,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'l> LookupSpan<'l>,
    N: for<'w> FormatFields<'w> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let Fields(mut fields) = fields;
        let own_request = match fields.remove("request_id") {
            Some(Value::String(request)) => Some(request),
            _ => None,
        };
        let message = match fields.remove("message") {
            Some(Value::String(message)) => message,
            Some(other) => other.to_string(),
            None => String::new(),
        };
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let (level, target) = (*event.metadata().level(), event.metadata().target());
        let line =
            Line { time, level, target, request: own_request.or_else(current::request_id), message, fields };
        match self.format {
            LogFormat::Human => line.write_human(writer),
            LogFormat::Json => line.write_json(writer),
        }
    }
}

impl Line<'_> {
    fn write_human(&self, mut writer: Writer<'_>) -> fmt::Result {
        let request = self.request.as_deref().unwrap_or("-");
        write!(writer, "{} {:5} [{}] {}: ", self.time, self.level, one_line(request), self.target)?;
        writer.write_str(&one_line(&self.message))?;
        for (name, value) in &self.fields {
            match value {
                Value::String(text) if is_plain(text) => write!(writer, " {name}={text}")?,
                value => write!(writer, " {name}={value}")?,
            }
        }
        writeln!(writer)
    }

    fn write_json(&self, mut writer: Writer<'_>) -> fmt::Result {
        let mut record = Map::new();
        record.insert("timestamp".to_owned(), Value::from(self.time.as_str()));
        record.insert("level".to_owned(), Value::from(self.level.as_str()));
        record.insert("target".to_owned(), Value::from(self.target));
        record.insert("request_id".to_owned(), Value::from(self.request.as_deref()));
        record.insert("message".to_owned(), Value::from(self.message.as_str()));
        if !self.fields.is_empty() {
            record.insert("fields".to_owned(), Value::Object(self.fields.clone()));
        }
        writeln!(writer, "{}", Value::Object(record))
    }
}

fn is_plain(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| !c.is_whitespace() && !c.is_control() && c != '"')
}

/// A record stays one line and cannot move the cursor, whatever a client put into a name.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_control() { line.extend(letter.escape_default()) } else { line.push(letter) }
    }
    line
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn files(dir: &Path, format: LogFormat, level: LogLevel) -> LogConfig {
        LogConfig {
            level,
            format,
            file_enabled: true,
            file_path: dir.join("server.log"),
            access_file_path: dir.join("access.log"),
            ..LogConfig::default()
        }
    }

    fn logged(config: &LogConfig, filter: Option<&str>, work: impl FnOnce()) -> (String, String) {
        let subscriber = subscriber(config, filter).unwrap();
        tracing::subscriber::with_default(subscriber, work);
        let read = |path: &Path| std::fs::read_to_string(path).unwrap();
        (read(&config.file_path), read(&config.access_file_path))
    }

    #[test]
    fn a_line_carries_level_request_id_target_message_and_fields() {
        let dir = tempfile::tempdir().unwrap();
        let config = files(dir.path(), LogFormat::Human, LogLevel::Info);
        let (main, access) = logged(&config, None, || {
            current::within_sync(http::HeaderValue::from_static("req-7"), || {
                tracing::info!(target: "sandglass::engine", sandbox = "s1", count = 3, "started a box");
                tracing::info!(target: ACCESS_TARGET, status = 200, "GET /v1/sandboxes");
            });
            tracing::warn!(target: "sandglass::engine", "alone\nreally");
        });
        let lines: Vec<&str> = main.lines().collect();
        assert_eq!(lines.len(), 2, "{main}");
        assert!(
            lines[0].ends_with("INFO  [req-7] sandglass::engine: started a box count=3 sandbox=s1"),
            "{main}"
        );
        assert!(lines[1].ends_with("WARN  [-] sandglass::engine: alone\\nreally"), "{main}");
        assert!(access.ends_with("[req-7] sandglass::access: GET /v1/sandboxes status=200\n"), "{access}");
    }

    #[test]
    fn json_is_one_object_a_line() {
        let dir = tempfile::tempdir().unwrap();
        let config = files(dir.path(), LogFormat::Json, LogLevel::Info);
        let (main, _) = logged(&config, None, || {
            tracing::error!(target: "sandglass::store", request_id = "r", code = 5, "broken \"x\"");
        });
        let record: Value = serde_json::from_str(&main).unwrap();
        assert_eq!(record["level"], "ERROR");
        assert_eq!(record["request_id"], "r");
        assert_eq!(record["message"], "broken \"x\"");
        assert_eq!(record["fields"]["code"], 5);
        assert_eq!(record["target"], "sandglass::store");
        assert!(record["timestamp"].as_str().unwrap().ends_with('Z'));
    }

    #[test]
    fn secrets_are_replaced_whoever_logs_them() {
        let dir = tempfile::tempdir().unwrap();
        for format in [LogFormat::Human, LogFormat::Json] {
            let config = files(dir.path(), format, LogLevel::Trace);
            let (main, _) = logged(&config, None, || {
                tracing::info!(target: "sandglass::http", token = "hunter2", api_key = ?"hunter2", "call");
                tracing::info!(target: "sandglass::http", key = ?crate::config::Secret::new("hunter2"), "call");
            });
            assert!(main.contains("***") && !main.contains("hunter2"), "{main}");
        }
    }

    #[test]
    fn the_level_is_ours_and_libraries_only_warn() {
        let dir = tempfile::tempdir().unwrap();
        let config = files(dir.path(), LogFormat::Human, LogLevel::Debug);
        let speak = || {
            tracing::debug!(target: "sandglass_server::engine", "ours");
            tracing::trace!(target: "sandglass_server::engine", "too fine");
            tracing::info!(target: "hyper::proto", "chatter");
            tracing::warn!(target: "hyper::proto", "trouble");
        };
        let (main, _) = logged(&config, None, speak);
        assert!(main.contains("ours") && main.contains("trouble"), "{main}");
        assert!(!main.contains("too fine") && !main.contains("chatter"), "{main}");

        let dir = tempfile::tempdir().unwrap();
        let config = files(dir.path(), LogFormat::Human, LogLevel::Error);
        let (main, _) = logged(&config, Some("hyper=info"), speak);
        assert!(main.contains("chatter") && !main.contains("ours"), "{main}");
    }

    #[test]
    fn errors_are_logged_with_their_causes() {
        let dir = tempfile::tempdir().unwrap();
        let config = files(dir.path(), LogFormat::Human, LogLevel::Info);
        let error = LogError::File {
            path: PathBuf::from("/x"),
            source: io::Error::from(io::ErrorKind::PermissionDenied),
        };
        let (main, _) = logged(&config, None, || {
            let error: &(dyn std::error::Error + 'static) = &error;
            tracing::error!(target: "sandglass::logs", error, "failed");
        });
        assert!(main.contains("failed to open the log file /x: permission denied"), "{main}");
    }

    /// The real middleware around a handler that logs, also from a task of its own.
    #[test]
    fn everything_in_a_request_carries_its_id_and_one_access_record_ends_it() {
        use axum::{Router, body::Body, middleware::from_fn_with_state, routing::any};
        use tower::ServiceExt as _;

        use crate::{
            http::middleware::request_id::attach,
            telemetry::{Telemetry, belonging},
        };

        async fn handler() {
            tracing::error!(target: "sandglass::inside", "here");
            let task = async { tracing::error!(target: "sandglass::inside", "there") };
            tokio::spawn(belonging(task)).await.unwrap();
        }
        let request = || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let app = Router::new()
                    .route("/sandboxes/{id}/proxy/{port}/{*path}", any(handler))
                    .layer(from_fn_with_state(Telemetry::default(), attach));
                let request = http::Request::put("/sandboxes/s/proxy/80/hunter2?token=hunter2")
                    .header("x-request-id", "r-1")
                    .header("open-sandbox-api-key", "hunter2")
                    .header("authorization", "hunter2")
                    .body(Body::from("hunter2"));
                app.oneshot(request.unwrap()).await.unwrap();
            });
        };
        let said = |main: &str| -> Vec<Vec<String>> {
            let records = main.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            let words = |record: Value| ["message", "request_id"].map(|f| record[f].to_string()).to_vec();
            records.map(words).collect()
        };
        let expected = [[r#""here""#, r#""r-1""#], [r#""there""#, r#""r-1""#]];
        let dir = tempfile::tempdir().unwrap();
        let quiet = files(&dir.path().join("quiet"), LogFormat::Json, LogLevel::Error);
        let (main, access) = logged(&quiet, None, request);
        assert_eq!(said(&main), expected);
        assert_eq!(access, "");
        let config = files(dir.path(), LogFormat::Json, LogLevel::Info);
        let (main, access) = logged(&config, None, request);
        assert_eq!(said(&main), expected);
        let record: Value = serde_json::from_str(&access).unwrap();
        assert_eq!((&record["request_id"], &record["level"]), (&"r-1".into(), &"INFO".into()));
        let fields = &record["fields"];
        assert_eq!((&fields["method"], &fields["status"]), (&"PUT".into(), &200.into()));
        assert_eq!(fields["route"], "/sandboxes/{sandbox_id}/proxy/{port}/{full_path:path}");
        assert_eq!(fields["path"], "/sandboxes/s/proxy/80");
        assert!(fields["duration_ms"].is_u64());
        assert!(!main.contains("hunter2") && !access.contains("hunter2"));
    }

    #[test]
    fn a_bad_filter_or_path_is_an_error() {
        assert!(matches!(targets(LogLevel::Info, Some("sandglass=loud")), Err(LogError::Filter)));
        let config = files(Path::new("/proc/none"), LogFormat::Human, LogLevel::Info);
        assert!(matches!(subscriber(&config, None), Err(LogError::File { .. })));
    }
}
