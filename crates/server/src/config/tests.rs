//! The configuration as an operator meets it: files, variables, mistakes and what is printed about them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use proptest::prelude::*;
use serde_json::Value;

use super::load::catalogue;
use super::reader::variable;
use super::show::{Format, render};
use super::*;

mod samples;

use samples::{ALL_KEYS, DOCKER_EXAMPLE, KUBERNETES_EXAMPLE, TENANTS};

type Env = BTreeMap<String, String>;

fn env(pairs: &[(&str, &str)]) -> Env {
    let home = [("HOME", "/home/op")];
    home.iter().chain(pairs).map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn load_text(text: &str, pairs: &[(&str, &str)]) -> Result<Loaded, ConfigErrors> {
    read(text, Path::new("/etc/s.toml"), &env(pairs))
}

fn good(text: &str) -> Loaded {
    load_text(text, &[]).unwrap_or_else(|errors| panic!("{errors}\n{text}"))
}

fn problems(text: &str, pairs: &[(&str, &str)]) -> Vec<String> {
    match load_text(text, pairs) {
        Ok(_) => Vec::new(),
        Err(errors) => errors.problems().iter().map(ToString::to_string).collect(),
    }
}

fn only_problem(text: &str) -> String {
    let problems = problems(text, &[]);
    assert_eq!(problems.len(), 1, "{problems:?}\n{text}");
    problems.into_iter().next().unwrap()
}

fn warnings(text: &str) -> Vec<String> {
    check::report(&good(text)).iter().map(ToString::to_string).collect()
}

#[test]
fn the_docker_example_is_accepted_unchanged() {
    let loaded = good(DOCKER_EXAMPLE);
    let config = &loaded.config;
    assert_eq!(config.server.max_sandbox_timeout, Some(Duration::from_secs(86_400)));
    assert_eq!(config.runtime.kind, RuntimeKind::Docker);
    assert_eq!(config.docker.network_mode, "bridge");
    assert_eq!(config.docker.apparmor_profile, None);
    assert_eq!(config.docker.drop_capabilities, DockerConfig::default().drop_capabilities);
    assert_eq!(config.store.path, PathBuf::from("/home/op/.opensandbox/opensandbox.db"));
    assert_eq!(config.egress.readiness_timeout, Duration::from_secs(30));
    assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
}

#[test]
fn the_kubernetes_example_is_accepted_unchanged() {
    let config = good(KUBERNETES_EXAMPLE).config;
    assert_eq!(config.kubernetes.kubeconfig_path, Some(PathBuf::from("/home/op/.kube/config")));
    assert!(!config.renew_intent.redis.enabled);
}

#[test]
fn nothing_at_all_is_a_valid_configuration() {
    let loaded = good("");
    let mut expected = Config::default();
    expected.store.path = PathBuf::from("/var/lib/sandglass/server.db");
    expected.log.file_path = PathBuf::from("/home/op/logs/opensandbox/server.log");
    expected.log.access_file_path = PathBuf::from("/home/op/logs/opensandbox/access.log");
    assert_eq!(loaded.config, expected);
    assert!(loaded.warnings.is_empty());
    assert!(loaded.entries.iter().all(|entry| entry.origin == Origin::Default));
}

#[test]
fn every_key_can_be_set_in_the_file_and_remembers_its_line() {
    let (all, tenants) = (good(ALL_KEYS), good(TENANTS));
    let elsewhere = ["egress.upstream_proxy.ca_cert_path"];
    for entry in &all.entries {
        let loaded = if entry.key.starts_with("tenants.") { &tenants } else { &all };
        if elsewhere.contains(&entry.key.as_str()) {
            continue;
        }
        assert!(matches!(loaded.origin(&entry.key), Some(Origin::File { .. })), "{}", entry.key);
        let entry = loaded.entries.iter().find(|own| own.key == entry.key).unwrap();
        assert_ne!(entry.value, entry.default, "{} should differ from its default", entry.key);
    }
    let Some(Origin::File { line, column, .. }) = all.origin("server.port") else { panic!() };
    assert_eq!((*line, *column), (4, 1));
    let config = all.config;
    assert_eq!(config.server.limit_concurrency, Some(7));
    assert_eq!(config.log.file_max.bytes(), 10 << 20);
    assert_eq!(config.docker.network_mode, "my-net");
    assert_eq!(config.docker.sandbox_env["TOKEN"].expose(), "hunter2");
    assert_eq!(config.embedded.state_dir, PathBuf::from("/home/op/state"));
    assert_eq!(config.embedded.create_grace, Duration::ZERO);
    assert_eq!(config.kubernetes.sandbox_create_poll_interval, Duration::from_millis(250));
    assert_eq!(config.ingress.secure_access.unwrap().keys[0].key, b"hunter2");
    let tenants = tenants.config.tenants.unwrap();
    assert_eq!(tenants.auth_token.unwrap().expose(), "hunter2");
}

#[test]
fn every_key_can_be_set_in_the_environment() {
    // Whatever the file could say is said by variables instead, printed the way variables are written.
    let source = good(ALL_KEYS);
    let secrets = BTreeMap::from([
        ("server.api_key", "k"),
        ("store.postgresql.dsn", "postgres://u:hunter2@h/db"),
        ("egress.upstream_proxy.authorization", "Basic hunter2"),
        ("ingress.secure_access.keys", "a=aHVudGVyMg=="),
        ("ingress.key", "hunter2"),
        ("renew_intent.redis.dsn", "redis://:hunter2@h/0"),
        ("otel.endpoint", "http://u:hunter2@otel/v1/metrics"),
        ("docker.sandbox_env", "TOKEN=hunter2"),
    ]);
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(|item| item.as_str().unwrap()).collect::<Vec<_>>().join(","),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| format!("{name}={}", value.as_str().unwrap()))
            .collect::<Vec<_>>()
            .join(","),
        other => other.to_string(),
    };
    let mut variables = env(&[]);
    for entry in source.entries.iter().filter(|entry| entry.origin != Origin::Default) {
        let value =
            secrets.get(entry.key.as_str()).map_or_else(|| text(&entry.value), |value| (*value).to_owned());
        variables.insert(variable(&entry.key), value);
    }
    let loaded = read("", Path::new("/none"), &variables).unwrap_or_else(|errors| panic!("{errors}"));
    assert_eq!(loaded.config, source.config);
    for entry in loaded.entries.iter().filter(|entry| entry.origin != Origin::Default) {
        assert_eq!(entry.origin, Origin::Env { name: variable(&entry.key) });
    }
}

