//! Configuration files that the tests read.

/// The values of the reference's Docker example.
pub(super) const DOCKER_EXAMPLE: &str = r#"
[server]
host = "127.0.0.1"
port = 8080
max_sandbox_timeout_seconds = 86400
[proxy]
resolve_internal = true
[log]
level = "INFO"
[runtime]
type = "docker"
execd_image = "opensandbox/execd:v1.1.0"
[storage]
allowed_host_paths = []
volume_default_size = "1Gi"
[store]
type = "sqlite"
path = "~/.opensandbox/opensandbox.db"
[docker]
network_mode = "bridge"
port_range_min = 40000
port_range_max = 60000
drop_capabilities = ["AUDIT_WRITE", "MKNOD", "NET_ADMIN", "NET_RAW", "SYS_ADMIN", "SYS_MODULE", "SYS_PTRACE", "SYS_TIME", "SYS_TTY_CONFIG"]
no_new_privileges = true
apparmor_profile = ""
pids_limit = 4096
seccomp_profile = ""
[ingress]
mode = "direct"
[egress]
image = "opensandbox/egress:v1.1.7"
mode = "dns"
readiness_timeout_seconds = 30.0
[renew_intent]
enabled = false
min_interval_seconds = 60
"#;

/// The values of the reference's Kubernetes example.
pub(super) const KUBERNETES_EXAMPLE: &str = r#"
[server]
host = "0.0.0.0"
port = 8080
max_sandbox_timeout_seconds = 86400
[proxy]
resolve_internal = true
[log]
level = "INFO"
[runtime]
type = "kubernetes"
execd_image = "opensandbox/execd:v1.1.0"
[storage]
allowed_host_paths = []
volume_default_size = "1Gi"
[store]
type = "sqlite"
path = "~/.opensandbox/opensandbox.db"
[kubernetes]
kubeconfig_path = "~/.kube/config"
namespace = "opensandbox"
informer_resync_seconds = 300
informer_watch_timeout_seconds = 60
workload_provider = "batchsandbox"
image_pull_policy = "IfNotPresent"
batchsandbox_template_file = "~/batchsandbox-template.yaml"
[ingress]
mode = "direct"
[egress]
image = "opensandbox/egress:v1.1.7"
mode = "dns"
[renew_intent]
enabled = false
min_interval_seconds = 60
redis.enabled = false
"#;

/// Every key with one value that differs from its default, valid together with the others of its case.
pub(super) const ALL_KEYS: &str = r#"
[server]
host = "::1"
port = 9000
api_key = "k"
eip = "https://x.example/base"
max_sandbox_timeout_seconds = 60
timeout_keep_alive = 31
tls_cert = "/etc/sandglass/cert.pem"
tls_key = "/etc/sandglass/key.pem"
tls_redirect_port = 8081
hsts_max_age_seconds = 3600
limit_concurrency = 7
timeout_graceful_shutdown = 6
backlog = 9
thread_pool_size = 10
loop = "uvloop"
http = "h11"
open_proxy = true
open_metrics = true
[proxy]
resolve_internal = false
[log]
level = "debug"
format = "json"
file_enabled = true
file_path = "~/a.log"
access_file_path = "/b.log"
file_max_bytes = "10MiB"
file_backup_count = 0
[runtime]
type = "kubernetes"
execd_image = "execd"
execd_run_as_init = true
[docker]
network_mode = "My-Net"
api_timeout = 5
host_ip = "10.0.0.1"
drop_capabilities = ["MKNOD"]
apparmor_profile = "a"
seccomp_profile = "{}"
no_new_privileges = false
pids_limit = 1
port_range_min = 1024
port_range_max = 1124
publish_host = "127.0.0.1"
sandbox_env = { TOKEN = "hunter2" }
sandbox_binds = ["/a:/b:ro"]
[embedded]
state_dir = "~/state"
host_image = "never"
subnet = "10.9.0.0/20"
endpoints = "direct"
dns = ["1.1.1.1", "::1"]
pids_limit = 5
create_grace_ms = 0
expiry_grace_seconds = 1
insecure_registries = ["localhost:5000"]
max_sandboxes = 3
[builds]
base_image = "debian:12"
allowed_hosts = ["*.example.com"]
file_urls = true
http_urls = true
concurrency = 3
tenant_concurrency = 1
queue = 9
timeout_seconds = 60
max_timeout_seconds = 600
resolve_timeout_seconds = 30
keep = 1
images_budget = "20GiB"
layers_budget = "5GiB"
layer_after_seconds = 2
engine_builder = "never"
git_authorities = "/etc/sandglass/git-authorities.pem"
repository_limit = "1GiB"
mirrors_budget = "5GiB"
cpu = "500m"
memory = "1Gi"

