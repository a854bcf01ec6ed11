/* A stand-in for the agent, for tests of the shim alone.
 *
 * As "execd --init --boot-fd 3" it honours the boot contract: reads the configuration from descriptor 3, serves on
 * descriptor 4, starts the entrypoint, reports on descriptor 5, is init. A connection sends one line, which is run by
 * /bin/sh with its output going back, followed by "#exit N".
 * As "execd probe NAME" it tries one forbidden thing and prints the outcome.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/keyctl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char config[1 << 20];
static volatile pid_t entry = 0;

/* Collects the strings of the (possibly nested) array after "key":, undoing simple escapes. */
static int strings(const char *key, char **out, int most) {
    char want[64];
    snprintf(want, sizeof want, "\"%s\":[", key);
    char *at = strstr(config, want);
    int count = 0, depth = 1;
    if (!at) return 0;
    for (at += strlen(want); depth && *at; at++) {
        if (*at == '[') depth++;
        if (*at == ']') depth--;
        if (*at != '"') continue;
        char *text = malloc(strlen(at) + 1), *end = text;
        for (at++; *at && *at != '"'; at++) {
            if (*at == '\\') { at++; *end++ = *at == 'n' ? '\n' : *at == 't' ? '\t' : *at; }
            else *end++ = *at;
        }
        *end = 0;
        if (count < most) out[count++] = text;
    }
    return count;
}

static void say(const char *text) { if (write(5, text, strlen(text)) < 0) _exit(9); }