#[test]
fn the_environment_wins_over_the_file_and_hides_its_mistakes() {
    let pairs = [("SANDGLASS_SERVER__PORT", "9001"), ("SANDGLASS_EMBEDDED__DNS", "[\"1.1.1.1\"]")];
    let loaded = load_text("[server]\nport = \"never mind\"", &pairs).unwrap();
    assert_eq!(loaded.config.server.port, 9001);
    assert_eq!(loaded.config.embedded.dns.len(), 1);
    assert_eq!(
        loaded.origin("server.port"),
        Some(&Origin::Env { name: "SANDGLASS_SERVER__PORT".to_owned() })
    );
}

#[test]
fn a_defined_but_empty_upstream_key_switches_authentication_off() {
    let file = "[server]\napi_key = \"from-file\"";
    let key = |pairs: &[(&str, &str)]| {
        load_text(file, pairs).unwrap().config.server.api_key.map(|key| key.expose().to_owned())
    };
    assert_eq!(key(&[]).as_deref(), Some("from-file"));
    assert_eq!(key(&[("OPENSANDBOX_SERVER_API_KEY", "")]), None);
    assert_eq!(key(&[("OPENSANDBOX_SERVER_API_KEY", "e")]).as_deref(), Some("e"));
    let both = [("OPENSANDBOX_SERVER_API_KEY", "e"), ("SANDGLASS_SERVER__API_KEY", "ours")];
    assert_eq!(key(&both).as_deref(), Some("ours"));
}