[workspaces]
agent_listen = "0.0.0.0:8091"
agent_url = "http://10.0.0.1:8091"
provision_deadline_seconds = 60
attach_timeout_seconds = 30
grace_seconds = 9
shutdown_grace_seconds = 5
failed_retention_seconds = 7
breaker_failures = 5
breaker_window_seconds = 100
breaker_open_seconds = 20
secrets_dir = "/etc/sandglass/secrets"
[webhooks]
plain_http = true
private_networks = ["10.0.0.0/8"]
timeout_seconds = 3
concurrency = 2
max_webhooks = 5
give_up_after_seconds = 60
disable_after_seconds = 600
secret_overlap_seconds = 0
[storage]
allowed_host_paths = ["/data"]
volume_default_size = "2Gi"
ossfs_mount_root = "/oss"
[store]
type = "postgresql"
path = "/x.db"
[store.postgresql]
dsn = "postgres://u:hunter2@h/db"
min_pool_size = 0
max_pool_size = 1
connect_timeout_seconds = 6
pool_timeout_seconds = 0.5
snapshot_recovery_interval_seconds = 1
[egress]
image = "egress"
mode = "dns+nft"
disable_ipv6 = false
otlp_endpoint = "http://otel:4318"
readiness_timeout_seconds = 1.5
requests = { cpu = "25m" }
limits = { cpu = 1 }
[egress.upstream_proxy]
url = "http://proxy:3128"
authorization = "Basic hunter2"
ca_secret_name = "ca"
[ingress]
mode = "gateway"
listen = "[::1]:28888"
key = "hunter2"
open_gateway = true
[ingress.gateway]
address = "gw.example.com:8443"
route.mode = "header"
[ingress.secure_access]
active_key = "a"
keys = [{ key_id = "a", key = "aHVudGVyMg" }]
signature = "short"
[secure_runtime]
type = "kata"
docker_runtime = "kata-runtime"
k8s_runtime_class = "kata-qemu"
[renew_intent]
enabled = true
min_interval_seconds = 1
[renew_intent.redis]
enabled = true
dsn = "redis://:hunter2@h/0"
queue_key = "q"
consumer_concurrency = 1
[otel]
enabled = true
endpoint = "http://u:hunter2@otel/v1/metrics"
service_name = "s"
export_interval_millis = 1000
traces = true
[kubernetes]
kubeconfig_path = "/k"
insecure_skip_tls_verify = true
namespace = "n"
workload_provider = "agent-sandbox"
batchsandbox_template_file = "/t"
sandbox_create_timeout_seconds = 1
sandbox_create_poll_interval_seconds = 0.25
pool_acquisition_timeout_seconds = 1
image_pull_policy = "Always"
informer_resync_seconds = 1
informer_watch_timeout_seconds = 1
read_qps = 0.5
read_burst = 1
write_qps = 2
write_burst = 1
fastpath_endpoint = "f:1"
fastpath_timeout_seconds = 1.5
fastpath_wait_ready_seconds = 2
fastpath_resource_pool = "p"
template_s3_publish_secret = "s"
[kubernetes.execd_init_resources]
limits = { memory = "1Gi" }
requests = { memory = "1Mi" }
[agent_sandbox]
template_file = "/t"
shutdown_policy = "Retain"
ingress_enabled = false
"#;

pub(super) const TENANTS: &str = r#"
[runtime]
type = "kubernetes"
execd_image = "execd"
[tenants]
provider = "http"
file = "/t.toml"
endpoint = "https://tenants"
max_stale_seconds = 0
timeout_seconds = 0.5
auth_header = "X-Auth"
auth_token = "hunter2"
"#;