static void serve(int fd) {
    char line[65536];
    size_t have = 0;
    while (have < sizeof line - 1) {
        ssize_t got = read(fd, line + have, sizeof line - 1 - have);
        if (got <= 0) break;
        have += got;
        if (memchr(line, '\n', have)) break;
    }
    line[have] = 0;
    pid_t child = fork();
    if (child == 0) {
        dup2(fd, 1);
        dup2(fd, 2);
        close(fd);
        close(4);
        execl("/bin/sh", "sh", "-c", line, (char *)0);
        _exit(127);
    }
    int status = 0;
    if (child < 0) dprintf(fd, "cannot fork: %s", strerror(errno));
    else waitpid(child, &status, 0);
    dprintf(fd, "\n#exit %d\n", child < 0 ? 126 : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    _exit(0);
}

static void on_term(int sig) { (void)sig; if (entry > 0) kill(entry, SIGTERM); else _exit(143); }

static int init(void) {
    size_t have = 0;
    ssize_t got;
    while ((got = read(3, config + have, sizeof config - 1 - have)) > 0) have += got;
    close(3);
    char *argv[256], *pairs[512], *env[257];
    int argc = strings("entrypoint", argv, 255), n = strings("env", pairs, 512), i;
    argv[argc] = 0;
    for (i = 0; i + 1 < n; i += 2) { env[i / 2] = malloc(strlen(pairs[i]) + strlen(pairs[i + 1]) + 2); sprintf(env[i / 2], "%s=%s", pairs[i], pairs[i + 1]); }
    env[n / 2] = 0;
    signal(SIGTERM, on_term);
    if (argc && !strcmp(argv[0], "@silent")) pause();
    if (argc && !strcmp(argv[0], "@die")) { fprintf(stderr, "dying as told\n"); return 3; }
    if (argc) {
        int tell[2], error = 0;
        if (pipe2(tell, O_CLOEXEC)) return 9;
        entry = fork();
        if (entry == 0) { signal(SIGTERM, SIG_DFL); close(4); close(5); execvpe(argv[0], argv, env); error = errno; if (write(tell[1], &error, sizeof error)) {} _exit(127); }
        close(tell[1]);
        if (read(tell[0], &error, sizeof error) > 0) {
            char text[512];
            snprintf(text, sizeof text, "{\"status\":\"failed\",\"phase\":\"entrypoint\",\"message\":\"%s: %s\"}\n", argv[0], strerror(error));
            say(text);
            return 127;
        }
    }
    pid_t server = fork();
    if (server == 0) {
        signal(SIGCHLD, SIG_DFL);
        signal(SIGTERM, SIG_DFL);
        close(5);
        for (;;) {
            int fd = accept(4, 0, 0);
            if (fd < 0) continue;
            pid_t worker = fork();
            if (worker == 0) serve(fd);
            if (worker < 0) dprintf(fd, "cannot fork: %s\n#exit 126\n", strerror(errno));
            close(fd);
            while (waitpid(-1, 0, WNOHANG) > 0) {}
        }
    }
    say("{\"status\":\"started\"}\n");
    close(5);
    for (;;) {
        int status;
        pid_t pid = wait(&status);
        if (pid < 0 && errno == ECHILD) pause();
        if (pid == entry && entry > 0) return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
}

static int outcome(const char *name, long result) {
    if (result < 0) printf("%s: denied: %s\n", name, strerrorname_np(errno));
    else printf("%s: allowed\n", name);
    return result < 0 ? 1 : 0;
}

static int probe(const char *name, const char *argument) {
    char attr[128] = {0};
    if (!strcmp(name, "mount")) return outcome(name, mount("none", "/tmp", "tmpfs", 0, 0));
    if (!strcmp(name, "umount")) return outcome(name, umount2(argument, MNT_DETACH));
    if (!strcmp(name, "remount")) return outcome(name, mount(0, argument, 0, MS_REMOUNT | MS_BIND, 0));
    if (!strcmp(name, "fsopen")) return outcome(name, syscall(SYS_fsopen, "tmpfs", 0));
    if (!strcmp(name, "open_tree")) return outcome(name, syscall(SYS_open_tree, AT_FDCWD, "/", 1));
    if (!strcmp(name, "pivot_root")) return outcome(name, syscall(SYS_pivot_root, "/", "/"));
    if (!strcmp(name, "unshare-user")) return outcome(name, unshare(CLONE_NEWUSER));
    if (!strcmp(name, "unshare-net")) return outcome(name, unshare(CLONE_NEWNET));
    if (!strcmp(name, "clone-user")) return outcome(name, syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0));
    if (!strcmp(name, "clone3")) return outcome(name, syscall(SYS_clone3, attr, 64));
    if (!strcmp(name, "setns")) return outcome(name, setns(open("/proc/1/ns/net", O_RDONLY), 0));
    if (!strcmp(name, "bpf")) return outcome(name, syscall(SYS_bpf, 0, attr, sizeof attr));
    if (!strcmp(name, "keyctl")) return outcome(name, syscall(SYS_keyctl, KEYCTL_GET_KEYRING_ID, KEY_SPEC_SESSION_KEYRING, 1));
    if (!strcmp(name, "add_key")) return outcome(name, syscall(SYS_add_key, "user", "k", "v", 1, KEY_SPEC_SESSION_KEYRING));
    if (!strcmp(name, "io_uring")) return outcome(name, syscall(SYS_io_uring_setup, 4, attr));
    if (!strcmp(name, "userfaultfd")) return outcome(name, syscall(SYS_userfaultfd, 0));
    if (!strcmp(name, "perf")) return outcome(name, syscall(SYS_perf_event_open, attr, 0, -1, -1, 0));
    if (!strcmp(name, "open_by_handle")) return outcome(name, syscall(SYS_open_by_handle_at, AT_FDCWD, attr, 0));
    if (!strcmp(name, "init_module")) return outcome(name, syscall(SYS_init_module, attr, 0, ""));
    if (!strcmp(name, "kexec")) return outcome(name, syscall(SYS_kexec_load, 0, 0, 0, 0));
    if (!strcmp(name, "reboot")) return outcome(name, syscall(SYS_reboot, 0xfee1dead, 672274793, 0x89ABCDEF, 0));
    if (!strcmp(name, "settime")) { struct timespec now = {1, 0}; return outcome(name, clock_settime(CLOCK_REALTIME, &now)); }
    if (!strcmp(name, "syslog")) return outcome(name, syscall(SYS_syslog, 3, attr, sizeof attr));
    if (!strcmp(name, "sethostname")) return outcome(name, sethostname(argument, strlen(argument)));
    if (!strcmp(name, "vsock")) return outcome(name, socket(40, SOCK_STREAM, 0));
    if (!strcmp(name, "packet")) return outcome(name, socket(AF_PACKET, SOCK_RAW, htons(3)));
    if (!strcmp(name, "packet-cooked")) return outcome(name, socket(AF_PACKET, SOCK_DGRAM | SOCK_CLOEXEC, htons(3)));
    if (!strcmp(name, "packet-old")) return outcome(name, socket(AF_INET, SOCK_PACKET, htons(3)));
    if (!strcmp(name, "packet-high")) return outcome(name, syscall(SYS_socket, AF_PACKET | 1L << 32, SOCK_RAW | 1L << 32, htons(3)));
    if (!strcmp(name, "raw-tcp")) return outcome(name, socket(AF_INET, SOCK_RAW | SOCK_CLOEXEC, IPPROTO_TCP));
    if (!strcmp(name, "raw-any")) return outcome(name, socket(AF_INET, SOCK_RAW, IPPROTO_RAW));
    if (!strcmp(name, "raw-icmp")) return outcome(name, socket(AF_INET, SOCK_RAW | SOCK_CLOEXEC, IPPROTO_ICMP));
    if (!strcmp(name, "mptcp")) return outcome(name, socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 262));
    if (!strcmp(name, "raw-header")) { int on = 1; return outcome(name, setsockopt(socket(AF_INET, SOCK_RAW, IPPROTO_ICMP), IPPROTO_IP, 3, &on, sizeof on)); }
    if (!strcmp(name, "raw-header-6")) { int on = 1; return outcome(name, setsockopt(socket(AF_INET6, SOCK_RAW, IPPROTO_ICMPV6), IPPROTO_IPV6, 36, &on, sizeof on)); }
    if (!strcmp(name, "any-source")) { int on = 1; return outcome(name, setsockopt(socket(AF_INET, SOCK_DGRAM, 0), IPPROTO_IP, 19, &on, sizeof on)); }
    if (!strcmp(name, "raw-netlink")) return outcome(name, socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, 0));
    if (!strcmp(name, "xdp")) return outcome(name, socket(44, SOCK_RAW, 0));
    if (!strcmp(name, "prlimit-init")) { struct rlimit few = {1, 1}; return outcome(name, prlimit(1, RLIMIT_NOFILE, &few, 0)); }
    if (!strcmp(name, "prlimit-ask")) { struct rlimit now; return outcome(name, prlimit(1, RLIMIT_NOFILE, 0, &now)); }
    if (!strcmp(name, "prlimit-self")) { struct rlimit few = {64, 64}; return outcome(name, prlimit(0, RLIMIT_NOFILE, &few, 0)); }
    if (!strcmp(name, "tiocsti")) return outcome(name, ioctl(0, TIOCSTI, "x"));
    if (!strcmp(name, "unknown-call")) return outcome(name, syscall(600));
    if (!strcmp(name, "x32")) return outcome(name, syscall(0x40000000 | SYS_getpid));
    if (!strcmp(name, "ptrace")) return outcome(name, ptrace(PTRACE_ATTACH, atoi(argument), 0, 0));
    if (!strcmp(name, "kill")) return outcome(name, kill(atoi(argument), 0));
    if (!strcmp(name, "mknod")) return outcome(name, mknod("/tmp/disk", S_IFBLK | 0600, makedev(254, 0)));
    if (!strcmp(name, "mknod-null")) return outcome(name, mknod("/tmp/null", S_IFCHR | 0600, makedev(1, 3)));
    if (!strcmp(name, "nofile")) { struct rlimit most = {1 << 22, 1 << 22}; return outcome(name, setrlimit(RLIMIT_NOFILE, &most)); }
    if (!strcmp(name, "i386")) { long r; __asm__ volatile("int $0x80" : "=a"(r) : "0"(20L) : "memory"); errno = EPERM; return outcome(name, r); }
    if (!strcmp(name, "no_new_privs")) { printf("%d\n", prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)); return 0; }
    if (!strcmp(name, "euid")) { printf("%d\n", geteuid()); return 0; }
    if (!strcmp(name, "shm-make")) { int id = shmget(0x5a9d, 4096, IPC_CREAT | 0666); return outcome(name, id); }
    if (!strcmp(name, "shm-find")) return outcome(name, shmget(0x5a9d, 4096, 0));
    if (!strcmp(name, "eat")) {
        size_t step = 1 << 20;
        for (;;) { char *more = mmap(0, step, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); if (more == MAP_FAILED) return 1; memset(more, 1, step); }
    }
    if (!strcmp(name, "forks")) {
        int made = 0;
        for (; made < atoi(argument); made++) { pid_t pid = fork(); if (pid == 0) { pause(); _exit(0); } if (pid < 0) break; }
        printf("forked %d\n", made);
        fflush(stdout);
        kill(0, SIGTERM);
        return 0;
    }
    if (!strcmp(name, "spin")) { time_t end = time(0) + atoi(argument); while (time(0) < end) {} return 0; }
    printf("no probe %s\n", name);
    return 2;
}

int main(int argc, char **argv) {
    if (argc > 2 && !strcmp(argv[1], "probe")) return probe(argv[2], argc > 3 ? argv[3] : "");
    return init();
}