#[test]
fn the_other_upstream_variables_work() {
    let dsn = ("OPENSANDBOX_STORE_POSTGRESQL_DSN", "postgres://h/db");
    let loaded = load_text("[store]\ntype = \"postgresql\"", &[dsn]).unwrap();
    assert_eq!(loaded.config.store.postgresql.dsn.unwrap().expose(), "postgres://h/db");

    let gateway =
        "[ingress]\nmode = \"gateway\"\ngateway = { address = \"*.a.b\", route = { mode = \"wildcard\" } }\n";
    let keys = ("OPENSANDBOX_SECURE_ACCESS_KEYS", "a=YQ,b=Yg==");
    let active = ("OPENSANDBOX_SECURE_ACCESS_ACTIVE_KEY", "b");
    let loaded = load_text(gateway, &[keys, active]).unwrap();
    let access = loaded.config.ingress.secure_access.unwrap();
    assert_eq!((access.active_key, access.keys.len()), ('b', 2));

    let block = format!(
        "{gateway}[ingress.secure_access]\nactive_key = \"a\"\nkeys = [{{ key_id = \"a\", key = \"YQ==\" }}]\n"
    );
    for (file, pairs) in
        [(gateway, vec![keys]), (gateway, vec![active]), (&block, vec![keys]), ("", vec![keys, active])]
    {
        assert!(!problems(file, &pairs).is_empty(), "{file} {pairs:?}");
    }

    let file = ("SANDBOX_TENANTS_CONFIG_PATH", "~/t.toml");
    assert_eq!(load_text("", &[file]).unwrap().config.tenants, None, "the path alone turns nothing on");
    let loaded =
        load_text("[runtime]\ntype = \"kubernetes\"\nexecd_image = \"x\"\n[tenants]", &[file]).unwrap();
    assert_eq!(loaded.config.tenants.unwrap().file, PathBuf::from("/home/op/t.toml"));
}

#[test]
fn scalars_are_read_leniently() {
    for (line, accepted) in [
        ("port = 9000", true),
        ("port = \"9000\"", true),
        ("port = 9000.0", true),
        ("port = 0x2328", true),
        ("port = 9_000", true),
        ("port = 9000.5", false),
        ("port = true", false),
        ("port = 0", false),
        ("port = 65536", false),
        ("port = -1", false),
        ("port = 99999999999999999999999999999999999999999999", false),
        ("port = [9000]", false),
        ("port = {}", false),
        ("port = 2026-01-01", false),
        ("port = \"\"", false),
        ("open_proxy = \"yes\"", true),
        ("open_proxy = 0", true),
        ("open_proxy = \"maybe\"", false),
        ("open_proxy = 2", false),
        ("max_sandbox_timeout_seconds = \"60\"", true),
        ("max_sandbox_timeout_seconds = \"\"", true),
        ("max_sandbox_timeout_seconds = 59", false),
        ("max_sandbox_timeout_seconds = 60.5", false),
        ("max_sandbox_timeout_seconds = 1e300", false),
        ("limit_concurrency = 0", true),
        ("limit_concurrency = -1", false),
        ("host = \" \"", false),
        ("host = 1", false),
        ("loop = \"fast\"", false),
    ] {
        let problems = problems(&format!("[server]\n{line}"), &[]);
        assert_eq!(problems.is_empty(), accepted, "{line}: {problems:?}");
        assert!(problems.len() <= 1, "{line}: {problems:?}");
    }
    assert_eq!(good("[server]\nlimit_concurrency = 0").config.server.limit_concurrency, None);
    for level in ["info", "Warning", "CRITICAL", "trace", "notset"] {
        good(&format!("[log]\nlevel = \"{level}\""));
    }
}

#[test]
fn our_own_keys_are_checked() {
    for (line, accepted) in [
        ("subnet = \"auto\"", true),
        ("subnet = \"10.0.0.0/16\"", true),
        ("subnet = \"10.0.0.0/24\"", true),
        ("subnet = \"10.0.0.0/15\"", false),
        ("subnet = \"10.0.0.0/25\"", false),
        ("subnet = \"10.0.0.1/24\"", false),
        ("subnet = \"fd00::/64\"", false),
        ("subnet = \"\"", false),
        ("state_dir = \"relative\"", false),
        ("state_dir = \"\"", false),
        ("dns = [\"nonsense\"]", false),
        ("dns = \"1.1.1.1\"", false),
        ("insecure_registries = [\"http://x\"]", false),
        ("insecure_registries = [\"[::1]:5000\", \"r.example\"]", true),
        ("pids_limit = 0", false),
        ("max_sandboxes = 0", true),
        ("host_image = \"sometimes\"", false),
        ("create_grace_ms = -1", false),
    ] {
        let problems = problems(&format!("[embedded]\n{line}"), &[]);
        assert_eq!(problems.is_empty(), accepted, "{line}: {problems:?}");
    }
}

#[test]
fn the_host_image_follows_the_address() {
    let offered = |host: &str, choice: &str| {
        let text = format!("[server]\nhost = \"{host}\"\n[embedded]\nhost_image = \"{choice}\"");
        good(&text).config.offers_host_image()
    };
    for host in ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]", "::ffff:127.0.0.1"] {
        assert!(offered(host, "loopback"), "{host}");
        assert!(!offered(host, "never"), "{host}");
    }
    for host in ["0.0.0.0", "::", "10.0.0.1", "example.com", "127.0.0.1.example.com"] {
        assert!(!offered(host, "loopback"), "{host}");
        assert!(offered(host, "always"), "{host}");
    }
    let among_tenants =
        |choice: &str| good(&format!("[embedded]\nhost_image = \"{choice}\"\n[tenants]")).config;
    assert!(!among_tenants("loopback").offers_host_image());
    assert!(among_tenants("always").offers_host_image());
}

#[test]
fn every_runtime_may_have_tenants() {
    for runtime in ["embedded", "docker", "kubernetes"] {
        let text = format!("[runtime]\ntype = \"{runtime}\"\nexecd_image = \"x\"\n[tenants]");
        let config = good(&text).config;
        assert!(config.tenants.is_some(), "{runtime}");
        assert_eq!(guard::Authentication::of(&config), guard::Authentication::Required, "{runtime}");
    }
    assert_eq!(warnings("[tenants]").len(), 0);
    let host_image = "[embedded]\nhost_image = \"always\"\n[tenants]\n[server]\nhost = ";
    for host in ["\"127.0.0.1\"", "\"0.0.0.0\""] {
        assert_eq!(warnings(&format!("{host_image}{host}")).len(), 1, "{host}");
    }
    assert_eq!(warnings("[tenants]\nauth_token = \"x\"").len(), 1);
}

#[test]
fn unknown_names_are_refused_with_the_nearest_known_one() {
    for (text, expected) in [
        ("[server]\n\n  prot = 1", "/etc/s.toml:3:3: server.prot: unknown key; did you mean `port`?"),
        ("[servr]\nport = 1", "/etc/s.toml:1:2: servr: unknown section; did you mean `[server]`?"),
        ("port = 1", "/etc/s.toml:1:1: port: a key outside of any section; did you mean `server.port`?"),
        (
            "[server]\nnetwork_mode = \"x\"",
            "/etc/s.toml:2:1: server.network_mode: unknown key; did you mean `docker.network_mode`?",
        ),
        (
            "[renew_intent]\nredis.dns = \"x\"",
            "/etc/s.toml:2:7: renew_intent.redis.dns: unknown key; did you mean `dsn`?",
        ),
        ("server = 1", "/etc/s.toml:1:1: server: expected a table: write `[server]`"),
    ] {
        assert_eq!(only_problem(text), expected);
    }
    let far = only_problem("[proxy]\nzzz = 1");
    assert_eq!(far, "/etc/s.toml:2:1: proxy.zzz: unknown key; known here are resolve_internal");
    let word = only_problem("[runtime]\ntype = \"dokcer\"");
    assert!(word.ends_with("did you mean \"docker\"?"), "{word}");
}

#[test]
fn keys_of_older_versions_only_warn() {
    let text = "[kubernetes]\nservice_account = \"x\"\ninformer_enabled = true\nsomething_new = 1\n\
                [server]\nsnapshot_create_timeout_seconds = 5\n[runtime]\ntype = \"kubernetes\"\nexecd_image = \"x\"";
    let warnings = warnings(text);
    assert_eq!(warnings.len(), 4, "{warnings:?}");
    assert!(warnings.iter().any(|warning| warning.starts_with("/etc/s.toml:6:1: server.snapshot_create")));
}

#[test]
fn misspelt_variables_are_refused_and_foreign_ones_are_left_alone() {
    let found = problems("", &[("SANDGLASS_SERVER__PROT", "1")]);
    assert_eq!(found, ["env SANDGLASS_SERVER__PROT: unknown variable; did you mean SANDGLASS_SERVER__PORT?"]);
    let foreign = [
        ("SANDGLASS_API_KEY", "x"),
        ("SANDGLASS_URL", "x"),
        ("SANDGLASS_LOG", "x"),
        ("SANDGLASS_BLESS", "1"),
        ("SANDGLASS_SERVICE_HOST", "x"),
    ];
    assert!(load_text("", &foreign).unwrap().warnings.is_empty());
    for name in ["SANDGLASS_SERVR__PORT", "SANDGLASS_SERVER_PORT"] {
        let warnings = load_text("", &[(name, "tcp://1.2.3.4:80")]).unwrap().warnings;
        assert_eq!(warnings.len(), 1, "{name}");
        assert!(warnings[0].to_string().contains("SANDGLASS_SERVER__PORT"), "{}", warnings[0]);
    }
}

#[test]
fn all_problems_are_reported_at_once() {
    let text = "[server]\nport = 0\nhots = \"x\"\n[log]\nlevel = \"loud\"\n[docker]\nport_range_max = 40050\n[nope]\n";
    let problems = problems(text, &[("SANDGLASS_OTEL__ENABLED", "perhaps")]);
    assert_eq!(problems.len(), 6, "{problems:#?}");
    let errors = load_text(text, &[]).unwrap_err().to_string();
    assert!(errors.starts_with("5 problems in the configuration\n  /etc/s.toml:"), "{errors}");
}

#[test]
fn rules_between_keys() {
    let docker = "[runtime]\ntype = \"docker\"\nexecd_image = \"x\"\n";
    let kubernetes = "[runtime]\ntype = \"kubernetes\"\nexecd_image = \"x\"\n";
    let gateway = |rest: &str| format!("{kubernetes}[ingress]\nmode = \"gateway\"\n{rest}");
    let address = |mode: &str, address: &str| {
        gateway(&format!("gateway = {{ address = \"{address}\", route = {{ mode = \"{mode}\" }} }}\n"))
    };
    let proxy = "[egress]\nmode = \"dns+nft\"\n[egress.upstream_proxy]\nurl = \"http://p\"\n";
    for (text, key) in [
        ("[runtime]\ntype = \"kubernetes\"".to_owned(), "runtime.execd_image"),
        (format!("{docker}[kubernetes]"), "kubernetes"),
        (format!("{docker}[agent_sandbox]"), "agent_sandbox"),
        (format!("{docker}[tenants]\n[server]\nopen_proxy = true"), "server.open_proxy"),
        (format!("{docker}[tenants]\n[ingress]\nopen_gateway = true"), "ingress.open_gateway"),
        ("[tenants]\n[server]\napi_key = \"x\"".to_owned(), "server.api_key"),
        (
            format!("{docker}[secure_runtime]\ntype = \"firecracker\"\nk8s_runtime_class = \"x\""),
            "secure_runtime.type",
        ),
        (format!("{docker}[secure_runtime]\ntype = \"gvisor\""), "secure_runtime.type"),
        ("[secure_runtime]\ntype = \"gvisor\"\ndocker_runtime = \"runsc\"".to_owned(), "secure_runtime.type"),
        ("[secure_runtime]\ndocker_runtime = \"runsc\"".to_owned(), "secure_runtime.docker_runtime"),
        (format!("{docker}{proxy}ca_secret_name = \"x\""), "egress.upstream_proxy.ca_secret_name"),
        (format!("{kubernetes}{proxy}ca_cert_path = \"/x\""), "egress.upstream_proxy.ca_cert_path"),
        ("[egress]\nimage = \"x\"\n[egress.upstream_proxy]\nurl = \"http://p\"".to_owned(), "egress.mode"),
        ("[egress]\nmode = \"dns+nft\"\n[egress.upstream_proxy]".to_owned(), "egress.upstream_proxy.url"),
        ("[egress]\nrequests.cpu = \"2\"\nlimits.cpu = \"1999m\"".to_owned(), "egress.requests"),
        (format!("{kubernetes}[agent_sandbox]"), "agent_sandbox"),
        (format!("{kubernetes}[tenants]\n[server]\napi_key = \"x\""), "server.api_key"),
        (format!("{kubernetes}[tenants]\nprovider = \"http\""), "tenants.endpoint"),
        ("[store]\ntype = \"postgresql\"".to_owned(), "store.postgresql.dsn"),
        ("[store.postgresql]\nmin_pool_size = 11".to_owned(), "store.postgresql.min_pool_size"),
        ("[renew_intent]\nredis.enabled = true".to_owned(), "renew_intent.redis.dsn"),
        (gateway(""), "ingress.gateway"),
        ("[ingress]\ngateway = { address = \"x\", route.mode = \"uri\" }".to_owned(), "ingress.gateway"),
        ("[ingress]\nlisten = \"127.0.0.1:28888\"".to_owned(), "ingress.listen"),
        (format!("{}listen = \"127.0.0.1\"", address("uri", "gw:1")), "ingress.listen"),
        (address("wildcard", "example.com"), "ingress.gateway.address"),
        (address("header", "*.example.com"), "ingress.gateway.address"),
        (address("uri", "*.example.com"), "ingress.gateway.address"),
        (address("uri", "http://example.com"), "ingress.gateway.address"),
        (
            format!(
                "{}[ingress.secure_access]\nactive_key = \"b\"\nkeys = [{{ key_id = \"a\", key = \"YQ\" }}]",
                address("uri", "example.com")
            ),
            "ingress.secure_access.active_key",
        ),
    ] {
        match load_text(&text, &[]) {
            Ok(_) => panic!("accepted:\n{text}"),
            Err(errors) => {
                let keys: Vec<&str> = errors.problems().iter().map(|problem| problem.key.as_str()).collect();
                assert_eq!(keys, [key], "{errors}\n{text}");
            }
        }
    }
    for text in
        [address("wildcard", "*.example.com"), address("header", "10.0.0.1:80"), address("uri", "gw:1/base")]
    {
        good(&text);
        for runtime in [docker, "[runtime]\ntype = \"embedded\"\n"] {
            good(&format!("{}listen = \"[::]:28888\"\n", text.replace(kubernetes, runtime)));
        }
    }
    let broken = gateway("gateway = { address = \"x\" }");
    assert!(only_problem(&broken).contains("ingress.gateway.route.mode: required"));
}

#[test]
fn what_has_no_effect_is_remarked_upon() {
    assert_eq!(warnings("[docker]\nnetwork_mode = \"bridge\"\n[kubernetes]").len(), 2);
    assert_eq!(warnings("[server]\nopen_proxy = true").len(), 1);
    assert_eq!(warnings("[ingress]\nopen_gateway = true").len(), 1);
    assert_eq!(warnings("[embedded]\nhost_image = \"always\"").len(), 1);
    assert_eq!(warnings("[storage]\nallowed_host_paths = [\"data\"]").len(), 1);
}

#[test]
fn no_secret_is_ever_printed() {
    for (text, format) in [(ALL_KEYS, Format::Table), (ALL_KEYS, Format::Json), (TENANTS, Format::Json)] {
        let loaded = good(text);
        let printed = format!("{}{:?}", render(&loaded, format), loaded);
        for secret in ["hunter2", "aHVudGVyMg", "104, 117, 110"] {
            assert!(!printed.contains(secret), "{secret} in {printed}");
        }
        assert!(printed.contains("***"));
    }
    let unset = render(&good(""), Format::Table);
    let line = unset.lines().find(|line| line.starts_with("server.api_key ")).unwrap();
    assert!(line.contains("(unset)") && line.ends_with("default"), "{line}");
}

#[test]
fn no_value_is_ever_part_of_a_problem() {
    // Every key refuses a table or a list with this text in it, or accepts the text; neither may repeat it.
    let (entries, _) = catalogue();
    for entry in entries {
        let (section, name) = entry.key.rsplit_once('.').unwrap();
        for value in ["[\"hunter2\", 1]", "\"hunter2\\n\"", "{ hunter2 = \"hunter2\" }", "hunter2"] {
            let found = problems(&format!("[{section}]\n{name} = {value}\n"), &[]).concat();
            assert!(!found.contains("hunter2"), "{}: {found}", entry.key);
        }
        let found = problems("", &[(&variable(&entry.key), "hunter2=\u{1}")]).concat();
        assert!(!found.contains("hunter2"), "{}: {found}", entry.key);
    }
}

#[test]
fn show_prints_every_key_with_its_origin() {
    let loaded = load_text("[server]\nport = 9000", &[("SANDGLASS_LOG__LEVEL", "debug")]).unwrap();
    let table = render(&loaded, Format::Table);
    let line = |key: &str| {
        let line = table.lines().find(|line| line.split_whitespace().next() == Some(key));
        line.unwrap_or_else(|| panic!("{key} is missing")).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("server.port"), "server.port 9000 /etc/s.toml:2:1");
    assert_eq!(line("server.host"), "server.host \"0.0.0.0\" default");
    assert_eq!(line("log.level"), "log.level \"DEBUG\" env SANDGLASS_LOG__LEVEL");
    assert_eq!(table.lines().count(), loaded.entries.len() + 1);

    let json: Value = serde_json::from_str(&render(&loaded, Format::Json)).unwrap();
    let port = &json["settings"]["server.port"];
    assert_eq!((&port["value"], &port["default"]), (&Value::from(9000), &Value::from(8080)));
    assert_eq!(port["origin"]["line"], 2);
    assert_eq!(json["settings"]["log.level"]["origin"]["name"], "SANDGLASS_LOG__LEVEL");
}

#[test]
fn the_file_is_found_by_option_then_variable_then_home() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, port: u16| {
        let path = dir.path().join(name);
        std::fs::write(&path, format!("[server]\nport = {port}")).unwrap();
        path
    };
    let (option, by_variable) = (write("option.toml", 1001), write("variable.toml", 1002));
    let home = ("HOME", dir.path().to_str().unwrap());
    let named = (PATH_VARIABLE, by_variable.to_str().unwrap());
    let port = |path: Option<&Path>, pairs: &[(&str, &str)]| {
        let env = env(pairs);
        load(LoadOptions { path: path.map(Path::to_path_buf), env: &env })
            .map(|loaded| loaded.config.server.port)
    };
    assert_eq!(port(None, &[home]), Ok(8080), "no file, the defaults");
    write(".sandbox.toml", 1003);
    assert_eq!(port(None, &[home]), Ok(1003));
    assert_eq!(port(None, &[home, named]), Ok(1002));
    assert_eq!(port(Some(&option), &[home, named]), Ok(1001));
    assert_eq!(port(Some(Path::new("~/option.toml")), &[home]), Ok(1001));

    let missing = port(Some(&dir.path().join("missing.toml")), &[home]).unwrap_err().to_string();
    assert!(missing.contains("missing.toml"), "{missing}");
    let env = env(&[(PATH_VARIABLE, "/nowhere/at/all.toml")]);
    let loaded = load(LoadOptions { path: None, env: &env }).unwrap();
    assert_eq!((loaded.path, loaded.warnings.len()), (None, 1));
    assert!(port(Some(dir.path()), &[home]).is_err(), "a directory is not a file");
    std::fs::write(&option, [0xff, 0xfe]).unwrap();
    assert!(port(Some(&option), &[home]).is_err(), "not text");
    std::fs::write(&option, vec![b'#'; (1 << 20) + 1]).unwrap();
    assert!(port(Some(&option), &[home]).is_err(), "too large");
}

#[test]
fn without_a_home_the_tilde_is_a_problem_only_where_it_is_used() {
    let nothing = Env::new();
    assert!(read("", Path::new("/x"), &nothing).is_ok());
    assert!(load(LoadOptions { path: None, env: &nothing }).is_ok());
    let errors = read("[embedded]\nstate_dir = \"~/x\"", Path::new("/x"), &nothing).unwrap_err();
    assert!(errors.to_string().contains("HOME"), "{errors}");
}

#[test]
fn quantities_compare_exactly() {
    let nanos = |text: &str| Quantity::parse(text).map(|quantity| quantity.nanos());
    for (left, right) in [
        ("1", "1000m"),
        ("1Ki", "1024"),
        ("1k", "1e3"),
        ("0.5", "500m"),
        (".5", "0.50"),
        ("1.5Gi", "1536Mi"),
        ("1E", "1e18"),
        ("0.1n", "1n"),
        ("0", "0e9999"),
    ] {
        assert!(nanos(left).is_some(), "{left}");
        assert_eq!(nanos(left), nanos(right), "{left} {right}");
    }
    for bad in [
        "", ".", "-1", "1 Gi", "1K", "1GiB", "NaN", "inf", "1e", "1e+", "1..2", "1.2.3", "Gi", "1e99999",
        "9e999",
    ] {
        assert_eq!(nanos(bad), None, "{bad}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn arbitrary_text_never_panics(text in "\\PC*", noise in prop::collection::vec(any::<char>(), 0..64)) {
        let noise: String = noise.into_iter().collect();
        for text in [text.clone(), format!("[server]\n{text}"), noise] {
            let _either = load_text(&text, &[]);
        }
    }

    #[test]
    fn arbitrary_values_under_real_keys_never_panic(
        index in any::<prop::sample::Index>(),
        value in prop_oneof![
            any::<i64>().prop_map(|value| value.to_string()),
            any::<f64>().prop_map(|value| format!("{value:?}").replace("NaN", "nan")),
            any::<bool>().prop_map(|value| value.to_string()),
            "\\PC{0,24}".prop_map(|text| Value::from(text).to_string()),
            "[-+0-9.eEKMGimunk/:*a]{0,24}".prop_map(|text| Value::from(text).to_string()),
            "[a-z0-9.]{1,8}".prop_map(|text| format!("[\"{text}\", 1, [], {{}}]")),
            "[a-z0-9.]{1,8}".prop_map(|text| format!("{{ \"{text}\" = \"{text}\" }}")),
        ],
    ) {
        let (entries, _) = catalogue();
        let key = &entries[index.index(entries.len())].key;
        let (section, name) = key.rsplit_once('.').unwrap();
        let text = format!("[{section}]\n{name} = {value}\n");
        if let Ok(loaded) = load_text(&text, &[]) {
            let _printed = (render(&loaded, Format::Table), render(&loaded, Format::Json));
        }
        let plain = value.trim_matches('"');
        let _either = load_text("", &[(&variable(key), plain)]);
    }
}
